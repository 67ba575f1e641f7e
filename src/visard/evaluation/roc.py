"""The ROC as a staircase of exact counts, and how metrics are read off it.

Accept if score >= threshold. FAR(t) = share of impostor scores >= t, TAR(t) = share of genuine scores >= t.
A staircase may be partly coarse: a step may stand for a whole bin of scores, of which there are 2^16. Its corners are
exact all the same; a metric whose value lies inside such a bin names the bin, and the caller looks into it.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visard.evaluation.arrays import Doubles, Floats, Ints, Result


@dataclass(frozen=True)
class Steps:
    """Corners of the ROC, thresholds falling; corner 0 accepts nothing. bin[i] = -1: step i is one score."""

    threshold: Doubles  # (P,)
    false: Ints  # (P,) impostors >= threshold
    true: Ints  # (P,) genuine >= threshold
    bin: Ints  # (P,)

    @classmethod
    def build(cls, threshold: NDArray[np.floating], imp: Ints, gen: Ints, bins: Ints | None = None) -> Steps:
        """From numbers of scores at distinct rising thresholds (or in bins that start there)."""
        one = np.full(len(threshold), -1, np.int64) if bins is None else bins
        return cls(
            np.concatenate([[np.inf], threshold[::-1].astype(np.float64)]),
            np.concatenate([[0], np.cumsum(imp[::-1], dtype=np.int64)]),
            np.concatenate([[0], np.cumsum(gen[::-1], dtype=np.int64)]),
            np.concatenate([[-1], one[::-1]]),
        )

    @classmethod
    def of(cls, genuine: NDArray[np.floating], impostor: NDArray[np.floating]) -> Steps:
        """From all the scores themselves."""
        scores = np.concatenate([genuine, impostor])
        value, inverse, count = np.unique(scores, return_inverse=True, return_counts=True)
        gen = np.bincount(inverse[: len(genuine)], minlength=len(value))
        return cls.build(value, count - gen, gen)

    @property
    def impostors(self) -> int:
        """Number of impostor scores, N."""
        return int(self.false[-1])

    @property
    def genuine(self) -> int:
        """Number of genuine scores, G."""
        return int(self.true[-1])


@dataclass(frozen=True)
class FarPoint(Result):
    """TAR at the asked `far`, and the rate reached. `unreliable`: far stands for fewer than ten impostors."""

    far: float
    tar: float
    far_reached: float
    threshold: float
    genuine_accepted: int
    impostors_accepted: int
    rule: str = field(default="conservative", kw_only=True)
    unreliable: bool


@dataclass(frozen=True)
class Curve(Result):
    """Exact corners of the ROC near log-spaced false-accept rates (DET: 1 - tar over far)."""

    far: tuple[float, ...]
    tar: tuple[float, ...]
    threshold: tuple[float, ...]


def allowed(target: float, total: int) -> int:
    """Largest k with k / total <= target, as float64 division decides it."""
    k = int(target * total)
    while (k + 1) / total <= target:
        k += 1
    while k / total > target:
        k -= 1
    return k


def _closed(steps: Steps, *corners: int) -> set[int]:
    """The bins that the steps into these corners cross: what hides the exact scores there."""
    return {int(steps.bin[i]) for i in corners if i < len(steps.bin)} - {-1}


def conservative(steps: Steps, target: float) -> tuple[int, set[int]]:
    """Last corner with FAR <= target: the largest TAR, at the smallest score that may be a threshold."""
    i = int(np.searchsorted(steps.false, allowed(target, steps.impostors), side="right")) - 1
    return i, _closed(steps, i, i + 1)


def equal_error(steps: Steps) -> tuple[float, float, set[int]]:
    """EER and its threshold: where the ROC, straight between corners, meets FAR = 1 - TAR.

    The threshold is that of the corner nearest to the crossing. Signs are decided in whole numbers.
    """
    N, G = steps.impostors, steps.genuine

    def excess(i: int) -> int:  # (FAR - FRR) · N · G
        return int(steps.false[i]) * G - (G - int(steps.true[i])) * N

    i = bisect.bisect_right(range(len(steps.false)), 0, key=excess) - 1  # excess rises from -N·G to N·G
    before, after = excess(i), excess(i + 1)
    rise = int(steps.false[i + 1]) - int(steps.false[i])
    rate = (int(steps.false[i]) + rise * (-before / (after - before))) / N
    corner = i if -before < after and i > 0 else i + 1
    return rate, float(steps.threshold[corner]), _closed(steps, i, i + 1)


def area(steps: Steps) -> tuple[float, float]:
    """Area under the ROC and a bound on its error: half of what coarse steps leave open, 0.0 without any."""
    N, G = steps.impostors, steps.genuine
    wide = 2 * N * G >= 1 << 62  # whole numbers as long as they fit, then 64-bit mantissas
    kind: Any = np.longdouble if wide else np.int64
    rise, up = np.diff(steps.false).astype(kind), steps.true.astype(kind)
    twice = (rise * (up[1:] + up[:-1])).sum()
    open_ = (rise * np.diff(up))[steps.bin[1:] >= 0].sum()
    if wide:
        return float(twice / 2 / N / G), float(open_ / 2 / N / G)
    return int(twice) / (2 * N * G), int(open_) / (2 * N * G)


def far_point(steps: Steps, target: float) -> tuple[FarPoint, set[int]]:
    """TAR at a target FAR, and the bins that must be opened before it is final."""
    i, missing = conservative(steps, target)
    false, true = int(steps.false[i]), int(steps.true[i])
    threshold = float(steps.threshold[i])
    if i == 0:  # nothing may be accepted: just above the largest score
        threshold = float(np.nextafter(np.float32(steps.threshold[1]), np.float32(np.inf)))
    N, G = steps.impostors, steps.genuine
    return FarPoint(target, true / G, false / N, threshold, true, false, target * N < 10), missing


def curve(steps: Steps) -> Curve:
    """About 200 exact corners, at the last corner below each of the log-spaced rates from 1 / N to 1."""
    N, G = steps.impostors, steps.genuine
    wanted = np.floor(np.geomspace(1.0, N, 200) + 1e-6).astype(np.int64) if N > 1 else np.array([1])
    index = np.searchsorted(steps.false, np.unique(np.concatenate([[0], wanted])), side="right") - 1
    index = np.unique(np.concatenate([[0], index]))
    return Curve(
        tuple((steps.false[index] / N).tolist()),
        tuple((steps.true[index] / G).tolist()),
        tuple(steps.threshold[index].tolist()),
    )


# Bins of equal width over the range of cosines.

SCALE = 32768.0  # bins per unit of cosine
SHIFT = 32769.0  # one spare bin below -1 and a few above 1: rounding may leave [-1, 1] by a few units of 1e-7
BINS = 65540


def bin_index(scores: Tensor, scratch: Tensor, out: Tensor) -> Tensor:
    """out = trunc(SCALE · score + SHIFT) as int32: a monotone map, so bins order as scores do."""
    torch.add(SHIFT, scores, alpha=SCALE, out=scratch)
    return out.copy_(scratch)


def bin_of(scores: Floats) -> Ints:
    """Bin of each score."""
    given = torch.from_numpy(np.array(scores, np.float32))
    index = bin_index(given, torch.empty_like(given), torch.empty(len(given), dtype=torch.int32))
    return index.numpy().astype(np.int64)


@cache
def edges() -> Floats:
    """Smallest float32 score of each bin (BINS,): found by bisection, since the sum in the map rounds."""

    def as_float(key: Ints) -> Floats:  # keys rise as floats do
        bits = np.where(key >= 0, key, np.int64(-(2**31)) - key).astype(np.int64)
        return bits.astype(np.int32).view(np.float32)

    limit = int(np.float32(4.0).view(np.int32))
    low, high = np.full(BINS, -limit, np.int64), np.full(BINS, limit, np.int64)
    wanted = np.arange(BINS)
    while (high - low > 1).any():
        middle = (low + high) // 2
        reached = bin_of(np.clip(as_float(middle), -2, 2)) >= wanted
        high, low = np.where(reached, middle, high), np.where(reached, low, middle)
    found = as_float(high)
    found.setflags(write=False)
    return found


def distinct(ordered: Floats) -> tuple[Floats, Ints]:
    """Distinct values of rising scores, and how often each occurs."""
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)])
    return ordered[starts], np.diff(starts, append=len(ordered))


def values_of(every: Floats, genuine: Floats) -> tuple[Floats, Ints, Ints]:
    """Distinct values of sorted scores with counts of all and of genuine."""
    value, count = distinct(every)
    ends = np.searchsorted(genuine, value, side="right")
    return value, count, np.diff(ends, prepend=0)


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
