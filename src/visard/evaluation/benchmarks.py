"""Named tests of face sets: LFW and its kind in ten folds, RFW group by group, IJB; from features of all pictures.

Ten folds as the LFW, CFP, AgeDB, CALFW and CPLFW tables of the community are computed:

d = |a - b|² of unit features in float64; a pair is judged the same if d < t. For each fold, t is the first of
0, 0.01, .. 3.99 that judges most pairs of the other folds rightly. TAR at a FAR: t is where the FAR of the other
folds, known at 0, 0.001, .. 3.999 and straight in between, first reaches the target; t = 0 if it never does.

Groups (the four races of RFW, or any other): per group the ten-fold accuracy with thresholds of its own, as RFW's
tables have it; then mean, standard deviation (ddof 1) and skewed error ratio = largest error / smallest error. A
deployed system has one threshold: with that of all groups together at a false match rate, each has its FMR and FNMR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visard.data.faces import FaceSet
from visard.data.pairs import ARRAY, Pairs, load_galleries, load_pairs, load_template_pairs, load_templates, splits
from visard.data.storage import array_path
from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import Bools, Doubles, Floats, Ints, Result, labels, matrix, shares
from visard.evaluation.ijb import Search, Switches, pool, search_galleries, verify_templates
from visard.evaluation.metrics import FAR
from visard.evaluation.scores import Roc, roc_of
from visard.evaluation.verification import DISTANCES, Verification, consecutive, held_out, verify_pairs

FLIPPED = ("lfw", "rfw", "ijb")  # features are summed with those of the mirrored picture, unless a switch says no
FINE = np.arange(0, 4, 0.001)
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
    """The metrics of pairs with squared distances (P,) in [0, 4].

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
    (accuracy,), (chosen,) = held_out(d, truth, np.ones((1, len(d))), place)
    genuine, impostors = (np.bincount(place[kind], minlength=folds) for kind in (truth, ~truth))
    at = _thresholds(_accepted(d[~truth], place[~truth], folds), impostors, target)
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
        fold_distance=tuple(DISTANCES[chosen].tolist()),
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
        return 10, consecutive(count, 10)
    names, place = np.unique(labels(fold, count, "fold"), return_inverse=True)
    if len(names) < 2:
        raise UsageError("the pairs lie in one fold: held-out metrics need two or more")
    return len(names), place


def _accepted(distance: Doubles, place: Ints, folds: int) -> Ints:
    """How many of each fold are below each of the fine distances (folds, T): sorted into them, then cumulated."""
    cell = place * (len(FINE) + 1) + np.searchsorted(FINE, distance, side="right")
    counts = np.bincount(cell, minlength=folds * (len(FINE) + 1)).reshape(folds, -1)
    below: Ints = counts[:, :-1].cumsum(axis=1)
    return below


def _thresholds(false: Ints, impostors: Ints, target: float) -> Doubles:
    """For each fold the distance at which the others reach the target FAR; the last such one if there are several."""
    found = np.zeros(len(false))
    for k in range(len(false)):
        total = impostors.sum() - impostors[k]
        if not total:
            continue
        far = (false.sum(axis=0) - false[k]) / total
        if far.max() < target:
            continue
        last = int(np.searchsorted(far, target, side="right")) - 1
        if far[last] == target:
            found[k] = FINE[last]
            continue
        i = last + 1  # far[0] is 0: no distance is below 0
        slope = (FINE[i] - FINE[i - 1]) / (far[i] - far[i - 1])
        found[k] = slope * (target - far[i - 1]) + FINE[i - 1]
    return found


def share_at(scores: Doubles, kind: Bools, threshold: float) -> float:
    """Share of the scores of a kind that reach the threshold; NaN if there are none."""
    return float((scores[kind] >= threshold).mean()) if kind.any() else float("nan")


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
    """Metrics of each group and over groups; ratios are infinite where the smallest error is 0, NaN where all are."""

    groups: dict[str, TenFolds]
    mean: float
    std: float
    skewed_error_ratio: float
    worst: float
    gap: float
    shared: tuple[SharedThreshold, ...]


def rfw(features: Any, first: Any, second: Any, same: Any, *groups: Any, **options: Any) -> Groups:
    """Metrics of pairs (P,) of rows, group by group; see `by_group` for what else it takes."""
    return by_group(squared_distances(features, first, second), same, *groups, **options)


def by_group(
    distance: Any,
    same: Any,
    group: Any,
    names: Sequence[str],
    fold: Any = None,
    *,
    fmr: tuple[float, ...] = FAR,
) -> Groups:
    """Metrics of pairs with squared distances (P,) of unit features, group by group."""
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
    accuracy = np.array([of_group.accuracy for of_group in found.values()])
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


def pictures_of(protocol: str, faces: FaceSet, listed: Path | None) -> tuple[int, ...] | None:
    """The rows of a face set whose features a protocol needs; None: all."""
    if protocol in ("lfw", "rfw") or (protocol == "verification" and listed is not None):
        pairs = pairs_of(faces, listed)
        return tuple(np.unique(np.concatenate([pairs.first, pairs.second])).tolist())
    if protocol == "ijb":
        rows = [load_templates(faces, split).row for split in splits(faces)]
        return tuple(np.unique(np.concatenate(rows)).tolist())
    return None


def lfw_metrics(features: Floats, faces: FaceSet, listed: Path | None, rates: tuple[float, ...]) -> TenFolds:
    """Ten folds over the pairs of the set, or over those that the file `listed` names."""
    pairs = pairs_of(faces, listed)
    return lfw(features, pairs.first, pairs.second, pairs.same, pairs.fold, rates=rates)


def list_metrics(
    features: Floats, faces: FaceSet, listed: Path, rates: tuple[float, ...], bootstrap: int, seed: int
) -> Verification:
    """1:1 metrics with confidence intervals over the pairs that a file names; features of others are not looked at."""
    pairs = pairs_of(faces, listed)
    order = np.argsort(pairs.fold, kind="stable")
    used, rows = np.unique(np.stack([pairs.first[order], pairs.second[order]], axis=1), return_inverse=True)
    folds = min(10, len(order))
    return verify_pairs(
        features[used], rows.reshape(-1, 2), pairs.same[order], far=rates, folds=folds, bootstrap=bootstrap, seed=seed
    )


def rfw_metrics(features: Floats, faces: FaceSet, listed: Path | None, rates: tuple[float, ...]) -> Groups:
    """Each domain of the set (the races of RFW) on its own pairs, and all of them at one threshold."""
    pairs = pairs_of(faces, listed)
    group = faces.domain[pairs.first].astype(np.int64)
    mixed = group != faces.domain[pairs.second]
    if mixed.any():
        raise VisardError(f"{faces.path.name}: pair {int(np.argmax(mixed))} is of two domains")
    return rfw(features, pairs.first, pairs.second, pairs.same, group, faces.domains, pairs.fold, fmr=rates)


@dataclass(frozen=True)
class TemplateTest(Result):
    """1:1 and 1:N of every split; mean and standard deviation (ddof 1) over splits, None where there is none."""

    switches: dict[str, bool]
    mean: dict[str, float | None]
    std: dict[str, float | None]
    verification: tuple[Roc, ...]
    identification: tuple[Search, ...]


def ijb_metrics(features: Floats, faces: FaceSet, switches: Switches) -> TemplateTest:
    """1:1 and 1:N of every split: one of IJB-B and IJB-C, ten of IJB-A with mean and standard deviation over them."""
    one: list[Roc] = []
    many: list[Search] = []
    for split in splits(faces):
        t = load_templates(faces, split)
        score = t.score if switches.D else None
        pooled = pool(features, t.template, t.media, row=t.row, score=score, keep_norm=switches.N)
        if array_path(faces.path, f"template_pairs_{split}").is_file():
            pairs = load_template_pairs(faces, split)
            one.append(verify_templates(pooled, pairs.first, pairs.second, pairs.same))
        if faces.info.get("ijb", {}).get("galleries"):
            files = load_galleries(faces, split)
            galleries = {name: (g.template, g.subject) for name, g in files.galleries.items()}
            many.append(search_galleries(pooled, galleries, (files.probes.template, files.probes.subject)))
    if not one and not many:
        raise UsageError(f"{faces.path.name} has neither pairs of templates nor galleries")
    found: dict[str, list[float | None]] = {}
    for roc in one:
        for point in roc.tar:
            found.setdefault(f"tar@far={point.far:g}", []).append(point.tar)
    for search in many:
        for rank, share in search.rank.items():
            found.setdefault(f"rank{rank}", []).append(share)
        for rate, tpir in search.tpir.items():
            found.setdefault(f"tpir@fpir={rate:g}", []).append(tpir)
    return TemplateTest(
        switches={"N": switches.N, "D": switches.D, "F": switches.F},
        mean={name: _over_splits(values, np.mean, 1) for name, values in found.items()},
        std={name: _over_splits(values, np.std, 2, ddof=1) for name, values in found.items()},
        verification=tuple(one),
        identification=tuple(many),
    )


def _over_splits(values: list[float | None], statistic: Callable[..., Any], least: int, **options: Any) -> float | None:
    """A statistic over splits; None where one has no value, or where there are fewer than `least`."""
    known = [v for v in values if v is not None]
    return float(statistic(known, **options)) if len(known) == len(values) >= least else None


def pairs_of(faces: FaceSet, listed: Path | None) -> Pairs:
    """The pairs that came with a set, or that a file lists."""
    if listed is None and not array_path(faces.path, ARRAY).is_file():
        raise UsageError(f"{faces.path.name} carries no pairs: import it with some, or name a list of them (--list)")
    return load_pairs(faces, listed)
