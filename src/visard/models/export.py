"""Networks as ONNX files: exported with a free batch size and checked, and quantised to 8-bit integers."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from visard.errors import UsageError, VisardError
from visard.files import fsync_folder
from visard.models.onnx import OnnxNetwork, need

OPSET = 18  # what torch's exporter writes by itself
TOLERANCE = 1e-5  # largest difference from PyTorch, relative to the largest value of a feature
INPUT, OUTPUT = "pictures", "features"


@dataclass(frozen=True)
class Exported:
    """What was written, and how far it is from PyTorch."""

    path: Path
    difference: float
    bytes: int


def export_onnx(
    network: nn.Module, path: str | Path, spec: dict[str, str], *, dynamic: bool = True, opset: int = OPSET
) -> Exported:
    """Write the network with its spec as metadata, and check it against PyTorch; nothing is left if it differs.

    `dynamic`: any batch size, otherwise 1. The check runs random pictures in batches of 1, 2 and 5.
    """
    need("onnxscript")
    onnx, path = need("onnx"), Path(path)
    if isinstance(network, OnnxNetwork):
        raise UsageError(f"{network.path} is an ONNX file already")
    most = onnx.defs.onnx_opset_version()
    if not OPSET <= opset <= most:
        raise UsageError(f"opset {opset}: must be {OPSET} to {most}")
    size = int(spec["size"])
    network.eval()
    with written(path) as beside:
        shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
        # torch traces a batch of 1 as a constant, whatever is said of it
        example = torch.zeros(2 if dynamic else 1, 3, size, size)
        with _quiet():
            torch.onnx.export(
                network, (example,), str(beside), dynamo=True, dynamic_shapes=shapes, opset_version=opset,
                input_names=[INPUT], output_names=[OUTPUT], external_data=False, verbose=False,
            )  # fmt: skip
        graph = onnx.load(str(beside))
        onnx.helper.set_model_props(graph, dict(sorted(spec.items())))
        onnx.save(graph, str(beside))
        difference = check_against(network, OnnxNetwork(beside), size, (1, 2, 5))
        if not difference <= TOLERANCE:
            raise VisardError(f"{path}: differs from PyTorch by {difference:.1e}, allowed are {TOLERANCE:g}")
    return Exported(path, difference, path.stat().st_size)


def check_against(one: nn.Module, two: nn.Module, size: int, batches: Sequence[int], seed: int = 0) -> float:
    """Largest difference of the features of random pictures, relative to their largest value."""
    rng = torch.Generator().manual_seed(seed)
    worst = 0.0
    with torch.inference_mode():
        for batch in batches:
            x = torch.rand(batch, 3, size, size, generator=rng).mul_(2).sub_(1)
            a: Tensor = one.forward(x)
            b: Tensor = two.forward(x)
            if a.shape != b.shape:
                raise VisardError(f"features of shape {tuple(b.shape)} instead of {tuple(a.shape)}")
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)))
    return worst


def quantise(
    source: str | Path, path: str | Path, calibration: Sequence[npt.NDArray[np.float32]] | None = None
) -> Exported:
    """An exported network with 8-bit integers, metadata kept; `difference` is that from `source` on random pictures.

    Without `calibration` (batches of network inputs) the range of activations is found anew for each batch (dynamic);
    with it, it is fixed beforehand (static), which is faster and needs pictures like those to come.
    """
    quantization, preparation = need("onnxruntime.quantization"), need("onnxruntime.quantization.shape_inference")
    onnx, source, path = need("onnx"), Path(source), Path(path)
    with written(path) as beside, tempfile.TemporaryDirectory(dir=path.parent, prefix=".visard-") as folder, _quiet():
        prepared = str(Path(folder) / "prepared.onnx")
        preparation.quant_pre_process(str(source), prepared)
        if calibration is None:
            quantization.quantize_dynamic(prepared, str(beside), weight_type=quantization.QuantType.QUInt8)
        else:
            quantization.quantize_static(
                prepared, str(beside), _Batches(source, calibration), per_channel=True,
                quant_format=quantization.QuantFormat.QDQ, weight_type=quantization.QuantType.QInt8,
                activation_type=quantization.QuantType.QUInt8,
            )  # fmt: skip
        graph = onnx.load(str(beside))
        kept = {entry.key: entry.value for entry in onnx.load(str(source)).metadata_props}
        onnx.helper.set_model_props(graph, {**kept, "int8": "dynamic" if calibration is None else "static"})
        onnx.save(graph, str(beside))
        one, two = OnnxNetwork(source), OnnxNetwork(beside)
        difference = check_against(one, two, int(kept.get("size", one.size or 112)), (5,))
    return Exported(path, difference, path.stat().st_size)


class _Batches:
    """Calibration batches, one at a time, as onnxruntime asks for them."""

    def __init__(self, source: Path, batches: Sequence[npt.NDArray[np.float32]]) -> None:
        self._name = OnnxNetwork(source).name
        self._batches = iter(batches)

    def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: np.ascontiguousarray(batch, np.float32)}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get_next, None)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place when the block ends well, and is removed when not."""
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: no folder {path.parent}")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        with beside.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)
    fsync_folder(path.parent)


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn of their own inside; what matters is raised, and the result is checked."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
