"""Models as ONNX files, and the loss of accuracy by 8-bit integers."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from visard.config import EvaluationSettings
from visard.data.faces import FaceView
from visard.errors import UsageError
from visard.evaluation.arrays import unit_rows
from visard.evaluation.metrics import brief
from visard.evaluation.protocols import verification
from visard.inference.model import Data, FaceModel, embed, load_model, open_data
from visard.models.inputs import resized
from visard.models.onnx import OPSET, Exported, OnnxNetwork, export_onnx, quantise

CALIBRATION = 256  # pictures that fix the ranges of a static quantisation


@dataclass(frozen=True)
class Loss:
    """The effect of 8-bit integers: metrics before and after, and the mean cosine of features before and after."""

    pictures: int
    cosine: float
    before: dict[str, float | None]
    after: dict[str, float | None]


def export(
    model: FaceModel,
    path: str | Path,
    *,
    int8: bool = False,
    data: Data | None = None,
    static: bool = False,
    dynamic_batch: bool = True,
    opset: int = OPSET,
) -> tuple[Exported, Loss | None]:
    """Write a model as ONNX, and with `int8` as ONNX of 8-bit integers, measured on the people of `data`.

    `static` fixes the ranges of activations on pictures of every second person of `data` and measures on the others.
    """
    path = Path(path)
    if static and (data is None or not int8):
        raise UsageError("static quantisation needs int8 and a face set to find its ranges on")
    spec = {k: v for k, v in model.spec.items() if v is not None}
    if not int8:
        return export_onnx(model.network, path, spec, dynamic=dynamic_batch, opset=opset), None
    view = None if data is None else open_data(data)
    test, used = (view, None) if view is None or not static else _halves(view)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "float.onnx"
        if isinstance(model.network, OnnxNetwork):
            source = model.network.path
        else:
            export_onnx(model.network, source, spec, dynamic=dynamic_batch, opset=opset)
        batches = None if used is None else _batches(model, used, 1 if not dynamic_batch else 16)
        made = quantise(source, path, batches)
    return made, None if test is None else _loss(model, path, test)


def _halves(view: FaceView) -> tuple[FaceView, FaceView]:
    """Pictures of every second person to test on, and those of the others."""
    odd = view.labels % 2 == 1
    if not odd.any() or odd.all():
        raise UsageError(f"{view.faces.path.name} shows one person: static quantisation needs two or more")
    return view.take(~odd), view.take(odd)


def _batches(model: FaceModel, view: FaceView, size: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    if isinstance(model.network, OnnxNetwork):
        size = model.network.batch or size
    rows = np.unique(np.linspace(0, len(view) - 1, CALIBRATION).astype(np.int64))
    usable = rows[: max(size, len(rows) // size * size)]
    pictures = resized(view.batch(usable), model.size)
    return [model.inputs.tensor(pictures[i : i + size]).cpu().numpy() for i in range(0, len(pictures), size)]


def _loss(model: FaceModel, path: Path, view: FaceView) -> Loss:
    small, settings = load_model(path, size=model.size), EvaluationSettings(bootstrap=0)
    one, two = (embed(m, view) for m in (model, small))
    cosine = float(np.einsum("nd,nd->n", unit_rows(one), unit_rows(two)).mean())
    before, after = (brief({"verification": verification(f, view.identity, settings)}) for f in (one, two))
    return Loss(len(view), cosine, before, after)
