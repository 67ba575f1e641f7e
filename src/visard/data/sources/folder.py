"""A folder (or zip) with one folder of pictures per identity, or per domain and identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.containers import Files, open_container
from visard.data.pairs import kept_pairs, read_pair_list, with_folds
from visard.data.pictures import Crop, is_picture
from visard.data.sources.listing import Extras, Listing, Numbers, coordinates, fields, number, rows_of
from visard.errors import UsageError


def read(
    source: Path,
    *,
    crop: int | None = None,
    domains: bool = False,
    landmarks: Path | str | None = None,
    pairs: Path | str | None = None,
) -> Listing:
    """List `source`/<identity>/**/<picture>, or `source`/<domain>/<identity>/**/<picture> with `domains`.

    Each picture keeps its centre square of `crop` pixels (by default as large as fits), or is aligned by `landmarks`:
    a text file with a line "<file> x y x y x y x y x y" for each. `pairs` is a list of pairs to compare (see
    `visard.data.pairs.read_pairs`) with file names inside `source`.
    """
    if crop is not None and crop < 1:
        raise UsageError(f"crop = {crop}: must be at least 1 pixel")
    levels = 2 if domains else 1
    container = open_container(source)
    found = [(name.split("/"), name) for name in container.names() if is_picture(name)]
    inside = sorted((parts[:levels], name) for parts, name in found if len(parts) > levels)
    if not inside:
        container.close()
        layout = "<domain>/<identity>/<picture>" if domains else "<identity>/<picture>"
        raise UsageError(f"{source} holds no pictures as {layout}")
    files = [name for _, name in inside]
    identity, names = number("/".join(parts) for parts, _ in inside)
    info: dict[str, Any] = {"crop": crop}
    return Listing(
        pictures=Files(container, files),
        files=files,
        identity=identity,
        names=names,
        domains=[parts[0] for parts, _ in inside] if domains else None,
        crop=Crop(crop),
        align="none" if landmarks is None else "landmarks",
        landmarks=None if landmarks is None else read_landmarks(Path(landmarks), files),
        extras=None if pairs is None else _pairs(Path(pairs), files, info),
        info=info,
    )


def read_landmarks(path: Path, files: list[str]) -> npt.NDArray[np.float32]:
    """Landmarks (files, 5, 2) from lines "<file> x y ..." with spaces or commas; NaN for files without a line."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    item_of = {name: item for item, name in enumerate(files)}
    points = np.full((len(files), 5, 2), np.nan, np.float32)
    known = 0
    for where, words in fields(path):
        words = " ".join(words).replace(",", " ").split()
        if where.endswith(":1") and not any(word[-1].isdecimal() and word[0].isdecimal() for word in words[-10:]):
            continue  # names of columns
        item = item_of.get(" ".join(words[:-10]))
        values = coordinates(where, words[-10:])
        if item is not None:
            points[item] = values
            known += 1
    if not known:
        raise UsageError(f"{path} has no landmarks of any picture here (names are like {files[0]!r})")
    return points


def _pairs(path: Path, files: list[str], info: dict[str, Any]) -> Extras:
    by_rows, lines = read_pair_list(path)
    if by_rows:
        raise UsageError(f"{path}: rows are known only after the import; name files (file_a,file_b,same)")
    item_of = {name: item for item, name in enumerate(files)}
    table = []
    for where, a, b, same, fold in lines:
        if a not in item_of or b not in item_of:
            raise UsageError(f"{where}: no picture {b if a in item_of else a}")
        table.append((item_of[a], item_of[b], same, fold))
    items = with_folds(np.array(table, np.int64))

    def extras(kept: Numbers) -> dict[str, np.ndarray[Any, Any]]:
        return kept_pairs(items, rows_of(kept, len(files)), info)

    return extras


# ----------
# Office-31 (or any set like it): the same classes seen by several cameras, <domain>/[images/]<class>/<picture>.


def read_office31(source: Path, *, crop: int | None = None) -> Listing:
    """List the pictures; a class is one identity in all domains. Each keeps its centre square of `crop` pixels."""
    if crop is not None and crop < 1:
        raise UsageError(f"crop = {crop}: must be at least 1 pixel")
    container = open_container(source)
    found = [([p for p in name.split("/") if p != "images"], name) for name in container.names() if is_picture(name)]
    inside = sorted((parts, name) for parts, name in found if len(parts) == 3)
    if not inside:
        container.close()
        raise UsageError(f"{source} holds no pictures as <domain>/<class>/<picture>")
    files = [name for _, name in inside]
    identity, names = number(parts[1] for parts, _ in inside)
    return Listing(
        pictures=Files(container, files),
        files=files,
        identity=identity,
        names=names,
        domains=[parts[0] for parts, _ in inside],
        crop=Crop(crop),
        info={"crop": crop},
    )
