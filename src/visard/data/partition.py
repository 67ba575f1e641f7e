"""Share the pictures of a face set out to clients, with test sets of identities that no client has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from visard.data import partition_kinds
from visard.data.faces import ClientData, FaceSet, FaceView, Federation
from visard.data.partition_kinds import Ints, domain_groups, expressions, home_domain, identities_in, split_by_identity
from visard.data.storage import canonical_json, digest, first_problem
from visard.errors import UsageError, VisardError
from visard.files import write_atomically

# ----------
# A partition as a JSON file: which picture belongs to which client, with a hash over all of it.

PARTS = ("train", "val", "test")
Rows = list[Annotated[int, Field(ge=0)]]


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
    count: int = Field(ge=1)  # pictures of the set
    clients: dict[str, ClientRows]
    unseen: dict[str, Rows]
    hold_out: list[str]
    public: Rows = []


@dataclass(frozen=True)
class Manifest:
    """A checked partition of one face set; make it with `partition` or `Manifest.load`."""

    content: Content

    def __post_init__(self) -> None:
        owner = np.full(self.content.count, -1, np.int64)
        groups = self._groups()
        for number, (name, rows) in enumerate(groups):
            if len(rows) and rows.max() >= self.content.count:
                raise VisardError(f"partition: row {rows.max()} of {name} is beyond {self.content.count} pictures")
            if len(np.unique(rows)) != len(rows):
                raise VisardError(f"partition: {name} has a picture twice")
            taken = rows[owner[rows] >= 0]
            if len(taken):
                other = groups[owner[taken[0]]][0]
                raise VisardError(f"partition: picture {taken[0]} is in {other} and in {name}")
            owner[rows] = number
        for client in self.content.hold_out:
            if client not in self.content.clients:
                raise VisardError(f"partition: {client!r} is held out but is no client")

    def _groups(self) -> list[tuple[str, np.ndarray[Any, np.dtype[np.int64]]]]:
        clients = self.content.clients.items()
        lists = [(f"{name} ({part})", getattr(rows, part)) for name, rows in clients for part in PARTS]
        lists += [(f"test set {name}", rows) for name, rows in self.content.unseen.items()]
        lists.append(("public pictures", self.content.public))
        return [(name, np.array(rows, np.int64)) for name, rows in lists]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the canonical JSON of the content, in hexadecimal."""
        return digest(canonical_json(self.content.model_dump(mode="json")))

    def save(self, path: Path | str) -> Path:
        """Write the manifest atomically."""
        text = canonical_json({**self.content.model_dump(mode="json"), "sha256": self.hash})
        write_atomically(path := Path(path), text + b"\n", parents=True)
        return path

    @classmethod
    def load(cls, path: Path | str) -> Manifest:
        """Read a manifest and check its form, its hash and its rows."""
        try:
            stored = _Stored.model_validate_json(Path(path).read_bytes())
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


Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# streams of random numbers: the test and the public identities stay the same whatever the clients are
TEST_STREAM, CLIENT_STREAM, SPLIT_STREAM, PUBLIC_STREAM = 1, 2, 3, 4


class PartitionSettings(BaseModel):
    """How a set becomes clients: [partition] in the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # parties: real clients bring their own pictures, and all of this set are test pictures
    # one_domain: the same classes everywhere, every source domain a client, the target domains one client, the last
    kind: Literal[
        "equal", "lognormal", "attribute", "one_identity", "domains", "dirichlet", "one_domain", "parties"
    ] = "equal"  # fmt: skip
    clients: Count | None = None  # number of clients; of target clients for kind = domains
    identities: Count | None = None  # given out in total (by domains: to the target clients); None = all
    test_identities: int = Field(0, ge=0)  # set aside as unseen test set, of each domain if there are several
    public_identities: int = Field(0, ge=0)  # set aside as pictures that every party has
    min_images: Count = 1  # identities with fewer pictures are left out
    client_images: Count = 1  # and clients (by domains: target clients) get those with so many or more
    split: tuple[Fraction, Fraction, Fraction] = (0.7, 0.1, 0.2)  # train, validation, test inside a client
    hold_out: int = Field(0, ge=0)  # the last so many clients take no part in training
    mu: float = 3.0  # lognormal: S_i ~ LogNormal(mu, sigma)
    sigma: float = Field(3.0, ge=0)
    shares: tuple[float, ...] = ()  # lognormal: the S_i, where they are not to be drawn
    alpha: float = Field(0.5, gt=0)  # dirichlet: each identity's pictures over the clients ~ Dirichlet(alpha)
    # attribute: one expression a client, earlier ones choose first; or the name of a list ("table-ii", "eight")
    attributes: tuple[str, ...] = ()
    cap: Count | None = None  # attribute: at most so many pictures a client
    least: Count = 1  # attribute: identities with fewer pictures at a client are left out there
    seed: int | None = Field(None, ge=0)  # of its own, so that runs with other seeds share the partition
    # domains: names of domains, or an attribute expression; one_domain: names, () = all but the target's
    source_domain: str | tuple[str, ...] = ()
    target_domain: str | tuple[str, ...] = ()
    source_identities: Count | None = None  # domains: identities of the source client; None = all

    @field_validator("attributes", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return expressions(given) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _fits_together(self) -> PartitionSettings:
        if abs(sum(self.split) - 1) > 1e-6:
            raise ValueError(f"split {self.split} must sum to 1")
        if self.kind == "attribute":
            if not self.attributes:
                raise ValueError("kind = attribute needs attributes, one expression a client")
            if self.clients not in (None, len(self.attributes)):
                raise ValueError(f"{self.clients} clients, but {len(self.attributes)} attribute expressions")
        elif self.kind == "one_identity":
            if None not in (self.clients, self.identities) and self.clients != self.identities:
                raise ValueError("kind = one_identity has as many clients as identities")
        elif self.kind == "one_domain":
            if self.test_identities or not self.target_domain:
                raise ValueError("kind = one_domain needs target_domain, and has no test_identities")
        elif self.clients is None:
            raise ValueError(f"kind = {self.kind} needs clients")
        if self.shares and (len(self.shares) != self.clients or min(self.shares) <= 0):
            raise ValueError(f"shares: {len(self.shares)} for {self.clients} clients; each must be positive")
        if self.kind == "domains" and not (self.source_domain and self.target_domain):
            raise ValueError("kind = domains needs source_domain and target_domain")
        if self.public_identities and self.kind in ("domains", "one_domain", "parties"):
            raise ValueError(f"kind = {self.kind} has no public identities")
        return self


def partition(faces: FaceSet, settings: PartitionSettings, seed: int) -> Manifest:
    """Share out `faces`; the same settings and seed give the same manifest."""
    seed = seed if settings.seed is None else settings.seed
    if seed < 0:
        raise UsageError(f"seed = {seed}: must not be negative")
    pictures = np.bincount(faces.identity, minlength=len(faces.names))
    enough = np.flatnonzero(pictures >= settings.min_images)
    if not len(enough):
        raise UsageError(f"no identity of {faces.path.name} has {settings.min_images} pictures")
    source, target = _sides(faces, settings, enough)
    rng = np.random.default_rng([seed, TEST_STREAM])
    groups = domain_groups(faces, enough)
    if settings.kind == "domains":
        groups = _test_groups(faces, settings, source, target)
    if settings.kind == "parties":
        return _only_tests(faces, settings, seed, groups)
    unseen = _choose_unseen(groups, pictures, settings.test_identities, rng)
    taken = np.concatenate([np.zeros(0, np.int64), *unseen.values()])
    source, target = np.setdiff1d(source, taken), np.setdiff1d(target, taken)
    public = np.zeros(0, np.int64)
    if settings.public_identities:
        rng = np.random.default_rng([seed, PUBLIC_STREAM])
        public = partition_kinds.pick(target, settings.public_identities, rng, "public_identities")
        target = np.setdiff1d(target, public)
    target = target[pictures[target] >= settings.client_images]

    owned = _deal(faces, settings, source, target, np.random.default_rng([seed, CLIENT_STREAM]))
    for name, rows in owned.items():
        if not len(rows):
            raise UsageError(f"{name} would have no pictures: ask for fewer clients or wider conditions")
    if settings.hold_out >= len(owned):
        raise UsageError(f"hold_out = {settings.hold_out} leaves none of {len(owned)} clients to train")
    rng = np.random.default_rng([seed, SPLIT_STREAM])
    content = Content(
        kind=settings.kind,
        settings=settings.model_dump(mode="json"),
        seed=seed,
        faces=faces.fingerprint(),
        count=len(faces),
        clients={name: _split(faces, rows, settings.split, rng) for name, rows in owned.items()},
        unseen={name: partition_kinds.rows_of(faces, group).tolist() for name, group in unseen.items()},
        hold_out=list(owned)[len(owned) - settings.hold_out :],
        public=partition_kinds.rows_of(faces, public).tolist(),
    )
    return Manifest(content)


def _only_tests(faces: FaceSet, settings: PartitionSettings, seed: int, groups: dict[str, Ints]) -> Manifest:
    """A partition without clients: every picture is in the test set of its domain."""
    unseen = {name: partition_kinds.rows_of(faces, group).tolist() for name, group in groups.items()}
    plain = settings.model_dump(mode="json")
    return Manifest(
        Content(
            kind=settings.kind,
            settings=plain,
            seed=seed,
            faces=faces.fingerprint(),
            count=len(faces),
            clients={},
            unseen=unseen,
            hold_out=[],
        )
    )


def _sides(faces: FaceSet, settings: PartitionSettings, enough: Ints) -> tuple[Ints, Ints]:
    """Identities of the source and of the target clients; without domains all are target."""
    if settings.kind != "domains":
        return np.zeros(0, np.int64), enough
    source = identities_in(faces, settings.source_domain, enough)
    target = identities_in(faces, settings.target_domain, enough)
    both = np.intersect1d(source, target)
    if len(both):
        raise UsageError(f"{len(both)} identities belong to the source and to the target domain")
    return source, target


def _test_groups(faces: FaceSet, settings: PartitionSettings, source: Ints, target: Ints) -> dict[str, Ints]:
    """One group per named domain; "source" and "target" where an expression tells them apart."""
    groups: dict[str, Ints] = {}
    for side, where, members in (
        ("source", settings.source_domain, source),
        ("target", settings.target_domain, target),
    ):
        if isinstance(where, str) and where not in faces.domains:
            groups[side] = members
        else:
            home = home_domain(faces)[members]
            names = [where] if isinstance(where, str) else where
            groups |= {name: members[home == faces.domains.index(name)] for name in names}
    return groups


def _choose_unseen(groups: dict[str, Ints], pictures: Ints, wanted: int, rng: np.random.Generator) -> dict[str, Ints]:
    """`wanted` identities of each group, each with at least two pictures to compare."""
    if not wanted:
        return {}
    unseen = {}
    for name, group in groups.items():
        usable = group[pictures[group] >= 2]
        if len(usable) < wanted:
            have = f"{len(usable)} identities with two pictures or more"
            raise UsageError(f"test_identities = {wanted}, but there are {have} for test set {name!r}")
        unseen[name] = np.sort(rng.permutation(usable)[:wanted])
    return unseen


def _deal(
    faces: FaceSet, settings: PartitionSettings, source: Ints, target: Ints, rng: np.random.Generator
) -> dict[str, Ints]:
    """The rows of each client."""
    kind, wanted = settings.kind, settings.identities
    if kind == "one_identity":
        wanted = wanted or settings.clients
    given = partition_kinds.pick(target, wanted, rng, "identities" if wanted == settings.identities else "clients")
    clients = settings.clients or len(given)
    if kind == "equal" or kind == "one_identity":
        return partition_kinds.named(partition_kinds.equal(faces, given, clients))
    if kind == "lognormal":
        return partition_kinds.named(
            partition_kinds.lognormal(faces, given, clients, settings.mu, settings.sigma, rng, settings.shares)
        )
    if kind == "one_domain":
        return partition_kinds.by_domain(faces, settings.source_domain, settings.target_domain)
    if kind == "dirichlet":
        return partition_kinds.named(partition_kinds.dirichlet(faces, given, clients, settings.alpha, rng))
    if kind == "attribute":
        return partition_kinds.named(
            partition_kinds.by_attribute(faces, given, settings.attributes, settings.cap, rng, settings.least)
        )
    origin = partition_kinds.pick(source, settings.source_identities, rng, "source_identities")
    targets = partition_kinds.equal(faces, given, clients)
    return {"source": partition_kinds.rows_of(faces, origin)} | {f"target-{i}": rows for i, rows in enumerate(targets)}


def _split(faces: FaceSet, rows: Ints, fractions: tuple[float, float, float], rng: np.random.Generator) -> ClientRows:
    part = split_by_identity(faces.identity[rows].astype(np.int64), fractions, rng)
    train, val, test = (rows[part == number].tolist() for number in range(3))
    return ClientRows(train=train, val=val, test=test)
