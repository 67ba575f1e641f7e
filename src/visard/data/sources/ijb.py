"""IJB-B and IJB-C (Whitelam et al. 2017, Maze et al. 2018) in the layout of InsightFace, and IJB-A (Klare et al. 2015).

All have templates, 1:1 comparisons and 1:N galleries; IJB-A has ten splits of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.listing import Container, Files, Listing, Numbers, coordinates, csv_fields, fields, number, rows_of
from visard.errors import UsageError
from visard.files import open_text

BLOCK = 2**24  # characters of the list of pairs that are parsed at a time
BOX = ("FACE_X", "FACE_Y", "FACE_WIDTH", "FACE_HEIGHT")
EYES_AND_NOSE = (("RIGHT_EYE_X", "RIGHT_EYE_Y"), ("LEFT_EYE_X", "LEFT_EYE_Y"), ("NOSE_BASE_X", "NOSE_BASE_Y"))
NEEDED = ("TEMPLATE_ID", "SUBJECT_ID", "FILE", "MEDIA_ID", *BOX)
GALLERY = "A"  # IJB-A has one gallery in each split

Points = npt.NDArray[np.float32]
Face = tuple[str, float, float, float, float]  # file and box: a file may show several people


@dataclass(frozen=True, eq=False)
class Split:
    """One protocol: which item is in which template, and the comparisons; see `visard.data.pairs`."""

    members: Numbers  # (T, 4): item, template, medium, subject
    score: npt.NDArray[np.float32]  # (T,)
    pairs: npt.NDArray[np.int32] | None = None  # (P, 3): template, template, same
    galleries: dict[str, Numbers] = field(default_factory=dict)  # name -> (n, 2): template, subject
    probes: Numbers | None = None  # (n, 2)


def read(source: Path) -> Listing:
    """List `source`/loose_crop with `source`/meta: templates, media, landmarks, 1:1 pairs, 1:N galleries and probes.

    Files: *_face_tid_mid.txt and *_name_5pts_score.txt (needed), *_template_pair_label.txt, *_1N_gallery_*.csv and
    *_1N_probe_mixed.csv. IJB-A, with its split folders of verify_metadata and search_gallery, is recognised too.
    """
    if not source.is_dir():
        raise UsageError(f"no such folder: {source}")
    meta = source / "meta" if (source / "meta").is_dir() else source
    member_file = _one(meta, "*_face_tid_mid.txt")
    if member_file is None:
        if find_ijba(source):
            return read_ijba(source)
        raise UsageError(f"{source} is no IJB: {meta} has no *_face_tid_mid.txt")
    files, places = _members(member_file)
    template = places[:, 0]
    scored = _one(meta, "*_name_5pts_score.txt")
    if scored is None:
        raise UsageError(f"{meta} has no *_name_5pts_score.txt")
    points, score = _landmarks(scored, files)
    galleries = {
        _gallery_name(path): _subjects(path) for path in sorted(meta.glob("*_1N_gallery_*.csv")) if path.is_file()
    }
    probe_file = _one(meta, "*_1N_probe_mixed.csv")
    if galleries and probe_file is None:
        raise UsageError(f"{meta} has galleries but no *_1N_probe_mixed.csv")
    probes = _subjects(probe_file) if galleries and probe_file else None
    subject_of: dict[int, int] = {}
    for table in (*galleries.values(), *([] if probes is None else [probes])):
        subject_of.update(table.tolist())
    subject = [subject_of.get(t, -1) for t in template.tolist()]
    pair_file = _one(meta, "*_template_pair_label.txt")
    pairs = None if pair_file is None else _pairs(pair_file, template)
    members = np.column_stack([np.arange(len(files)), places, subject])
    split = Split(members, score, pairs, galleries, probes)
    owners = [f"{s}" if s >= 0 else f"template-{t}" for s, t in zip(subject, template.tolist(), strict=True)]
    return _listing(source / "loose_crop", files, owners, points, {0: split})


def _listing(
    folder: Path,
    files: list[str],
    owners: list[str],
    points: Points,
    splits: dict[int, Split],
    boxes: Points | None = None,
) -> Listing:
    info: dict[str, Any] = {}
    return Listing(
        Files(Container(folder), files), files, *number(owners), align="landmarks", landmarks=points, boxes=boxes,
        extras=lambda kept: keep_splits(splits, kept, len(files), info), info=info,
    )  # fmt: skip


def _one(folder: Path, pattern: str) -> Path | None:
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    if len(found) > 1:
        raise UsageError(f"{folder} has {len(found)} files {pattern}: keep one data set in a folder")
    return found[0] if found else None


def _gallery_name(path: Path) -> str:
    name = path.stem.rsplit("_", 1)[-1]
    if not name.isidentifier() or len(name) > 20:
        raise UsageError(f"{path}: expected a name such as ijbc_1N_gallery_G1.csv")
    return name


def whole_number(where: str, word: str) -> int:
    """A number that fits 32 bits, from -1."""
    text = word.strip().removesuffix(".0")
    if not (text.isdecimal() or text == "-1") or len(text) > 10 or int(text) >= 2**31:
        raise UsageError(f"{where}: expected a number, found {word[:40]!r}")
    return int(text)


def _members(path: Path) -> tuple[list[str], Numbers]:
    """The file of each picture, and its template and medium (n, 2)."""
    files, numbers = [], []
    for where, words in fields(path):
        if len(words) != 3:
            raise UsageError(f"{where}: expected a file name, a template and a medium")
        files.append(words[0])
        numbers.append([whole_number(where, word) for word in words[1:]])
    if not files:
        raise UsageError(f"{path} lists no pictures")
    return files, np.array(numbers, np.int64)


def _landmarks(path: Path, files: list[str]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Landmarks (n, 5, 2) and detector scores (n,) of `files`; every one must have a line."""
    line_of: dict[str, tuple[npt.NDArray[np.float32], float]] = {}
    for where, words in fields(path):
        if len(words) != 12:
            raise UsageError(f"{where}: expected a file name, ten coordinates and a score, found {len(words)} words")
        try:
            line_of[words[0]] = coordinates(where, words[1:11]), float(words[11])
        except ValueError:
            raise UsageError(f"{where}: expected a score, found {words[11][:40]!r}") from None
    missing = next((name for name in files if name not in line_of), None)
    if missing is not None:
        raise UsageError(f"{path} has no line for {missing}")
    score = np.array([line_of[name][1] for name in files], np.float32)
    if not np.isfinite(score).all():
        raise UsageError(f"{path}: the score of {files[int(np.argmin(np.isfinite(score)))]} is no number")
    return np.stack([line_of[name][0] for name in files]), score


def _subjects(path: Path) -> Numbers:
    """Template and subject (n, 2), each template once, of a CSV file with a header and one line a picture."""
    found: dict[int, int] = {}
    for where, words in islice(csv_fields(path), 1, None):
        if len(words) < 2:
            raise UsageError(f"{where}: expected a template and a subject")
        template, subject = whole_number(where, words[0]), whole_number(where, words[1])
        if found.setdefault(template, subject) != subject:
            raise UsageError(f"{where}: template {template} has two subjects")
    if not found:
        raise UsageError(f"{path} lists no templates")
    return np.array(list(found.items()), np.int64)


def _pairs(path: Path, template: Numbers) -> npt.NDArray[np.int32]:
    """Pairs (P, 3) of templates and label; parsed in blocks, because IJB-C has 15.7 million of them."""
    blocks = [np.zeros((0, 3), np.int32)]
    rest, line = "", 1
    with open_text(path, errors="replace", encoding="ascii") as file:
        while text := file.read(BLOCK):
            cut = text.rfind("\n") + 1
            whole, rest = (rest + text[:cut], text[cut:]) if cut else ("", rest + text)
            if len(rest) > 1000:
                raise UsageError(f"{path}:{line + whole.count(chr(10))}: expected two templates and a label")
            blocks.append(_parse_pairs(path, whole, line))
            line += whole.count("\n")
    blocks.append(_parse_pairs(path, rest, line))
    pairs = np.concatenate(blocks)
    if not len(pairs):
        raise UsageError(f"{path} lists no pairs")
    known = np.unique(template)  # numbers are anyone's: no table is as long as the largest of them
    place = np.searchsorted(known, pairs[:, :2]).clip(max=len(known) - 1)
    strange = (known[place] != pairs[:, :2]).any(1)
    if strange.any():
        a, b, _ = pairs[int(np.argmax(strange))]
        raise UsageError(f"{path}: a pair of templates {a} and {b}, of which one has no pictures")
    return pairs


def _parse_pairs(path: Path, text: str, line: int) -> npt.NDArray[np.int32]:
    rows = text.splitlines()
    try:
        # numpy's reader checks that every line has three numbers, at ten million numbers a second
        table = np.loadtxt(rows, np.int64, ndmin=2) if text.strip() else np.zeros((0, 3), np.int64)
        bad = np.flatnonzero((table < 0).any(1) | (table >= 2**31).any(1) | (table[:, 2] > 1))
        if table.shape[1] != 3 or len(bad):
            raise ValueError
    except (ValueError, IndexError):
        where = next((k for k, row in enumerate(rows) if not _is_pair(row)), 0)
        raise UsageError(f"{path}:{line + where}: expected two templates and a label 0 or 1") from None
    return table.astype(np.int32)


def _is_pair(row: str) -> bool:
    words = row.split()
    return not words or (len(words) == 3 and all(w.isdecimal() and len(w) < 10 for w in words) and int(words[2]) < 2)


def find_ijba(source: Path) -> dict[str, dict[int, Path]]:
    """The files of the splits: kind -> split -> path."""
    kinds: dict[str, dict[int, Path]] = {}
    for path in sorted(source.rglob("*.csv")):
        name = re.fullmatch(r"(verify_metadata|verify_comparisons|search_gallery|search_probe)_(\d{1,3})", path.stem)
        if name:
            kinds.setdefault(name[1], {})[int(name[2])] = path
    return kinds


def read_ijba(source: Path) -> Listing:
    """List every face of every split once: aligned by eyes and nose where they are known, else cut by its box.

    Pictures are at `source`/images/<FILE> or `source`/<FILE>. Comparisons have no label in the files: two templates
    are "same" if they have one subject.
    """
    kinds = find_ijba(source)
    faces = _Faces()
    splits: dict[int, Split] = {}
    numbers = sorted(set(kinds.get("verify_metadata", {})) | set(kinds.get("search_gallery", {})))
    for k in numbers:
        used = [kind for kind in ("verify_metadata", "search_gallery", "search_probe") if k in kinds.get(kind, {})]
        tables = {kind: faces.members(kinds[kind][k]) for kind in used}
        # a template may be in a gallery and in the 1:1 list
        every = np.unique(np.concatenate(list(tables.values())), axis=0)
        both = np.unique(every[:, [1, 3]], axis=0)  # template, subject
        twice = np.flatnonzero(np.diff(both[:, 0]) == 0)
        if len(twice):
            raise UsageError(f"{source}: template {both[twice[0], 0]} of split {k} has two subjects")
        comparisons = kinds.get("verify_comparisons", {}).get(k)
        if ("search_gallery" in tables) != ("search_probe" in tables):
            raise UsageError(f"{source}: split {k} has only one of search_gallery and search_probe")
        searched = "search_gallery" in tables
        splits[k] = Split(
            members=every,
            score=np.ones(len(every), np.float32),
            pairs=None if comparisons is None else _comparisons(comparisons, dict(both.tolist())),
            galleries={GALLERY: np.unique(tables["search_gallery"][:, [1, 3]], axis=0)} if searched else {},
            probes=np.unique(tables["search_probe"][:, [1, 3]], axis=0) if searched else None,
        )
    if not splits:
        raise UsageError(f"{source} has no verify_metadata_*.csv or search_gallery_*.csv")
    images = source / "images" if (source / "images").is_dir() else source
    files, owners = [face[0] for face in faces.item_of], [str(subject) for subject in faces.subject]
    boxes = np.array([face[1:] for face in faces.item_of], np.float32)
    return _listing(images, files, owners, np.array(faces.points, np.float32), splits, boxes)


class _Faces:
    """Every face that any split mentions, numbered."""

    def __init__(self) -> None:
        self.item_of: dict[Face, int] = {}
        self.subject: list[int] = []
        self.points: list[npt.NDArray[np.float32]] = []

    def members(self, path: Path) -> Numbers:
        """Item, template, medium, subject (n, 4) of a metadata file."""
        rows = []
        for where, line in _lines(path):
            try:
                x, y, width, height = (float(line[name]) for name in BOX)
                numbers = [int(line[name]) for name in ("TEMPLATE_ID", "MEDIA_ID", "SUBJECT_ID")]
                points = _points(line)
            except ValueError:
                raise UsageError(f"{where}: a number is missing") from None
            # written so that NaN is out of range too
            if not all(abs(value) < 1e6 for value in (x, y, width, height)) or max(map(abs, numbers)) >= 2**31:
                raise UsageError(f"{where}: a number is out of range")
            face = (line["FILE"].replace("\\", "/"), x, y, width, height)
            item = self.item_of.setdefault(face, len(self.item_of))
            if item == len(self.subject):
                self.subject.append(numbers[2])
                self.points.append(points)
            rows.append((item, *numbers))
        if not rows:
            raise UsageError(f"{path} lists no pictures")
        return np.array(rows, np.int64)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """("file:line", value of each column) of a metadata file."""
    lines = csv_fields(path)
    _, head = next(lines, ("", []))
    head = [name.upper() for name in head]
    missing = [name for name in NEEDED if name not in head]
    if missing:
        raise UsageError(f"{path}:1: no column {missing[0]}")
    for where, values in lines:
        if len(values) != len(head):
            raise UsageError(f"{where}: expected {len(head)} values, found {len(values)}")
        yield where, dict(zip(head, values, strict=True))


def _points(line: dict[str, str]) -> npt.NDArray[np.float32]:
    points = np.full((5, 2), np.nan, np.float32)
    for k, names in enumerate(EYES_AND_NOSE):
        words = [line.get(name, "").strip() for name in names]
        if all(words):
            points[k] = [float(word) for word in words]
    if np.isfinite(points[:2]).all() and points[0, 0] > points[1, 0]:
        points[:2] = points[1::-1]  # some tables call the eyes as one sees them, some as the person does
    return points


def _comparisons(path: Path, subject_of: dict[int, int]) -> npt.NDArray[np.int32]:
    """Pairs (P, 3) from lines "template,template" or "template template"."""
    rows = []
    for where, words in fields(path):
        words = " ".join(words).replace(",", " ").split()
        if len(words) != 2 or not all(word.isdecimal() and len(word) < 10 for word in words):
            raise UsageError(f"{where}: expected two templates")
        a, b = int(words[0]), int(words[1])
        if a not in subject_of or b not in subject_of:
            raise UsageError(f"{where}: template {b if a in subject_of else a} has no pictures")
        rows.append((a, b, subject_of[a] == subject_of[b]))
    if not rows:
        raise UsageError(f"{path} lists no pairs")
    return np.array(rows, np.int32)


def keep_splits(
    splits: dict[int, Split], kept: Numbers, count: int, info: dict[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays to save; pairs and gallery entries of templates without any picture are dropped and counted."""
    row_of = rows_of(kept, count)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    galleries = sorted({name for split in splits.values() for name in split.galleries})
    about: dict[str, Any] = {"splits": sorted(splits), "galleries": galleries}
    about |= {"templates": 0, "templates_dropped": 0, "pairs": 0, "pairs_dropped": 0}
    for k, split in splits.items():
        rows = row_of[split.members[:, 0]]
        there = rows >= 0
        table = np.column_stack([rows, split.members[:, 1:]])[there]
        arrays[f"templates_{k}"], arrays[f"scores_{k}"] = table, split.score[there]
        left = np.unique(table[:, 1])
        about["templates"] += len(left)
        about["templates_dropped"] += len(np.unique(split.members[:, 1])) - len(left)
        if split.pairs is not None:
            pairs = split.pairs[np.isin(split.pairs[:, :2], left).all(1)] if about["templates_dropped"] else split.pairs
            arrays[f"template_pairs_{k}"] = pairs
            about["pairs"] += len(pairs)
            about["pairs_dropped"] += len(split.pairs) - len(pairs)
        for name, gallery in split.galleries.items():
            arrays[f"gallery_{k}_{name}"] = gallery[np.isin(gallery[:, 0], left)]
        if split.probes is not None:
            arrays[f"probes_{k}"] = split.probes[np.isin(split.probes[:, 0], left)]
    info["ijb"] = about
    return arrays
