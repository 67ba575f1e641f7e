"""Folders (or zip files) of pictures: one folder per identity, per domain and identity, or per domain and class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.listing import Container, Extras, Files, Listing, coordinates, fields, number
from visard.data.pairs import pair_extras, read_pair_list, with_folds
from visard.data.pictures import Crop, is_picture
from visard.errors import UsageError

UNLABELLED = "unlabelled"  # the one name of pictures without labels
Place = Callable[[list[str]], tuple[str, str] | None]  # parts of a file's name -> domain and identity, None: not used


def read(
    source: Path,
    *,
    crop: int | None = None,
    domains: bool = False,
    unlabelled: bool = False,
    landmarks: Path | str | None = None,
    pairs: Path | str | None = None,
) -> Listing:
    """List `source`/<identity>/**/<picture>, or `source`/<domain>/<identity>/**/<picture> with `domains`.

    With `unlabelled`, or where all pictures are directly in `source` or in its domains, they have no labels.
    Each picture is aligned by the landmarks of the face that is found in it, or by `landmarks`: a text file with a line
    "<file> x y x y x y x y x y" for each; or it keeps its centre square of `crop` pixels. `pairs` is a list of
    pairs to compare (see `visard.data.pairs.read_pairs`) with file names inside `source`.
    """
    cut, info = Crop(crop), dict[str, Any](crop=crop)
    container, places, files = _placed(source, domains, unlabelled)
    if all(name == UNLABELLED for _, name in places):
        info["labels"] = False
    return Listing(
        Files(container, files), files, *number(name for _, name in places), crop=cut, info=info,
        domains=[domain for domain, _ in places] if domains else None,
        align="landmarks" if landmarks is not None else "five" if crop is None else "none",
        landmarks=None if landmarks is None else read_landmarks(Path(landmarks), files),
        extras=None if pairs is None else _pairs(Path(pairs), files, info),
    )  # fmt: skip


def _placed(source: Path, domains: bool, unlabelled: bool) -> tuple[Container, list[tuple[str, str]], list[str]]:
    """What `walk` finds as <identity>/<picture>, or without identities, where it is so or where there are none."""
    outer = "<domain>/" if domains else ""

    def loose(parts: list[str]) -> tuple[str, str] | None:
        return (parts[0], UNLABELLED) if len(parts) > domains else None

    def of_people(parts: list[str]) -> tuple[str, str] | None:
        return (parts[0], "/".join(parts[: 1 + domains])) if len(parts) > 1 + domains else None

    if unlabelled:
        return walk(source, f"{outer}<picture>", loose)
    try:
        return walk(source, f"{outer}<identity>/<picture>", of_people)
    except UsageError:
        try:
            return walk(source, f"{outer}<picture>", loose)
        except UsageError:
            pass
        raise


def read_office31(source: Path, *, crop: int | None = None) -> Listing:
    """List Office-31 or any set like it, the same classes seen by several cameras: <domain>/[images/]<class>/<picture>.

    A class is one identity in all domains. Each picture keeps its centre square of `crop` pixels.
    """

    def place(parts: list[str]) -> tuple[str, str] | None:
        parts = [part for part in parts if part != "images"]
        return (parts[0], parts[1]) if len(parts) == 3 else None

    cut = Crop(crop)
    container, places, files = walk(source, "<domain>/<class>/<picture>", place)
    numbers, domains = number(name for _, name in places), [domain for domain, _ in places]
    return Listing(Files(container, files), files, *numbers, domains=domains, crop=cut, info={"crop": crop})


def walk(source: Path, layout: str, place: Place) -> tuple[Container, list[tuple[str, str]], list[str]]:
    """The container at `source`, and of each picture that has a place the place and the file, in their order."""
    container = Container(source)
    placed = ((place(name.split("/")), name) for name in container.names() if is_picture(name))
    found = sorted((where, name) for where, name in placed if where is not None)
    if not found:
        container.close()
        raise UsageError(f"{source} holds no pictures as {layout}")
    return container, [where for where, _ in found], [name for _, name in found]


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
    return pair_extras(with_folds(np.array(table, np.int64)), files, info)
