"""One pass over all tiles of a grid, on several threads, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from visard.evaluation.bins import BINS, Tally, bin_index, distinct, edges
from visard.evaluation.grid import Grid
from visard.evaluation.inputs import Floats, Ints

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
