"""Search of templates by cosine: exactly, or through a sketch of bits that answers in milliseconds for a million."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from visard.errors import UsageError
from visard.evaluation.grid import one_thread_each
from visard.numerics import CPU, device, moved, resident

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Found = tuple[Floats, Ints]  # scores and rows (queries, k), best first

CELLS = 1 << 22  # scores held at a time by a thread
BITS = 1024  # of a sketch
CANDIDATES = 1024  # templates whose cosine is computed after the sketch


class Index(Protocol):
    """Something to search in."""

    def search(self, queries: Floats, k: int) -> Found:
        """The k best templates of each unit query (Q, E); fewer where there are fewer."""


def faiss() -> Any:
    """The package faiss, or None where it is not installed."""
    try:
        return importlib.import_module("faiss")
    except ImportError:
        return None


class Exact:
    """Every template is compared: with faiss, or with a matrix product for one query or where faiss is absent.

    Threads take shards of the templates, each on its own: none waits for a slower one after every block, as inside
    one parallel product. The templates are not copied, unless to the memory of a device, which then does the products.
    """

    def __init__(self, templates: Floats) -> None:
        self.templates = np.ascontiguousarray(templates, np.float32)

    @cached_property
    def _table(self) -> torch.Tensor:
        return resident(torch.from_numpy(self.templates))

    def search(self, queries: Floats, k: int) -> Found:
        """The k best templates of each unit query (Q, E); fewer where there are fewer."""
        queries = np.ascontiguousarray(queries, np.float32)
        k = min(k, len(self.templates))
        library = faiss() if len(queries) > 1 and device() == CPU else None
        if library is None:
            _ = self._table  # once, before threads ask for it
        with one_thread_each() as threads, ThreadPoolExecutor(threads) as workers, _products(library):
            size = max(k, -(-len(self.templates) // (4 * threads)))
            starts = range(0, len(self.templates), size)
            parts = list(workers.map(lambda start: self._shard(library, queries, k, start, size), starts))
        value, row = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
        return _best(value, row, k)

    def _shard(self, library: Any, queries: Floats, k: int, start: int, size: int) -> Found:
        shard = self.templates[start : start + size]
        k = min(k, len(shard))
        if library is not None:
            library.omp_set_num_threads(1)  # of this thread
            value, row = library.knn(queries, shard, k, metric=library.METRIC_INNER_PRODUCT)
            return value, row.astype(np.int64) + start
        step, given, table = max(1, CELLS // len(shard)), torch.from_numpy(queries), moved(self._table[start:][:size]).T
        parts = [(moved(given[i : i + step]) @ table).topk(k, dim=1) for i in range(0, len(given), step)]
        value, row = (torch.cat([p[side] for p in parts]).cpu().numpy() for side in (0, 1))
        return value, row + start


@contextmanager
def _products(library: Any) -> Iterator[None]:
    """faiss turns to matrix products only from hundreds of queries on; they pay from two (up to eight times)."""
    if library is None:
        yield
        return
    before, library.cvar.distance_compute_blas_threshold = library.cvar.distance_compute_blas_threshold, 2
    try:
        yield
    finally:
        library.cvar.distance_compute_blas_threshold = before


class Sketch:
    """The signs of BITS random projections are compared first, then the cosines of the CANDIDATES nearest.

    The share of differing signs of two vectors is their angle / π, with a standard deviation below 1 / (2 √BITS). So a
    template with cosine 0.3 differs in 413 of 1024 bits, 6 standard deviations below strangers (512): among a million
    of those it is lost in about one search of a thousand; with cosine 0.4 in one of a hundred million.
    """

    def __init__(self, templates: Floats, seed: int = 0) -> None:
        library = faiss()
        if library is None:
            raise UsageError("fast search needs the package faiss: pip install 'visard[gallery]'")
        self.templates = np.ascontiguousarray(templates, np.float32)
        rng = np.random.default_rng(seed)
        self._projection = torch.from_numpy(rng.standard_normal((templates.shape[1], BITS), dtype=np.float32))
        bits = np.concatenate([self._bits(templates[i : i + 16384]) for i in range(0, len(templates), 16384)])
        self._shards = []  # first row, index
        for rows in np.array_split(np.arange(len(bits)), max(1, min(torch.get_num_threads(), len(bits)))):
            shard = library.IndexBinaryFlat(BITS)
            shard.use_heap = False  # counting is faster for many candidates
            shard.add(bits[rows[0] : rows[-1] + 1])
            self._shards.append((int(rows[0]), shard))

    def _bits(self, rows: Floats) -> npt.NDArray[np.uint8]:
        signs = torch.from_numpy(np.ascontiguousarray(rows, np.float32)) @ self._projection > 0
        return np.packbits(signs.numpy(), axis=1)

    def search(self, queries: Floats, k: int) -> Found:
        """The k best templates of each unit query (Q, E) among its candidates."""
        queries = np.ascontiguousarray(queries, np.float32)
        count, k = min(max(CANDIDATES, k), len(self.templates)), min(k, len(self.templates))
        bits = self._bits(queries)

        def work(start: int, shard: Any) -> Found:
            faiss().omp_set_num_threads(1)  # of this thread
            found: Found = shard.search(bits, min(count, shard.ntotal))
            return found[0], found[1] + start

        with one_thread_each(), ThreadPoolExecutor(len(self._shards)) as workers:
            parts = list(workers.map(work, *zip(*self._shards, strict=True)))
            differing, near = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
            kept = np.argpartition(differing, count - 1, axis=1)[:, :count]
            near = np.take_along_axis(near, kept, 1)
            table = torch.from_numpy(self.templates)
            scores = [
                torch.mv(table[torch.from_numpy(row)], torch.from_numpy(query)).numpy()
                for row, query in zip(near, queries, strict=True)
            ]
        return _best(np.stack(scores), near, k)


def _best(value: Floats, row: Ints, k: int) -> Found:
    """The k best, best first; of equal scores the first template."""
    order = np.lexsort((row, -value), axis=1)[:, :k]
    return np.take_along_axis(value, order, 1), np.take_along_axis(row.astype(np.int64), order, 1)
