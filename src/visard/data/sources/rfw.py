"""Racial Faces in the Wild (Wang et al. 2019): four races, each with LFW-style pairs and five landmarks a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.containers import Container, Files
from visard.data.pairs import consecutive_folds, kept_pairs
from visard.data.pictures import is_picture
from visard.data.sources import bin as packed
from visard.data.sources.lfw import Pair, pair_lines
from visard.data.sources.listing import Listing, Numbers, coordinates, fields, number, rows_of
from visard.errors import UsageError


def read(source: Path) -> Listing:
    """List `source`/data/<race>/<person>/<person>_0001.jpg with `source`/txts/<race>/<race>_pairs.txt and _lmk.txt.

    The race is the domain of a picture. Pictures are aligned by their landmarks where the file is there, otherwise
    their centre is taken. A folder of <race>_test.bin files is read too.
    """
    root = next((path for path in (source, source / "test") if (path / "data").is_dir()), None)
    if root is None:
        if source.is_dir() and any(source.glob("*.bin")):
            return packed.read(source)
        raise UsageError(f"{source} is no RFW: it has neither a folder data nor .bin files")
    container = Container(root / "data")
    found = [(name.split("/"), name) for name in container.names() if is_picture(name)]
    inside = [(parts, name) for parts, name in found if len(parts) == 3]
    if not inside:
        raise UsageError(f"{root / 'data'} holds no pictures as <race>/<person>/<picture>")
    files = [name for _, name in inside]
    races = [parts[0] for parts, _ in inside]
    item_of = {(parts[0], Path(name).stem): item for item, (parts, name) in enumerate(inside)}
    identity, names = number(f"{parts[0]}/{parts[1]}" for parts, _ in inside)
    table, points, info = [], np.full((len(files), 5, 2), np.nan, np.float32), dict[str, Any]()
    for race in sorted(set(races)):
        texts = root / "txts" / race
        table += [
            (item_of.get((race, a), -1), item_of.get((race, b), -1), same, fold)
            for a, b, same, fold in _read_pairs(texts / f"{race}_pairs.txt")
        ]
        _read_landmarks(texts / f"{race}_lmk.txt", race, item_of, points)
    items = np.array(table, np.int64).reshape(-1, 4)
    known = np.isfinite(points).any()

    def extras(kept: Numbers) -> dict[str, np.ndarray[Any, Any]]:
        # one more row at the end, so that item -1, a picture that is not there, has row -1
        return kept_pairs(items, np.append(rows_of(kept, len(files)), -1), info)

    return Listing(
        pictures=Files(container, files),
        files=files,
        identity=identity,
        names=names,
        domains=races,
        align="landmarks" if known else "none",
        landmarks=points if known else None,
        size=112,
        extras=extras,
        info=info,
    )


def _read_pairs(path: Path) -> list[Pair]:
    """Pairs with folds from a file with or without a first line "folds pairs"."""
    if not path.is_file():
        raise UsageError(f"{path} is missing")
    lines = list(fields(path))
    head = lines[0][1] if lines else []
    if len(head) in (1, 2) and all(word.isdecimal() and 0 < int(word) < 10**6 for word in head):
        per_fold = 2 * int(head[-1])
        pairs = pair_lines(lines[1:])
        return [(a, b, same, k // per_fold) for k, (a, b, same) in enumerate(pairs)]
    pairs = pair_lines(lines)
    if not pairs:
        raise UsageError(f"{path} lists no pairs")
    folds = consecutive_folds(len(pairs)).tolist()
    return [(a, b, same, fold) for (a, b, same), fold in zip(pairs, folds, strict=True)]


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
