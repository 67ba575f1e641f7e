"""IJB-B and IJB-C (Whitelam et al. 2017, Maze et al. 2018) in the layout of InsightFace: loose_crop and meta."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.containers import Files, open_container
from visard.data.sources import ijba
from visard.data.sources.ijb_tables import Split, keep_splits
from visard.data.sources.listing import Listing, Numbers, coordinates, fields, number
from visard.errors import UsageError

BLOCK = 2**24  # characters of the list of pairs that are parsed at a time


def read(source: Path) -> Listing:
    """List `source`/loose_crop with `source`/meta: templates, media, landmarks, 1:1 pairs, 1:N galleries and probes.

    Files: *_face_tid_mid.txt and *_name_5pts_score.txt (needed), *_template_pair_label.txt, *_1N_gallery_*.csv and
    *_1N_probe_mixed.csv. IJB-A, with its split folders of verify_metadata and search_gallery, is recognised too.
    """
    if not source.is_dir():
        raise UsageError(f"no such folder: {source}")
    meta = source / "meta" if (source / "meta").is_dir() else source
    members = _one(meta, "*_face_tid_mid.txt")
    if members is None:
        if ijba.find(source):
            return ijba.read(source)
        raise UsageError(f"{source} is no IJB: {meta} has no *_face_tid_mid.txt")
    files, template, media = _members(members)
    scored = _one(meta, "*_name_5pts_score.txt")
    if scored is None:
        raise UsageError(f"{meta} has no *_name_5pts_score.txt")
    points, score = _landmarks(scored, files)
    galleries = {_gallery_name(path): _subjects(path) for path in sorted(meta.glob("*_1N_gallery_*.csv"))}
    probe_file = _one(meta, "*_1N_probe_mixed.csv")
    if galleries and probe_file is None:
        raise UsageError(f"{meta} has galleries but no *_1N_probe_mixed.csv")
    probes = _subjects(probe_file) if galleries and probe_file else None
    subject = _all_subjects(template, [*galleries.values(), *([] if probes is None else [probes])])
    pair_file = _one(meta, "*_template_pair_label.txt")
    split = Split(
        item=np.arange(len(files)),
        template=template,
        media=media,
        subject=subject,
        score=score,
        pairs=None if pair_file is None else _pairs(pair_file, template),
        galleries=galleries,
        probes=probes,
    )
    identity, names = number(
        f"{s}" if s >= 0 else f"template-{t}" for s, t in zip(subject.tolist(), template.tolist(), strict=True)
    )
    info: dict[str, Any] = {}
    return Listing(
        pictures=Files(open_container(source / "loose_crop"), files),
        files=files,
        identity=identity,
        names=names,
        align="landmarks",
        landmarks=points,
        size=112,
        extras=lambda kept: keep_splits({0: split}, kept, len(files), info),
        info=info,
    )


def _one(folder: Path, pattern: str) -> Path | None:
    found = sorted(folder.glob(pattern))
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


def _members(path: Path) -> tuple[list[str], Numbers, Numbers]:
    files, numbers = [], []
    for where, words in fields(path):
        if len(words) != 3:
            raise UsageError(f"{where}: expected a file name, a template and a medium")
        files.append(words[0])
        numbers.append([whole_number(where, word) for word in words[1:]])
    if not files:
        raise UsageError(f"{path} lists no pictures")
    template, media = np.array(numbers, np.int64).T
    return files, np.ascontiguousarray(template), np.ascontiguousarray(media)


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
    for where, words in csv_lines(path):
        if len(words) < 2:
            raise UsageError(f"{where}: expected a template and a subject")
        template, subject = whole_number(where, words[0]), whole_number(where, words[1])
        if found.setdefault(template, subject) != subject:
            raise UsageError(f"{where}: template {template} has two subjects")
    if not found:
        raise UsageError(f"{path} lists no templates")
    return np.array(list(found.items()), np.int64)


def csv_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """("file:line", values) of each line after the header."""
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            next(reader, None)
            for words in reader:
                if words:
                    yield f"{path}:{reader.line_num}", words
    except (OSError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _all_subjects(template: Numbers, tables: list[Numbers]) -> Numbers:
    """The subject of each entry from all galleries and probes, -1 where none says."""
    known: dict[int, int] = {}
    for table in tables:
        known.update(table.tolist())
    return np.array([known.get(number, -1) for number in template.tolist()], np.int64)


def _pairs(path: Path, template: Numbers) -> npt.NDArray[np.int32]:
    """Pairs (P, 3) of templates and label; parsed in blocks, because IJB-C has 15.7 million of them."""
    blocks = [np.zeros((0, 3), np.int32)]
    rest, line = "", 1
    with path.open(encoding="ascii", errors="replace") as file:
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
    known = np.zeros(int(max(pairs[:, :2].max(), template.max())) + 1, bool)
    known[template] = True
    strange = ~known[pairs[:, :2]].all(1)
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
