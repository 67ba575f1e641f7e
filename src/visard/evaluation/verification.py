"""1:1 verification: the LFW protocol on given pairs, all pairs of a set, and confidence intervals for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import Bools, Doubles, Floats, Ints, Result, labels, shares, unit_rows
from visard.evaluation.grid import Grid, one_thread_each
from visard.evaluation.metrics import FAR, LEVEL
from visard.evaluation.scores import Limits, Roc, roc_of, stream_roc

CELLS = 1 << 22  # replicates x pairs worked on at a time


@dataclass(frozen=True)
class Interval(Result):
    """Percentile interval from `replicates` resamples of `unit`: "identity" or "pair"."""

    low: float
    high: float
    level: float
    replicates: int
    unit: str


def interval(values: Doubles, unit: str) -> Interval:
    """Central percentile interval; replicates without a value (NaN) are left out."""
    kept = values[~np.isnan(values)]
    if not len(kept):
        return Interval(float("nan"), float("nan"), LEVEL, 0, unit)
    low, high = np.quantile(kept, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high), LEVEL, len(kept), unit)


def draws(rng: np.random.Generator, units: int, replicates: int) -> Doubles:
    """How often each unit is drawn in each resample (replicates, units): multinomial, rows sum to `units`."""
    return rng.multinomial(units, np.full(units, 1.0 / units), size=replicates).astype(np.float64)


def pair_weights(same: Bools, owners: Ints | None, replicates: int, seed: int) -> Iterator[Doubles]:
    """Weights (block, P) of pairs in each resample, in blocks of bounded size.

    With the pair's two identities `owners` (P, 2), identities are drawn: a genuine pair counts as often as
    its identity was drawn, an impostor pair as often as both were, w_a · w_b. Without, pairs are drawn, genuine
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


def weighted_metrics(scores: Floats, same: Bools, weights: Doubles, far: tuple[float, ...]) -> dict[str, Doubles]:
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
    empty = ((G == 0) | (N == 0))[:, 0]  # a resample without one of the kinds has no metrics
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
    extra: Callable[[Doubles], dict[str, Doubles]] | None = None,
) -> dict[str, Interval]:
    """Intervals for every metric of `weighted_metrics` and of `extra` (a function of the pair weights)."""
    found: dict[str, list[Doubles]] = {}
    for weights in pair_weights(same, owners, replicates, seed):
        found_here = weighted_metrics(scores, same, weights, far) | (extra(weights) if extra else {})
        for name, values in found_here.items():
            found.setdefault(name, []).append(values)
    unit = "pair" if owners is None else "identity"
    return {name: interval(np.concatenate(parts), unit) for name, parts in found.items()}


def bootstrap_share(hits: Ints, totals: Ints, replicates: int, seed: int) -> Interval:
    """Interval of Σ hits / Σ totals over units (identities) drawn with replacement."""
    drawn = draws(np.random.default_rng(seed), len(totals), replicates)
    below = drawn @ totals.astype(np.float64)
    shares = np.full(replicates, np.nan)
    np.divide(drawn @ hits.astype(np.float64), below, out=shares, where=below > 0)
    return interval(shares, "identity")


DISTANCES = np.arange(0, 4, 0.01)  # squared distances tried as thresholds, as in LFW evaluations


@dataclass(frozen=True)
class Verification(Roc):
    """An ROC and more metrics of a test; accuracies are of pair lists only, intervals only where asked for.

    accuracy, accuracy_std: mean and standard deviation (ddof 0) over the held-out folds. best_accuracy: with
    the one threshold that is best for all pairs. Intervals: "tar/<far>", "eer", "auc", "best", "accuracy".
    """

    accuracy: float | None = None
    accuracy_std: float | None = None
    fold_accuracy: tuple[float, ...] = ()
    fold_distance: tuple[float, ...] = ()
    best_accuracy: float | None = None
    best_threshold: float | None = None
    intervals: dict[str, Interval] | None = None


def _with(roc: Roc, **more: Any) -> Verification:
    return Verification(**{name: getattr(roc, name) for name in Roc.__dataclass_fields__}, **more)


def pair_scores(features: Any, pairs: Any) -> Floats:
    """Cosines of the pairs (P, 2) of rows, summed in float64."""
    rows = unit_rows(features)
    index = np.asarray(pairs)
    if index.ndim != 2 or index.shape[1] != 2 or len(index) == 0 or index.dtype.kind not in "iu":
        raise VisardError(f"pairs: expected integers of shape (pairs, 2), got {index.dtype} {index.shape}")
    outside = ((index < 0) | (index >= len(rows))).any(axis=1)
    if outside.any():
        raise VisardError(f"pairs: pair {int(np.argmax(outside))} points outside the {len(rows)} rows of features")
    found: Floats = np.empty(len(index), np.float32)
    for start in range(0, len(index), 16384):
        a, b = (rows[index[start : start + 16384, side]].astype(np.float64) for side in (0, 1))
        found[start : start + len(a)] = np.einsum("nd,nd->n", a, b)
    return found


def consecutive(count: int, folds: int) -> Ints:
    """The number of the fold of each of `count` pairs: consecutive ones, of which the first take the remainder."""
    return np.repeat(np.arange(folds), [len(part) for part in np.array_split(np.arange(count), folds)])


def held_out(distance: Doubles, same: Bools, weights: Doubles, fold: Ints) -> tuple[Doubles, Ints]:
    """Accuracy on each fold with the distance (its index) that is best on the others (the first best), both (R, folds).

    A pair is judged the same if its squared distance is smaller; weights of pairs are (R, P). Pairs are put into the
    grid of distances once and cumulated, not judged at each.
    """
    T, folds = len(DISTANCES), int(fold.max()) + 1
    cell = fold * (T + 1) + np.searchsorted(DISTANCES, distance, side="right")
    signed = np.where(same, weights, -weights)
    gain = np.stack([np.bincount(cell, row, folds * (T + 1)) for row in signed]).reshape(-1, folds, T + 1)
    other = np.stack([np.bincount(fold[~same], row[~same], folds) for row in weights])
    score = gain[..., :T].cumsum(axis=2) + other[..., None]  # weight decided rightly, (R, folds, T)
    size = np.stack([np.bincount(fold, row, folds) for row in weights])
    chosen = (score.sum(axis=1, keepdims=True) - score).argmax(axis=2)
    hits = np.take_along_axis(score, chosen[..., None], axis=2)[..., 0]
    return np.divide(hits, size, out=np.full(size.shape, np.nan), where=size > 0), chosen


def best_threshold(scores: Floats, same: Bools) -> tuple[float, float]:
    """Largest share of pairs decided rightly by one threshold, and the highest such threshold."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order]) != 0), len(scores) - 1)
    gain = np.cumsum(np.where(same[order], 1, -1))[ends]
    none = int((~same).sum())  # accept nothing: all impostors are decided rightly
    best = int(np.argmax(gain))
    if gain[best] <= 0:
        return none / len(scores), float(np.nextafter(scores.max(), np.float32(np.inf)))
    return (none + int(gain[best])) / len(scores), float(scores[order][ends[best]])


def verify_pairs(
    features: Any,
    pairs: Any,
    same: Any,
    *,
    identity: Any = None,
    folds: int = 10,
    far: tuple[float, ...] = FAR,
    bootstrap: int = 200,
    seed: int = 0,
) -> Verification:
    """LFW-style verification of the pairs (P, 2) of rows of `features`, `same` (P,) telling the genuine ones.

    Folds are consecutive pairs in the given order. With `identity` (one per row) the bootstrap draws
    identities, otherwise pairs; `bootstrap=0` leaves it out.
    """
    scores = pair_scores(features, pairs)
    truth = np.asarray(same)
    if truth.shape != scores.shape or truth.dtype != np.bool_:
        raise VisardError(f"same: expected {len(scores)} booleans, got {truth.dtype} {truth.shape}")
    if not 2 <= folds <= len(scores):
        raise UsageError(f"folds: {folds} is not between 2 and the number of pairs, {len(scores)}")
    roc = roc_of(scores[truth], scores[~truth], far=far)
    distance, fold = 2.0 - 2.0 * scores.astype(np.float64), consecutive(len(scores), folds)
    (accuracy,), (chosen,) = held_out(distance, truth, np.ones((1, len(scores))), fold)
    best, threshold = best_threshold(scores, truth)
    owners = None
    if identity is not None:
        owners = labels(identity, len(np.asarray(features)))[np.asarray(pairs)]
        wrong = (owners[:, 0] == owners[:, 1]) != truth
        if wrong.any():
            raise VisardError(f"same: pair {int(np.argmax(wrong))} contradicts the identities of its rows")
    intervals = None
    if bootstrap:

        def accuracies(weights: Doubles) -> dict[str, Doubles]:
            return {"accuracy": held_out(distance, truth, weights, fold)[0].mean(axis=1)}

        targets = shares(far, "far")
        intervals = bootstrap_pairs(scores, truth, owners, targets, bootstrap, seed, accuracies)
    return _with(
        roc,
        accuracy=float(accuracy.mean()),
        accuracy_std=float(accuracy.std()),
        fold_accuracy=tuple(accuracy.tolist()),
        fold_distance=tuple(DISTANCES[chosen].tolist()),
        best_accuracy=best,
        best_threshold=threshold,
        intervals=intervals,
    )


def verify_all(
    features: Any,
    identity: Any,
    *,
    far: tuple[float, ...] = FAR,
    bootstrap: int = 0,
    seed: int = 0,
    limits: Limits | None = None,
) -> Verification:
    """Verification over all pairs i < j of a set; see `stream_roc`.

    The bootstrap draws identities and recomputes the TAR with the thresholds held where all pairs put them:
    with many more impostor than genuine pairs nearly all of the uncertainty is in the genuine ones.
    """
    roc = stream_roc(features, identity, far=far, limits=limits)
    if not bootstrap:
        return _with(roc)
    grid = Grid.build(features, identity, (limits or Limits()).tile)
    hits, totals = genuine_hits(grid, np.array([point.threshold for point in roc.tar]))
    found = {
        f"tar/{point.far:g}": bootstrap_share(hits[:, k], totals, bootstrap, seed) for k, point in enumerate(roc.tar)
    }
    return _with(roc, intervals=found)


def genuine_hits(grid: Grid, thresholds: Doubles) -> tuple[Ints, Ints]:
    """Per identity with genuine pairs: how many reach each threshold (I, T), and how many there are (I,)."""
    names = np.unique(grid.identity)
    hits = np.zeros((len(names), len(thresholds)), np.int64)
    totals = np.zeros(len(names), np.int64)
    buffer = torch.empty(grid.tile * grid.tile)
    with one_thread_each():
        for corner in grid.tiles(genuine_only=True):
            scores, owner = grid.genuine(corner, buffer)
            place = np.searchsorted(names, owner)
            totals += np.bincount(place, minlength=len(names))
            for k, threshold in enumerate(thresholds):
                hits[:, k] += np.bincount(place[scores >= threshold], minlength=len(names))
    return hits[totals > 0], totals[totals > 0]
