"""The comparisons of one evaluation as a grid of tiles, and one pass over them on several threads in bounded memory.

A tile is one float32 matrix product. Rows are sorted by identity, so genuine pairs lie in few tiles and the rest are
impostors throughout.

The score of a pair does not depend on how the grid is cut: every product runs on one thread (parallel work is
over tiles) and has at least `PAD` rows and columns, zero rows filling the edge. So no product falls back to a
matrix-vector kernel or splits its inner sum, the two cases in which sgemm was seen to change the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visard.errors import VisardError
from visard.evaluation.arrays import Floats, Ints, labels, matrix, pair_counts, unit_rows
from visard.evaluation.roc import BINS, bin_index, distinct, edges
from visard.numerics import CPU, device, moved, resident

PAD = 64
Tile = tuple[int, int]


@contextmanager
def one_thread_each() -> Iterator[int]:
    """torch on one thread, for work that is parallel over tiles; gives the number of threads it had."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def padded(count: int) -> int:
    """The next multiple of `PAD`."""
    return -(-count // PAD) * PAD


def padded_rows(rows: Floats) -> Floats:
    """Zero rows up to a multiple of `PAD`: a score then does not depend on the cut into blocks."""
    whole = np.zeros((padded(len(rows)), rows.shape[1]), np.float32)
    whole[: len(rows)] = rows
    return whole


@dataclass(frozen=True)
class Grid:
    """All pairs i < j of a set of N faces, i among its first `local` ones."""

    rows: Tensor  # (N padded, D): unit rows sorted by identity, zero rows at the end
    identity: Ints  # (N,)
    local: int
    tile: int = 1024

    @classmethod
    def build(cls, features: Any, identity: Any, tile: int = 1024, below: int | None = None) -> Grid:
        """Check, sort and normalise. `below`: only pairs with at least one identity smaller than this."""
        if tile < PAD or tile % PAD:
            raise VisardError(f"tile: {tile} is not a positive multiple of {PAD}")
        ids = labels(identity, len(matrix(features, "features")), "identity")
        order = np.argsort(ids, kind="stable")
        local = len(ids) if below is None else int(np.searchsorted(ids[order], below))
        return cls(torch.from_numpy(unit_rows(features, "features", order, PAD)), ids[order], local, tile)

    @cached_property
    def table(self) -> Tensor:
        """`rows` on the device, where there is room for them."""
        return resident(self.rows)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """Numbers of genuine and of impostor pairs, from the labels alone."""
        every, others = pair_counts(self.identity), pair_counts(self.identity[self.local :])
        return every[0] - others[0], every[1] - others[1]

    def tiles(self, genuine_only: bool = False) -> list[Tile]:
        """Upper left corners of the tiles; only those that hold genuine pairs if asked."""
        corners = [(i, j) for i in range(0, self.local, self.tile) for j in range(i, len(self.identity), self.tile)]
        return [corner for corner in corners if self._mixed(corner)] if genuine_only else corners

    def _sides(self, corner: Tile) -> tuple[Ints, Ints]:
        """Identities of the tile's rows and columns."""
        i, j = corner
        return self.identity[i : min(i + self.tile, self.local)], self.identity[j : j + self.tile]

    def _mixed(self, corner: Tile) -> bool:
        """Whether the identities of the tile's rows and columns overlap (both are sorted)."""
        a, b = self._sides(corner)
        return bool(a[0] <= b[-1] and b[0] <= a[-1])

    def block(self, corner: Tile, buffer: Tensor) -> Floats:
        """The scores of a tile (m, n), of which a tile on the diagonal counts only those above it."""
        i, j = corner
        a, b = moved(self.table[i : min(i + self.tile, padded(self.local))]), moved(self.table[j : j + self.tile])
        out = buffer[: len(a) * len(b)].view(len(a), len(b))
        product = torch.mm(a, b.T, out=out) if device() == CPU else out.copy_(a @ b.T)
        found: Floats = product.numpy()[: self.local - i, : len(self.identity) - j]
        return found

    def scores(self, corner: Tile, buffer: Tensor) -> tuple[Tensor, Floats]:
        """All scores of a tile, flat, and the genuine ones among them; `buffer` (tile²,) is scratch."""
        tile = self.block(corner, buffer)
        upper = np.triu(np.ones(tile.shape, np.bool_), 1) if corner[0] == corner[1] else None
        flat = torch.from_numpy(tile.reshape(-1) if upper is None else tile[upper])
        return flat, self._genuine(corner, tile)[0] if self._mixed(corner) else np.empty(0, np.float32)

    def genuine(self, corner: Tile, buffer: Tensor) -> tuple[Floats, Ints]:
        """The genuine scores of a tile, and the identity of each."""
        return self._genuine(corner, self.block(corner, buffer))

    def _genuine(self, corner: Tile, tile: Floats) -> tuple[Floats, Ints]:
        a, b = self._sides(corner)
        same = a[:, None] == b[None, :]
        if corner[0] == corner[1]:
            same = np.triu(same, 1)
        return tile[same], a[np.nonzero(same)[0]]

    def sample_impostors(self, count: int) -> Floats:
        """Scores of about `count` random impostor pairs, sorted; only to guess where thresholds will lie."""
        rng = np.random.default_rng(0)
        i, j = rng.integers(self.local, size=count), rng.integers(len(self.identity), size=count)
        keep = self.identity[i] != self.identity[j]
        i, j = i[keep], j[keep]
        found, rows = np.empty(len(i), np.float32), self.rows.numpy()
        for start in range(0, len(i), 32768):
            part = slice(start, start + 32768)
            found[part] = np.einsum("nd,nd->n", rows[i[part]], rows[j[part]])
        return np.sort(found)


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
        """Add another tally of the same ranges."""
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


@dataclass
class Counted:
    """The counts of a pass: scores per bin, scores kept, and twice the area in pairs if asked for."""

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
        """Sort and count the gathered scores."""
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
                bins = np.searchsorted(edges(), genuine, side="right") - 1
                counted.genuine_bins += np.bincount(bins, minlength=BINS)
                counted.genuine_kept.add(genuine)
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


def genuine_scores(grid: Grid) -> Floats:
    """All genuine scores, sorted: only tiles that can hold some are computed."""
    buffer = torch.empty(grid.tile * grid.tile)
    found = np.concatenate([grid.genuine(corner, buffer)[0] for corner in grid.tiles(genuine_only=True)])
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
