"""Share the pictures of a face set out to clients, with test sets of identities that no client has."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from visard.data import dealing
from visard.data.attributes import expressions
from visard.data.dealing import Ints
from visard.data.domains import domain_groups, home_domain, identities_in
from visard.data.faces import FaceSet
from visard.data.manifest import ClientRows, Content, Manifest, check_disjoint
from visard.data.shares import split_by_identity
from visard.errors import UsageError

__all__ = ["Manifest", "PartitionSettings", "check_disjoint", "partition"]

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
    def _fits_together(self) -> "PartitionSettings":
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
        public = dealing.pick(target, settings.public_identities, rng, "public_identities")
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
        unseen={name: dealing.rows_of(faces, group).tolist() for name, group in unseen.items()},
        hold_out=list(owned)[len(owned) - settings.hold_out :],
        public=dealing.rows_of(faces, public).tolist(),
    )
    return Manifest(content)


def _only_tests(faces: FaceSet, settings: PartitionSettings, seed: int, groups: dict[str, Ints]) -> Manifest:
    """A partition without clients: every picture is in the test set of its domain."""
    unseen = {name: dealing.rows_of(faces, group).tolist() for name, group in groups.items()}
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
    given = dealing.pick(target, wanted, rng, "identities" if wanted == settings.identities else "clients")
    clients = settings.clients or len(given)
    if kind == "equal" or kind == "one_identity":
        return dealing.named(dealing.equal(faces, given, clients))
    if kind == "lognormal":
        return dealing.named(
            dealing.lognormal(faces, given, clients, settings.mu, settings.sigma, rng, settings.shares)
        )
    if kind == "one_domain":
        return dealing.by_domain(faces, settings.source_domain, settings.target_domain)
    if kind == "dirichlet":
        return dealing.named(dealing.dirichlet(faces, given, clients, settings.alpha, rng))
    if kind == "attribute":
        return dealing.named(dealing.by_attribute(faces, given, settings.attributes, settings.cap, rng, settings.least))
    origin = dealing.pick(source, settings.source_identities, rng, "source_identities")
    targets = dealing.equal(faces, given, clients)
    return {"source": dealing.rows_of(faces, origin)} | {f"target-{i}": rows for i, rows in enumerate(targets)}


def _split(faces: FaceSet, rows: Ints, fractions: tuple[float, float, float], rng: np.random.Generator) -> ClientRows:
    part = split_by_identity(faces.identity[rows].astype(np.int64), fractions, rng)
    train, val, test = (rows[part == number].tolist() for number in range(3))
    return ClientRows(train=train, val=val, test=test)
