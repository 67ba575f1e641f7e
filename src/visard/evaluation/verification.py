"""1:1 verification: the LFW protocol on given pairs, and all pairs of a set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import Bools, Doubles, Floats, Ints, Result, labels, shares, unit_rows
from visard.evaluation.bins import Grid, Progress, one_thread_each
from visard.evaluation.metrics import FAR
from visard.evaluation.scores import Limits, Roc, roc_of, stream_roc

# ----------
# Bootstrap confidence intervals that respect which comparisons share a person.

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


DISTANCES = np.arange(0, 4, 0.01)  # squared distances tried as thresholds, as in LFW evaluations


@dataclass(frozen=True)
class Verification(Roc):
    """An ROC and more figures of a test; accuracies are of pair lists only, intervals only where asked for.

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


def _held_out(scores: Floats, same: Bools, weights: Doubles, folds: int) -> tuple[Doubles, Ints]:
    """Accuracy on each fold with the distance (its index) that is best on the others, for weights (R, P).

    A pair is judged the same if 2 - 2·score < distance. Folds are consecutive; the first take the remainder.
    Both results are (R, folds). Pairs are put into the grid of distances once and cumulated, not judged at each.
    """
    T = len(DISTANCES)
    fold = np.concatenate([np.full(len(p), k) for k, p in enumerate(np.array_split(scores, folds))])
    cell = fold * (T + 1) + np.searchsorted(DISTANCES, 2.0 - 2.0 * scores.astype(np.float64), side="right")
    signed = np.where(same, weights, -weights)
    gain = np.stack([np.bincount(cell, row, folds * (T + 1)) for row in signed]).reshape(-1, folds, T + 1)
    other = np.stack([np.bincount(fold[~same], row[~same], folds) for row in weights])
    score = gain[..., :T].cumsum(axis=2) + other[..., None]  # weight decided rightly, (R, folds, T)
    size = np.stack([np.bincount(fold, row, folds) for row in weights])
    chosen = (score.sum(axis=1, keepdims=True) - score).argmax(axis=2)
    hits = np.take_along_axis(score, chosen[..., None], axis=2)[..., 0]
    return np.divide(hits, size, out=np.full(size.shape, np.nan), where=size > 0), chosen


def fold_accuracy(scores: Floats, same: Bools, folds: int = 10) -> tuple[Doubles, Doubles]:
    """Accuracy on each held-out fold, and the squared distance chosen on the others (the first best)."""
    accuracy, chosen = _held_out(scores, same, np.ones((1, len(scores))), folds)
    return accuracy[0], DISTANCES[chosen[0]]


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
    rule: str = "conservative",
    bootstrap: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Verification:
    """LFW-style verification of the pairs (P, 2) of rows of `features`, `same` (P,) telling the genuine ones.

    Folds are consecutive pairs in the given order. With `identity` (one per row) the bootstrap draws
    identities, otherwise pairs; `bootstrap=0` leaves it out. Its TAR uses the conservative rule.
    """
    scores = pair_scores(features, pairs)
    truth = np.asarray(same)
    if truth.shape != scores.shape or truth.dtype != np.bool_:
        raise VisardError(f"same: expected {len(scores)} booleans, got {truth.dtype} {truth.shape}")
    if not 2 <= folds <= len(scores):
        raise UsageError(f"folds: {folds} is not between 2 and the number of pairs, {len(scores)}")
    roc = roc_of(scores[truth], scores[~truth], far=far, rule=rule)
    accuracy, distance = fold_accuracy(scores, truth, folds)
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
            return {"accuracy": _held_out(scores, truth, weights, folds)[0].mean(axis=1)}

        targets = shares(far, "far")
        intervals = bootstrap_pairs(scores, truth, owners, targets, bootstrap, seed, level, accuracies)
    return _with(
        roc,
        accuracy=float(accuracy.mean()),
        accuracy_std=float(accuracy.std()),
        fold_accuracy=tuple(accuracy.tolist()),
        fold_distance=tuple(distance.tolist()),
        best_accuracy=best,
        best_threshold=threshold,
        intervals=intervals,
    )


def verify_all(
    features: Any,
    identity: Any,
    *,
    against: tuple[Any, Any] | None = None,
    exclude: Any = None,
    far: tuple[float, ...] = FAR,
    rule: str = "conservative",
    bootstrap: int = 0,
    level: float = 0.95,
    seed: int = 0,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Verification over all pairs i < j of a set, or of a set `against` another; see `stream_roc`.

    The bootstrap draws identities and recomputes the TAR with the thresholds held where all pairs put them:
    with many more impostor than genuine pairs nearly all of the uncertainty is in the genuine ones.
    """
    roc = stream_roc(
        features,
        identity,
        against=against,
        exclude=exclude,
        far=far,
        rule=rule,
        limits=limits,
        progress=progress,
    )
    if not bootstrap:
        return _with(roc)
    grid = Grid.build(features, identity, against, exclude, (limits or Limits()).tile)
    hits, totals = genuine_hits(grid, np.array([point.threshold for point in roc.tar]))
    found = {
        f"tar/{point.far:g}": bootstrap_share(hits[:, k], totals, bootstrap, seed, level)
        for k, point in enumerate(roc.tar)
    }
    return _with(roc, intervals=found)


def genuine_hits(grid: Grid, thresholds: Doubles) -> tuple[Ints, Ints]:
    """Per identity with genuine pairs: how many reach each threshold (I, T), and how many there are (I,)."""
    names = np.unique(grid.a.identity)
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


# ----------
# Balanced lists of genuine and impostor pairs, in folds that share no person where that is possible.


@dataclass(frozen=True)
class PairList(Result):
    """Pairs (P, 2) of rows and whether they show the same person, fold after fold, genuine first in each."""

    pairs: Ints
    same: Bools
    fold: Ints
    disjoint: bool  # no person appears in two folds


def make_pairs(identity: Any, count: int, seed: int = 0, same_fraction: float = 0.5, folds: int = 10) -> PairList:
    """Draw `count` different pairs, uniformly among genuine and among impostor pairs; the seed decides all.

    Persons are dealt to the folds first. If one fold cannot give its share, all folds draw from everyone
    (`disjoint` is then False).
    """
    given = np.asarray(identity)
    ids = labels(given, given.size)
    if count < folds or folds < 1:
        raise UsageError(f"count: {count} pairs cannot fill {folds} folds")
    if not 0.0 <= same_fraction <= 1.0:
        raise UsageError(f"same_fraction: {same_fraction} is not between 0 and 1")
    sizes = np.unique(ids, return_counts=True)[1]
    genuine = int((sizes * (sizes - 1) // 2).sum())
    impostors = len(ids) * (len(ids) - 1) // 2 - genuine
    same_count = round(count * same_fraction)
    if same_count and not genuine:
        raise VisardError("pairs: every identity has only one picture, so there are no genuine pairs")
    for asked, there, kind in ((same_count, genuine, "genuine"), (count - same_count, impostors, "impostor")):
        if asked > there:
            raise VisardError(f"pairs: {asked} {kind} pairs were asked for, the set has {there}")
    rng = np.random.default_rng(seed)
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(count), folds)])
    same_ends = ends * same_count // count
    same_sizes, other_sizes = np.diff(same_ends, prepend=0), np.diff(ends - same_ends, prepend=0)
    deal = _deal(ids, folds, rng)
    disjoint = all(map(_has, [ids[rows] for rows in deal], same_sizes, other_sizes))
    if disjoint:
        genuine_parts = [_genuine(ids, rows, size, rng) for rows, size in zip(deal, same_sizes, strict=True)]
        other_parts = [_impostor(ids, rows, size, rng) for rows, size in zip(deal, other_sizes, strict=True)]
    else:
        everyone = np.arange(len(ids))
        genuine_parts = np.split(_genuine(ids, everyone, same_count, rng), same_ends[:-1])
        other_parts = np.split(_impostor(ids, everyone, count - same_count, rng), (ends - same_ends)[:-1])
    parts = [part for both in zip(genuine_parts, other_parts, strict=True) for part in both]
    sizes = np.array([len(part) for part in parts])
    same = np.repeat(np.arange(2 * folds) % 2 == 0, sizes)
    return PairList(np.concatenate(parts), same, np.repeat(np.arange(2 * folds) // 2, sizes), disjoint)


def _deal(ids: Ints, folds: int, rng: np.random.Generator) -> list[Ints]:
    """Rows of each fold: persons shuffled, then dealt largest first so that every fold gets genuine pairs."""
    names, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    order = rng.permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    fold_of = np.empty(len(names), np.int64)
    turn = np.arange(len(names))
    snake = np.where(turn // folds % 2 == 0, turn % folds, folds - 1 - turn % folds)
    fold_of[order] = snake
    return [np.flatnonzero(fold_of[inverse] == k) for k in range(folds)]


def _has(ids: Ints, same: int, other: int) -> bool:
    """Whether these pictures give so many genuine and impostor pairs."""
    sizes = np.unique(ids, return_counts=True)[1]
    genuine = int((sizes * (sizes - 1) // 2).sum())
    return same <= genuine and other <= len(ids) * (len(ids) - 1) // 2 - genuine


def _ranks(total: int, count: int, rng: np.random.Generator) -> Ints:
    """`count` different numbers below `total`, in random order."""
    if count * 3 > total:
        return rng.permutation(total)[:count]
    found = np.empty(0, np.int64)
    while len(found) < count:
        more = np.concatenate([found, rng.integers(total, size=count + count // 8 + 8)])
        _, first = np.unique(more, return_index=True)
        found = more[np.sort(first)]
    return found[:count]


def _unrank(rank: Ints) -> tuple[Ints, Ints]:
    """The pair i < j with number j(j-1)/2 + i; the square root is corrected by one where it rounds."""
    j = ((1 + np.sqrt(1 + 8 * rank.astype(np.float64))) / 2).astype(np.int64)
    j -= j * (j - 1) // 2 > rank
    j += (j + 1) * j // 2 <= rank
    return rank - j * (j - 1) // 2, j


def _genuine(ids: Ints, rows: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Different genuine pairs among the rows, uniformly."""
    if not count:
        return np.empty((0, 2), np.int64)
    ordered = rows[np.argsort(ids[rows], kind="stable")]
    _, starts, sizes = np.unique(ids[ordered], return_index=True, return_counts=True)
    ends = np.cumsum(sizes * (sizes - 1) // 2)
    rank = _ranks(int(ends[-1]), count, rng)
    owner = np.searchsorted(ends, rank, side="right")
    i, j = _unrank(rank - (ends[owner] - sizes[owner] * (sizes[owner] - 1) // 2))
    return np.stack([ordered[starts[owner] + i], ordered[starts[owner] + j]], axis=1)


def _impostor(ids: Ints, rows: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Different impostor pairs among the rows, uniformly: drawn among all pairs, genuine ones passed over."""
    total = len(rows) * (len(rows) - 1) // 2
    asked = count
    while True:
        asked = min(total, 2 * asked + 16)
        i, j = _unrank(_ranks(total, asked, rng)) if count else (rows[:0], rows[:0])
        different = ids[rows[i]] != ids[rows[j]]
        if different.sum() >= count or asked == total:
            return np.stack([rows[i[different]], rows[j[different]]], axis=1)[:count]
