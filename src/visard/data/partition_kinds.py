"""The kinds of partition: how the pictures of a face set are divided among clients, and the settings of each.

A new kind is a subclass of `Kind` and its entry in `PARTITIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, field_validator, model_validator
from pydantic_core import PydanticCustomError

from visard.data.expressions import expressions, matching
from visard.data.faces import FaceSet
from visard.data.joined import CLIENTS, Joined
from visard.errors import UsageError, did_you_mean, one_line
from visard.files import read_text
from visard.plugins import Registry

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Count = Annotated[int, Field(ge=1)]
CountFromZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Domains = str | tuple[str, ...]


class PartitionSettings(BaseModel):
    """How a set becomes clients: [partition] in the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str = "equal"  # a name in PARTITIONS
    clients: Count | None = None  # number of clients; of target clients for kind = domains; sites has its own number
    identities: Count | None = None  # given out in total (by domains: to the target clients); None = all
    test_identities: CountFromZero = 0  # set aside as unseen test set, of each domain if there are several
    public_identities: CountFromZero = 0  # set aside as pictures that every client has
    min_images: Count = 1  # identities with fewer pictures are left out
    client_images: Count = 1  # clients (by domains: target clients) get identities with at least this many
    exclude: tuple[str, ...] = ()  # names of identities that are left out everywhere; or a file with one in each line
    split: tuple[Fraction, Fraction, Fraction] = (0.7, 0.1, 0.2)  # train, validation, test inside a client
    hold_out: CountFromZero = 0  # this many clients, the last ones, take no part in training
    without: tuple[str, ...] = ()  # clients that are not there; all others have the pictures that they have with them
    mu: float = 3.0  # lognormal: S_i ~ LogNormal(mu, sigma)
    sigma: float = Field(3.0, ge=0)
    shares: tuple[PositiveFloat, ...] = ()  # lognormal: the S_i, where they are not to be drawn
    alpha: PositiveFloat = 0.5  # dirichlet: each identity's pictures over the clients ~ Dirichlet(alpha)
    # attribute: one expression a client, earlier ones choose first; or the name of a list ("table-ii", "eight")
    attributes: tuple[str, ...] = ()
    cap: Count | None = None  # attribute: most pictures of a client
    least: Count = 1  # attribute: identities with fewer pictures at a client are left out there
    # sites: (k, n) tests on part k (from 0) of n of the source's people, and of the sites' where no set is for tests
    fold: tuple[CountFromZero, Count] | None = None
    seed: CountFromZero | None = None  # of the partition alone, so that runs with other seeds share it
    # domains: names of domains, or an attribute expression; one_domain: names, () = all but the target's
    source_domain: Domains = ()
    target_domain: Domains = ()
    source_identities: Count | None = None  # domains: identities of the source client; None = all

    @field_validator("kind")
    @classmethod
    def _is_registered(cls, kind: str) -> str:
        if kind not in PARTITIONS:
            hint = did_you_mean(kind, PARTITIONS)
            raise PydanticCustomError("partition_kind", "no such kind of partition{hint}", {"hint": hint})
        return kind

    @field_validator("attributes", mode="before")
    @classmethod
    def _named_list(cls, given: Any) -> Any:
        return expressions(given) if isinstance(given, str) else given

    @field_validator("exclude", mode="before")
    @classmethod
    def _names_in_a_file(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        try:
            lines = read_text(given).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {given}: {one_line(error)}") from None
        return [line.strip() for line in lines if line.strip()]

    @model_validator(mode="after")
    def _fits_together(self) -> PartitionSettings:
        if abs(sum(self.split) - 1) > 1e-6:
            raise ValueError(f"split {self.split} must sum to 1")
        if self.shares and len(self.shares) != self.clients:
            raise ValueError(f"shares: {len(self.shares)} for {self.clients} clients")
        kind = PARTITIONS[self.kind](self)
        if self.exclude and not kind.excludes:
            raise ValueError(f"kind = {self.kind} takes all that there is, so that exclude has no effect")
        if self.public_identities and not kind.public:
            raise ValueError(f"kind = {self.kind} has no public identities")
        kind.check()
        return self


@dataclass(frozen=True)
class Kind:
    """One kind of partition; a subclass says which pictures each client has.

    `partition` sets the test and public identities aside and splits each client's pictures into train, validation and
    test; it calls `check` when settings are read, `unseen` and then `clients` when a set is divided.
    """

    settings: PartitionSettings
    public = True  # whether identities can be set aside whose pictures every client has
    excludes = True  # whether identities can be left out

    def check(self) -> None:
        """Raise ValueError where the settings do not fit this kind."""
        if self.settings.clients is None:
            raise ValueError(f"kind = {self.settings.kind} needs clients")

    def test_groups(self, faces: FaceSet, identities: Ints) -> dict[str, Ints]:
        """The identities from which each test set is chosen, by name of the test set: here by domain.

        An identity belongs to the domain of most of its pictures; the set of a single domain is called "test".
        """
        if len(faces.domains) == 1:
            return {"test": identities}
        home = home_domain(faces)[identities]
        groups = {name: identities[home == number] for number, name in enumerate(faces.domains)}
        return {name: group for name, group in groups.items() if len(group)}

    def unseen(self, faces: FaceSet, identities: Ints, rng: np.random.Generator) -> dict[str, Ints]:
        """The identities of each test set: `test_identities` of its group, with at least two pictures to compare."""
        wanted, chosen = self.settings.test_identities, {}
        for name, group in self.test_groups(faces, identities).items() if wanted else ():
            usable = group[pictures_of(faces)[group] >= 2]
            if len(usable) < wanted:
                have = f"{len(usable)} identities with two pictures or more"
                raise UsageError(f"test_identities = {wanted}, but there are {have} for test set {name!r}")
            chosen[name] = np.sort(rng.permutation(usable)[:wanted])
        return chosen

    def clients(self, faces: FaceSet, identities: Ints, rng: np.random.Generator) -> dict[str, Ints]:
        """The rows of each client in ascending order; `identities` are those that tests and public pictures leave."""
        chosen = self.pick(faces, identities, rng)
        owned = self.rows(faces, chosen, self.settings.clients or len(chosen), rng)
        width = max(3, len(str(len(owned) - 1)))
        return {f"client-{number:0{width}d}": rows for number, rows in enumerate(owned)}

    def rows(self, faces: FaceSet, identities: Ints, clients: int, rng: np.random.Generator) -> list[Ints]:
        """The rows of client-000, client-001, ..., for kinds that need no other names."""
        raise NotImplementedError

    def pick(self, faces: FaceSet, identities: Ints, rng: np.random.Generator, setting: str = "identities") -> Ints:
        """As many of the identities with enough pictures as `setting` says (all if None), in random order."""
        enough = identities[pictures_of(faces)[identities] >= self.settings.client_images]
        return pick(enough, getattr(self.settings, setting), rng, setting)


class Equal(Kind):
    """The same number of identities (give or take one) to each client."""

    def rows(self, faces: FaceSet, identities: Ints, clients: int, rng: np.random.Generator) -> list[Ints]:
        return equal_rows(faces, identities, clients)


class OneIdentity(Equal):
    """As many clients as identities."""

    def check(self) -> None:
        clients, identities = self.settings.clients, self.settings.identities
        if None not in (clients, identities) and clients != identities:
            raise ValueError("kind = one_identity has as many clients as identities")

    def pick(self, faces: FaceSet, identities: Ints, rng: np.random.Generator, setting: str = "identities") -> Ints:
        return super().pick(faces, identities, rng, setting if self.settings.identities else "clients")


class LogNormal(Kind):
    """C * S_i / sum S of C identities to client i, S_i ~ LogNormal(mu, sigma) or `shares`; at least one each."""

    def rows(self, faces: FaceSet, identities: Ints, clients: int, rng: np.random.Generator) -> list[Ints]:
        s, total = self.settings, len(identities)
        check_enough(identities, clients)
        if s.shares:
            return rows_by_counts(faces, identities, proportional_counts(total, np.array(s.shares, np.float64)))
        return rows_by_counts(faces, identities, lognormal_counts(total, clients, s.mu, s.sigma, rng))


class Dirichlet(Kind):
    """Label skew: the pictures of each identity go to the clients as p ~ Dirichlet(alpha, ..., alpha)."""

    def rows(self, faces: FaceSet, identities: Ints, clients: int, rng: np.random.Generator) -> list[Ints]:
        rows = rows_of(faces, identities)
        client = dirichlet_clients(faces.identity[rows].astype(np.int64), clients, self.settings.alpha, rng)
        return rows_by_client(rows, client, clients)


class ByAttribute(Kind):
    """Pictures (not identities) by expression: each client takes up to `cap` of those that earlier ones left.

    With `least` > 1 a client takes the pictures of one identity after the other, in random order, and none of an
    identity of which it would have fewer than `least`.
    """

    def check(self) -> None:
        clients, attributes = self.settings.clients, self.settings.attributes
        if not attributes:
            raise ValueError("kind = attribute needs attributes, one expression a client")
        if clients not in (None, len(attributes)):
            raise ValueError(f"{clients} clients, but {len(attributes)} attribute expressions")

    def rows(self, faces: FaceSet, identities: Ints, clients: int, rng: np.random.Generator) -> list[Ints]:
        cap, least = self.settings.cap, self.settings.least
        free = np.zeros(len(faces), bool)
        free[rows_of(faces, identities)] = True
        owned = []
        for expression in self.settings.attributes:
            chosen = rng.permutation(np.flatnonzero(free & matching(faces, expression)))
            if least > 1:
                turn = rng.permutation(len(faces.names))
                chosen = chosen[np.argsort(turn[faces.identity[chosen]], kind="stable")]
                chosen = _frequent(faces, _frequent(faces, chosen, least)[:cap], least)
            chosen = np.sort(chosen[:cap])
            if not len(chosen):
                raise UsageError(f"no picture is left for the attribute expression {expression!r}")
            free[chosen] = False
            owned.append(chosen)
        return owned


class SourceAndTargets(Kind):
    """One client with the identities of the source domain; those of the target domain equally to `clients` others."""

    public = False

    def check(self) -> None:
        super().check()
        if not (self.settings.source_domain and self.settings.target_domain):
            raise ValueError("kind = domains needs source_domain and target_domain")

    def sides(self, faces: FaceSet, identities: Ints) -> tuple[Ints, Ints]:
        """The identities of the source and of the target domain."""
        source = identities_in(faces, self.settings.source_domain, identities)
        target = identities_in(faces, self.settings.target_domain, identities)
        both = np.intersect1d(source, target)
        if len(both):
            raise UsageError(f"{len(both)} identities belong to the source and to the target domain")
        return source, target

    def test_groups(self, faces: FaceSet, identities: Ints) -> dict[str, Ints]:
        """One group per named domain; "source" and "target" where an expression tells them apart."""
        groups: dict[str, Ints] = {}
        sides, where = self.sides(faces, identities), (self.settings.source_domain, self.settings.target_domain)
        for side, names, members in zip(("source", "target"), where, sides, strict=True):
            if isinstance(names, str) and names not in faces.domains:
                groups[side] = members
            else:
                home = home_domain(faces)[members]
                groups |= {name: members[home == faces.domains.index(name)] for name in _as_tuple(names)}
        return groups

    def clients(self, faces: FaceSet, identities: Ints, rng: np.random.Generator) -> dict[str, Ints]:
        source, target = self.sides(faces, identities)
        targets = self.pick(faces, target, rng)
        origin = pick(source, self.settings.source_identities, rng, "source_identities")
        owned = equal_rows(faces, targets, self.settings.clients or 1)
        return {"source": rows_of(faces, origin)} | {f"target-{i}": rows for i, rows in enumerate(owned)}


class OneDomain(Kind):
    """The same classes everywhere: every source domain is a client, the target domains are the last client."""

    public = False
    excludes = False

    def check(self) -> None:
        if self.settings.test_identities or not self.settings.target_domain:
            raise ValueError("kind = one_domain needs target_domain, and has no test_identities")

    def clients(self, faces: FaceSet, identities: Ints, rng: np.random.Generator) -> dict[str, Ints]:
        targets = _as_tuple(self.settings.target_domain)
        sources = _as_tuple(self.settings.source_domain) or tuple(d for d in faces.domains if d not in targets)
        numbers = {name: [number_of_domain(faces, name)] for name in sources}
        numbers["target"] = [number_of_domain(faces, name) for name in targets]
        if not sources or set(sources) & set(targets):
            raise UsageError("source_domain and target_domain must be different domains, at least one of each")
        owned = {name: np.flatnonzero(np.isin(faces.domain, of)) for name, of in numbers.items()}
        known = {name: set(np.unique(faces.identity[rows]).tolist()) for name, rows in owned.items()}
        for name, classes in known.items():
            if classes != known["target"]:
                have = f"{name} has {len(classes)} classes, the target {len(known['target'])}"
                raise UsageError(f"kind = one_domain needs the same classes everywhere: {have}")
        return owned


class Sites(Kind):
    """Every face set of `[[data.sets]]` for clients is a client; of a single one, every domain. They need no number."""

    def check(self) -> None:
        if self.settings.fold and self.settings.fold[0] >= self.settings.fold[1]:
            raise ValueError(f"fold = {list(self.settings.fold)}: parts are counted from 0, so the first is smaller")

    def unseen(self, faces: FaceSet, identities: Ints, rng: np.random.Generator) -> dict[str, Ints]:
        if self.settings.fold is None:
            return super().unseen(faces, identities, rng)
        people = {} if (faces.roles == "test").any() else {"sites": identities}
        people["source"] = np.flatnonzero(faces.roles == "source")
        return {name: self._part(faces, group, name, rng) for name, group in people.items() if len(group)}

    def _part(self, faces: FaceSet, identities: Ints, name: str, rng: np.random.Generator) -> Ints:
        """Part k of n of the identities with two pictures or more, the same share of each domain."""
        k, n = self.settings.fold or (0, 1)
        usable = rng.permutation(identities[pictures_of(faces)[identities] >= 2])
        usable = usable[np.argsort(home_domain(faces)[usable], kind="stable")]
        chosen = np.sort(usable[k::n])
        if len(chosen) < 2 or len(chosen) >= len(identities):
            have = f"{len(identities)} people, {len(usable)} of them with two pictures or more"
            raise UsageError(f"fold = {k + 1} of {n}: {name} has {have}, which is too few")
        return chosen

    def clients(self, faces: FaceSet, identities: Ints, rng: np.random.Generator) -> dict[str, Ints]:
        rows = rows_of(faces, identities)
        sites = sites_of(faces)
        owned = {name: rows[site[rows]] for name, site in sites.items()}
        return {name: own for name, own in owned.items() if len(own)}


class Parties(Kind):
    """No clients here: real ones bring their own pictures, and all of this set are test pictures."""

    public = False

    def unseen(self, faces: FaceSet, identities: Ints, rng: np.random.Generator) -> dict[str, Ints]:
        return self.test_groups(faces, identities)

    def clients(self, faces: FaceSet, identities: Ints, rng: np.random.Generator) -> dict[str, Ints]:
        return {}


PARTITIONS: Registry[Callable[[PartitionSettings], Kind]] = Registry("partitions", {
    "equal": Equal,
    "lognormal": LogNormal,
    "attribute": ByAttribute,
    "one_identity": OneIdentity,
    "domains": SourceAndTargets,
    "dirichlet": Dirichlet,
    "one_domain": OneDomain,
    "sites": Sites,
    "parties": Parties,
})  # fmt: skip


def pick(identities: Ints, wanted: int | None, rng: np.random.Generator, setting: str) -> Ints:
    """`wanted` of the identities (all if None) in random order."""
    if not len(identities):
        raise UsageError("no identity is left to give out to clients")
    if wanted is not None and wanted > len(identities):
        raise UsageError(f"{setting} = {wanted}, but only {len(identities)} identities are left to give out")
    return rng.permutation(identities)[:wanted]


def check_enough(identities: Ints, clients: int) -> None:
    """Refuse more clients than identities."""
    if clients > len(identities):
        raise UsageError(f"{clients} clients, but only {len(identities)} identities to give out")


def pictures_of(faces: FaceSet) -> Ints:
    """How many pictures each identity of the set has."""
    return np.bincount(faces.identity, minlength=len(faces.names))


def rows_of(faces: FaceSet, identities: Ints) -> Ints:
    """All pictures of the identities, in ascending order."""
    wanted = np.zeros(len(faces.names), bool)
    wanted[identities] = True
    return np.flatnonzero(wanted[faces.identity])


def rows_by_counts(faces: FaceSet, identities: Ints, counts: Ints) -> list[Ints]:
    """The rows of the first counts[0] identities, of the next counts[1], ..."""
    owner = np.full(len(faces.names), -1, np.int64)
    owner[identities] = np.repeat(np.arange(len(counts)), counts)
    rows = rows_of(faces, identities)
    return rows_by_client(rows, owner[faces.identity[rows]], len(counts))


def rows_by_client(rows: Ints, client: Ints, clients: int) -> list[Ints]:
    """Rows by client, each ascending; one sort instead of a pass per client."""
    order = np.argsort(client, kind="stable")
    return np.split(rows[order], np.cumsum(np.bincount(client, minlength=clients))[:-1])


def equal_rows(faces: FaceSet, identities: Ints, clients: int) -> list[Ints]:
    """The rows of each client, with equal numbers of identities; the first clients get one more if needed."""
    check_enough(identities, clients)
    total = len(identities)
    counts = np.array([total // clients + (i < total % clients) for i in range(clients)], np.int64)
    return rows_by_counts(faces, identities, counts)


def proportional_counts(total: int, weights: Floats) -> Ints:
    """`total` in whole numbers proportional to `weights`, at least 1 each (total >= len(weights)).

    Largest remainders get the units that rounding down leaves over; then a part without any takes one from
    the largest. The sum is exactly `total`.
    """
    exact = total * (weights / weights.sum())
    counts: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    for empty in np.flatnonzero(counts == 0):
        counts[np.argmax(counts)] -= 1
        counts[empty] = 1
    return counts


def lognormal_counts(total: int, parts: int, mu: float, sigma: float, rng: np.random.Generator) -> Ints:
    """`total` * S_i / sum S with S_i ~ LogNormal(mu, sigma), rounded so that the total stays."""
    log_s = rng.normal(mu, sigma, parts)
    # the largest S divides out, so no sigma overflows
    return proportional_counts(total, np.exp(log_s - log_s.max()))


def position_in_group(group: Ints, rng: np.random.Generator) -> tuple[Ints, Ints, Ints, Ints]:
    """Shuffle within each group: (order, number, position, size); order sorts by group, position counts 0, 1, ...

    The group's number from 0, position and size belong to the sorted elements group[order].
    """
    order = np.lexsort((rng.random(len(group)), group))
    _, start, size = np.unique(group[order], return_index=True, return_counts=True)
    number = np.repeat(np.arange(len(size)), size)
    return order, number, np.arange(len(group)) - start[number], size[number]


def dirichlet_clients(identity: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    """The client of each picture: every identity's pictures are divided as p ~ Dirichlet(alpha)."""
    order, groups, position, size = position_in_group(identity, rng)
    n = int(groups.max(initial=-1)) + 1
    bounds = np.cumsum(rng.dirichlet(np.full(clients, alpha), n), axis=1)
    place = (position + rng.random(n)[groups]) / size
    result = np.empty(len(identity), np.int64)
    result[order] = np.minimum((place[:, None] >= bounds[groups]).sum(axis=1), clients - 1)
    return result


def split_by_identity(identity: Ints, fractions: tuple[float, float, float], rng: np.random.Generator) -> Ints:
    """0 train, 1 validation or 2 test for each picture, so that every identity is split like `fractions`.

    Picture j of n falls where (j + u) / n lies among the cumulated fractions, u ~ U(0, 1) per identity: each
    count is within 1 of n * fraction, and exact on average however small n is. Then every identity has a
    training picture, and a test picture too if it has 3 or more, where those fractions are not zero.
    """
    order, groups, position, size = position_in_group(identity, rng)
    offset = rng.random(int(groups.max(initial=-1)) + 1)[groups]
    bounds = np.cumsum(fractions)[:2]
    part = np.searchsorted(bounds, (position + offset) / size, side="right")
    # a part of fraction 0 has no width, but rounding in the sum could let a picture in
    usable = np.flatnonzero(np.array(fractions) > 0)
    part = usable[np.abs(part[:, None] - usable[None, :]).argmin(axis=1)]
    # parts rise with the position, so the first picture is in train if any is, and the last in test
    if fractions[0] > 0:
        part[position == 0] = 0
    if fractions[2] > 0:
        part[(position == size - 1) & (size >= 3)] = 2
    result = np.empty(len(identity), np.int64)
    result[order] = part
    return result


def _frequent(faces: FaceSet, rows: Ints, least: int) -> Ints:
    """The rows of identities with at least `least` pictures among them."""
    return rows[np.bincount(faces.identity[rows], minlength=len(faces.names))[faces.identity[rows]] >= least]


def sites_of(faces: FaceSet) -> dict[str, npt.NDArray[np.bool_]]:
    """Which pictures (N,) belong to each site."""
    if isinstance(faces, Joined) and len(own := [k for k, m in enumerate(faces.members) if m.role == CLIENTS]) > 1:
        of = np.repeat(np.arange(len(faces.members)), np.diff(faces.starts))
        return {faces.members[k].name: of == k for k in own}
    return {name: faces.domain == number for number, name in enumerate(faces.domains)}


def _as_tuple(domains: Domains) -> tuple[str, ...]:
    return (domains,) if isinstance(domains, str) else domains


def home_domain(faces: FaceSet) -> Ints:
    """The domain number of most pictures of each identity of the set (the smaller number where two tie)."""
    table = np.zeros((len(faces.names), len(faces.domains)), np.int64)
    np.add.at(table, (faces.identity, faces.domain), 1)
    return np.asarray(table.argmax(axis=1), np.int64)


def number_of_domain(faces: FaceSet, name: str) -> int:
    """The number of a domain of the set."""
    if name not in faces.domains:
        raise UsageError(f"{faces.path.name} has no domain {name!r}{did_you_mean(name, faces.domains)}")
    return faces.domains.index(name)


def identities_in(faces: FaceSet, where: Domains, identities: Ints) -> Ints:
    """Those of `identities` in the named domains, or with most pictures fitting an attribute expression."""
    # in a set without attributes a string can only be a domain
    if isinstance(where, str) and where not in faces.domains and faces.attribute_names:
        fits = np.bincount(faces.identity, matching(faces, where), len(faces.names))
        chosen = identities[2 * fits[identities] > pictures_of(faces)[identities]]
    else:
        wanted = [number_of_domain(faces, name) for name in _as_tuple(where)]
        chosen = identities[np.isin(home_domain(faces)[identities], wanted)]
    if not len(chosen):
        raise UsageError(f"{faces.path.name} has no identity with enough pictures in domain {where!r}")
    return chosen
