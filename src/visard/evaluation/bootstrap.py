"""Bootstrap confidence intervals that respect which comparisons share a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from visard.errors import UsageError
from visard.evaluation.inputs import Bools, Doubles, Floats, Ints
from visard.evaluation.results import Result

CELLS = 1 << 22  # replicates x pairs worked on at a time


@dataclass(frozen=True)
class Interval(Result):
    """Percentile interval from `replicates` resamples of `unit`: "identity" or "pair"."""

    low: float
    high: float
    level: float
    replicates: int
    unit: str


def interval(values: Doubles, level: float, unit: str) -> Interval:
    """Central percentile interval; replicates without a value (NaN) are left out."""
    kept = values[~np.isnan(values)]
    if not len(kept):
        return Interval(float("nan"), float("nan"), level, 0, unit)
    low, high = np.quantile(kept, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level, len(kept), unit)


def draws(rng: np.random.Generator, units: int, replicates: int) -> Doubles:
    """How often each unit is drawn in each resample (replicates, units): multinomial, rows sum to `units`."""
    return rng.multinomial(units, np.full(units, 1.0 / units), size=replicates).astype(np.float64)


def pair_weights(same: Bools, owners: Ints | None, replicates: int, seed: int) -> Iterator[Doubles]:
    """Weights (block, P) of pairs in each resample, in blocks of bounded size.

    With the pair's two identities `owners` (P, 2), identities are drawn: a genuine pair counts as often as
    its person was drawn, an impostor pair as often as both were, w_a · w_b. Without, pairs are drawn, genuine
    and impostor apart, so that both kinds keep their numbers.
    """
    rng = np.random.default_rng(seed)
    block = max(1, CELLS // max(1, len(same)))
    if owners is not None:
        names, flat = np.unique(owners, return_inverse=True)
        a, b = flat.reshape(-1, 2).T
    for start in range(0, replicates, block):
        count = min(block, replicates - start)
        if owners is not None:
            drawn = draws(rng, len(names), count)
            yield np.where(same, drawn[:, a], drawn[:, a] * drawn[:, b])
        else:
            weights = np.zeros((count, len(same)))
            for kind in (same, ~same):
                weights[:, kind] = draws(rng, int(kind.sum()), count)
            yield weights


def weighted_figures(scores: Floats, same: Bools, weights: Doubles, far: tuple[float, ...]) -> dict[str, Doubles]:
    """TAR at each FAR (conservative), EER, AUC and best accuracy of weighted pairs, for each row of weights.

    Definitions as in roc.py, counts replaced by sums of weights. Keys: tar/<far>, eer, auc, best.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # last pair of each run of ties
    w = weights[:, order]
    zero = np.zeros((len(w), 1))
    true = np.hstack([zero, np.cumsum(np.where(same[order], w, 0.0), axis=1)[:, ends]])
    false = np.hstack([zero, np.cumsum(np.where(same[order], 0.0, w), axis=1)[:, ends]])
    G, N = true[:, -1:], false[:, -1:]
    with np.errstate(invalid="ignore", divide="ignore"):
        tar, fa = true / G, false / N
    found: dict[str, Doubles] = {}
    rows = np.arange(len(w))
    for target in far:
        last = (fa <= target).sum(axis=1) - 1
        found[f"tar/{target:g}"] = tar[rows, last]
    excess = fa + tar - 1.0
    i = np.clip((excess <= 0).sum(axis=1) - 1, 0, fa.shape[1] - 2)
    before, after = excess[rows, i], excess[rows, i + 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        step = np.where(after > before, -before / (after - before), 0.0)
    found["eer"] = fa[rows, i] + step * (fa[rows, i + 1] - fa[rows, i])
    found["auc"] = (np.diff(fa, axis=1) * (tar[:, 1:] + tar[:, :-1]) / 2).sum(axis=1)
    found["best"] = ((true + N - false) / (G + N)).max(axis=1)
    empty = ((G == 0) | (N == 0))[:, 0]  # a resample without one of the kinds has no figures
    for values in found.values():
        values[empty] = np.nan
    return found


def bootstrap_pairs(
    scores: Floats,
    same: Bools,
    owners: Ints | None,
    far: tuple[float, ...],
    replicates: int,
    seed: int,
    level: float,
    extra: Callable[[Doubles], dict[str, Doubles]] | None = None,
) -> dict[str, Interval]:
    """Intervals for every figure of `weighted_figures` and of `extra` (a function of the pair weights)."""
    if not 0 < level < 1:
        raise UsageError(f"confidence level: {level} is not between 0 and 1")
    found: dict[str, list[Doubles]] = {}
    for weights in pair_weights(same, owners, replicates, seed):
        figures = weighted_figures(scores, same, weights, far) | (extra(weights) if extra else {})
        for name, values in figures.items():
            found.setdefault(name, []).append(values)
    unit = "pair" if owners is None else "identity"
    return {name: interval(np.concatenate(parts), level, unit) for name, parts in found.items()}


def bootstrap_share(hits: Ints, totals: Ints, replicates: int, seed: int, level: float) -> Interval:
    """Interval of Σ hits / Σ totals over units (identities) drawn with replacement."""
    drawn = draws(np.random.default_rng(seed), len(totals), replicates)
    below = drawn @ totals.astype(np.float64)
    shares = np.full(replicates, np.nan)
    np.divide(drawn @ hits.astype(np.float64), below, out=shares, where=below > 0)
    return interval(shares, level, "identity")
