"""Several face sets joined as one: the role of each in a run, shared identities, one picture size for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from visard.data.faces import SKIPPED, FaceSet, FaceSetWriter, Rows, Skipped
from visard.data.pictures import LANDMARKS
from visard.data.storage import array_path, canonical_json, digest
from visard.errors import UsageError

Role = Literal["clients", "public", "source", "test"]
CLIENTS: Role = "clients"
CHUNK = 256  # pictures that are written at a time
RESERVED = ("source", "public", "pool")  # names of clients that are no sites


@dataclass(frozen=True)
class Member:
    """One of the sets: its name and its role in the run."""

    name: str
    faces: FaceSet
    role: Role = CLIENTS


class Resized(FaceSet):
    """A face set whose pictures are brought to another size when they are read."""

    def __init__(self, faces: FaceSet, size: int) -> None:
        self.__dict__.update(faces.__dict__)
        self.faces, self.size, self.shape = faces, size, (size, size, 3)

    def __reduce__(self) -> tuple[Callable[..., FaceSet], tuple[Any, ...]]:
        return Resized, (self.faces, self.size)

    def read(self, rows: Rows, mirrored: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[Any]:
        side = (self.size, self.size)
        pictures = (Image.fromarray(picture) for picture in self.faces.read(rows))
        resized = [np.asarray(picture.resize(side, Image.Resampling.BICUBIC)) for picture in pictures]
        return np.stack(resized) if resized else np.empty((0, *self.shape), np.uint8)


class Joined(FaceSet):
    """Face sets one after the other, without a copy of their pictures; rows are counted through.

    An identity is called SET/NAME and is another person than one of the same name in another set, unless `same_names`.
    The domain of a picture is its set or, where a set has several domains, SET/DOMAIN. An attribute that a set does not
    have is unknown there. Pictures are as large as those of the set with the largest ones.
    """

    def __init__(self, members: Sequence[Member], same_names: bool = False) -> None:
        _check(members)
        sets = [member.faces for member in members]
        size = max(faces.size for faces in sets)
        self.same_names = same_names
        self.members = tuple(
            member if member.faces.size == size else Member(member.name, Resized(member.faces, size), member.role)
            for member in members
        )
        self.path = Path(" + ".join(member.name for member in members))
        self.size, self.shape, self.dtype = size, self.members[0].faces.shape, sets[0].dtype
        self.starts = np.cumsum([0, *map(len, sets)])
        self.names, numbers = _numbered(
            [[name if same_names else f"{m.name}/{name}" for name in m.faces.names] for m in members]
        )
        self.identity = _together([n[s.identity] for n, s in zip(numbers, sets, strict=True)], np.int32)
        self.domains, of_sets = _numbered([_domains(member) for member in members])
        self.domain = _together([n[s.domain] for n, s in zip(of_sets, sets, strict=True)], np.int16)
        self.attribute_names, columns = _numbered([faces.attribute_names for faces in sets])
        self.attributes = np.zeros((len(self.identity), len(self.attribute_names)), np.int8)
        for start, faces, column in zip(self.starts, sets, columns, strict=False):
            self.attributes[start : start + len(faces), column] = faces.attributes
        self._numbers = list(zip(numbers, of_sets, columns, strict=True))  # of identities, domains and attributes
        self.roles = _roles(self, numbers)
        self.unlabelled = np.zeros(len(self.names), bool)
        for number, faces in zip(numbers, sets, strict=True):
            self.unlabelled[number] |= faces.unlabelled
        kinds, cuts = {str(s.info.get("kind")) for s in sets}, {s.align for s in sets}
        self.info = {"kind": kinds.pop() if len(kinds) == 1 else "sites"}
        self.info["align"] = cuts.pop() if len(cuts) == 1 else "none"
        if any(s.info.get("every_face") for s in sets):
            self.info["every_face"] = True
        about = [[m.name, m.role, m.faces.fingerprint()] for m in members]
        self._fingerprint = digest(canonical_json([about, size, same_names]))[:16]

    def __reduce__(self) -> tuple[Callable[..., FaceSet], tuple[Any, ...]]:
        return Joined, (self.members, self.same_names)

    def __repr__(self) -> str:
        return f"Joined({self.path}: {len(self)} pictures of {len(self.names)} identities)"

    def parts(self, rows: Rows) -> list[tuple[int, npt.NDArray[np.bool_], Rows]]:
        """The sets that rows are of: number of the set, which of the rows, and their numbers in it."""
        of = np.searchsorted(self.starts, rows, side="right") - 1
        return [(int(k), of == k, rows[of == k] - self.starts[k]) for k in np.unique(of)]

    def read(self, rows: Rows, mirrored: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[Any]:
        rows = np.asarray(rows, np.int64)
        found = np.empty((len(rows), *self.shape), self.dtype)
        for k, here, inside in self.parts(rows):
            found[here] = self.members[k].faces.read(inside)
        return found

    def file(self, row: int) -> str:
        ((k, _, inside),) = self.parts(np.array([row]))
        return f"{self.members[k].name}/{self.members[k].faces.file(int(inside[0]))}"

    def extra(self, name: str) -> np.ndarray[Any, Any]:
        """The arrays of all sets, one after the other; every set must have one with a row for each picture."""
        found = [member.faces.extra(name) for member in self.members]
        for array, member in zip(found, self.members, strict=True):
            if array.shape[:1] != (len(member.faces),) or array.shape[1:] != found[0].shape[1:]:
                raise UsageError(f"{member.name}: {name}.npy has no row for each picture")
        return np.concatenate(found)

    def quality(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Only the sets that the rows are of must have scores."""
        found = np.empty(len(rows), np.float32)
        for k, here, inside in self.parts(rows):
            found[here] = self.members[k].faces.quality(inside)
        return found

    def skipped(self) -> Skipped | None:
        found, beyond = [], len(self.names)
        for member, (identity, domain, column) in zip(self.members, self._numbers, strict=True):
            left = member.faces.skipped()
            if left is None:
                return None
            strangers = left.identity >= len(identity)  # identities without any picture
            number = np.where(strangers, left.identity - len(identity) + beyond, 0)
            number[~strangers] = identity[left.identity[~strangers]]
            marks = np.zeros((len(number), len(self.attribute_names)), np.int32)
            marks[:, column] = left.attributes
            found.append((number.astype(np.int32), domain[left.domain].astype(np.int32), left.reason, marks))
            beyond = max(beyond, int(number.max(initial=-1)) + 1)
        return Skipped(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def cut_differently(self) -> str:
        """A line where faces were cut out in more than one way; nothing where all are alike."""
        cuts = {member.name: member.faces.align for member in self.members}
        if len(set(cuts.values())) == 1:
            return ""
        listed = ", ".join(f"{name} {cut}" for name, cut in cuts.items())
        return f"faces are cut differently ({listed}): import all sets with the same --align"

    def namesakes(self) -> list[str]:
        """Names of a test set that also occur in other sets, where they are taken for different people."""
        named: dict[bool, set[str]] = {True: set(), False: set()}
        for member in self.members:
            if not member.faces.unlabelled.any():
                named[member.role == "test"] |= set(member.faces.names)
        return sorted(named[True] & named[False])


def merge(
    joined: Joined, out: Path, overwrite: bool = False, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write joined sets as one new face set, with their domains and attributes.

    Landmarks and quality are kept where all sets have them; lists of pairs and templates are not, for they are tests of
    one set. Nothing is at `out` before all of it is.
    """
    if joined.dtype != np.uint8:
        raise UsageError("readings cannot be merged: give them to a run as [[data.sets]]")
    of = [
        {"name": m.name, "kind": m.faces.info.get("kind"), "fingerprint": m.faces.fingerprint()} for m in joined.members
    ]
    info: dict[str, Any] = {**joined.info, "merged": of}
    if joined.unlabelled.any():
        info["unlabelled"] = [name for name, bare in zip(joined.names, joined.unlabelled, strict=True) if bare]
    total = len(joined)
    with FaceSetWriter(
        out, count=total, size=joined.size, names=joined.names, domains=joined.domains,
        attributes=joined.attribute_names, info=info, overwrite=overwrite,
    ) as writer:  # fmt: skip
        for start in range(0, total, CHUNK):
            rows = np.arange(start, min(start + CHUNK, total))
            files = [joined.file(int(row)) for row in rows]
            labels = joined.identity[rows], joined.domain[rows], joined.attributes[rows]
            writer.write(start, joined.read(rows), *labels, files)
            if progress is not None:
                progress(int(rows[-1]) + 1, total)
        for name in (LANDMARKS, "quality"):
            if all(array_path(m.faces.path, name).is_file() for m in joined.members):
                writer.attach(name, joined.extra(name))
        if (left := joined.skipped()) is not None:
            table = np.column_stack([left.identity, left.domain, left.reason, left.attributes]).astype(np.int32)
            writer.attach(SKIPPED, table)
            writer.info["skipped_count"] = len(table)
    return out


def _check(members: Sequence[Member]) -> None:
    if not members:
        raise UsageError("no face set is given")
    seen: dict[str, str] = {}
    for member in members:
        fingerprint = member.faces.fingerprint()
        if fingerprint in seen and seen[fingerprint] == member.name:
            raise UsageError(f"the face set {member.faces.path} is given twice")
        if fingerprint in seen:
            raise UsageError(f"{seen[fingerprint]} and {member.name} are the same face set")
        if member.name in seen.values():
            raise UsageError(f"two face sets are called {member.name}: give one of them another name")
        if member.name in RESERVED and member.role == CLIENTS:
            raise UsageError(f"a site cannot be called {member.name}: give it another name")
        seen[fingerprint] = member.name
        if member.role != CLIENTS and member.faces.unlabelled.any():
            raise UsageError(f"{member.name} has no labels, which a set with the role {member.role} needs")
    first = members[0]
    for other in members[1:]:
        pictures = first.faces.dtype == other.faces.dtype == np.uint8
        if first.faces.dtype != other.faces.dtype or (first.faces.shape != other.faces.shape and not pictures):
            raise UsageError(f"{first.name} and {other.name} hold different things, so they cannot be joined")


def _numbered(lists: Sequence[Sequence[str]]) -> tuple[list[str], list[npt.NDArray[np.int64]]]:
    """All names, each once, and for each list the number of each of its names."""
    known: dict[str, int] = {}
    numbers = [np.array([known.setdefault(name, len(known)) for name in names], np.int64) for names in lists]
    return list(known), numbers


def _together(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype)


def _domains(member: Member) -> list[str]:
    domains = member.faces.domains
    return [member.name] if len(domains) == 1 else [f"{member.name}/{domain}" for domain in domains]


def _roles(joined: Joined, numbers: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.str_]:
    """The one role of each identity."""
    roles = np.full(len(joined.names), "", "<U7")
    for member, number in zip(joined.members, numbers, strict=True):
        taken = number[(roles[number] != "") & (roles[number] != member.role)]
        if len(taken):
            name = joined.names[taken[0]]
            raise UsageError(
                f"{name} is in a set with the role {roles[taken[0]]} and in {member.name} with the role {member.role}, "
                "and same_names makes them one person"
            )
        roles[number] = member.role
    return roles
