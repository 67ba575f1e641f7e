"""Labeled Faces in the Wild (Huang et al. 2007): a folder per person, and the pairs to compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.decoding import Crop
from visard.data.faces import FaceSet
from visard.data.sources import folder
from visard.data.sources.listing import Listing
from visard.errors import UsageError, VisardError

OFFICIAL_SIZE = (250, 250)
Pair = tuple[str, str, bool, int]  # name_0001, name_0002, same person, fold


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of pictures to compare: rows of the set (P,), whether they show one person, fold number."""

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]
    same: npt.NDArray[np.bool_]
    fold: npt.NDArray[np.int64]


def read(source: Path, *, crop: int = 150, pairs: Path | str | None = None) -> Listing:
    """List `source`/<name>/<name>_0001.jpg; pictures of the official 250 x 250 keep their centre `crop`.

    `pairs` is pairs.txt or pairsDevTest.txt; by default pairs.txt in or beside `source` if there is one.
    Pairs with a picture that was not imported are left out and counted.
    """
    listing = folder.read(source, crop=crop)
    info: dict[str, Any] = {"crop": crop}
    lines = _read_pairs(_find_pairs(source, pairs))

    def extras(rows: dict[str, int]) -> dict[str, np.ndarray[Any, Any]]:
        by_name = {Path(file).stem: row for file, row in rows.items()}
        known = [
            (by_name[a], by_name[b], same, k) for a, b, same, k in lines if a in by_name and b in by_name
        ]
        info["pairs"], info["pairs_dropped"] = len(known), len(lines) - len(known)
        return {"pairs": np.array(known, np.int64).reshape(-1, 4)} if known else {}

    return Listing(
        container=listing.container,
        files=listing.files,
        identity=listing.identity,
        crop=Crop(crop, OFFICIAL_SIZE),
        extras=extras,
        info=info,
    )


def load_pairs(faces: FaceSet) -> Pairs:
    """The pairs that came with an imported set."""
    table = faces.extra("pairs")
    fits = table.ndim == 2 and table.shape[1] == 4 and table.dtype == np.int64
    if not fits or table.min(initial=0) < 0 or table[:, :2].max(initial=0) >= len(faces):
        raise VisardError(f"{faces.path / 'pairs.npy'} is no list of pairs of this set")
    plain = np.array(table)
    return Pairs(plain[:, 0], plain[:, 1], plain[:, 2] == 1, plain[:, 3])


def _find_pairs(source: Path, pairs: Path | str | None) -> Path | None:
    if pairs is not None:
        if not Path(pairs).is_file():
            raise UsageError(f"no such file: {pairs}")
        return Path(pairs)
    beside = (source / "pairs.txt", source.parent / "pairs.txt")
    return next((path for path in beside if path.is_file()), None)


def _read_pairs(path: Path | None) -> list[Pair]:
    """Lines "name i j" (same) and "name i name j" (different) after "folds pairs" or "pairs"."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise VisardError(f"cannot read {path}: {error.strerror}") from None
    head = lines[0].split() if lines else []
    if len(head) not in (1, 2) or not all(word.isdecimal() and int(word) > 0 for word in head):
        raise VisardError(f"{path}:1: expected the number of folds and of pairs")
    per_fold = 2 * int(head[-1])
    pairs: list[Pair] = []
    for number, line in enumerate(lines[1:], 2):
        words = line.split()
        if not words:
            continue
        numbers = words[1:] if len(words) == 3 else words[1::2]
        if len(words) not in (3, 4) or not all(word.isdecimal() for word in numbers):
            raise VisardError(f"{path}:{number}: expected 'name i j' or 'name i name j'")
        other = words[0] if len(words) == 3 else words[2]
        first, second = f"{words[0]}_{int(numbers[0]):04d}", f"{other}_{int(numbers[1]):04d}"
        pairs.append((first, second, len(words) == 3, len(pairs) // per_fold))
    return pairs
