"""Bins that are opened: where the thresholds are guessed, and the staircase of opened and closed bins (scores.py)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from visard.evaluation.bins import BINS, bin_of, distinct, edges
from visard.evaluation.grid import Grid
from visard.evaluation.inputs import Floats, Ints
from visard.evaluation.roc import Steps
from visard.evaluation.sweep import Counted

SURE = 4.5  # standard errors on either side of a guessed threshold


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


def _join(spans: list[tuple[float, float]], gap: float = 2e-3) -> list[tuple[float, float]]:
    """Spans of false-accept rates, joined over small gaps: more scores kept cost less than one more test."""
    joined = [(-1.0, 0.0)]
    for least, most in sorted(spans):
        if least - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(most, joined[-1][1]))
        else:
            joined.append((least, most))
    return joined


def bridged(bins: set[int], sizes: Ints) -> set[int]:
    """The bins and those between them where few scores lie: few wide ranges are faster to test than many."""
    before = np.concatenate([[0], np.cumsum(sizes)])
    ordered = sorted(bins)
    found = set(bins)
    for one, two in pairwise(ordered):
        if before[two] - before[one + 1] <= before[-1] // 1000:
            found |= set(range(one, two))
    return found


def ranges(bins: set[int]) -> list[tuple[float, float]]:
    """Half-open value ranges that cover the bins, neighbours joined."""
    found: list[tuple[float, float]] = []
    ordered = sorted(bins)
    for begin, end in zip(
        [b for b in ordered if b - 1 not in bins], [b for b in ordered if b + 1 not in bins], strict=True
    ):
        found.append((float(edges()[begin]), float(edges()[end + 1]) if end + 1 < BINS else math.inf))
    return found


def staircase(all_bins: Ints, genuine_bins: Ints, value: Floats, every: Ints, genuine: Ints, opened: set[int]) -> Steps:
    """Staircase: opened bins as single values (`value`, counts of all and of genuine), the rest as bins."""
    closed = all_bins > 0
    closed[list(opened)] = False
    rest = np.flatnonzero(closed)
    threshold = np.concatenate([edges()[rest], value])
    order = np.argsort(threshold)
    gen = np.concatenate([genuine_bins[rest], genuine])
    imp = np.concatenate([all_bins[rest], every]) - gen
    bins = np.concatenate([rest, np.full(len(value), -1, np.int64)])
    return Steps.build(threshold[order], imp[order], gen[order], bins[order])


def values_of(every: Floats, genuine: Floats) -> tuple[Floats, Ints, Ints]:
    """Distinct values of sorted scores with counts of all and of genuine."""
    value, count = distinct(every)
    ends = np.searchsorted(genuine, value, side="right")
    return value, count, np.diff(ends, prepend=0)


def picked(kept: Counted, bins: set[int]) -> tuple[Floats, Ints, Ints]:
    """Distinct values in the given bins with counts of all and of genuine, from what a pass has kept."""
    inside = np.isin(bin_of(kept.all_kept.value), list(bins))
    value, every = kept.all_kept.value[inside], kept.all_kept.count[inside]
    inside = np.isin(bin_of(kept.genuine_kept.value), list(bins))
    genuine = np.zeros(len(value), np.int64)
    genuine[np.searchsorted(value, kept.genuine_kept.value[inside])] = kept.genuine_kept.count[inside]
    return value, every, genuine
