"""Partitions: which picture of a face set belongs to which client, made from settings and kept in a JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from visard.data.faces import ClientData, FaceSet, FaceView, Federation
from visard.data.joined import Joined
from visard.data.partition_kinds import PARTITIONS, PartitionSettings, pick, pictures_of, rows_of, split_by_identity
from visard.data.storage import canonical_json, digest, first_problem
from visard.errors import UsageError, VisardError, did_you_mean
from visard.files import read_bytes, write_atomically

PARTS = ("train", "val", "test")
# streams of random numbers: the test and the public identities stay the same whatever the clients are
TEST_STREAM, CLIENT_STREAM, SPLIT_STREAM, PUBLIC_STREAM = 1, 2, 3, 4

Rows = list[Annotated[int, Field(ge=0, lt=2**62)]]


class ClientRows(BaseModel):
    """Rows of one client's pictures in the set."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    train: Rows
    val: Rows
    test: Rows


class Content(BaseModel):
    """All of a manifest but its hash."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = 1
    kind: str
    settings: dict[str, Any]
    seed: int
    faces: str  # fingerprint of the set
    count: int = Field(ge=1, lt=2**62)  # pictures of the set
    clients: dict[str, ClientRows]
    unseen: dict[str, Rows]
    hold_out: list[str]
    public: Rows = []


@dataclass(frozen=True)
class Manifest:
    """A checked partition of one face set; make it with `partition` or `Manifest.load`."""

    content: Content

    def __post_init__(self) -> None:
        clients = self.content.clients.items()
        lists = [(f"{name} ({part})", getattr(rows, part)) for name, rows in clients for part in PARTS]
        lists += [(f"test set {name}", rows) for name, rows in self.content.unseen.items()]
        lists.append(("public pictures", self.content.public))
        groups = [(name, np.array(rows, np.int64)) for name, rows in lists]
        for name, rows in groups:
            if len(rows) and rows.max() >= self.content.count:
                raise VisardError(f"partition: row {rows.max()} of {name} is beyond {self.content.count} pictures")
            if len(np.unique(rows)) != len(rows):
                raise VisardError(f"partition: {name} has a picture twice")
        # sorted, not noted in an array of `count`: a file can say any number
        picture = np.concatenate([rows for _, rows in groups])
        owner = np.repeat(np.arange(len(groups)), [len(rows) for _, rows in groups])
        order = np.argsort(picture, kind="stable")
        again = np.flatnonzero(np.diff(picture[order]) == 0)
        if len(again):
            one, two = (groups[owner[order[at]]][0] for at in (again[0], again[0] + 1))
            raise VisardError(f"partition: picture {picture[order[again[0]]]} is in {one} and in {two}")
        for client in self.content.hold_out:
            if client not in self.content.clients:
                raise VisardError(f"partition: {client!r} is held out but is no client")

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the canonical JSON of the content, in hexadecimal."""
        return digest(canonical_json(self.content.model_dump(mode="json")))

    def save(self, path: Path | str) -> Path:
        """Write the manifest, with the hash of its content, to `path`."""
        text = canonical_json({**self.content.model_dump(mode="json"), "sha256": self.hash})
        write_atomically(path := Path(path), text + b"\n", parents=True)
        return path

    @classmethod
    def load(cls, path: Path | str) -> Manifest:
        """Read a manifest and check its form, its hash and its rows."""
        try:
            stored = _Stored.model_validate_json(read_bytes(path))
        except FileNotFoundError:
            raise UsageError(f"no partition at {path}") from None
        except OSError as error:
            raise VisardError(f"cannot read {path}: {error.strerror}") from None
        except ValidationError as error:
            raise VisardError(f"{path} is no partition: {first_problem(error)}") from None
        content = Content(**{name: getattr(stored, name) for name in Content.model_fields})
        try:
            manifest = cls(content)
        except VisardError as error:
            raise VisardError(f"{path}: {error}") from None
        if manifest.hash != stored.sha256:
            raise VisardError(f"{path} was changed after it was made: its hash does not fit")
        return manifest

    def federation(self, faces: FaceSet) -> Federation:
        """The clients and test sets over the pictures of `faces`, which must be the set it was made for."""
        if faces.fingerprint() != self.content.faces or len(faces) != self.content.count:
            raise VisardError(
                f"the partition was made for face set {self.content.faces}, not for {faces.fingerprint()}"
            )
        clients = {name: _client(faces, rows) for name, rows in self.content.clients.items()}
        unseen = {name: FaceView.of(faces, rows) for name, rows in self.content.unseen.items()}
        public = FaceView.of(faces, self.content.public) if self.content.public else None
        known = [view for data in clients.values() for view in (data.train, data.val, data.test)]
        check_disjoint(known if public is None else [*known, public], unseen)
        return Federation(clients, unseen, tuple(self.content.hold_out), len(faces.names), self.hash, public)


class _Stored(Content):
    sha256: str


def _client(faces: FaceSet, rows: ClientRows) -> ClientData:
    own = np.array([*rows.train, *rows.val, *rows.test], np.int64)
    classes = np.unique(faces.identity[own]).astype(np.int64)
    train, val, test = (FaceView.of(faces, getattr(rows, part), classes) for part in PARTS)
    return ClientData(train, val, test)


def check_disjoint(training: Iterable[FaceView], tests: Mapping[str, FaceView]) -> None:
    """Refuse test sets with an identity that is in training, also across face sets (by identity name)."""
    known = {name for view in training for name in identity_names(view)}
    for test, view in tests.items():
        shared = sorted(known & identity_names(view))
        if shared:
            some = ", ".join(shared[:5]) + (", ..." if len(shared) > 5 else "")
            what = "identity is" if len(shared) == 1 else "identities are"
            raise VisardError(f"{len(shared)} {what} in training and in test set {test!r}: {some}")


def identity_names(view: FaceView) -> set[str]:
    """The names of the identities with a picture in the view."""
    return {view.faces.names[number] for number in np.unique(view.identity)}


def test_sets(faces: FaceSet) -> dict[str, npt.NDArray[np.int64]]:
    """The identities of each face set that is for tests alone, by the name of the set."""
    if not isinstance(faces, Joined):
        return {}
    found = {}
    for k, member in enumerate(faces.members):
        if member.role == "test":
            found[member.name] = np.unique(faces.identity[faces.starts[k] : faces.starts[k + 1]]).astype(np.int64)
    return found


def excluded(faces: FaceSet, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """The identities of these names; an unknown name is an error, since a typo would leave an identity in."""
    number = {name: i for i, name in enumerate(faces.names)} if names else {}
    if missing := [name for name in names if name not in number]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(f"partition.exclude: there is no identity {missing[0]!r}{more} in {faces.path.name}")
    return np.array(sorted({number[name] for name in names}), np.int64)


def partition(faces: FaceSet, settings: PartitionSettings, seed: int) -> Manifest:
    """Divide `faces` among clients; the same settings and seed give the same manifest."""
    seed = seed if settings.seed is None else settings.seed
    if seed < 0:
        raise UsageError(f"seed = {seed}: must not be negative")
    out = excluded(faces, settings.exclude)
    roles = {
        role: np.setdiff1d(np.flatnonzero(faces.roles == role), out) for role in ("clients", "public", "source", "test")
    }
    left = roles["clients"][pictures_of(faces)[roles["clients"]] >= settings.min_images]
    kind = PARTITIONS[settings.kind](settings)
    if not len(left) and (len(roles["clients"]) or settings.kind != "parties"):
        raise UsageError(f"no identity of {faces.path.name} has {settings.min_images} pictures")
    known = left[~faces.unlabelled[left]]
    unseen = kind.unseen(faces, known, np.random.default_rng([seed, TEST_STREAM]))
    unseen = {name: group for name, group in unseen.items() if len(group)} | test_sets(faces)
    unseen = {name: np.setdiff1d(group, out) for name, group in unseen.items()} if len(out) else unseen
    taken = np.concatenate([np.zeros(0, np.int64), *unseen.values()])
    left, known = np.setdiff1d(left, taken), np.setdiff1d(known, taken)
    public = roles["public"]
    if settings.public_identities:
        rng = np.random.default_rng([seed, PUBLIC_STREAM])
        chosen = pick(known, settings.public_identities, rng, "public_identities")
        left, public = np.setdiff1d(left, chosen), np.union1d(public, chosen)
    clients = kind.clients(faces, left, np.random.default_rng([seed, CLIENT_STREAM]))
    if len(roles["source"]):
        if "source" in clients:
            raise UsageError(f"partition.kind = {settings.kind} has a source already, and a face set has the role too")
        clients = {"source": rows_of(faces, np.setdiff1d(roles["source"], taken)), **clients}
    rng, owned = np.random.default_rng([seed, SPLIT_STREAM]), dict[str, ClientRows]()
    for name, rows in clients.items():
        if not len(rows):
            raise UsageError(f"{name} would have no pictures: ask for fewer clients or wider conditions")
        part = split_by_identity(faces.identity[rows].astype(np.int64), settings.split, rng)
        part[faces.unlabelled[faces.identity[rows]]] = 0  # nothing can be tested on them
        owned[name] = ClientRows(**{which: rows[part == number].tolist() for number, which in enumerate(PARTS)})
    if clients and settings.hold_out >= len(clients):
        raise UsageError(f"hold_out = {settings.hold_out} leaves none of {len(clients)} clients to train")
    left_out = {name for name in ("fold", "exclude", "without") if not getattr(settings, name)}
    content = Content(
        kind=settings.kind, seed=seed, settings=settings.model_dump(mode="json", exclude=left_out),
        faces=faces.fingerprint(), count=len(faces), clients=owned,
        unseen={name: rows_of(faces, group).tolist() for name, group in unseen.items()},
        hold_out=list(clients)[len(clients) - settings.hold_out :],
        public=rows_of(faces, public).tolist(),
    )  # fmt: skip
    return Manifest(_without(content, settings.without))


def _without(content: Content, gone: Sequence[str]) -> Content:
    """The partition without these clients; nothing of the others changes."""
    if unknown := [name for name in gone if name not in content.clients]:
        raise UsageError(
            f"partition.without: there is no client {unknown[0]!r}{did_you_mean(unknown[0], content.clients)}"
        )
    clients = {name: rows for name, rows in content.clients.items() if name not in gone}
    hold_out = [name for name in content.hold_out if name not in gone]
    if gone and len(clients) == len(hold_out):
        raise UsageError("partition.without leaves no client to train")
    return content.model_copy(update={"clients": clients, "hold_out": hold_out})
