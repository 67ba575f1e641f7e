"""The ways to deal identities or pictures to clients; each returns the rows of every client."""

import numpy as np
import numpy.typing as npt

from visard.data.attributes import matching
from visard.data.faces import FaceSet
from visard.data.shares import deal_by_dirichlet, equal_counts, lognormal_counts, proportional_counts
from visard.errors import UsageError
from visard.names import did_you_mean

Ints = npt.NDArray[np.int64]


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
