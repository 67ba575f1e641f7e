"""ONNX files as networks: a graph cannot run code, and `visard.onnx_process` bounds its time and memory."""

from __future__ import annotations

import logging
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
from visard.files import SHARED, replacing
from visard.models.inputs import PRESETS, Inputs
from visard.onnx_process import Graph, Refused, need

MAX_SIDE, MAX_INPUT = 4096, 2**24  # pixels of a side, and of all pictures that a graph wants at a time
DETECTOR = 6  # outputs of the smallest face detector
FLOATS: dict[str, npt.DTypeLike] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class OnnxNetwork(nn.Module):
    """A graph with one picture input, as a network: (B, 3, size, size) -> (B, embedding).

    Graphs with a fixed batch get batches of just that length, the last one filled up with its first picture.
    """

    def __init__(self, path: str | Path, size: int | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        self.graph = Graph(self.path, torch.get_num_threads())
        given = self.graph.inputs
        if len(given) != 1 or len(given[0].shape) != 4:
            shapes = "; ".join(f"{i.name} {i.shape}" for i in given)
            raise VisardError(f"{path}: expected one input of pictures (batch, 3, size, size), found {shapes}")
        if given[0].type not in FLOATS:
            raise VisardError(f"{path}: takes {given[0].type}, not floating-point pictures")
        self.name, self.kind = given[0].name, FLOATS[given[0].type]
        batch, *rest = given[0].shape
        self.last = rest[0] != 3 and rest[2] == 3  # channels last: (batch, size, size, 3)
        channels, height, width = (rest[2], rest[0], rest[1]) if self.last else rest
        if isinstance(channels, int) and channels != 3:
            raise VisardError(f"{path}: takes pictures with {channels} channels, not 3")
        self.fixed = isinstance(height, int) and isinstance(width, int)
        if self.fixed and height != width:
            raise VisardError(f"{path}: takes pictures of {width} x {height} pixels, only squares are supported")
        if self.fixed and size not in (None, height):
            raise UsageError(f"{path}: takes pictures of {height} pixels, not {size}")
        self.size = height if isinstance(height, int) and self.fixed else size
        self.batch = batch if isinstance(batch, int) and batch > 0 else None
        self.output, self.embedding = "", 0
        self.assumed = False  # whether nothing says how pictures go in

    def probe(self, size: int) -> None:
        """Run the graph once: finds the output, its length, and graphs that take one picture whatever they declare."""
        if self.embedding:
            return
        self.size, found = size, []
        if size > MAX_SIDE or (self.batch or 1) * size**2 > MAX_INPUT:
            raise VisardError(f"{self.path}: takes {self.batch or 1} pictures of {size} pixels at a time: too many")
        for count in [self.batch] if self.batch else [2, 1]:
            try:
                found = self.graph.run([], self.name, self._array(torch.zeros(count, 3, size, size)))
            except Refused as error:
                if count == 1 or self.batch:
                    self._refuse_detector()
                    raise VisardError(f"{self.path}: does not run on pictures of {size} pixels: {error}") from None
                continue
            if any(_is_matrix(values, count) for values in found):
                self.batch = self.batch or (None if count == 2 else 1)
                break
        names = [o.name for o in self.graph.outputs]
        fitting = [(n, v) for n, v in zip(names, found, strict=True) if _is_matrix(v, count)]
        if not fitting:
            self._refuse_detector()
            raise VisardError(f"{self.path}: no output is one vector for each picture")
        self.output, self.embedding = fitting[0][0], fitting[0][1].size // count

    def _refuse_detector(self) -> None:
        """One line for a graph that gives no features because it finds faces: YuNet has 12 outputs, SCRFD 6 or 9."""
        if (many := len(self.graph.outputs)) >= DETECTOR:
            raise VisardError(
                f"{self.path}: looks like a face detector ({many} outputs), which --detector takes; "
                "a model gives one vector for each picture"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Features of the pictures, float32."""
        self.probe(int(x.shape[2]))
        step = self.batch or len(x)
        if not len(x):
            return torch.zeros(0, self.embedding)
        parts = []
        for start in range(0, len(x), step):
            part = x[start : start + step]
            count = len(part)
            if count < step:
                part = torch.cat([part, part[:1].expand(step - count, -1, -1, -1)])
            (found,) = self.graph.run([self.output], self.name, self._array(part))
            parts.append(np.asarray(found, np.float32).reshape(step, -1)[:count])
        return torch.from_numpy(np.concatenate(parts))

    def _array(self, x: Tensor) -> npt.NDArray[Any]:
        return np.ascontiguousarray((x.permute(0, 2, 3, 1) if self.last else x).cpu().numpy(), self.kind)


def load_onnx(path: str | Path, size: int | None = None, name: str | None = None) -> tuple[OnnxNetwork, dict[str, str]]:
    """The network in an ONNX file, and its spec: what its metadata say, the preset `name`, or what its graph shows.

    A graph that starts with a subtraction and a multiplication normalises by itself and gets 0..255 (as InsightFace's
    own loader decides); every other one without metadata gets (x - 127.5) / 127.5.
    """
    network = OnnxNetwork(path, size)
    meta = network.graph.metadata
    if name is not None:
        inputs = PRESETS[name]
    elif "mean" in meta and "std" in meta:
        inputs = Inputs.of_spec(meta, path)
    else:
        network.assumed = not network.graph.normalises
        inputs = PRESETS["arcface" if network.assumed else "raw"]
    network.probe(network.size or inputs.size)
    spec = inputs.to_spec() | {"model": "onnx", "embedding": str(network.embedding), "size": str(network.size)}
    spec |= {key: meta[key] for key in ("align", "licence", "visard") if len(meta.get(key, "")) in range(1, 1000)}
    return network.eval(), spec


def _is_matrix(values: object, rows: int) -> bool:
    """Whether an output is one vector for each of `rows` pictures, perhaps with trailing axes of length 1."""
    if not isinstance(values, np.ndarray) or values.ndim < 2 or values.shape[0] != rows or values.dtype.kind != "f":
        return False
    return bool(values.size // rows == max(values.shape[1:]) > 1)


# ----------
# Networks as ONNX files: exported with a free batch size and checked, and quantised to 8-bit integers.

OPSET = 18  # what torch's exporter writes by itself
TOLERANCE = 1e-5  # largest difference from PyTorch, relative to the largest value of a feature


@dataclass(frozen=True)
class Exported:
    """The exported file, and its difference from PyTorch."""

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
    with replacing(path, mode=SHARED) as beside:
        shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
        # torch traces a batch of 1 as a constant, whatever is said of it
        example = torch.zeros(2 if dynamic else 1, 3, size, size)
        with _quiet():
            torch.onnx.export(
                network, (example,), str(beside), dynamo=True, dynamic_shapes=shapes, opset_version=opset,
                input_names=["pictures"], output_names=["features"], external_data=False, verbose=False,
            )  # fmt: skip
        graph = onnx.load(str(beside))
        onnx.helper.set_model_props(graph, {key: spec[key] for key in sorted(spec) if key != "graph"})
        onnx.save(graph, str(beside))
        difference = check_against(network, OnnxNetwork(beside), size, (1, 2, 5))
        if not difference <= TOLERANCE:
            raise VisardError(f"{path}: differs from PyTorch by {difference:.1e}, allowed are {TOLERANCE:g}")
    return Exported(path, difference, path.stat().st_size)


def rename_ports(path: Path, name: str, output: str) -> None:
    """Give the one input and the one output of an exported graph other names, so that it takes another one's place."""
    onnx = need("onnx")
    graph = onnx.load(str(path))
    names = {graph.graph.input[0].name: name, graph.graph.output[0].name: output}
    for node in graph.graph.node:
        node.input[:] = [names.get(port, port) for port in node.input]
        node.output[:] = [names.get(port, port) for port in node.output]
    for port in (graph.graph.input[0], graph.graph.output[0]):
        port.name = names[port.name]
    with replacing(path, mode=SHARED) as beside:
        onnx.save(graph, str(beside))


def check_against(one: nn.Module, two: nn.Module, size: int, batches: Sequence[int]) -> float:
    """Largest difference of the features of random pictures, relative to their largest value."""
    rng = torch.Generator().manual_seed(0)
    worst = 0.0
    with torch.inference_mode():
        for batch in batches:
            x = torch.rand(batch, 3, size, size, generator=rng).mul_(2).sub_(1)
            a, b = one.forward(x), two.forward(x)
            if a.shape != b.shape:
                raise VisardError(f"features of shape {tuple(b.shape)} instead of {tuple(a.shape)}")
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)))
    return worst


def quantise(
    source: str | Path, path: str | Path, calibration: Sequence[npt.NDArray[np.float32]] | None = None
) -> Exported:
    """An exported network with 8-bit integers, metadata kept; `difference` is that from `source` on random pictures.

    Without `calibration` (batches of network inputs) the range of activations is computed for each batch (dynamic);
    with it, it is fixed beforehand (static), which is faster and needs pictures like those to come.
    """
    quantization, preparation = need("onnxruntime.quantization"), need("onnxruntime.quantization.shape_inference")
    onnx, source, path = need("onnx"), Path(source), Path(path)
    with (
        replacing(path, mode=SHARED) as beside,
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".visard-") as folder,
        _quiet(),
    ):
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
def _quiet() -> Iterator[None]:
    """Silence warnings of exporters; errors are raised, and the result is checked."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
