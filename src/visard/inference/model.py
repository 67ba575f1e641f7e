"""For notebooks and scripts: load a model, embed pictures, test it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from visard.config import EvaluationSettings
from visard.data.faces import FaceSet, FaceView
from visard.data.pictures import CUTS, is_picture
from visard.data.sources.catalog import find_set
from visard.data.storage import HEADER, digest, map_npy
from visard.errors import UsageError, did_you_mean
from visard.evaluation import benchmarks as tests
from visard.evaluation.groups import DOMAIN, errors_by
from visard.evaluation.ijb import Switches
from visard.evaluation.protocols import search_set, verify_set
from visard.evaluation.results import Evaluated, left_out
from visard.files import file_digest
from visard.inference.photos import Photos, framing
from visard.learning.features import embed as embed_view
from visard.learning.features import embed_pictures
from visard.models.catalogue import is_kept, locate
from visard.models.files import located, open_model
from visard.models.inputs import PRESETS, Inputs, words

Data = FaceSet | FaceView | str | Path
Pictures = npt.NDArray[np.uint8]  # (n, size, size, 3)
Progress = Callable[[int, int], None]
AT_ONCE = 256  # pictures of a view between two words about progress
PROTOCOLS = ("verification", "identification", "lfw", "rfw", "ijb")


@dataclass(frozen=True, eq=False)
class Embedded:
    """Features (n, E) of pictures, not normalised; of photographs also the file of each row, and what was skipped."""

    features: npt.NDArray[np.float32]
    files: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()  # file, reason
    crowded: tuple[str, ...] = ()  # files with more faces than the main one, which was taken

    def __len__(self) -> int:
        return len(self.features)

    @property
    def norm(self) -> npt.NDArray[np.float32]:
        """The length of each feature (n,): of a picture quality, small where the network recognises little in it."""
        lengths: npt.NDArray[np.float32] = np.linalg.norm(self.features, axis=1)
        return lengths

    def __repr__(self) -> str:
        n, width = self.features.shape
        return f"Embedded({n} x {width} features, {len(self.skipped)} pictures skipped)"


@dataclass(frozen=True, eq=False)
class FaceModel:
    """A network with the metadata of its file; square pictures of other sizes are resized."""

    network: nn.Module
    spec: dict[str, str]
    path: Path | None = None

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

    def embed(
        self,
        source: Data | Pictures | Photos | Sequence[str | Path],
        *,
        align: str | None = None,
        flip: bool = False,
        say: Callable[[str], None] = lambda text: None,
        progress: Progress | None = None,
    ) -> Embedded:
        """Features of a face set, of an array of pictures, or of photographs: a folder, a zip file or a list of files.

        Photographs are cut as the model wants it (`align`: five, none or haar), and those that cannot be used are
        skipped and listed. `progress(done, total)` follows, and `say` gets lines for people.
        """
        opened = open_pictures(source)
        if line := self.resizes(opened):
            say(line)
        if isinstance(opened, np.ndarray):
            return Embedded(embed(self, opened, flip=flip))
        if isinstance(opened, FaceView):
            features = np.concatenate(
                [embed(self, opened.take([]), flip=flip), *in_parts(self, opened, flip, progress)]
            )
            return Embedded(features, tuple(opened.faces.file(int(row)) for row in opened.index))
        files, skipped, crowded, parts = list[str](), list[tuple[str, str]](), list[str](), []
        with closing(opened):
            cut = framing(align or self.align, say)
            for names, squares, failed, several in opened.squares(cut, self.size, progress):
                files += names
                skipped += failed
                crowded += several
                parts.append(embed(self, squares, flip=flip))
        return Embedded(np.concatenate(parts), tuple(files), tuple(skipped), tuple(crowded))

    @property
    def contract(self) -> str:
        """Its input and output, in words."""
        taken = self.inputs
        pictures = f"{taken.size} x {taken.size} {taken.order.upper()}"
        return f"{pictures}, {words(taken)}, {CUTS.get(self.align, self.align)}, {self.spec['embedding']} numbers"

    @property
    def assumption(self) -> str | None:
        """A line for a file that does not say how pictures go in, None where it does or where that was given."""
        if not getattr(self.network, "assumed", False) or self.path is None or is_kept(self.path):
            return None
        if self.inputs != replace(PRESETS["arcface"], size=self.inputs.size):
            return None
        return (
            f"{self.path.name} does not say how pictures go in: {words(self.inputs)} is assumed. Most networks of "
            "InsightFace want that; if figures are poor, try --input imagenet, cosface or raw"
        )

    def misaligned(self, faces: FaceSet) -> str | None:
        """A line for pictures that are not cut as the network wants them, None where they are."""
        if faces.synthetic or self.align != "five" or faces.align == "five":
            return None
        return (
            f"{faces.path.name} is {CUTS[faces.align]}, and the model wants faces aligned to five points: expect worse "
            "figures (visard data import --align five)"
        )

    def resizes(self, pictures: FaceView | Pictures | Photos) -> str | None:
        """A line for squares of another size than the network takes, None where there is nothing to say."""
        if isinstance(pictures, Photos) or (isinstance(pictures, np.ndarray) and not _are_squares(pictures)):
            return None
        side = pictures.shape[1] if isinstance(pictures, np.ndarray) else pictures.faces.size
        if side == self.size:
            return None
        how = "reduced" if side > self.size else "enlarged, which adds no detail"
        return f"the pictures have {side} x {side} pixels, the model takes {self.size} x {self.size}: they are {how}"

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over the file and the way pictures go in: equal means equal features."""
        if self.path is None:
            state = sorted(self.network.state_dict().items())
            content = digest(*(part for k, v in state for part in (k.encode(), v.cpu().contiguous().numpy().tobytes())))
        else:
            content = file_digest(self.path)
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
    """The model in a `.safetensors`, `.pth` / `.pt` (weights only) or `.onnx` file, or one of `visard models add`.

    `input` is a preset (arcface, cosface, facenet, imagenet, raw) and `order` (rgb, bgr), `mean`, `std` ("0.5" or
    "a,b,c", of pixels / 255) are single settings, for files that do not say how pictures go in. `size` is the side of
    the pictures for files that leave it open.
    """
    network, spec = open_model(path, name=input, size=size, order=order, mean=mean, std=std)
    return FaceModel(network, spec, locate(located(path))[0])


def open_data(data: Data) -> FaceView:
    """The pictures of a face set, given as itself, a view of it, its folder or its name."""
    if isinstance(data, FaceView):
        return data
    return data.all() if isinstance(data, FaceSet) else FaceSet.open(find_set(str(data))).all()


def open_pictures(source: Data | Pictures | Photos | Sequence[str | Path]) -> FaceView | Pictures | Photos:
    """A face set (itself, a view, its folder or name), pictures in an array or a .npy file, or photographs."""
    if isinstance(source, np.ndarray | Photos):
        return source
    if isinstance(source, FaceSet | FaceView):
        return open_data(source)
    if not isinstance(source, str | Path):
        paths = [Path(one) for one in source]
        return open_pictures(paths[0]) if len(paths) == 1 else Photos(paths)
    path = Path(source)
    if path.suffix == ".npy" and path.is_file():
        return np.asarray(map_npy(path))
    if (path.is_dir() and not (path / HEADER).is_file()) or is_picture(path.name) or path.suffix.lower() == ".zip":
        return Photos(path)
    return open_data(source)


def in_parts(
    model: FaceModel, view: FaceView, flip: bool, progress: Progress | None = None
) -> Iterator[npt.NDArray[np.float32]]:  # fmt: skip
    """The features of a view, some rows at a time; `progress(done, total)` hears of each."""
    for start in range(0, max(1, len(view)), AT_ONCE):
        end = min(start + AT_ONCE, len(view))
        yield embed(model, view.take(np.arange(start, end)), flip=flip)
        if progress is not None:
            progress(end, len(view))


def _are_squares(pictures: npt.NDArray[Any]) -> bool:
    shape = pictures.shape
    return pictures.dtype == np.uint8 and len(shape) == 4 and 0 < shape[1] == shape[2] and shape[3] == 3


def embed(model: FaceModel, data: Data | npt.NDArray[np.uint8], *, flip: bool = False) -> npt.NDArray[np.float32]:
    """Features (n, E), not normalised, of a face set or of square pictures (n, side, side, 3) uint8 of any side."""
    if isinstance(data, np.ndarray):
        if not _are_squares(data):
            raise UsageError(
                f"pictures must be uint8 of shape (n, {model.size}, {model.size}, 3) or other squares, which are "
                f"resized, not {data.dtype} {data.shape}"
            )
        return embed_pictures(model.network, data, flip=flip, inputs=model.inputs)
    view = open_data(data)
    if view.faces.dtype != np.uint8:
        raise UsageError(f"{view.faces.path.name} holds readings, and the model takes pictures")
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
    progress: Progress | None = None,
) -> Evaluated:
    """Test a model (or features of all pictures) on a face set, by these protocols.

    verification, identification: any set. lfw: ten folds over the set's own pairs, or over those that the file `pairs`
    names (which verification takes too). rfw: the same for each domain. ijb: templates, with the N, D, F `switches`.
    lfw, rfw and ijb sum features with those of mirrored pictures, as their tables do (ijb: unless F is off).
    Where `settings.by` names domain or attributes, `groups` has the errors of each group at one threshold for all.
    Only the pictures that the protocols need are embedded; `progress(done, total)` follows.

    >>> result = visard.evaluate(model, "data/mine")   # doctest: +SKIP
    >>> result.verification.auc                        # doctest: +SKIP
    """
    settings = settings or EvaluationSettings()
    view = open_data(data)
    for name in protocols:
        if name not in PROTOCOLS:
            raise UsageError(f"no protocol {name!r}{did_you_mean(name, PROTOCOLS)}")
    chosen = Switches.parse(switches)
    if isinstance(model, np.ndarray) and (model.ndim != 2 or len(model) != len(view)):
        raise UsageError(f"features of shape {model.shape} do not fit the {len(view)} pictures")
    faces, listed, far = view.faces, None if pairs is None else Path(pairs), settings.far
    if len(view) != len(faces) and (listed or set(protocols) & set(tests.FLIPPED)):
        raise UsageError("pairs and templates are of whole face sets, not of views of some pictures")
    for by in settings.by or ():
        if by != DOMAIN:
            faces.attribute(by)
    flips = {"lfw": True, "rfw": True, "ijb": chosen.F}
    asked = {(flips.get(name, settings.flip), tests.pictures_of(name, faces, listed)) for name in protocols}
    asked |= {(settings.flip, None)} if settings.by else set()
    made = _features(model, view, asked, progress)
    run: dict[str, Callable[[], Any]] = {
        "verification": lambda: (
            verify_set(made[settings.flip], view.identity, settings, seed)
            if listed is None
            else tests.list_metrics(made[settings.flip], faces, listed, far, settings.bootstrap, seed)
        ),
        "identification": lambda: search_set(made[settings.flip], view.identity, seed),
        "lfw": lambda: tests.lfw_metrics(made[True], faces, listed, far),
        "rfw": lambda: tests.rfw_metrics(made[True], faces, listed, far),
        "ijb": lambda: tests.ijb_metrics(made[chosen.F], faces, chosen),
    }
    found = {name: run[name]() for name in protocols}
    rate, draws = settings.fmr, settings.bootstrap
    groups = {
        by: errors_by([made[settings.flip]], [view], by, fmr=rate, bootstrap=draws, seed=seed)
        for by in settings.by or ()
    }
    if listed is None and not {"lfw", "rfw"} & set(protocols):
        return Evaluated(**found, groups=groups)
    given = tests.pairs_of(faces, listed)
    return Evaluated(**found, groups=groups, left=left_out(faces, given.lost, given.lost_count))


def _features(
    model: FaceModel | npt.NDArray[Any],
    view: FaceView,
    asked: set[tuple[bool, tuple[int, ...] | None]],
    progress: Progress | None,
) -> dict[bool, npt.NDArray[Any]]:
    """Features of all rows of a view, with and without mirror images as asked; rows that are not needed are zero."""
    if isinstance(model, np.ndarray):
        return {True: model, False: model}
    rows = {}
    for flip in {flip for flip, _ in asked}:
        needed = [some for mirrored, some in asked if mirrored == flip]
        every = any(some is None for some in needed)
        some = np.unique([row for part in needed for row in part or ()]).astype(np.int64)
        rows[flip] = np.arange(len(view)) if every else some
    total, done, made = sum(len(r) for r in rows.values()), 0, {}
    for flip, some in sorted(rows.items()):
        part = view if len(some) == len(view) else view.take(some)
        start = done
        watched = None if progress is None else (lambda n, _, start=start: progress(start + n, total))
        found = np.concatenate(list(in_parts(model, part, flip, watched)))
        done += len(some)
        if len(found) < len(view):
            whole = np.zeros((len(view), found.shape[1]), np.float32)
            whole[some] = found
            found = whole
        made[flip] = found
    return made
