"""What an importer finds before any picture is decoded."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.containers import Pictures, Stream
from visard.data.pictures import CENTRE, Crop
from visard.errors import UsageError

Numbers = npt.NDArray[np.int64]
# saves more arrays beside the pictures: (item of each row that was kept) -> name of array -> values
Extras = Callable[[Numbers], dict[str, np.ndarray[Any, Any]]]


@dataclass(frozen=True, eq=False)
class Listing:
    """The pictures of a source, numbered from 0 ("items"), and what is known of each."""

    pictures: Pictures | Stream
    files: Sequence[str]  # what each picture is called
    identity: npt.NDArray[np.int32]  # of each picture, number of a name
    names: list[str]  # of the identities, in the order that limits and numbers follow
    attribute_names: list[str] = field(default_factory=list)
    attributes: npt.NDArray[np.int8] | None = None  # (files, attribute_names) in {-1, 0, 1}
    domains: Sequence[str] | None = None  # of each picture; the name of the importer by default
    crop: Crop = CENTRE
    align: str = "none"  # unless the user asks for something else
    landmarks: npt.NDArray[np.float32] | None = None  # (files, 5, 2) x, y in the source's pixels, NaN = unknown
    boxes: npt.NDArray[np.float32] | None = None  # (files, 4) x, y, width, height, NaN = unknown
    size: int = 64  # unless the user asks for something else
    extras: Extras | None = None
    info: dict[str, Any] = field(default_factory=dict)


def number(names: Iterable[str]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Give each name a number in the order of first appearance: (number of each, names)."""
    known: dict[str, int] = {}
    numbers = np.fromiter((known.setdefault(name, len(known)) for name in names), np.int32)
    return numbers, list(known)


def rows_of(kept: Numbers, count: int) -> Numbers:
    """The row of each of `count` items in the finished set, -1 for those that were left out."""
    rows = np.full(count, -1, np.int64)
    rows[kept] = np.arange(len(kept))
    return rows


def fields(path: Path) -> Iterator[tuple[str, list[str]]]:
    """("file:line", words) of each line that is not empty."""
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            for line_number, line in enumerate(lines, 1):
                words = line.split()
                if words:
                    yield f"{path}:{line_number}", words
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def coordinates(where: str, words: list[str]) -> npt.NDArray[np.float32]:
    """Five points (5, 2) from ten words."""
    try:
        points = np.array([float(word) for word in words], np.float32)
    except (ValueError, OverflowError):
        points = np.zeros(0, np.float32)
    if points.shape != (10,) or not (np.abs(points) < 1e6).all():
        raise UsageError(f"{where}: expected five landmarks x y, found {' '.join(words)[:60]!r}")
    return points.reshape(5, 2)
