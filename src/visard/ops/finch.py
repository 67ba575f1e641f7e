r"""FINCH (Sarfraz et al., CVPR 2019) and C-FINCH (Zhuang et al., 2021): merge first neighbours, level by level.

    kappa_i   the cluster whose centroid is nearest to that of cluster i
    d         C-FINCH: neighbours at this distance or further are not merged

Clusters i and j are first neighbours if j = kappa_i, i = kappa_j or kappa_i = kappa_j; C-FINCH also asks that their
distance is below d. Both come down to the edges i -> kappa_i (below d): dist(i, j) >= dist(i, kappa_i), so a pair
(i, j) with one kappa that is closer than d has both its edges, and the connected components are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from visard.errors import UsageError, VisardError
from visard.ops.neighbours import Floats, Ints, Metric, Search, nearest


@dataclass(frozen=True)
class Level:
    """One partition of the hierarchy."""

    labels: Ints  # (n,) the cluster of each vector, numbered by first appearance
    clusters: int
    distance: Floats  # (clusters one level below,) of each to its first neighbour


def finch(x: Floats, metric: Metric = "cosine", search: Search = "auto") -> list[Level]:
    """All partitions of x (n, D), finest first; the last one is a single cluster."""
    return cfinch(x, math.inf, metric, search)


def cfinch(
    x: Floats,
    d: float,
    metric: Metric = "euclidean",
    search: Search = "auto",
    first: tuple[Ints, Floats] | None = None,
) -> list[Level]:
    """The partitions of C-FINCH, finest first, until nothing merges; the last is the labelling.

    Centroids are means of the original vectors, not of centroids. If nothing at all is within d there is one level,
    in which everybody is alone. `first` are the neighbours of x itself, where they are known already.
    """
    if not d > 0:
        raise UsageError(f"d = {d}: clusters merge below a distance, which must be positive")
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim != 2 or not len(x):
        raise VisardError(f"clustering needs vectors, got an array of shape {x.shape}")
    levels: list[Level] = []
    labels, centroids = np.arange(len(x)), x
    while len(centroids) > 1:
        kappa, distance = nearest(centroids, metric, search) if first is None or levels else first
        merged = components(kappa, distance < d)
        clusters = int(merged.max()) + 1
        if clusters == len(centroids) and levels:
            break
        labels = merged[labels]
        levels.append(Level(labels, clusters, distance))
        if clusters == len(centroids):
            break
        centroids = means(x, labels, clusters)
    return levels or [Level(labels, 1, np.zeros(1, np.float32))]


def components(kappa: Ints, kept: npt.NDArray[np.bool_]) -> Ints:
    """Connected components (n,) of the edges i -> kappa_i that are kept, numbered by their first member."""
    rows = np.flatnonzero(kept)
    graph = csr_matrix((np.ones(len(rows), np.int8), (rows, kappa[rows])), shape=(len(kappa), len(kappa)))
    _, found = connected_components(graph, directed=False)
    return by_appearance(found)


def by_appearance(labels: Ints) -> Ints:
    """The same partition with clusters numbered 0, 1, ... in the order in which they first appear."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def means(x: Floats, labels: Ints, clusters: int) -> Floats:
    """The mean (clusters, D) of the vectors of each cluster, summed in float64, some columns at a time."""
    members = csr_matrix((np.ones(len(x)), (labels, np.arange(len(x)))), shape=(clusters, len(x)))
    sizes = np.bincount(labels, minlength=clusters)[:, None]
    step, out = max(1, 2**21 // len(x)), np.empty((clusters, x.shape[1]), np.float32)
    for i in range(0, x.shape[1], step):  # columns in float64 at a time: 16 MB
        out[:, i : i + step] = members @ x[:, i : i + step].astype(np.float64) / sizes
    return out
