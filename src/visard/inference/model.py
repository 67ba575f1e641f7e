"""For notebooks and scripts: load a model, embed pictures, test it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from visard.config import EvaluationSettings
from visard.data.faces import FaceSet, FaceView
from visard.data.sources.catalog import find_set
from visard.data.storage import digest
from visard.errors import UsageError, did_you_mean
from visard.evaluation import benchmarks as tests
from visard.evaluation.groups import errors_by
from visard.evaluation.ijb import Switches
from visard.evaluation.protocols import identification, verification
from visard.learning.features import embed as embed_view
from visard.learning.features import embed_pictures
from visard.models.files import open_model
from visard.models.inputs import Inputs

Data = FaceSet | FaceView | str | Path
PROTOCOLS = ("verification", "identification", "lfw", "rfw", "ijb")


@dataclass(frozen=True, eq=False)
class FaceModel:
    """A network with what its file says of it; `resize` lets it take pictures of other sizes."""

    network: nn.Module
    spec: dict[str, str]
    path: Path | None = None
    resize: bool = False

    @property
    def size(self) -> int:
        """Side of the pictures that it takes."""
        return int(self.spec["size"])

    @property
    def inputs(self) -> Inputs:
        """How pictures go in."""
        return Inputs.of_spec(self.spec)

    @property
    def align(self) -> str:
        """How photographs are cut for it: as the pictures were that it was trained on. Models of visard say so where
        these were aligned; public ones do not say it, and nearly all of them were trained on five landmarks.
        """
        return self.spec.get("align") or ("none" if "visard" in self.spec else "five")

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over the file and the way pictures go in: equal means equal features."""
        if self.path is None:
            state = sorted(self.network.state_dict().items())
            content = digest(*(part for k, v in state for part in (k.encode(), v.contiguous().numpy().tobytes())))
        else:
            with self.path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        return digest(content.encode(), repr(sorted(self.inputs.to_spec().items())).encode())[:16]


def load_model(
    path: str | Path,
    *,
    input: str | None = None,
    size: int | None = None,
    order: str | None = None,
    mean: str | None = None,
    std: str | None = None,
) -> FaceModel:
    """The model in a visard `.safetensors`, an InsightFace `.pth` / `.pt` (weights only) or an `.onnx` file.

    `input` is a preset (arcface, cosface, imagenet, raw) and `order` (rgb, bgr), `mean`, `std` ("0.5" or "a,b,c", of
    pixels / 255) are single settings, for files that do not say how pictures go in. With `size` given, pictures of
    other sizes are resized to it.
    """
    network, spec = open_model(path, name=input, size=size, order=order, mean=mean, std=std)
    return FaceModel(network, spec, Path(path), resize=size is not None)


def open_data(data: Data) -> FaceView:
    """The pictures of a face set, given as itself, a view of it, its folder or its name."""
    if isinstance(data, FaceView):
        return data
    return data.all() if isinstance(data, FaceSet) else FaceSet.open(find_set(str(data))).all()


def embed(model: FaceModel, data: Data | npt.NDArray[np.uint8], *, flip: bool = False) -> npt.NDArray[np.float32]:
    """Features (n, E), not normalised, of a face set or of pictures (n, size, size, 3) uint8."""
    if isinstance(data, np.ndarray):
        square = data.ndim == 4 and data.shape[1] == data.shape[2] and data.shape[3] == 3
        if data.dtype != np.uint8 or not square or (data.shape[1] != model.size and not model.resize):
            raise UsageError(
                f"pictures must be uint8 of shape (n, {model.size}, {model.size}, 3), not {data.dtype} {data.shape}"
            )
        return embed_pictures(model.network, data, flip=flip, inputs=model.inputs)
    view = open_data(data)
    if view.faces.size != model.size and not model.resize:
        raise UsageError(
            f"{view.faces.path.name} has pictures of {view.faces.size} pixels, the model takes {model.size} "
            f"(--size {model.size} resizes them)"
        )
    return embed_view(model.network, view, flip=flip, inputs=model.inputs)


def evaluate(
    model: FaceModel | npt.NDArray[np.floating[Any]],
    data: Data,
    *,
    protocols: Sequence[str] = ("verification", "identification"),
    settings: EvaluationSettings | None = None,
    seed: int = 0,
    pairs: str | Path | None = None,
    switches: str = "N1D1F1",
) -> dict[str, Any]:
    """Figures of a model (or of features of all pictures) on a face set, by protocol, as plain values.

    verification, identification: any set. lfw: ten folds over the set's own pairs, or over those that the file `pairs`
    names (which verification takes too). rfw: the same for each domain. ijb: templates, with the N, D, F `switches`.
    lfw, rfw and ijb sum features with those of mirrored pictures, as their tables do (ijb: unless F is off).
    Where `settings.by` names domain or attributes, "groups" has the errors of each group at one threshold for all.
    """
    settings = settings or EvaluationSettings()
    view = open_data(data)
    for name in protocols:
        if name not in PROTOCOLS:
            raise UsageError(f"no protocol {name!r}{did_you_mean(name, PROTOCOLS)}")
    chosen = Switches.parse(switches)
    made: dict[bool, npt.NDArray[Any]] = {}

    def features(flip: bool) -> npt.NDArray[Any]:
        if isinstance(model, np.ndarray):
            return model
        if flip not in made:
            made[flip] = embed(model, view, flip=flip)
        return made[flip]

    if isinstance(model, np.ndarray) and (model.ndim != 2 or len(model) != len(view)):
        raise UsageError(f"features of shape {model.shape} do not fit the {len(view)} pictures")
    faces, listed, far = view.faces, None if pairs is None else Path(pairs), settings.far
    if len(view) != len(faces) and (listed or set(protocols) & set(tests.FLIPPED)):
        raise UsageError("pairs and templates are of whole face sets, not of views of some pictures")
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "verification": lambda: (
            verification(features(settings.flip), view.identity, settings, seed)
            if listed is None
            else tests.list_metrics(features(settings.flip), faces, listed, far, settings.bootstrap, seed)
        ),
        "identification": lambda: identification(features(settings.flip), view.identity, seed),
        "lfw": lambda: tests.lfw_metrics(features(True), faces, listed, far),
        "rfw": lambda: tests.rfw_metrics(features(True), faces, listed, far),
        "ijb": lambda: tests.ijb_metrics(features(chosen.F), faces, chosen),
    }
    found = {name: run[name]() for name in protocols}
    if settings.by:
        rate, draws = settings.fmr, settings.bootstrap
        groups = {
            by: errors_by([features(settings.flip)], [view], by, fmr=rate, bootstrap=draws, seed=seed).to_dict()
            for by in settings.by
        }
        found["groups"] = groups
    return found
