"""The nearest other vector of every vector: exactly by blocks of matrix products, through faiss beyond a size."""

from __future__ import annotations

import importlib
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from visard.errors import UsageError, VisardError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Metric = Literal["euclidean", "chord", "cosine"]
Search = Literal["auto", "exact", "faiss"]

BLOCK = 1024  # rows and columns of the products held at a time: 4 MB, which a cache holds
EXACT = 300_000  # up to so many vectors "auto" compares every pair
LISTS, PROBES, SAMPLES = 2048, 32, 40  # with faiss: lists, lists looked into for a vector, vectors to train a list
CHUNK, ASKING = 65536, 8192  # rows of a search for lists, and of a product with one


def nearest(x: Floats, metric: Metric = "euclidean", search: Search = "auto") -> tuple[Ints, Floats]:
    r"""For each row of x (n, D) the row nearest to it (n,) and how far that is (n,), the smaller row of a tie.

    `euclidean`: $\lVert x - y \rVert$. `chord`: the same between directions, $\sqrt{2 - 2\cos}$. `cosine`: $1 - \cos$,
    half the square of that; a zero row has no direction and counts as the origin in both.
    The row is found by the largest $x \cdot y - \lVert y \rVert^2 / 2$; its distance is then computed from the
    difference itself, because $\lVert x \rVert^2 - 2 x \cdot y + \lVert y \rVert^2$ of close vectors is rounding error.
    """
    if x.ndim != 2 or len(x) < 2:
        raise VisardError(f"neighbours need at least two vectors, got an array of shape {x.shape}")
    x = np.ascontiguousarray(x, np.float32)
    if not np.isfinite(x).all():
        raise VisardError("neighbours of vectors that are not finite")
    if metric != "euclidean":
        x = directions(x)
    if search == "faiss" or (search == "auto" and len(x) > EXACT):
        row = _through_faiss(x)
    else:  # a row without a direction stays at the origin, where products alone do not tell who is near
        unit = metric != "euclidean" and float(np.einsum("nd,nd->n", x, x).min()) > 0.5
        row = _exact(torch.from_numpy(x), unit).numpy()
    distance = _distances(x, row)
    return row, (distance**2 / 2 if metric == "cosine" else distance).astype(np.float32)


def directions(x: Floats) -> Floats:
    """Rows at length 1; a zero row stays zero."""
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.maximum(length, 1e-12), np.float32)


def _distances(x: Floats, row: Ints) -> npt.NDArray[np.float64]:
    """Euclidean distance of each vector to its neighbour, in pieces."""
    parts = [np.linalg.norm(x[i : i + 8192].astype(np.float64) - x[row[i : i + 8192]], axis=1)
             for i in range(0, len(x), 8192)]  # fmt: skip
    return np.concatenate(parts)


def _exact(x: Tensor, unit: bool) -> Tensor:
    """Every pair once: a block of products serves its rows and, by symmetry, its columns.

    Largest values are cheap to find, their places are not: the place is looked up only where a block beats what
    was found before, which for vectors in random order happens in H(blocks) = ln(blocks) + 0.6 blocks of a row.
    """
    n = len(x)
    best, row = torch.full((n,), -math.inf), torch.zeros(n, dtype=torch.int64)
    half = None if unit else (x * x).sum(1) / 2  # on the sphere it is the same for all
    buffer = torch.empty(BLOCK * BLOCK)
    for i in range(0, n, BLOCK):
        a = x[i : i + BLOCK]
        for j in range(i, n, BLOCK):
            b = x[j : j + BLOCK]
            products = torch.mm(a, b.T, out=buffer[: len(a) * len(b)].view(len(a), len(b)))
            if i == j:
                products.fill_diagonal_(-math.inf)
            else:  # first the columns: for row j+k the rows i.. come before those of its own block
                scores = products if half is None else products - half[i : i + BLOCK, None]
                _improve(best, row, j, i, scores.amax(0), scores.T)
            scores = products if half is None else products.sub_(half[j : j + BLOCK])
            _improve(best, row, i, j, scores.amax(1), scores)
    return row


def _improve(best: Tensor, row: Tensor, at: int, offset: int, largest: Tensor, scores: Tensor) -> None:
    """Take the largest of each row of `scores` (whose columns start at `offset`) where it beats the best so far."""
    better = torch.nonzero(largest > best[at : at + len(largest)])[:, 0]
    if len(better):
        found = scores[better] if len(better) < len(scores) else scores
        # numpy's argmax takes the first of equals and is several times as fast as torch's
        row[at + better] = torch.from_numpy(np.argmax(found.numpy(), axis=1)) + offset
        best[at + better] = largest[better]


def _through_faiss(x: Floats) -> Ints:
    """The nearest among the vectors of the PROBES nearest lists: faiss makes the lists and says which are near.

    Going through the lists instead of the vectors turns the comparisons into matrix products, which faiss's own
    inverted file does not use; the same every time.
    """
    try:
        faiss: Any = importlib.import_module("faiss")
    except ImportError:
        raise UsageError(f"{len(x)} vectors need the package faiss: pip install 'visard[gallery]'") from None
    n, size = x.shape
    lists = max(1, min(LISTS, n // SAMPLES))
    sample = np.sort(np.random.default_rng(0).permutation(n)[: lists * SAMPLES])
    means = faiss.Kmeans(size, lists, niter=10, seed=0, max_points_per_centroid=SAMPLES, min_points_per_centroid=1)
    means.train(x[sample])
    probes = min(PROBES, lists)
    near = np.empty((n, probes), np.int16)  # which sorts in linear time
    for start in range(0, n, CHUNK):
        near[start : start + CHUNK] = means.index.search(x[start : start + CHUNK], probes)[1]
    return _within_lists(torch.from_numpy(x), near, lists)


def _within_lists(x: Tensor, near: npt.NDArray[np.int16], lists: int) -> Ints:
    """The nearest row of each row of x (n, D) among those whose first list is in `near` (n, probes) of the row."""
    members, asking = _by_list(near[:, 0], 1, lists), _by_list(near.reshape(-1), near.shape[1], lists)
    half = (x * x).sum(1) / 2
    best, row = torch.full((len(x),), -math.inf), torch.full((len(x),), -1)
    for here, asked_by in zip(members, asking, strict=True):
        y = x[here]
        for start in range(0, len(asked_by) if len(here) else 0, ASKING):
            rows = asked_by[start : start + ASKING]
            scores = torch.addmm(half[here], x.index_select(0, rows), y.T, beta=-1)
            own = torch.searchsorted(here, rows).clamp_max_(len(here) - 1)
            mine = torch.nonzero(here[own] == rows)[:, 0]
            scores[mine, own[mine]] = -math.inf
            at = torch.from_numpy(np.argmax(scores.numpy(), axis=1))
            largest = scores.gather(1, at[:, None])[:, 0]
            before, found = best[rows], here[at]
            better = (largest > before) | ((largest == before) & (found < row[rows]))
            best[rows[better]], row[rows[better]] = largest[better], found[better]
    if bool((row < 0).any()):
        raise VisardError("a vector is alone in all lists that were looked into: use search = exact")
    return row.numpy()


def _by_list(of: npt.NDArray[np.int16], each: int, lists: int) -> list[Tensor]:
    """The rows that name each list, in order; `of` has `each` entries for a row."""
    order = np.argsort(of, kind="stable") // each
    return [torch.from_numpy(rows) for rows in np.split(order, np.cumsum(np.bincount(of, minlength=lists))[:-1])]
