"""The ways to deal identities or pictures to clients; each returns the rows of every client."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from importlib import resources

import numpy as np
import numpy.typing as npt

from visard.data.faces import FaceSet
from visard.errors import UsageError, did_you_mean

# ----------
# How many, and which ones: rounding and splitting that keep totals and proportions.

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def equal_counts(total: int, parts: int) -> Ints:
    """`total` in `parts` whole numbers that differ by at most one, the larger ones first."""
    return np.array([total // parts + (i < total % parts) for i in range(parts)], np.int64)


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


def position_in_group(group: Ints, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Shuffle within each group: (order, position, size); order sorts by group, position counts 0, 1, ...

    position and size belong to the sorted elements group[order].
    """
    order = np.lexsort((rng.random(len(group)), group))
    _, start, size = np.unique(group[order], return_index=True, return_counts=True)
    position = np.arange(len(group)) - np.repeat(start, size)
    return order, position.astype(np.int64), np.repeat(size, size).astype(np.int64)


def split_by_identity(identity: Ints, fractions: tuple[float, float, float], rng: np.random.Generator) -> Ints:
    """0 train, 1 validation or 2 test for each picture, so that every identity is split like `fractions`.

    Picture j of n falls where (j + u) / n lies among the cumulated fractions, u ~ U(0, 1) per identity: each
    count is within 1 of n * fraction, and exact on average however small n is. Then every identity has a
    training picture, and a test picture too if it has 3 or more, where those fractions are not zero.
    """
    order, position, size = position_in_group(identity, rng)
    groups = np.cumsum(position == 0) - 1
    offset = rng.random(int(groups[-1]) + 1 if len(groups) else 0)[groups]
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


def deal_by_dirichlet(identity: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    """The client of each picture: every identity's pictures are shared out as p ~ Dirichlet(alpha)."""
    order, position, size = position_in_group(identity, rng)
    groups = np.cumsum(position == 0) - 1
    n = int(groups[-1]) + 1 if len(groups) else 0
    bounds = np.cumsum(rng.dirichlet(np.full(clients, alpha), n), axis=1)
    place = (position + rng.random(n)[groups]) / size
    result = np.empty(len(identity), np.int64)
    result[order] = np.minimum((place[:, None] >= bounds[groups]).sum(axis=1), clients - 1)
    return result


# ----------
# Which pictures an attribute expression such as "Male & !(Wearing_Hat | Eyeglasses)" describes.
#
# Truth has three values, as in Kleene's logic: 1 true, -1 false, 0 unknown. So `&` is the minimum, `|` the
# maximum and `!` the negative; a picture whose hat is unknown fits neither "Wearing_Hat" nor "!Wearing_Hat".

Truth = npt.NDArray[np.int8]
TOKEN = re.compile(r"\s*(?:(?P<name>[\w.\-]+)|(?P<sign>[!&|()]))")
DEEPEST = 50


def expressions(name: str) -> tuple[str, ...]:
    """The list of that name in `attribute_clients.toml`: one expression a client."""
    lists = tomllib.loads((resources.files("visard") / "data" / "attribute_clients.toml").read_text())
    if name not in lists:
        raise UsageError(f"no list {name!r} of attribute expressions{did_you_mean(name, lists)}")
    return tuple(lists[name]["expressions"])


def matching(faces: FaceSet, expression: str) -> npt.NDArray[np.bool_]:
    """Whether each picture (N,) certainly fits `expression`."""
    return np.equal(evaluate(expression, faces.attribute_names, faces.attribute), 1)


def evaluate(expression: str, known: list[str], column: Callable[[str], Truth]) -> Truth:
    """The truth of `expression` for each picture, given the columns of the known attributes."""
    return _Parser(expression, known, column).parse()


class _Parser:
    """either := both ('|' both)* ; both := term ('&' term)* ; term := '!' term | '(' either ')' | name"""

    def __init__(self, text: str, known: list[str], column: Callable[[str], Truth]) -> None:
        self.text, self.known, self.column = text, known, column
        self.tokens: list[tuple[str, int]] = []
        self.next = 0
        at, end = 0, len(text.rstrip())
        while at < end:
            match = TOKEN.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise self._error(f"unexpected {text[at]!r}", at)
            kind = match.lastgroup or "name"
            self.tokens.append((match[kind], match.start(kind)))
            at = match.end()

    def _error(self, what: str, at: int) -> UsageError:
        return UsageError(f"attribute expression {self.text!r}: {what} at position {at + 1}")

    def _peek(self) -> tuple[str, int]:
        return self.tokens[self.next] if self.next < len(self.tokens) else ("", len(self.text))

    def _take(self, sign: str) -> bool:
        if self._peek()[0] != sign:
            return False
        self.next += 1
        return True

    def parse(self) -> Truth:
        value = self._either(0)
        token, at = self._peek()
        if token:
            raise self._error(f"expected '&' or '|' before {token!r}", at)
        return value

    def _either(self, depth: int) -> Truth:
        value = self._both(depth)
        while self._take("|"):
            value = np.maximum(value, self._both(depth))
        return value

    def _both(self, depth: int) -> Truth:
        value = self._term(depth)
        while self._take("&"):
            value = np.minimum(value, self._term(depth))
        return value

    def _term(self, depth: int) -> Truth:
        token, at = self._peek()
        if depth > DEEPEST:
            raise self._error("nested too deeply", at)
        if self._take("!"):
            return np.negative(self._term(depth + 1))
        if self._take("("):
            value = self._either(depth + 1)
            if not self._take(")"):
                raise self._error(f"missing ')' for the '(' opened at position {at + 1}", self._peek()[1])
            return value
        if not token or token in "&|)":
            raise self._error("expected the name of an attribute", at)
        if token not in self.known:
            raise self._error(f"unknown attribute {token!r}{did_you_mean(token, self.known)}", at)
        self.next += 1
        return self.column(token)


def pick(identities: Ints, wanted: int | None, rng: np.random.Generator, setting: str) -> Ints:
    """`wanted` of the identities (all if None) in random order."""
    if not len(identities):
        raise UsageError("no identity is left to give out to clients")
    if wanted is not None and wanted > len(identities):
        raise UsageError(f"{setting} = {wanted}, but only {len(identities)} identities are left to give out")
    return rng.permutation(identities)[:wanted]


def named(owned: list[Ints]) -> dict[str, Ints]:
    """client-000, client-001, ... and what they own."""
    width = max(3, len(str(len(owned) - 1)))
    return {f"client-{number:0{width}d}": rows for number, rows in enumerate(owned)}


def rows_of(faces: FaceSet, identities: Ints) -> Ints:
    """All pictures of the identities, in ascending order."""
    wanted = np.zeros(len(faces.names), bool)
    wanted[identities] = True
    return np.flatnonzero(wanted[faces.identity])


def equal(faces: FaceSet, identities: Ints, clients: int) -> list[Ints]:
    """The same number of identities (give or take one) to each client."""
    _check_enough(identities, clients)
    return _by_counts(faces, identities, equal_counts(len(identities), clients))


def lognormal(
    faces: FaceSet,
    identities: Ints,
    clients: int,
    mu: float,
    sigma: float,
    rng: np.random.Generator,
    shares: tuple[float, ...] = (),
) -> list[Ints]:
    """C * S_i / sum S identities to client i, S_i ~ LogNormal(mu, sigma) or `shares`; at least one each."""
    _check_enough(identities, clients)
    if shares:
        return _by_counts(faces, identities, proportional_counts(len(identities), np.array(shares, np.float64)))
    return _by_counts(faces, identities, lognormal_counts(len(identities), clients, mu, sigma, rng))


def dirichlet(faces: FaceSet, identities: Ints, clients: int, alpha: float, rng: np.random.Generator) -> list[Ints]:
    """Label skew: the pictures of each identity are shared out as p ~ Dirichlet(alpha, ..., alpha)."""
    rows = rows_of(faces, identities)
    client = deal_by_dirichlet(faces.identity[rows].astype(np.int64), clients, alpha, rng)
    return _gather(rows, client, clients)


def by_domain(
    faces: FaceSet, source_domain: str | tuple[str, ...], target_domain: str | tuple[str, ...]
) -> dict[str, Ints]:
    """The rows of each source domain under its name (default: all others), and those of the target domains together."""
    targets = (target_domain,) if isinstance(target_domain, str) else target_domain
    sources = (source_domain,) if isinstance(source_domain, str) else source_domain
    sources = sources or tuple(d for d in faces.domains if d not in targets)
    for name in (*sources, *targets):
        if name not in faces.domains:
            raise UsageError(f"{faces.path.name} has no domain {name!r}{did_you_mean(name, faces.domains)}")
    if not sources or set(sources) & set(targets):
        raise UsageError("source_domain and target_domain must be different domains, at least one of each")
    numbers = {c: [faces.domains.index(c)] for c in sources} | {"target": [faces.domains.index(c) for c in targets]}
    owned = {c: np.flatnonzero(np.isin(faces.domain, of)) for c, of in numbers.items()}
    known = {c: set(np.unique(faces.identity[rows]).tolist()) for c, rows in owned.items()}
    for c, classes in known.items():
        if classes != known["target"]:
            have = f"{c} has {len(classes)} classes, the target {len(known['target'])}"
            raise UsageError(f"kind = one_domain needs the same classes everywhere: {have}")
    return owned


def by_attribute(
    faces: FaceSet,
    identities: Ints,
    expressions: tuple[str, ...],
    cap: int | None,
    rng: np.random.Generator,
    least: int = 1,
) -> list[Ints]:
    """Pictures (not identities) by expression: each takes up to `cap` of those that earlier ones left.

    With `least` > 1 a client takes the pictures of one person after the other, in random order, and nobody of whom it
    would have fewer than `least`.
    """
    free = np.zeros(len(faces), bool)
    free[rows_of(faces, identities)] = True
    owned = []
    for expression in expressions:
        chosen = rng.permutation(np.flatnonzero(free & matching(faces, expression)))
        if least > 1:
            turn = rng.permutation(len(faces.names))
            chosen = chosen[np.argsort(turn[faces.identity[chosen]], kind="stable")]
            chosen = _with_company(faces, _with_company(faces, chosen, least)[:cap], least)
        chosen = np.sort(chosen[:cap])
        if not len(chosen):
            raise UsageError(f"no picture is left for the attribute expression {expression!r}")
        free[chosen] = False
        owned.append(chosen)
    return owned


def _with_company(faces: FaceSet, rows: Ints, least: int) -> Ints:
    """The rows of people with at least `least` pictures among them."""
    return rows[np.bincount(faces.identity[rows], minlength=len(faces.names))[faces.identity[rows]] >= least]


def _check_enough(identities: Ints, clients: int) -> None:
    if clients > len(identities):
        raise UsageError(f"{clients} clients, but only {len(identities)} identities to give out")


def _by_counts(faces: FaceSet, identities: Ints, counts: Ints) -> list[Ints]:
    owner = np.full(len(faces.names), -1, np.int64)
    owner[identities] = np.repeat(np.arange(len(counts)), counts)
    rows = rows_of(faces, identities)
    return _gather(rows, owner[faces.identity[rows]], len(counts))


def _gather(rows: Ints, client: Ints, clients: int) -> list[Ints]:
    """Rows by client, each ascending; one sort instead of a pass per client."""
    order = np.argsort(client, kind="stable")
    return np.split(rows[order], np.cumsum(np.bincount(client, minlength=clients))[:-1])


# ----------
# Which domain an identity belongs to: where most of its pictures are.


def home_domain(faces: FaceSet) -> Ints:
    """The domain number of each identity of the set (the smaller number where two tie)."""
    table = np.zeros((len(faces.names), len(faces.domains)), np.int64)
    np.add.at(table, (faces.identity, faces.domain), 1)
    return np.asarray(table.argmax(axis=1), np.int64)


def domain_groups(faces: FaceSet, identities: Ints) -> dict[str, Ints]:
    """`identities` by domain; of a set with one domain all of them, called "test"."""
    if len(faces.domains) == 1:
        return {"test": identities}
    home = home_domain(faces)[identities]
    groups = {name: identities[home == number] for number, name in enumerate(faces.domains)}
    return {name: group for name, group in groups.items() if len(group)}


def identities_in(faces: FaceSet, where: str | tuple[str, ...], identities: Ints) -> Ints:
    """Those of `identities` in the named domains, or with most pictures fitting an attribute expression."""
    if isinstance(where, str) and where not in faces.domains and not faces.attribute_names:
        where = (where,)  # without attributes it can only be a misspelt domain
    if isinstance(where, str) and where not in faces.domains:
        fits = np.bincount(faces.identity, matching(faces, where), len(faces.names))
        pictures = np.bincount(faces.identity, minlength=len(faces.names))
        chosen = identities[2 * fits[identities] > pictures[identities]]
    else:
        names = (where,) if isinstance(where, str) else where
        for name in names:
            if name not in faces.domains:
                hint = did_you_mean(name, faces.domains)
                raise UsageError(f"{faces.path.name} has no domain {name!r}{hint}")
        wanted = [faces.domains.index(name) for name in names]
        chosen = identities[np.isin(home_domain(faces)[identities], wanted)]
    if not len(chosen):
        raise UsageError(f"{faces.path.name} has no identity with enough pictures in domain {where!r}")
    return chosen
