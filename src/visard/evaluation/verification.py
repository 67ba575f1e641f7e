"""1:1 verification: the LFW protocol on given pairs, and all pairs of a set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visard.errors import UsageError, VisardError
from visard.evaluation.bootstrap import Interval, bootstrap_pairs, bootstrap_share
from visard.evaluation.grid import Grid
from visard.evaluation.inputs import Bools, Doubles, Floats, Ints, labels, shares, unit_rows
from visard.evaluation.scores import FAR, Limits, Roc, roc_of, stream_roc
from visard.evaluation.sweep import Progress, one_thread_each

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
    far: tuple[float, ...] = (1e-1, 1e-2, 1e-3),
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
