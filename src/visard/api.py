"""For notebooks and scripts: load a model, embed pictures, test it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from visard import models
from visard.config import EvaluationSettings
from visard.data.faces import FaceSet, FaceView
from visard.data.locate import find_set
from visard.errors import UsageError
from visard.evaluation.embedding import embed as embed_view
from visard.evaluation.embedding import embed_pictures
from visard.evaluation.generic import identification, verification

Data = FaceSet | FaceView | str | Path


@dataclass(frozen=True)
class FaceModel:
    """A network with what its file says of it."""

    network: nn.Module
    spec: dict[str, str]

    @property
    def size(self) -> int:
        """Side of the pictures that it takes."""
        return int(self.spec["size"])


def load_model(path: str | Path) -> FaceModel:
    """The model in a `.safetensors` file that visard wrote."""
    return FaceModel(*models.load(path))


def open_data(data: Data) -> FaceView:
    """The pictures of a face set, given as itself, a view of it, its folder or its name."""
    if isinstance(data, FaceView):
        return data
    return data.all() if isinstance(data, FaceSet) else FaceSet.open(find_set(str(data))).all()


def embed(model: FaceModel, data: Data | npt.NDArray[np.uint8], *, flip: bool = False) -> npt.NDArray[np.float32]:
    """Features (n, E), not normalised, of a face set or of pictures (n, size, size, 3) uint8."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 4 or data.shape[1:] != (model.size, model.size, 3):
            raise UsageError(
                f"pictures must be uint8 of shape (n, {model.size}, {model.size}, 3), not {data.dtype} {data.shape}"
            )
        return embed_pictures(model.network, data, flip=flip)
    view = open_data(data)
    if view.faces.size != model.size:
        raise UsageError(
            f"{view.faces.path.name} has pictures of {view.faces.size} pixels, the model takes {model.size}"
        )
    return embed_view(model.network, view, flip=flip)


def evaluate(
    model: FaceModel,
    data: Data,
    *,
    protocols: Sequence[Literal["verification", "identification"]] = ("verification", "identification"),
    settings: EvaluationSettings | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Figures of a model on the people of a face set, by protocol, as plain values."""
    settings = settings or EvaluationSettings()
    view = open_data(data)
    features = embed(model, view, flip=settings.flip)
    tests = {"verification": verification, "identification": identification}
    return {name: tests[name](features, view.identity, settings, seed) for name in protocols}
