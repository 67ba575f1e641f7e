"""Nearest templates by cosine: exactly, or through a sketch of bits that a million templates answer in milliseconds."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from visard.errors import UsageError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Found = tuple[Floats, Ints]  # scores and rows (queries, k), best first

CELLS = 1 << 24  # scores held at a time
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
    """Every template is compared: faiss for several queries, a matrix product for one or where faiss is absent.

    For one query the memory that holds the templates is the limit: torch reads it with all threads, where faiss gives
    each query one. Neither copies the templates.
    """

    def __init__(self, templates: Floats) -> None:
        self.templates = np.ascontiguousarray(templates, np.float32)

    def search(self, queries: Floats, k: int) -> Found:
        """The k best templates of each unit query (Q, E); fewer where there are fewer."""
        queries = np.ascontiguousarray(queries, np.float32)
        k = min(k, len(self.templates))
        library = faiss()
        if library is not None and len(queries) > 1:
            library.omp_set_num_threads(torch.get_num_threads())
            # faiss turns to matrix products only from hundreds of queries on, where they pay from two (up to 8 x)
            before, library.cvar.distance_compute_blas_threshold = library.cvar.distance_compute_blas_threshold, 2
            try:
                return _ordered(*library.knn(queries, self.templates, k, metric=library.METRIC_INNER_PRODUCT))
            finally:
                library.cvar.distance_compute_blas_threshold = before
        table = torch.from_numpy(self.templates)
        step = max(1, CELLS // len(self.templates))
        parts = []
        for start in range(0, len(queries), step):
            scores = torch.from_numpy(queries[start : start + step]) @ table.T
            value, row = scores.topk(k, dim=1)
            parts.append((value.numpy(), row.numpy()))
        return _ordered(np.concatenate([v for v, _ in parts]), np.concatenate([r for _, r in parts]))


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
        # a query has one thread in each shard
        self._shards = []
        for part in np.array_split(bits, max(1, min(torch.get_num_threads(), len(bits)))):
            shard = library.IndexBinaryFlat(BITS)
            shard.add(part)
            self._shards.append(shard)
        self._index = library.IndexBinaryShards(BITS, True, True)
        for shard in self._shards:
            self._index.add_shard(shard)

    def _bits(self, rows: Floats) -> npt.NDArray[np.uint8]:
        signs = torch.from_numpy(np.ascontiguousarray(rows, np.float32)) @ self._projection > 0
        return np.packbits(signs.numpy(), axis=1)

    def search(self, queries: Floats, k: int) -> Found:
        """The k best templates of each unit query (Q, E) among its candidates."""
        queries = np.ascontiguousarray(queries, np.float32)
        count = min(max(CANDIDATES, k), len(self.templates))
        _, near = self._index.search(self._bits(queries), count)
        k = min(k, len(self.templates))
        value, row = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        for i, candidates in enumerate(near):
            scores = self.templates[candidates] @ queries[i]
            best = np.argsort(-scores, kind="stable")[:k]
            value[i], row[i] = scores[best], candidates[best]
        return _ordered(value, row)


def _ordered(value: Floats, row: Ints) -> Found:
    """Best first; of equal scores the first template."""
    order = np.lexsort((row, -value), axis=1)
    return np.take_along_axis(value, order, 1), np.take_along_axis(row.astype(np.int64), order, 1)
