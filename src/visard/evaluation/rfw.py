"""Verification group by group (the four races of RFW, or any other): accuracies, and errors at one threshold for all.

Per group the ten-fold accuracy with thresholds of its own, as RFW's tables have it; then mean, standard deviation
(ddof 1) and skewed error ratio = largest error / smallest error. A deployed system has one threshold: with that of
all groups together at a false match rate, each group has its own FMR and FNMR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visard.errors import VisardError
from visard.evaluation.inputs import labels
from visard.evaluation.lfw import TenFolds, share_at, squared_distances, ten_folds
from visard.evaluation.results import Result
from visard.evaluation.scores import roc_of


@dataclass(frozen=True)
class SharedThreshold(Result):
    """FMR and FNMR of each group at the one threshold (cosine) that gives all groups together the rate `fmr_target`."""

    fmr_target: float
    threshold: float
    fmr_all: float
    fnmr_all: float
    fmr: dict[str, float]
    fnmr: dict[str, float]
    fmr_ratio: float  # largest / smallest
    fnmr_ratio: float


@dataclass(frozen=True)
class Groups(Result):
    """Figures of each group and over groups; ratios are infinite where the smallest error is 0, NaN where all are."""

    groups: dict[str, TenFolds]
    mean: float
    std: float
    skewed_error_ratio: float
    worst: float
    gap: float
    shared: tuple[SharedThreshold, ...]


def rfw(
    features: Any,
    first: Any,
    second: Any,
    same: Any,
    group: Any,
    names: Sequence[str],
    fold: Any = None,
    *,
    fmr: tuple[float, ...] = (1e-1, 1e-2, 1e-3),
) -> Groups:
    """Figures of pairs (P,) of rows, `group` (P,) numbering the names."""
    return by_group(squared_distances(features, first, second), same, group, names, fold, fmr=fmr)


def by_group(
    distance: Any,
    same: Any,
    group: Any,
    names: Sequence[str],
    fold: Any = None,
    *,
    fmr: tuple[float, ...] = (1e-1, 1e-2, 1e-3),
) -> Groups:
    """The same from squared distances (P,) of unit features."""
    d, truth = np.asarray(distance, np.float64), np.asarray(same)
    place = labels(group, len(d), "group")
    folds = None if fold is None else labels(fold, len(d), "fold")
    used = np.unique(place)
    if len(used) < 2 or used[0] < 0 or used[-1] >= len(names):
        raise VisardError(f"group: the pairs show {len(used)} of {len(names)} groups, at least 2 are needed")
    members = {names[k]: place == k for k in used.tolist()}
    for name, mine in members.items():
        if truth[mine].all() or not truth[mine].any():
            raise VisardError(f"group {name}: has no {'impostor' if truth[mine].any() else 'genuine'} pairs")
    found = {
        name: ten_folds(d[m], truth[m], None if folds is None else folds[m], rates=fmr) for name, m in members.items()
    }
    accuracy = np.array([figures.accuracy for figures in found.values()])
    error = 1.0 - accuracy
    cosine = 1.0 - d / 2.0
    roc = roc_of(cosine[truth], cosine[~truth], far=fmr)
    shared = []
    for point in roc.tar:
        false = {name: share_at(cosine, mine & ~truth, point.threshold) for name, mine in members.items()}
        missed = {name: 1.0 - share_at(cosine, mine & truth, point.threshold) for name, mine in members.items()}
        shared.append(
            SharedThreshold(
                fmr_target=point.far,
                threshold=point.threshold,
                fmr_all=point.far_reached,
                fnmr_all=1.0 - point.tar,
                fmr=false,
                fnmr=missed,
                fmr_ratio=_ratio(np.array(list(false.values()))),
                fnmr_ratio=_ratio(np.array(list(missed.values()))),
            )
        )
    return Groups(
        groups=found,
        mean=float(accuracy.mean()),
        std=float(accuracy.std(ddof=1)),
        skewed_error_ratio=_ratio(error),
        worst=float(accuracy.min()),
        gap=float(accuracy.max() - accuracy.min()),
        shared=tuple(shared),
    )


def _ratio(errors: np.ndarray[Any, Any]) -> float:
    low, high = float(errors.min()), float(errors.max())
    if low > 0:
        return high / low
    return float("inf") if high > 0 else float("nan")
