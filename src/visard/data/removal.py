"""Removes people from a face set, and writes the receipt of a removal: what was searched, found and removed.

A receipt holds no name, no file name and nothing of a picture or template. Instead of a name stands

    HMAC-SHA256(proof, name)

with a random proof that is printed once and kept nowhere: who has the name and the proof can show later that a receipt
is about this person; from the receipt alone it cannot be found out.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.activations import activations_folder, entries, remove
from visard.data.faces import SKIPPED, FaceSet, FaceSetWriter
from visard.data.pairs import ARRAY as PAIRS
from visard.data.storage import ARRAYS, FILES, HEADER, array_path, recover, refuse_others
from visard.errors import UsageError, VisardError, did_you_mean
from visard.files import file_digest, json_list, mapping, read_json, whole, write_json

CHUNK = 256  # pictures that are written at a time
LEFT = (  # what a removal does not reach
    "copies and backups of the files, and the pictures that they were made from",
    "blocks of the disk that the old files took, until other files take them",
    "models that were trained with pictures of these people (visard run --without makes one without a client)",
    "files that were written elsewhere: features, groups, exports, and galleries and face sets that were not named",
)


@dataclass
class Receipt:
    """The receipt of a removal; written before anything is removed, and completed at the end."""

    path: Path
    kind: str  # gallery, or face set
    name: str  # of the file or folder, without where it is
    people: Sequence[str]  # their names, which are not written
    case: str = ""  # the operator's name for it
    proof: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    before: dict[str, str] = field(default_factory=dict)  # file -> SHA-256
    after: dict[str, str] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)  # what -> how many
    looked_at: list[dict[str, Any]] = field(default_factory=list)

    def look(self, what: str, where: str, found: int, removed: int, **more: Any) -> None:
        """Note what was searched, and how much was found."""
        self.looked_at.append({"what": what, "where": where, "found": found, "removed": removed, **more})

    def write(self, state: str) -> None:
        """Put the file in its place; `state` is begun or done. Only the receipt of a removal that was killed goes."""
        if state == "begun" and self.path.exists() and mapping(read_json(self.path)).get("state") != "begun":
            raise UsageError(f"{self.path} exists: a receipt takes the place of no other file, so nothing was removed")
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        names = sorted(self.before.keys() | self.after.keys())
        content = {
            "receipt": "visard removal", "version": 1, "state": state, "time": now, "visard": version("visard"),
            **({"case": self.case} if self.case else {}),
            self.kind: self.name,
            "people": [person_digest(self.proof, person) for person in self.people],
            "removed": self.removed,
            "looked_at": self.looked_at,
            "files": [{"file": n, "before": self.before.get(n), "after": self.after.get(n)} for n in names],
            "not_reached": LEFT,
        }  # fmt: skip
        write_json(self.path, content)


def person_digest(proof: bytes, name: str) -> str:
    """The digest that replaces a name in a receipt."""
    return hmac.digest(proof, name.encode(), "sha256").hex()


def receipt_path(of: Path) -> Path:
    """A new file name beside the data from which people are removed."""
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return of.with_name(f"{of.name}.removed-{when}.json")


def remove_people(
    folder: Path,
    people: Sequence[str],
    receipt: Receipt,
    more: Callable[[FaceSet, npt.NDArray[np.int64]], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Take people out of the face set in `folder`, with all that is kept beside their pictures, and their activations.

    The new set is written beside the old one, and then takes its place: a kill leaves one of the two, and the same
    call does what is left. `more` removes what is elsewhere, before the old set goes, and gets it with the rows of
    these people.
    """
    leftovers = recover(folder)
    faces = FaceSet.open(folder)
    gone = _numbers(faces, people, leftovers)
    keep = ~np.isin(faces.identity, gone)
    if not keep.any():
        raise UsageError(f"that is everyone in {folder.name}: delete the folder instead")
    receipt.before = digests(folder)
    refuse_others(folder)
    receipt.look("folders of an interrupted writer", "beside the face set", leftovers, leftovers)
    receipt.write("begun")  # nothing is removed if the receipt cannot be written
    writer = FaceSetWriter(
        folder, count=int(keep.sum()), size=faces.size, overwrite=True, info=faces.info,
        names=[name for number, name in enumerate(faces.names) if number not in set(gone.tolist())],
        domains=faces.domains, attributes=faces.attribute_names,
    )  # fmt: skip
    with writer:
        _copy(faces, writer, np.flatnonzero(keep), gone, progress)
        receipt.removed = {"people": len(people), "pictures": int((~keep).sum())}
        for name, (values, lost) in _extras(faces, keep, people, gone).items():
            receipt.look(name, "the face set", lost, lost)
            if name == PAIRS:
                writer.info["pairs"] = len(values)
            if len(values):
                writer.attach(name, values)
        for what, count in _about(faces, writer.info, people, gone).items():
            receipt.look(what, HEADER, count, count)
        _forget_activations(faces.path, receipt.before[array_path(folder, "images").name], receipt)
        if more is not None:
            more(faces, np.flatnonzero(~keep))
        writer.close()
    receipt.after = digests(folder)
    receipt.write("done")


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a face set."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".npy", ".json"):
            if not path.is_file():
                raise VisardError(f"{path} is not a file: this folder holds more than a face set")
            found[path.name] = file_digest(path)
    return found


def _numbers(faces: FaceSet, people: Sequence[str], leftovers: int) -> npt.NDArray[np.int64]:
    """The numbers of these people in the set; people whose pictures were all skipped have none."""
    done = " (what an interrupted removal had left is gone now)" if leftovers else ""
    found = []
    for name in people:
        if name in faces.names:
            number = faces.names.index(name)
            if faces.unlabelled[number]:
                raise UsageError(f"{faces.path.name}: it is not known who is in the pictures of {name!r}")
            found.append(number)
        elif not any(_is_about(entry, name) for entry in _listed(faces.info, "skipped")):
            raise UsageError(f"{faces.path.name} has no person {name!r}{did_you_mean(name, faces.names)}{done}")
    return np.array(sorted(set(found)), np.int64)


def _copy(
    faces: FaceSet,
    writer: FaceSetWriter,
    rows: npt.NDArray[np.int64],
    gone: npt.NDArray[np.int64],
    progress: Callable[[int, int], None] | None,
) -> None:
    number = np.arange(len(faces.names)) - np.searchsorted(gone, np.arange(len(faces.names)))
    for start in range(0, len(rows), CHUNK):
        some = rows[start : start + CHUNK]
        files = [faces.file(int(row)) for row in some]
        labels = number[faces.identity[some]], faces.domain[some], faces.attributes[some]
        writer.write(start, faces.read(some), *labels, files)
        if progress is not None:
            progress(start + len(some), len(rows))


def _extras(
    faces: FaceSet, keep: npt.NDArray[np.bool_], people: Sequence[str], gone: npt.NDArray[np.int64]
) -> dict[str, tuple[np.ndarray[Any, Any], int]]:
    """The arrays beside the pictures without the entries of removed rows; and how many entries each loses."""
    row_of = np.where(keep, np.cumsum(keep) - 1, -1)
    names = sorted(p.stem for p in faces.path.glob("*.npy") if p.stem not in ARRAYS and p.stem != FILES)
    arrays = {name: np.array(faces.extra(name)) for name in names}
    found: dict[str, np.ndarray[Any, Any]] = {}
    left: dict[str, npt.NDArray[Any]] = {}  # templates of each split that still have a picture
    for name, values in arrays.items():
        if split := re.fullmatch(r"templates_(\d+)", name):
            _check_table(faces, name, values, 4, 1)
            if (scores := arrays.get(f"scores_{split[1]}")) is None or scores.shape != values.shape[:1]:
                raise VisardError(f"{array_path(faces.path, f'scores_{split[1]}')} does not fit {name}.npy")
            there = keep[values[:, 0]]
            found[name] = np.column_stack([row_of[values[:, 0]], values[:, 1:]])[there].astype(values.dtype)
            found[f"scores_{split[1]}"] = scores[there]
            left[split[1]] = np.unique(found[name][:, 1])
    for name, values in arrays.items():
        split = re.fullmatch(r"(template_pairs|gallery|probes|scores)_(\d+)(_\w+)?", name)
        if name in found:
            continue
        if name == SKIPPED:
            found[name] = _renumbered(values[~_skips(faces, people, gone)[0]], gone)
        elif name == PAIRS:
            _check_table(faces, name, values, 4, 2)
            rows = row_of[values[:, :2]]
            found[name] = np.column_stack([rows, values[:, 2:]])[(rows >= 0).all(1)].astype(values.dtype)
        elif split and split[2] in left:
            columns = 2 if split[1] == "template_pairs" else 1
            _check_table(faces, name, values, columns, 0)
            found[name] = values[np.isin(values[:, :columns], left[split[2]]).all(1)]
        elif values.shape[:1] == keep.shape:
            found[name] = values[keep]
        else:
            raise VisardError(
                f"{array_path(faces.path, name)} has no row for each picture, so no person can be taken out of it: "
                "remove the file first, or make it again afterwards"
            )
    return {name: (values, len(arrays[name]) - len(values)) for name, values in found.items()}


def _check_table(faces: FaceSet, name: str, values: np.ndarray[Any, Any], columns: int, rows: int) -> None:
    """Refuse anything but a table of whole numbers with enough columns, the first of which are rows of the set."""
    fits = values.ndim == 2 and values.shape[1] >= columns and values.dtype.kind == "i"
    if not fits or not (values[:, :rows].min(initial=0) >= 0 and values[:, :rows].max(initial=0) < len(faces)):
        raise VisardError(f"{array_path(faces.path, name)} is damaged: it is no table of this set")


def _renumbered(table: npt.NDArray[np.int32], gone: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    numbers = table[:, 0] - np.searchsorted(gone, table[:, 0])
    return np.column_stack([numbers, table[:, 1:]]).astype(np.int32)


def _skips(
    faces: FaceSet, people: Sequence[str], gone: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which rows of the table of skipped pictures, and which entries of the header's list, are of these people.

    The list begins as the table does. Of people of whom no picture is left the set knows no name, but their files.
    """
    listed = _listed(faces.info, "skipped")
    named = np.array([any(_is_about(entry, person) for person in people) for entry in listed], bool)
    left = faces.skipped()
    if left is None or len(left.identity) < len(listed):
        return np.zeros(0 if left is None else len(left.identity), bool), named
    number = left.identity[: len(listed)]
    strangers = np.unique(number[named & (number >= len(faces.names))])
    theirs = np.isin(left.identity, np.concatenate([gone, strangers]))
    return theirs, theirs[: len(listed)]


def _about(faces: FaceSet, info: dict[str, Any], people: Sequence[str], gone: npt.NDArray[np.int64]) -> dict[str, int]:
    """Take out of the header the files that were skipped, pairs that were lost, and names without labels; how many."""
    table, theirs = _skips(faces, people, gone)
    skipped, lost = _listed(info, "skipped"), _listed(info, "pairs_lost")
    if skipped:
        info["skipped"] = [entry for entry, own in zip(skipped, theirs, strict=True) if not own]
        info["skipped_count"] = (whole(info.get("skipped_count")) or 0) - int((table if len(table) else theirs).sum())
    stay = [entry for entry in lost if not any(_is_about(entry, person) for person in people)]
    if lost:
        info["pairs_lost"] = stay
        info["pairs_dropped"] = (whole(info.get("pairs_dropped")) or 0) - (len(lost) - len(stay))
    if isinstance(info.get("unlabelled"), list):
        info["unlabelled"] = [name for name in info["unlabelled"] if name not in people]
    return {"files that were skipped": int(theirs.sum()), "pairs that were lost": len(lost) - len(stay)}


def _listed(info: dict[str, Any], name: str) -> list[list[str]]:
    return [[str(word) for word in entry] for entry in json_list(info.get(name)) if isinstance(entry, list)]


def _is_about(entry: Sequence[str], person: str) -> bool:
    """Whether a file of an entry is in a folder of this name, or is called after the person, as importers take it."""
    for word in entry:
        *folders, file = word.split("/")
        if person in folders or re.fullmatch(rf"{re.escape(person)}([_ ]\(?\d+\)?)?(\.\w+)?", file):
            return True
    return False


def _forget_activations(folder: Path, pictures: str, receipt: Receipt) -> None:
    """Remove stored activations of the set's pictures, under whatever path it was opened."""
    root = activations_folder()
    theirs = [e for e in entries(root) if e.about.get("path") == str(folder) or e.about.get("faces") == pictures]
    for entry in theirs:
        remove(entry.folder)
    receipt.look("stored activations", "the cache folder", len(theirs), len(theirs))
