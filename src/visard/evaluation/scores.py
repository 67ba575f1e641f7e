"""The exact ROC of given scores, and of all comparisons of a face set, streamed in bounded memory.

One pass over the tiles (grid.py) counts scores in 2^16 bins and keeps, exactly, the scores in narrow ranges
where a random sample of pairs says the wanted thresholds will lie. The bin counts then tell in which bins
they do lie; another pass is made only if a guess was wrong. So TAR at FAR and EER are exact at any size.
The area under the curve is exact up to `exact_auc_pairs` comparisons (chunks of scores are sorted, every
genuine score is ranked in each); above, it comes from the bins with a bound on its error: half the share of
genuine-impostor pairings that fall into one bin, 1e-5 with poor features and 1e-7 with good ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from visard.errors import VisardError
from visard.evaluation.arrays import Floats, Ints, Result, shares
from visard.evaluation.grid import Counted, Grid, Ranker, every_score, genuine_scores, one_thread_each, sweep
from visard.evaluation.metrics import FAR
from visard.evaluation.roc import (
    BINS,
    Curve,
    FarPoint,
    Steps,
    area,
    bin_of,
    bridged,
    curve,
    edges,
    equal_error,
    far_point,
    ranges,
    staircase,
    values_of,
)

SURE = 4.5  # standard errors on either side of a guessed threshold
GAP = 2e-3  # of false-accept rates: spans that are closer together are swept as one
DRAWN = 200  # bars of the score histograms
MANY = 1 << 21  # number of scores from which the staircase is built of bins: one step a score would take a gigabyte


@dataclass(frozen=True)
class Limits:
    """When to keep, when to stream. No metric depends on it, but for the area above `exact_auc_pairs`."""

    keep_all: int = 1 << 20  # comparisons up to which all scores are simply kept
    keep_genuine: int = 1 << 25  # genuine scores up to which they are kept (128 MB)
    keep_guessed: int = 1 << 23  # distinct scores that a thread may keep in guessed ranges (about 100 MB)
    exact_auc_pairs: int = 1 << 31
    tile: int = 1024
    chunk: int = 1 << 23
    threads: int | None = None


@dataclass(frozen=True)
class Histogram(Result):
    """Score counts in equal bins from -1 to 1, for drawing."""

    genuine: tuple[int, ...]
    impostor: tuple[int, ...]


@dataclass(frozen=True)
class Roc(Result):
    """The metrics of one ROC. `auc_error` bounds |auc - true area|, 0.0 = exact; `passes` over all pairs."""

    genuine: int
    impostors: int
    rule: str = field(default="conservative", kw_only=True)  # TAR at the largest FAR up to the one asked for
    tar: tuple[FarPoint, ...]
    eer: float
    eer_threshold: float
    auc: float
    auc_error: float
    curve: Curve
    histogram: Histogram
    passes: int = 1


def roc_of(genuine: Any, impostor: Any, *, far: tuple[float, ...] = FAR) -> Roc:
    """Exact ROC of given scores, larger = more similar."""
    gen, imp = np.asarray(genuine).ravel(), np.asarray(impostor).ravel()
    _both_kinds(len(gen), len(imp))
    if not (np.isfinite(gen).all() and np.isfinite(imp).all()):
        raise VisardError("scores: some are not finite")
    counts = (np.histogram(np.clip(s, -1, 1), DRAWN, (-1.0, 1.0))[0] for s in (gen, imp))
    bars = Histogram(*(tuple(c.tolist()) for c in counts))
    cosines = gen.dtype == imp.dtype == np.float32 and all(np.abs(s).max() < 1.00001 for s in (gen, imp))
    if len(gen) + len(imp) > MANY and cosines:
        return _of_many(np.sort(gen), np.sort(imp), shares(far, "far"), bars)
    return _read(Steps.of(gen, imp), shares(far, "far"), bars)[0]


def _of_many(gen: Floats, imp: Floats, targets: tuple[float, ...], bars: Histogram) -> Roc:
    """The same as one step a score, from sorted cosines: bins, of which only those that matter are opened."""
    cut = [np.append(np.searchsorted(scores, edges()), len(scores)) for scores in (gen, imp)]
    genuine_bins, impostor_bins = (np.diff(ends) for ends in cut)
    area_found = Ranker(gen).below(imp) / (2 * len(gen) * len(imp))
    have: set[int] = set()
    while True:
        inside = [
            np.concatenate([np.empty(0, np.float32), *(scores[ends[b] : ends[b + 1]] for b in sorted(have))])
            for scores, ends in zip((gen, imp), cut, strict=True)
        ]
        part = values_of(np.sort(np.concatenate(inside)), inside[0])
        steps = staircase(genuine_bins + impostor_bins, genuine_bins, *part, have)
        roc, missing = _read(steps, targets, bars, 1, area_found)
        if not missing:
            return roc
        have |= missing


def stream_roc(
    features: Any,
    identity: Any,
    *,
    below: int | None = None,
    far: tuple[float, ...] = FAR,
    limits: Limits | None = None,
) -> Roc:
    """Exact ROC of cosine scores of all pairs of a set; genuine = equal identity.

    `below`: only pairs with at least one identity smaller than this.
    """
    limits = limits or Limits()
    targets = shares(far, "far")
    grid = Grid.build(features, identity, limits.tile, below)
    G, N = grid.counts
    _both_kinds(G, N)
    with one_thread_each() as available:
        if limits.keep_all >= G + N:
            every, genuine = every_score(grid)
            value, count, gen = values_of(every, genuine)
            steps = Steps.build(value, count - gen, gen)
            of_bins, of_all = (np.bincount(bin_of(scores), minlength=BINS) for scores in (genuine, every))
            bars = _bars(of_bins, of_all - of_bins)
            return _read(steps, targets, bars)[0]
        return _stream(grid, targets, limits, limits.threads or available)


def _stream(grid: Grid, targets: tuple[float, ...], limits: Limits, threads: int) -> Roc:
    G, N = grid.counts
    genuine = genuine_scores(grid) if limits.keep_genuine >= G else None
    ranker = Ranker(genuine) if genuine is not None and limits.exact_auc_pairs >= G + N else None
    opened = guessed(grid, genuine, targets) if limits.keep_guessed else set()
    found = sweep(grid, ranges(opened), threads, ranker, limits.chunk, limits.keep_guessed)
    if found.all_kept.over or found.genuine_kept.over:
        opened = set()
    bars = _bars(found.genuine_bins, found.all_bins - found.genuine_bins)
    area_found = None
    if ranker is not None and genuine is not None:
        area_found = (found.below - ranker.below(genuine)) / (2 * G * N)
    kept, have, passes = found, set[int](), 1
    while True:
        part = picked(kept, have)
        steps = staircase(found.all_bins, found.genuine_bins, *part, have)
        roc, missing = _read(steps, targets, bars, passes, area_found)
        if not missing:
            return roc
        have |= missing
        if not have <= opened:
            opened, passes = bridged(have, found.all_bins), passes + 1
            kept = sweep(grid, ranges(opened), threads)


def _read(
    steps: Steps,
    targets: tuple[float, ...],
    bars: Histogram,
    passes: int = 1,
    area_found: float | None = None,
) -> tuple[Roc, set[int]]:
    """All metrics off a staircase, and the bins that must be opened before they are final."""
    answers = [far_point(steps, target) for target in targets]
    rate, threshold, missing = equal_error(steps)
    auc, auc_error = area(steps) if area_found is None else (area_found, 0.0)
    roc = Roc(
        genuine=steps.genuine,
        impostors=steps.impostors,
        tar=tuple(point for point, _ in answers),
        eer=rate,
        eer_threshold=threshold,
        auc=auc,
        auc_error=auc_error,
        curve=curve(steps),
        histogram=bars,
        passes=passes,
    )
    return roc, missing.union(*(m for _, m in answers))


def _both_kinds(genuine: int, impostors: int) -> None:
    if not genuine:
        raise VisardError("no genuine pairs: no identity has two pictures to compare")
    if not impostors:
        raise VisardError("no impostor pairs: there is only one identity to compare")


def _bars(genuine: Ints, impostor: Ints) -> Histogram:
    """2^16 bins gathered into the bars that are drawn."""
    bar = np.clip((edges().astype(np.float64) + 1) / 2 * DRAWN, 0, DRAWN - 1).astype(np.int64)
    drawn = (np.bincount(bar, weights=bins, minlength=DRAWN).astype(np.int64) for bins in (genuine, impostor))
    return Histogram(*(tuple(counts.tolist()) for counts in drawn))


def guessed(grid: Grid, genuine: Floats | None, targets: tuple[float, ...]) -> set[int]:
    """Bins where the thresholds for the targets and the EER very probably lie, from a sample of impostors."""
    N = grid.counts[1]
    sample = grid.sample_impostors(min(1 << 21, max(4096, N >> 11)))
    m = len(sample)
    if not m:
        return set()
    spans: list[tuple[float, float]] = []  # false-accept rates from, to
    for target in targets:
        slack = SURE * math.sqrt(target * (1 - target) / m) + SURE / m
        spans.append((target - slack, target + slack))
    if genuine is not None:
        far = np.arange(m, 0, -1) / m
        excess = far - np.searchsorted(genuine, sample) / len(genuine)  # FAR - FRR, falls along the sample
        rate = float(far[np.argmin(np.abs(excess))])
        slack = SURE * math.sqrt(rate * (1 - rate) / m) + SURE / m
        ends = np.searchsorted(-excess, [-slack, slack])  # where FAR - FRR is within ± slack
        spans.append((1 - (float(ends[1]) + SURE) / m, 1 - (float(ends[0]) - SURE) / m))
    bins: set[int] = set()
    for least, most in _join(spans):
        low = sample[max(0, m - 1 - math.ceil(most * m))]
        high = sample[m - 1 - math.floor(least * m)] if least > 0 else np.float32(2)
        first, last = (int(b) for b in bin_of(np.array([low, high], np.float32)))
        bins |= set(range(max(0, first - 1), min(BINS - 1, last + 1) + 1))
    return bins


def _join(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of false-accept rates, joined over small gaps: more scores kept cost less than one more test."""
    joined = [(-1.0, 0.0)]
    for least, most in sorted(spans):
        if least - joined[-1][1] <= GAP:
            joined[-1] = (joined[-1][0], max(most, joined[-1][1]))
        else:
            joined.append((least, most))
    return joined


def picked(kept: Counted, bins: set[int]) -> tuple[Floats, Ints, Ints]:
    """Distinct values in the given bins with counts of all and of genuine, from what a pass has kept."""
    inside = np.isin(bin_of(kept.all_kept.value), list(bins))
    value, every = kept.all_kept.value[inside], kept.all_kept.count[inside]
    inside = np.isin(bin_of(kept.genuine_kept.value), list(bins))
    genuine = np.zeros(len(value), np.int64)
    genuine[np.searchsorted(value, kept.genuine_kept.value[inside])] = kept.genuine_kept.count[inside]
    return value, every, genuine
