"""Labeled Faces in the Wild (Huang et al. 2007): a folder per person, and the pairs to compare."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from visard.data.pairs import Pairs, kept_pairs, load_pairs
from visard.data.pictures import Crop
from visard.data.sources import folder
from visard.data.sources.listing import Listing, Numbers, fields, rows_of
from visard.errors import UsageError

__all__ = ["Pairs", "load_pairs", "read", "read_lfw_pairs"]

OFFICIAL_SIZE = (250, 250)
Pair = tuple[str, str, bool, int]  # name_0001, name_0002, same person, fold


def read(
    source: Path, *, crop: int = 150, pairs: Path | str | None = None, landmarks: Path | str | None = None
) -> Listing:
    """List `source`/<name>/<name>_0001.jpg; pictures of the official 250 x 250 keep their centre `crop`.

    `pairs` is pairs.txt or pairsDevTest.txt; by default pairs.txt in or beside `source` if there is one.
    Pairs with a picture that was not imported are left out and counted. `landmarks` as for a folder.
    """
    lines = read_lfw_pairs(_find_pairs(source, pairs))
    listing = folder.read(source, crop=crop, landmarks=landmarks)
    info: dict[str, Any] = {"crop": crop}
    item_of = {Path(file).stem: item for item, file in enumerate(listing.files)}
    known = [(item_of.get(a, -1), item_of.get(b, -1), same, k) for a, b, same, k in lines]
    table = np.array(known, np.int64).reshape(-1, 4)

    def extras(kept: Numbers) -> dict[str, np.ndarray[Any, Any]]:
        # one more row at the end, so that item -1, a picture that is not there, has row -1
        return kept_pairs(table, np.append(rows_of(kept, len(listing.files)), -1), info)

    return replace(listing, crop=Crop(crop, OFFICIAL_SIZE), extras=extras, info=info)


def _find_pairs(source: Path, pairs: Path | str | None) -> Path | None:
    if pairs is not None:
        if not Path(pairs).is_file():
            raise UsageError(f"no such file: {pairs}")
        return Path(pairs)
    beside = (source / "pairs.txt", source.parent / "pairs.txt")
    return next((path for path in beside if path.is_file()), None)


def read_lfw_pairs(path: Path | None) -> list[Pair]:
    """Pairs after a first line "folds pairs" or "pairs", which says how many of each kind a fold has."""
    if path is None:
        return []
    lines = list(fields(path))
    head = lines[0][1] if lines else []
    if len(head) not in (1, 2) or not all(word.isdecimal() and int(word[:9]) > 0 for word in head):
        raise UsageError(f"{path}:1: expected the number of folds and of pairs")
    per_fold = 2 * int(head[-1][:9])
    return [(a, b, same, k // per_fold) for k, (a, b, same) in enumerate(pair_lines(lines[1:]))]


def pair_lines(lines: list[tuple[str, list[str]]]) -> list[tuple[str, str, bool]]:
    """Lines "name i j" (same person) and "name i name j" (different) as file names without ending."""
    pairs = []
    for where, words in lines:
        numbers = words[1:] if len(words) == 3 else words[1::2]
        if len(words) not in (3, 4) or not all(word.isdecimal() and len(word) < 10 for word in numbers):
            raise UsageError(f"{where}: expected 'name i j' or 'name i name j'")
        other = words[0] if len(words) == 3 else words[2]
        first, second = f"{words[0]}_{int(numbers[0]):04d}", f"{other}_{int(numbers[1]):04d}"
        pairs.append((first, second, len(words) == 3))
    return pairs
