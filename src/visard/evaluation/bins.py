"""A fixed cut of the score range into 2^16 bins, and scores kept with their multiplicities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visard.errors import VisardError
from visard.evaluation.arrays import Bools, Floats, Ints, labels, matrix, unit_rows

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


# ----------
# The comparisons of one evaluation as a grid of tiles, each one float32 matrix product.
#
# Rows are sorted by identity, so genuine pairs lie in few tiles and the rest are impostors throughout.
#
# The score of a pair does not depend on how the grid is cut: every product runs on one thread (parallel work is
# over tiles) and has at least `PAD` rows and columns, zero rows filling the edge. So no product falls back to a
# matrix-vector kernel or splits its inner sum, the two cases in which sgemm was seen to change the last bit.

PAD = 64
Tile = tuple[int, int]


@dataclass(frozen=True)
class Side:
    """One set of faces: unit rows sorted by identity, zero rows at the end up to a multiple of `PAD`."""

    rows: Tensor  # (N padded, D)
    identity: Ints  # (N,)
    group: Ints | None  # (N,)

    @classmethod
    def build(cls, features: Any, identity: Any, group: Any, what: str) -> Side:
        """Check, sort and normalise; `group` marks pairs that are never compared (same value = excluded)."""
        count = len(matrix(features, f"{what} features"))
        ids = labels(identity, count, f"{what} identity")
        order = np.argsort(ids, kind="stable")
        groups = None if group is None else labels(group, count, f"{what} exclusion groups")[order]
        rows = unit_rows(features, f"{what} features", order, PAD)
        return cls(torch.from_numpy(rows), ids[order], groups)

    def __len__(self) -> int:
        return len(self.identity)

    def first(self, count: int) -> Side:
        """The first `count` rows; rows that fill up to a multiple of `PAD` are here those that follow."""
        group = None if self.group is None else self.group[:count]
        return Side(self.rows[: -(-count // PAD) * PAD], self.identity[:count], group)


@dataclass(frozen=True)
class Grid:
    """All pairs i < j of one set (`within`; `a` may be only its first rows), or all pairs of two sets."""

    a: Side
    b: Side
    within: bool
    tile: int = 1024

    @classmethod
    def build(
        cls,
        features: Any,
        identity: Any,
        against: tuple[Any, Any] | None = None,
        exclude: Any = None,
        tile: int = 1024,
        below: int | None = None,
    ) -> Grid:
        """One set with itself, or with (features, identity) of `against`; `exclude`: groups, or a pair.

        `below`: of the pairs of one set only those with at least one identity smaller than this.
        """
        if tile < PAD or tile % PAD:
            raise VisardError(f"tile: {tile} is not a positive multiple of {PAD}")
        if against is None:
            side = Side.build(features, identity, exclude, "set")
            some = side if below is None else side.first(int(np.searchsorted(side.identity, below)))
            return cls(some, side, True, tile)
        first, second = (None, None) if exclude is None else exclude
        a = Side.build(features, identity, first, "first")
        b = Side.build(against[0], against[1], second, "second")
        if a.rows.shape[1] != b.rows.shape[1]:
            raise VisardError(f"features: {a.rows.shape[1]} dimensions against {b.rows.shape[1]}")
        return cls(a, b, False, tile)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """Numbers of genuine and of impostor pairs, from the labels alone."""
        total = len(self.a) * len(self.b)
        if self.within:
            total -= len(self.a) * (len(self.a) + 1) // 2
        genuine = self._equal(self.a.identity, self.b.identity)
        if self.a.group is None or self.b.group is None:
            return genuine, total - genuine
        a, b = self.a.group, self.b.group
        excluded = self._equal(a, b)
        both = self._equal(np.stack([self.a.identity, a], 1), np.stack([self.b.identity, b], 1))
        return genuine - both, total - genuine - (excluded - both)

    def _equal(self, a: Ints, b: Ints) -> int:
        """Number of pairs with equal labels."""
        if self.within:
            return _pairs(b) - _pairs(b[len(a) :])
        _, inverse = np.unique(np.concatenate([a, b]), axis=0, return_inverse=True)
        size = int(inverse.max()) + 1
        of_a, of_b = inverse[: len(a)], inverse[len(a) :]
        return int(np.dot(np.bincount(of_a, minlength=size), np.bincount(of_b, minlength=size)))

    def tiles(self, genuine_only: bool = False) -> list[Tile]:
        """Upper left corners of the tiles; only those that hold genuine pairs if asked."""
        corners = [
            (i, j)
            for i in range(0, len(self.a), self.tile)
            for j in range(i if self.within else 0, len(self.b), self.tile)
        ]
        return [corner for corner in corners if self._mixed(corner)] if genuine_only else corners

    def _mixed(self, corner: Tile) -> bool:
        """Whether the identities of the tile's rows and columns overlap (both are sorted)."""
        a = self.a.identity[corner[0] : corner[0] + self.tile]
        b = self.b.identity[corner[1] : corner[1] + self.tile]
        return bool(a[0] <= b[-1] and b[0] <= a[-1])

    def scores(self, corner: Tile, buffer: Tensor) -> tuple[Tensor, Floats]:
        """All scores of a tile, flat, and the genuine ones among them; `buffer` (tile²,) is scratch."""
        product = self._product(corner, buffer)
        tile = product.numpy()[: len(self.a) - corner[0], : len(self.b) - corner[1]]
        valid = self._valid(corner, *tile.shape)
        if valid is not None:
            flat = torch.from_numpy(tile[valid])
        elif tile.shape == product.shape:
            flat = product.view(-1)
        else:
            flat = torch.from_numpy(tile.ravel())
        return flat, tile[self._same(corner, valid)] if self._mixed(corner) else np.empty(0, np.float32)

    def genuine(self, corner: Tile, buffer: Tensor) -> tuple[Floats, Ints]:
        """The genuine scores of a tile, and the identity of each."""
        tile = self._product(corner, buffer).numpy()[: len(self.a) - corner[0], : len(self.b) - corner[1]]
        same = self._same(corner, self._valid(corner, *tile.shape))
        return tile[same], self.a.identity[corner[0] + np.nonzero(same)[0]]

    def _product(self, corner: Tile, buffer: Tensor) -> Tensor:
        a, b = self.a.rows[corner[0] :][: self.tile], self.b.rows[corner[1] :][: self.tile]
        product = buffer[: len(a) * len(b)].view(len(a), len(b))
        return torch.mm(a, b.T, out=product)

    def _same(self, corner: Tile, valid: Bools | None) -> Bools:
        i, j = corner
        same: Bools = self.a.identity[i : i + self.tile, None] == self.b.identity[None, j : j + self.tile]
        return same if valid is None else same & valid

    def _valid(self, corner: Tile, m: int, n: int) -> Bools | None:
        """Which of a tile's (m, n) pairs count; None = all."""
        i, j = corner
        valid = np.triu(np.ones((m, n), np.bool_), 1) if self.within and i == j else None
        if self.a.group is not None and self.b.group is not None:
            a, b = self.a.group[i : i + m], self.b.group[j : j + n]
            if np.intersect1d(a, b).size:
                other = a[:, None] != b[None, :]
                valid = other if valid is None else valid & other
        return valid

    def sample_impostors(self, count: int, seed: int = 0) -> Floats:
        """Scores of about `count` random impostor pairs, sorted; only to guess where thresholds will lie."""
        rng = np.random.default_rng(seed)
        i, j = rng.integers(len(self.a), size=count), rng.integers(len(self.b), size=count)
        keep = self.a.identity[i] != self.b.identity[j]
        if self.a.group is not None and self.b.group is not None:
            keep &= self.a.group[i] != self.b.group[j]
        i, j = i[keep], j[keep]
        found = np.empty(len(i), np.float32)
        a, b = self.a.rows.numpy(), self.b.rows.numpy()
        for start in range(0, len(i), 32768):
            part = slice(start, start + 32768)
            found[part] = np.einsum("nd,nd->n", a[i[part]], b[j[part]])
        return np.sort(found)


def _pairs(labels: Ints) -> int:
    """Number of pairs with equal labels inside one set."""
    sizes = np.unique(labels, axis=0, return_counts=True)[1]
    return int((sizes * (sizes - 1) // 2).sum())


# ----------
# One pass over all tiles of a grid, on several threads, in bounded memory.

Progress = Callable[[int, int], None]


@contextmanager
def one_thread_each() -> Iterator[int]:
    """torch on one thread, for work that is parallel over tiles; gives the number of threads it had."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@dataclass
class Counted:
    """What a pass has counted: scores per bin, scores kept, and twice the area in pairs if asked for."""

    all_bins: Ints = field(default_factory=lambda: np.zeros(BINS, np.int64))
    genuine_bins: Ints = field(default_factory=lambda: np.zeros(BINS, np.int64))
    all_kept: Tally = field(default_factory=lambda: Tally([]))
    genuine_kept: Tally = field(default_factory=lambda: Tally([]))
    below: int = 0  # over genuine scores g: scores < g plus scores <= g

    def join(self, other: Counted) -> None:
        """Add another thread's counts: whole numbers, so the order of threads leaves no trace."""
        self.all_bins += other.all_bins
        self.genuine_bins += other.genuine_bins
        self.below += other.below
        self.all_kept.join(other.all_kept)
        self.genuine_kept.join(other.genuine_kept)


class Ranker:
    """Rising genuine scores, distinct with multiplicities, to be ranked among others; float32 throughout."""

    def __init__(self, genuine: Floats) -> None:
        value, self.count = distinct(genuine)
        self.value = np.empty(2 * len(value), np.float32)
        self.value[0::2] = value
        self.value[1::2] = np.nextafter(value, np.float32(np.inf))

    def below(self, scores: Floats) -> int:
        """Σ over genuine g of (scores < g) + (scores <= g), for rising `scores`."""
        # scores <= g are those below the next float32 after g: one search over close, sorted keys serves both
        rank = np.searchsorted(scores, self.value).reshape(-1, 2).sum(axis=1)
        return int(np.dot(rank, self.count))


class Binned:
    """Counts scores per bin: an addition, a conversion and a table increment per score, nothing is sorted."""

    def __init__(self, counted: Counted, tile: int) -> None:
        self.counted = counted
        self.scratch = torch.empty(tile * tile)
        self.index = torch.empty(tile * tile, dtype=torch.int32)

    def take(self, scores: Tensor) -> None:
        """Count one tile."""
        n = len(scores)
        index = bin_index(scores, self.scratch[:n], self.index[:n])
        self.counted.all_bins += torch.bincount(index, minlength=BINS).numpy()
        self.counted.all_kept.add(scores.numpy())

    def finish(self) -> None:
        """Nothing is left over."""


class Sorted:
    """Gathers tiles into chunks and sorts those: the exact area needs the rank of every genuine score."""

    def __init__(self, counted: Counted, chunk: int, ranker: Ranker) -> None:
        self.counted = counted
        self.ranker = ranker
        self.chunk: Floats = np.empty(chunk, np.float32)
        self.filled = 0

    def take(self, scores: Tensor) -> None:
        """Gather one tile."""
        given = scores.numpy()
        while len(given):
            part = given[: len(self.chunk) - self.filled]
            self.chunk[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            given = given[len(part) :]
            if self.filled == len(self.chunk):
                self.finish()

    def finish(self) -> None:
        """Sort and count what was gathered."""
        scores = self.chunk[: self.filled]
        scores.sort()
        starts = np.searchsorted(scores, edges())
        self.counted.all_bins += np.diff(starts, append=len(scores))
        self.counted.all_kept.add_sorted(scores)
        self.counted.below += self.ranker.below(scores)
        self.filled = 0


def sweep(
    grid: Grid,
    ranges: list[tuple[float, float]],
    threads: int,
    ranker: Ranker | None = None,
    chunk: int = 1 << 23,
    most: int | None = None,
    progress: Progress | None = None,
) -> Counted:
    """Count every score of the grid, and keep those in the value ranges; rank the genuine ones if asked.

    `most`: distinct values beyond which a thread keeps nothing (the tally is then marked `over`).
    """
    tiles = grid.tiles()
    tickets = itertools.count()

    def work() -> Counted:
        counted = Counted(all_kept=Tally(ranges, most), genuine_kept=Tally(ranges, most))
        taker = Binned(counted, grid.tile) if ranker is None else Sorted(counted, chunk, ranker)
        buffer = torch.empty(grid.tile * grid.tile)
        while (number := next(tickets)) < len(tiles):
            scores, genuine = grid.scores(tiles[number], buffer)
            taker.take(scores)
            if len(genuine):
                counted.genuine_bins += np.bincount(_bins(genuine), minlength=BINS)
                counted.genuine_kept.add(genuine)
            if progress is not None:
                progress(number + 1, len(tiles))
        taker.finish()
        return counted

    with ThreadPoolExecutor(threads) as pool:
        parts = [job.result() for job in [pool.submit(work) for _ in range(threads)]]
    total = parts[0]
    for part in parts[1:]:
        total.join(part)
    total.all_kept.fold()
    total.genuine_kept.fold()
    return total


def _bins(scores: Floats) -> Ints:
    return np.searchsorted(edges(), scores, side="right") - 1


def genuine_scores(grid: Grid) -> Floats:
    """All genuine scores, sorted: only tiles that can hold some are computed."""
    found: Floats = np.empty(grid.counts[0], np.float32)
    buffer = torch.empty(grid.tile * grid.tile)
    filled = 0
    for corner in grid.tiles(genuine_only=True):
        genuine = grid.scores(corner, buffer)[1]
        found[filled : filled + len(genuine)] = genuine
        filled += len(genuine)
    found.sort()
    return found


def every_score(grid: Grid) -> tuple[Floats, Floats]:
    """All scores, sorted, and the genuine ones among them, sorted; for grids that fit in memory."""
    buffer = torch.empty(grid.tile * grid.tile)
    every: list[Floats] = []
    genuine: list[Floats] = []
    for corner in grid.tiles():
        scores, same = grid.scores(corner, buffer)
        every.append(scores.numpy().copy())
        genuine.append(same)
    return np.sort(np.concatenate(every)), np.sort(np.concatenate(genuine))
