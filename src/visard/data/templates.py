"""Templates (sets of pictures of one person), pairs of templates and galleries, as an IJB import saves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.faces import FaceSet
from visard.errors import UsageError, VisardError

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Templates:
    """Which picture belongs to which template; one entry (T,) per picture and template."""

    row: Numbers  # of the face set
    template: Numbers
    media: Numbers  # pictures of one medium (a video) are averaged before media are added
    subject: Numbers  # -1 where it is not known
    score: npt.NDArray[np.float32]  # of the face detector; 1 where there is none


@dataclass(frozen=True, eq=False)
class TemplatePairs:
    """Templates to compare (P,): template numbers, and whether they show one person."""

    first: npt.NDArray[np.int32]
    second: npt.NDArray[np.int32]
    same: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, eq=False)
class Gallery:
    """Templates with the subject of each (n,)."""

    template: Numbers
    subject: Numbers

    def __len__(self) -> int:
        return len(self.template)


@dataclass(frozen=True, eq=False)
class Galleries:
    """One split of 1:N: galleries by name (G1, G2), each searched on its own, and the probes of all."""

    galleries: Mapping[str, Gallery]
    probes: Gallery


def splits(faces: FaceSet) -> list[int]:
    """The numbers of the splits: [0] for IJB-B and IJB-C, 1 to 10 for IJB-A."""
    found = _ijb(faces).get("splits")
    if not isinstance(found, list) or not found or not all(isinstance(k, int) for k in found):
        raise UsageError(f"{faces.path.name} has no templates: it was not imported as ijb")
    return list(found)


def load_templates(faces: FaceSet, split: int | None = None) -> Templates:
    """The templates of one split (of the only one by default)."""
    k = _split(faces, split)
    table = _table(faces, f"templates_{k}", 4, np.int64)
    scores = np.array(faces.extra(f"scores_{k}"))
    if scores.shape != (len(table),) or scores.dtype != np.float32:
        raise VisardError(f"{faces.path / f'scores_{k}.npy'} does not fit the templates")
    if table[:, 0].min(initial=0) < 0 or table[:, 0].max(initial=0) >= len(faces):
        raise VisardError(f"{faces.path / f'templates_{k}.npy'} has a row that is not in the set")
    row, template, media, subject = np.ascontiguousarray(table.T)
    return Templates(row, template, media, subject, scores)


def load_template_pairs(faces: FaceSet, split: int | None = None) -> TemplatePairs:
    """The 1:1 comparisons of one split; 15.7 million of IJB-C are 188 MB, mapped from disk."""
    table = _table(faces, f"template_pairs_{_split(faces, split)}", 3, np.int32)
    return TemplatePairs(table[:, 0], table[:, 1], table[:, 2] == 1)


def load_galleries(faces: FaceSet, split: int | None = None) -> Galleries:
    """The galleries and probes of one split."""
    k = _split(faces, split)
    names = _ijb(faces).get("galleries", [])
    if not names:
        raise UsageError(f"{faces.path.name} has no galleries: the import found no 1N files")
    galleries = {name: _gallery(faces, f"gallery_{k}_{name}") for name in names}
    return Galleries(galleries, _gallery(faces, f"probes_{k}"))


def _ijb(faces: FaceSet) -> dict[str, Any]:
    found = faces.info.get("ijb", {})
    return found if isinstance(found, dict) else {}


def _split(faces: FaceSet, split: int | None) -> int:
    known = splits(faces)
    if split is None and len(known) == 1:
        return known[0]
    if split not in known:
        raise UsageError(f"{faces.path.name} has splits {', '.join(map(str, known))}: {split} is not one of them")
    return split


def _gallery(faces: FaceSet, name: str) -> Gallery:
    table = _table(faces, name, 2, np.int64)
    return Gallery(np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1]))


def _table(faces: FaceSet, name: str, width: int, kind: npt.DTypeLike) -> np.ndarray[Any, Any]:
    table = faces.extra(name).view(np.ndarray)
    if table.ndim != 2 or table.shape[1] != width or table.dtype != kind:
        raise VisardError(f"{faces.path / f'{name}.npy'} is damaged: {table.dtype} {table.shape}")
    return table
