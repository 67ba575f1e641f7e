"""Ten-fold verification as the LFW, CFP, AgeDB, CALFW and CPLFW tables of the community are computed.

d = |a - b|² of unit features in float64; a pair is judged the same if d < t. For each fold, t is the first of
0, 0.01, .. 3.99 that judges most pairs of the other folds rightly. TAR at a FAR: t is where the FAR of the other
folds, known at 0, 0.001, .. 3.999 and straight in between, first reaches the target; t = 0 if it never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from visard.errors import UsageError, VisardError
from visard.evaluation.inputs import Bools, Doubles, Ints, labels, matrix, shares
from visard.evaluation.results import Result
from visard.evaluation.scores import Roc, roc_of

COARSE, FINE = np.arange(0, 4, 0.01), np.arange(0, 4, 0.001)
BLOCK = 16384  # pairs compared at a time


@dataclass(frozen=True)
class TenFolds(Result):
    """Means and standard deviations (ddof 0) over held-out folds, and the ROC of all pairs together.

    fold_tar, fold_far: rates on held-out folds, NaN where a fold has no pair of the kind; `tar` and `far` are the
    means over the others.
    """

    pairs: int
    accuracy: float
    accuracy_std: float
    fold_accuracy: tuple[float, ...]
    fold_distance: tuple[float, ...]
    far_target: float
    tar: float
    tar_std: float
    far: float
    fold_tar: tuple[float, ...]
    fold_far: tuple[float, ...]
    roc: Roc


def squared_distances(features: Any, first: Any, second: Any) -> Doubles:
    """|a - b|² of the unit features in rows `first` and `second` (P,), in float64 throughout."""
    given = matrix(features, "features")
    pairs = [labels(rows, np.size(rows), "pairs") for rows in (first, second)]
    if pairs[0].shape != pairs[1].shape or not len(pairs[0]):
        raise VisardError(f"pairs: {len(pairs[0])} first and {len(pairs[1])} second rows")
    for rows in pairs:
        outside = (rows < 0) | (rows >= len(given))
        if outside.any():
            raise VisardError(f"pairs: pair {int(np.argmax(outside))} points outside the {len(given)} rows of features")
    found = np.empty(len(pairs[0]))
    for start in range(0, len(found), BLOCK):
        part = slice(start, start + BLOCK)
        a, b = (_unit(given[rows[part]], rows[part]) for rows in pairs)
        a -= b
        found[part] = np.einsum("nd,nd->n", a, a)
    return found


def _unit(rows: Any, numbers: Ints) -> Doubles:
    wide: Doubles = rows.astype(np.float64)
    length = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    usable = np.isfinite(length) & (length > 0)
    if not usable.all():
        raise VisardError(f"features: row {numbers[np.argmin(usable)]} is all zeros or not finite")
    wide /= length[:, None]
    return wide


def ten_folds(distance: Any, same: Any, fold: Any = None, *, far: float = 1e-3, rates: Any = (1e-2, 1e-3)) -> TenFolds:
    """The figures of pairs with squared distances (P,) in [0, 4].

    `fold` (P,) numbers the folds; by default ten consecutive ones, of which the first take the remainder.
    `rates`: false accept rates for the TAR over all pairs, with no folds, by the conservative rule.
    """
    d = np.asarray(distance, np.float64)
    truth = np.asarray(same)
    if d.ndim != 1 or truth.shape != d.shape or truth.dtype != np.bool_:
        raise VisardError(f"same: expected {d.size} booleans, got {truth.dtype} {truth.shape}")
    (target,) = shares((far,), "far")
    folds, place = _folds(fold, len(d))
    cosine = 1.0 - d / 2.0
    roc = roc_of(cosine[truth], cosine[~truth], far=rates)  # first: it says so where a kind of pairs is missing
    true, false = (_accepted(d[kind], place[kind], folds, COARSE) for kind in (truth, ~truth))
    genuine, impostors = (np.bincount(place[kind], minlength=folds) for kind in (truth, ~truth))
    right = true - false + impostors[:, None]  # pairs judged rightly in each fold at each distance
    chosen = (right.sum(axis=0) - right).argmax(axis=1)
    accuracy = right[np.arange(folds), chosen] / (genuine + impostors)
    at = _thresholds(_accepted(d[~truth], place[~truth], folds, FINE), impostors, target)
    under = d < at[place]
    tar, reached = (
        np.divide(np.bincount(place[kind & under], minlength=folds), total, out=np.full(folds, np.nan), where=total > 0)
        for kind, total in ((truth, genuine), (~truth, impostors))
    )
    return TenFolds(
        pairs=len(d),
        accuracy=float(accuracy.mean()),
        accuracy_std=float(accuracy.std()),
        fold_accuracy=tuple(accuracy.tolist()),
        fold_distance=tuple(COARSE[chosen].tolist()),
        far_target=target,
        tar=float(np.nanmean(tar)),
        tar_std=float(np.nanstd(tar)),
        far=float(np.nanmean(reached)),
        fold_tar=tuple(tar.tolist()),
        fold_far=tuple(reached.tolist()),
        roc=roc,
    )


def lfw(features: Any, first: Any, second: Any, same: Any, fold: Any = None, **options: Any) -> TenFolds:
    """Ten folds from features (rows of pictures, already summed with those of their mirror images) and pairs."""
    return ten_folds(squared_distances(features, first, second), same, fold, **options)


def _folds(fold: Any, count: int) -> tuple[int, Ints]:
    """Number of folds, and that of each pair from 0."""
    if fold is None:
        if count < 10:
            raise UsageError(f"{count} pairs cannot fill ten folds")
        parts = np.array_split(np.arange(count), 10)
        return 10, np.repeat(np.arange(10), [len(part) for part in parts])
    names, place = np.unique(labels(fold, count, "fold"), return_inverse=True)
    if len(names) < 2:
        raise UsageError("the pairs lie in one fold: held-out figures need two or more")
    return len(names), place


def _accepted(distance: Doubles, place: Ints, folds: int, grid: Doubles) -> Ints:
    """How many of each fold are below each distance of the grid (folds, T): sorted into the grid, then cumulated."""
    cell = place * (len(grid) + 1) + np.searchsorted(grid, distance, side="right")
    counts = np.bincount(cell, minlength=folds * (len(grid) + 1)).reshape(folds, -1)
    below: Ints = counts[:, :-1].cumsum(axis=1)
    return below


def _thresholds(false: Ints, impostors: Ints, target: float) -> Doubles:
    """For each fold the distance at which the others reach the target FAR."""
    found = np.zeros(len(false))
    for k in range(len(false)):
        total = impostors.sum() - impostors[k]
        if not total:
            continue
        far = (false.sum(axis=0) - false[k]) / total
        if far.max() < target:
            continue
        i = int(np.searchsorted(far, target))  # far[0] is 0: no distance is below 0
        slope = (FINE[i] - FINE[i - 1]) / (far[i] - far[i - 1])
        found[k] = slope * (target - far[i - 1]) + FINE[i - 1]
    return found


def share_at(scores: Doubles, kind: Bools, threshold: float) -> float:
    """Share of the scores of a kind that reach the threshold; NaN if there are none."""
    return float((scores[kind] >= threshold).mean()) if kind.any() else float("nan")
