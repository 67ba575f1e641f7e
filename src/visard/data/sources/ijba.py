"""IJB-A (Klare et al. 2015): ten splits with their own templates, 1:1 comparisons and 1:N galleries."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.containers import Files, open_container
from visard.data.sources.ijb_tables import Split, keep_splits
from visard.data.sources.listing import Listing, Numbers, number
from visard.errors import UsageError

BOX = ("FACE_X", "FACE_Y", "FACE_WIDTH", "FACE_HEIGHT")
EYES_AND_NOSE = (("RIGHT_EYE_X", "RIGHT_EYE_Y"), ("LEFT_EYE_X", "LEFT_EYE_Y"), ("NOSE_BASE_X", "NOSE_BASE_Y"))
NEEDED = ("TEMPLATE_ID", "SUBJECT_ID", "FILE", "MEDIA_ID", *BOX)
GALLERY = "A"  # IJB-A has one gallery in each split

Face = tuple[str, float, float, float, float]  # file and box: a file may show several people


def find(source: Path) -> dict[str, dict[int, Path]]:
    """The files of the splits: kind -> split -> path."""
    kinds: dict[str, dict[int, Path]] = {}
    for path in sorted(source.rglob("*.csv")):
        name = re.fullmatch(r"(verify_metadata|verify_comparisons|search_gallery|search_probe)_(\d{1,3})", path.stem)
        if name:
            kinds.setdefault(name[1], {})[int(name[2])] = path
    return kinds


def read(source: Path) -> Listing:
    """List every face of every split once: aligned by eyes and nose where they are known, else cut by its box.

    Pictures are at `source`/images/<FILE> or `source`/<FILE>. Comparisons have no label in the files: two templates
    are "same" if they have one subject.
    """
    kinds = find(source)
    faces = _Faces()
    splits: dict[int, Split] = {}
    numbers = sorted(set(kinds.get("verify_metadata", {})) | set(kinds.get("search_gallery", {})))
    for k in numbers:
        members, tables = [], {}
        for kind in ("verify_metadata", "search_gallery", "search_probe"):
            if k in kinds.get(kind, {}):
                tables[kind] = faces.members(kinds[kind][k])
                members.append(tables[kind])
        every = np.unique(np.concatenate(members), axis=0)  # a template may be in a gallery and in the 1:1 list
        template, subject = _subjects(kinds, k, every)
        comparisons = kinds.get("verify_comparisons", {}).get(k)
        if ("search_gallery" in tables) != ("search_probe" in tables):
            raise UsageError(f"{source}: split {k} has only one of search_gallery and search_probe")
        searched = "search_gallery" in tables
        splits[k] = Split(
            item=every[:, 0],
            template=every[:, 1],
            media=every[:, 2],
            subject=every[:, 3],
            score=np.ones(len(every), np.float32),
            pairs=None if comparisons is None else _comparisons(comparisons, dict(zip(template, subject, strict=True))),
            galleries={GALLERY: np.unique(tables["search_gallery"][:, [1, 3]], axis=0)} if searched else {},
            probes=np.unique(tables["search_probe"][:, [1, 3]], axis=0) if searched else None,
        )
    if not splits:
        raise UsageError(f"{source} has no verify_metadata_*.csv or search_gallery_*.csv")
    identity, names = number(str(subject) for subject in faces.subject)
    files, info = [face[0] for face in faces.item_of], dict[str, Any]()
    images = source / "images" if (source / "images").is_dir() else source
    return Listing(
        pictures=Files(open_container(images), files),
        files=files,
        identity=identity,
        names=names,
        align="landmarks",
        landmarks=np.array(faces.points, np.float32),
        boxes=np.array([face[1:] for face in faces.item_of], np.float32),
        size=112,
        extras=lambda kept: keep_splits(splits, kept, len(files), info),
        info=info,
    )


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
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            head = [name.strip().upper() for name in next(reader, [])]
            missing = [name for name in NEEDED if name not in head]
            if missing:
                raise UsageError(f"{path}:1: no column {missing[0]}")
            for words in reader:
                if len(words) != len(head):
                    raise UsageError(f"{path}:{reader.line_num}: expected {len(head)} values, found {len(words)}")
                yield f"{path}:{reader.line_num}", dict(zip(head, words, strict=True))
    except (OSError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _points(line: dict[str, str]) -> npt.NDArray[np.float32]:
    points = np.full((5, 2), np.nan, np.float32)
    for k, names in enumerate(EYES_AND_NOSE):
        words = [line.get(name, "").strip() for name in names]
        if all(words):
            points[k] = [float(word) for word in words]
    if np.isfinite(points[:2]).all() and points[0, 0] > points[1, 0]:
        points[:2] = points[1::-1]  # some tables call the eyes as one sees them, some as the person does
    return points


def _subjects(kinds: dict[str, dict[int, Path]], k: int, every: Numbers) -> tuple[list[int], list[int]]:
    """Template and subject, each template once."""
    both = np.unique(every[:, [1, 3]], axis=0)
    twice = np.flatnonzero(np.diff(both[:, 0]) == 0)
    if len(twice):
        path = next(files[k] for files in kinds.values() if k in files)
        raise UsageError(f"{path.parent}: template {both[twice[0], 0]} of split {k} has two subjects")
    return both[:, 0].tolist(), both[:, 1].tolist()


def _comparisons(path: Path, subject_of: dict[int, int]) -> npt.NDArray[np.int32]:
    """Pairs (P, 3) from lines "template,template"."""
    rows = []
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    for line_number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdecimal() and len(word) < 10 for word in words):
            raise UsageError(f"{path}:{line_number}: expected two templates")
        a, b = int(words[0]), int(words[1])
        if a not in subject_of or b not in subject_of:
            raise UsageError(f"{path}:{line_number}: template {b if a in subject_of else a} has no pictures")
        rows.append((a, b, subject_of[a] == subject_of[b]))
    if not rows:
        raise UsageError(f"{path} lists no pairs")
    return np.array(rows, np.int32)
