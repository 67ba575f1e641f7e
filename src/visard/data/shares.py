"""How many, and which ones: rounding and splitting that keep totals and proportions."""

import numpy as np
import numpy.typing as npt

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
