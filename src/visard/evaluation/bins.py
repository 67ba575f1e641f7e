"""A fixed cut of the score range into 2^16 bins, and scores kept with their multiplicities."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from visard.evaluation.inputs import Floats, Ints

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


class Tally:
    """A multiset of scores inside value ranges: raw while they are few, then distinct values with counts.

    More than `most` distinct values are not held: the tally is then `over` and empty.
    """

    def __init__(self, ranges: list[tuple[float, float]], most: int | None = None, fold: int = 1 << 22) -> None:
        self.ranges = [(np.float32(low), np.float32(high)) for low, high in ranges]
        self.most, self.fold_at = most, fold
        self.over = False
        self.raw: list[Floats] = []
        self.pending = 0
        self.value: Floats = np.empty(0, np.float32)
        self.count: Ints = np.empty(0, np.int64)
        self.masks = np.empty((3, 0), np.bool_)

    def add(self, scores: Floats) -> None:
        """Keep the scores that lie in low <= score < high of any range."""
        if not self.ranges or self.over:
            return
        if len(scores) > self.masks.shape[1]:
            self.masks = np.empty((3, len(scores)), np.bool_)  # made once: fresh pages cost more than the tests
        inside, other, under = self.masks[:, : len(scores)]
        for number, (low, high) in enumerate(self.ranges):
            here = other if number else inside
            np.greater_equal(scores, low, out=here)
            if high < np.inf:
                here &= np.less(scores, high, out=under)
            if number:
                inside |= here
        self._keep(scores[inside])

    def add_sorted(self, scores: Floats) -> None:
        """The same for scores in rising order."""
        for low, high in self.ranges:
            begin, end = np.searchsorted(scores, np.array([low, high], np.float32))
            self._keep(scores[begin:end].copy())

    def _keep(self, scores: Floats) -> None:
        self.raw.append(scores)
        self.pending += len(scores)
        if self.pending > self.fold_at:
            self.fold()

    def fold(self) -> None:
        """Replace raw scores by distinct values with counts."""
        scores = np.concatenate([*self.raw, np.empty(0, np.float32)])
        scores.sort()
        self.raw, self.pending = [], 0
        self._merge(*distinct(scores))

    def join(self, other: Tally) -> None:
        """Add what another tally of the same ranges holds."""
        self.fold()
        other.fold()
        self.over |= other.over
        self._merge(other.value, other.count)

    def _merge(self, value: Floats, count: Ints) -> None:
        if not len(self.value):
            self.value, self.count = value, count
            value, count = value[:0], count[:0]
        at = np.searchsorted(self.value, value)
        old = np.zeros(len(value), np.bool_)
        reach = at < len(self.value)
        old[reach] = self.value[at[reach]] == value[reach]
        self.count[at[old]] += count[old]
        self.count = np.insert(self.count, at[~old], count[~old])
        self.value = np.insert(self.value, at[~old], value[~old])
        self.over |= self.most is not None and len(self.value) > self.most
        if self.over:
            self.raw, self.value, self.count = [], self.value[:0], self.count[:0]


def _starts(ordered: Floats) -> Ints:
    """Where runs of equal values begin."""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)])


def distinct(ordered: Floats) -> tuple[Floats, Ints]:
    """Distinct values of rising scores, and how often each occurs."""
    starts = _starts(ordered)
    return ordered[starts], np.diff(starts, append=len(ordered))
