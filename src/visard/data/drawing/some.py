"""Painting some pictures of a batch: most have no hat, no beard and no mole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .shapes import Plane, Traits


class Some(Mapping[str, Plane]):
    """The traits of some of the pictures, taken when asked for."""

    def __init__(self, whole: Traits, pick: NDArray[np.intp]):
        self.whole, self.pick = whole, pick

    def __getitem__(self, name: str) -> Plane:
        return self.whole[name][self.pick]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def _take(value: Any, pick: NDArray[np.intp]) -> Any:
    """Rows `pick` of a plane, of traits, or of each field of a dataclass of planes; other things as they are."""
    if isinstance(value, np.ndarray):
        return value[pick]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _take(getattr(value, f.name), pick) for f in fields(value)})
    return Some(value, pick) if isinstance(value, Mapping) else value


def paint_where(on: Plane, paint: Callable[..., None], canvas: Plane, *args: Any) -> None:
    """Call paint(*args, canvas) for the pictures with `on` (B, 1, 1) above 0.5 only."""
    pick = np.flatnonzero(on[:, 0, 0] > 0.5)
    if len(pick) == len(canvas):
        paint(*args, canvas)
    elif len(pick):
        part = canvas[pick]
        paint(*(_take(a, pick) for a in args), part)
        canvas[pick] = part
