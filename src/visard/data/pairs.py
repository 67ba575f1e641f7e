"""The parts of benchmarks: pairs of pictures, templates (sets of pictures of one identity), galleries and probes.

Read from an imported set, or, pairs, from a list that a user wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.faces import FaceSet
from visard.data.listing import Extras, Numbers, csv_fields, printable, rows_of
from visard.errors import UsageError, VisardError
from visard.files import json_list, mapping, whole

ARRAY = "pairs"  # (P, 4) int64: row, row, same, fold
FOLDS = 10
LISTED = 1000  # lost pairs that are named
MISSING = "a picture that is not there"
SAME = {"1": 1, "true": 1, "yes": 1, "same": 1, "0": 0, "-1": 0, "false": 0, "no": 0, "different": 0}
COLUMNS = (("file_a", "file_b"), ("row_a", "row_b"))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of pictures to compare: rows of the set (P,), whether they show one identity, fold number."""

    first: Numbers
    second: Numbers
    same: npt.NDArray[np.bool_]
    fold: Numbers
    lost: tuple[tuple[str, str], ...] = ()  # files of pairs that are not here because a picture was skipped; the first
    lost_count: int = 0

    def __len__(self) -> int:
        return len(self.first)


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
    """Templates to compare (P,): template numbers, and whether they show one identity."""

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


def load_pairs(faces: FaceSet, file: Path | str | None = None) -> Pairs:
    """The pairs that came with an imported set (LFW, .bin, RFW, own list), or those that `file` lists."""
    if file is not None:
        return read_pairs(Path(file), faces)
    table = faces.extra(ARRAY)
    fits = table.ndim == 2 and table.shape[1] == 4 and table.dtype == np.int64
    if not fits or table.min(initial=0) < 0 or table[:, :2].max(initial=0) >= len(faces):
        raise VisardError(f"{faces.path / 'pairs.npy'} is no list of pairs of this set")
    plain = np.array(table)
    entries = json_list(faces.info.get("pairs_lost"))
    lost = tuple((str(e[0]), str(e[1])) for e in entries if isinstance(e, list) and len(e) == 2)
    count = whole(faces.info.get("pairs_dropped")) or 0
    return Pairs(plain[:, 0], plain[:, 1], plain[:, 2] == 1, plain[:, 3], lost, count)


def read_pairs(path: Path, faces: FaceSet) -> Pairs:
    """The pairs of a CSV file with header `file_a,file_b,same` or `row_a,row_b,same`, and perhaps `fold`.

    Files are named as the set names them (`FaceSet.file`), rows are numbers from 0, same is 1 or 0. Without a
    column `fold`, the pairs of each kind go to ten folds in order. Pairs with a picture that the import skipped are
    left out and counted.
    """
    by_rows, lines = read_pair_list(path)
    row_of = {} if by_rows else {faces.file(row): row for row in range(len(faces))}
    entries = json_list(faces.info.get("skipped"))
    skipped = {str(entry[0]) for entry in entries if isinstance(entry, list) and entry}
    table, lost = [], list[tuple[str, str]]()
    for where, a, b, same, fold in lines:
        rows = [_row(where, name, len(faces)) if by_rows else row_of.get(name, -1) for name in (a, b)]
        if min(rows) < 0 and all(name in row_of or name in skipped for name in (a, b)):
            lost.append((a, b))
            continue
        if min(rows) < 0:
            raise UsageError(f"{where}: {faces.path.name} has no picture {a if rows[0] < 0 else b}")
        table.append((*rows, same, fold))
    if not table:
        raise UsageError(f"{path}: not one of its {len(lost)} pairs can be compared, their pictures were skipped")
    plain = np.array(table, np.int64)
    return Pairs(plain[:, 0], plain[:, 1], plain[:, 2] == 1, with_folds(plain)[:, 3], tuple(lost[:LISTED]), len(lost))


def read_pair_list(path: Path) -> tuple[bool, list[tuple[str, str, str, int, int]]]:
    """Whether a pair list names rows, and its lines as (where, a, b, same, fold or -1)."""
    lines = csv_fields(path)
    where, head = next(lines, (f"{path}:1", []))
    head = [word.lower() for word in head]
    names = next((two for two in COLUMNS if {*two, "same"} <= set(head)), None)
    if names is None:
        raise UsageError(f"{where}: expected the header file_a,file_b,same or row_a,row_b,same (and perhaps fold)")
    found = []
    for where, words in lines:
        if len(words) != len(head):
            raise UsageError(f"{where}: expected {len(head)} values, found {len(words)}")
        line = dict(zip(head, words, strict=True))
        same, fold = line["same"].lower(), line.get("fold", "-1")
        if same not in SAME:
            raise UsageError(f"{where}: same must be 1 or 0, found {line['same'][:40]!r}")
        if "fold" in line and not (fold.isdecimal() and len(fold) < 7):
            raise UsageError(f"{where}: fold must be a number from 0, found {fold[:40]!r}")
        found.append((where, line[names[0]], line[names[1]], SAME[same], int(fold)))
    if not found:
        raise UsageError(f"{path} lists no pairs")
    return names == COLUMNS[1], found


def with_folds(table: Numbers) -> Numbers:
    """The (P, 4) table with fold -1 replaced: the pairs of each kind go to ten folds in order, so that a list
    that is sorted by `same` still gives folds of both kinds."""
    missing = table[:, 3] < 0
    for same in (0, 1):
        chosen = np.flatnonzero(missing & (table[:, 2] == same))
        table[chosen, 3] = consecutive_folds(len(chosen))
    return table


def consecutive_folds(count: int) -> Numbers:
    """The fold of each of `count` items in FOLDS unshuffled blocks; the first `count % FOLDS` have one more."""
    sizes = np.full(FOLDS, count // FOLDS)
    sizes[: count % FOLDS] += 1
    return np.repeat(np.arange(FOLDS), sizes)


def pair_extras(table: Numbers, files: Sequence[str], info: dict[str, Any]) -> Extras:
    """Saves the pairs (P, 4) whose two items were kept, and notes in `info` how many there are and how many were lost.

    Pairs are of items, which `files` names; -1 is a picture that is not there.
    """

    def extras(kept: Numbers) -> dict[str, np.ndarray[Any, Any]]:
        row_of = np.append(rows_of(kept, len(files)), -1)  # the last is the row of item -1
        rows = np.column_stack([row_of[table[:, :2]], table[:, 2:]])
        there = (rows[:, :2] >= 0).all(1)
        found, gone = rows[there], table[~there, :2]
        info["pairs"], info["pairs_dropped"] = len(found), len(gone)
        names = [[printable(files[item]) if item >= 0 else MISSING for item in two] for two in gone[:LISTED].tolist()]
        info.update({"pairs_lost": names} if names else {})
        return {ARRAY: found} if len(found) else {}

    return extras


def _row(where: str, text: str, count: int) -> int:
    if not (text.isdecimal() and len(text) < 12 and int(text) < count):
        raise UsageError(f"{where}: {text[:40]!r} is no row of the set (0 to {count - 1})")
    return int(text)


def splits(faces: FaceSet) -> list[int]:
    """The numbers of the splits: [0] for IJB-B and IJB-C, 1 to 10 for IJB-A."""
    found = mapping(faces.info.get("ijb")).get("splits")
    if not isinstance(found, list) or not found or not all(isinstance(k, int) for k in found):
        raise UsageError(f"{faces.path.name} has no templates: it was not imported as ijb")
    return list(found)


def load_templates(faces: FaceSet, split: int | None = None) -> Templates:
    """The templates of one split (of the only one by default)."""
    k = _split(faces, split)
    table = _template_table(faces, f"templates_{k}", 4, np.int64)
    scores = np.array(faces.extra(f"scores_{k}"))
    if scores.shape != (len(table),) or scores.dtype != np.float32:
        raise VisardError(f"{faces.path / f'scores_{k}.npy'} does not fit the templates")
    if table[:, 0].min(initial=0) < 0 or table[:, 0].max(initial=0) >= len(faces):
        raise VisardError(f"{faces.path / f'templates_{k}.npy'} has a row that is not in the set")
    row, template, media, subject = np.ascontiguousarray(table.T)
    return Templates(row, template, media, subject, scores)


def load_template_pairs(faces: FaceSet, split: int | None = None) -> TemplatePairs:
    """The 1:1 comparisons of one split; 15.7 million of IJB-C are 188 MB, mapped from disk."""
    table = _template_table(faces, f"template_pairs_{_split(faces, split)}", 3, np.int32)
    return TemplatePairs(table[:, 0], table[:, 1], table[:, 2] == 1)


def load_galleries(faces: FaceSet, split: int | None = None) -> Galleries:
    """The galleries and probes of one split."""
    k = _split(faces, split)
    names = mapping(faces.info.get("ijb")).get("galleries", [])
    if not names:
        raise UsageError(f"{faces.path.name} has no galleries: the import found no 1N files")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise VisardError(f"{faces.path.name} is damaged: the names of its galleries are none")
    galleries = {name: _gallery(faces, f"gallery_{k}_{name}") for name in names}
    return Galleries(galleries, _gallery(faces, f"probes_{k}"))


def _split(faces: FaceSet, split: int | None) -> int:
    known = splits(faces)
    if split is None and len(known) == 1:
        return known[0]
    if split not in known:
        raise UsageError(f"{faces.path.name} has splits {', '.join(map(str, known))}: {split} is not one of them")
    return split


def _gallery(faces: FaceSet, name: str) -> Gallery:
    table = _template_table(faces, name, 2, np.int64)
    return Gallery(np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1]))


def _template_table(faces: FaceSet, name: str, width: int, kind: npt.DTypeLike) -> np.ndarray[Any, Any]:
    table = faces.extra(name).view(np.ndarray)
    if table.ndim != 2 or table.shape[1] != width or table.dtype != kind:
        raise VisardError(f"{faces.path / f'{name}.npy'} is damaged: {table.dtype} {table.shape}")
    return table
