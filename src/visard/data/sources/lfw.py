"""LFW (Huang et al. 2007) and RFW (Wang et al. 2019): a folder per identity, and text files of pairs to compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.listing import Files, Listing, coordinates, fields, number
from visard.data.pairs import consecutive_folds, pair_extras
from visard.data.pictures import Crop
from visard.data.sources import bin as packed
from visard.data.sources import folder
from visard.errors import UsageError

OFFICIAL_SIZE = (250, 250)
CROP = 150  # pixels of those in which the face is
Pair = tuple[str, str, bool, int]  # name_0001, name_0002, same identity, fold


def read(
    source: Path, *, crop: int | None = None, pairs: Path | str | None = None, landmarks: Path | str | None = None
) -> Listing:
    """List Labeled Faces in the Wild, `source`/<name>/<name>_0001.jpg.

    Pictures are aligned by the face that is found; with `crop`, or without alignment, those of 250 x 250 keep their
    centre `crop` (150). `pairs` is pairs.txt or pairsDevTest.txt; by default pairs.txt in or beside `source` if there
    is one. Pairs with a picture that was not imported are left out and counted. `landmarks` as for a folder.
    """
    usual = (file for file in (source / "pairs.txt", source.parent / "pairs.txt") if file.is_file())
    path = next(usual, None) if pairs is None else Path(pairs)
    lines = [] if path is None else read_pairs(path)
    listing = folder.read(source, crop=crop, landmarks=landmarks)
    info: dict[str, Any] = {"crop": crop or CROP}
    item_of = {Path(file).stem: item for item, file in enumerate(listing.files)}
    known = [(item_of.get(a, -1), item_of.get(b, -1), same, k) for a, b, same, k in lines]
    extras = pair_extras(np.array(known, np.int64).reshape(-1, 4), listing.files, info)
    return replace(listing, crop=Crop(crop or CROP, OFFICIAL_SIZE), extras=extras, info=info)


def read_rfw(source: Path) -> Listing:
    """List Racial Faces in the Wild, `source`/data/<race>/<person>/<person>_0001.jpg, with the text files of each race.

    `source`/txts/<race>/<race>_pairs.txt has the pairs, _lmk.txt five landmarks a picture. The race is the domain of a
    picture. Pictures are aligned by their landmarks where the file is there, otherwise by the face that is found. A
    folder of <race>_test.bin files is read too.
    """
    root = next((path for path in (source, source / "test") if (path / "data").is_dir()), None)
    if root is None:
        if source.is_dir() and any(source.glob("*.bin")):
            return packed.read(source)
        raise UsageError(f"{source} is no RFW: it has neither a folder data nor .bin files")
    container, places, files = folder.walk(
        root / "data",
        "<race>/<person>/<picture>",
        lambda parts: (parts[0], f"{parts[0]}/{parts[1]}") if len(parts) == 3 else None,
    )
    races = [race for race, _ in places]
    item_of = {(race, Path(file).stem): item for item, (race, file) in enumerate(zip(races, files, strict=True))}
    table, points, info = [], np.full((len(files), 5, 2), np.nan, np.float32), dict[str, Any]()
    for race in sorted(set(races)):
        texts = root / "txts" / race
        table += [
            (item_of.get((race, a), -1), item_of.get((race, b), -1), same, fold)
            for a, b, same, fold in read_pairs(texts / f"{race}_pairs.txt", counted=False)
        ]
        _read_landmarks(texts / f"{race}_lmk.txt", race, item_of, points)
    known = np.isfinite(points).any()
    return Listing(
        Files(container, files), files, *number(name for _, name in places), domains=races, info=info,
        align="landmarks" if known else "five",
        landmarks=points if known else None,
        extras=pair_extras(np.array(table, np.int64).reshape(-1, 4), files, info),
    )  # fmt: skip


def read_pairs(path: Path, counted: bool = True) -> list[Pair]:
    """Lines "name i j" (the same identity) and "name i name j" (different) as file names without ending.

    A first line "folds pairs" or "pairs" says how many of each kind a fold has. With `counted` it must be there; else,
    where it is missing, the pairs are ten folds in order.
    """
    if not path.is_file():
        raise UsageError(f"no such file: {path}" if counted else f"{path} is missing")
    lines = list(fields(path))
    head = lines[0][1] if lines else []
    if len(head) in (1, 2) and all(word.isdecimal() and int(word[:9]) > 0 for word in head):
        pairs = [_pair(where, words) for where, words in lines[1:]]
        folds = [k // (2 * int(head[-1][:9])) for k in range(len(pairs))]
    elif counted:
        raise UsageError(f"{path}:1: expected the number of folds and of pairs")
    elif not lines:
        raise UsageError(f"{path} lists no pairs")
    else:
        pairs = [_pair(where, words) for where, words in lines]
        folds = consecutive_folds(len(pairs)).tolist()
    return [(*pair, fold) for pair, fold in zip(pairs, folds, strict=True)]


def _pair(where: str, words: list[str]) -> tuple[str, str, bool]:
    numbers = words[1:] if len(words) == 3 else words[1::2]
    if len(words) not in (3, 4) or not all(word.isdecimal() and len(word) < 10 for word in numbers):
        raise UsageError(f"{where}: expected 'name i j' or 'name i name j'")
    other = words[0] if len(words) == 3 else words[2]
    return f"{words[0]}_{int(numbers[0]):04d}", f"{other}_{int(numbers[1]):04d}", len(words) == 3


def _read_landmarks(
    path: Path, race: str, item_of: dict[tuple[str, str], int], points: npt.NDArray[np.float32]
) -> None:
    """Fill in lines "<path of the picture> [label] x y x y x y x y x y"; only the last part of the path counts."""
    if not path.is_file():
        return
    for where, words in fields(path):
        values = coordinates(where, words[-10:] if len(words) > 10 else words[1:])
        item = item_of.get((race, Path(words[0]).stem))
        if item is not None:
            points[item] = values
