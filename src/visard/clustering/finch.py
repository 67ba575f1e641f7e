"""FINCH (Sarfraz et al., CVPR 2019) and C-FINCH (Zhuang et al., 2021): merge first neighbours, level by level.

    kappa_i   the cluster whose centroid is nearest to that of cluster i
    d         C-FINCH: neighbours at this distance or further are not merged

Clusters i and j are first neighbours if j = kappa_i, i = kappa_j or kappa_i = kappa_j; C-FINCH also asks that their
distance is below d. Both come down to the edges i -> kappa_i (below d): dist(i, j) >= dist(i, kappa_i), so a pair
(i, j) with one kappa that is closer than d has both its edges, and the connected components are the same.

Beside the paper (ours): faces of one photograph are kept apart (`Apart`), and d is chosen from the features
(`choose_d`, `stable_d`).
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from visard.clustering.quality import overlap, pairwise
from visard.errors import UsageError, VisardError
from visard.numerics import CPU, device, moved, resident

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Metric = Literal["euclidean", "chord", "cosine"]
Search = Literal["auto", "exact", "faiss"]

BLOCK = 1024  # rows and columns of the products held at a time: 4 MB, which a cache holds
LARGE = 8192  # the same on a device: 256 MB
EXACT = 300_000  # up to so many vectors "auto" compares every pair
LISTS, PROBES, SAMPLES = 2048, 32, 40  # with faiss: lists, lists looked into for a vector, vectors to train a list
CHUNK, ASKING = 65536, 8192  # rows of a search for lists, and of a product with one or of distances


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
    else:  # a row without a direction stays at the origin, where products alone do not give the nearest
        unit = metric != "euclidean" and float(np.einsum("nd,nd->n", x, x).min()) > 0.5
        row = _exact(torch.from_numpy(x if unit else _near_origin(x)), unit).cpu().numpy()
    pieces = (slice(i, i + ASKING) for i in range(0, len(x), ASKING))
    distance = np.concatenate([np.linalg.norm(x[i].astype(np.float64) - x[row[i]], axis=1) for i in pieces])
    return row, (distance**2 / 2 if metric == "cosine" else distance).astype(np.float32)


def _near_origin(x: Floats) -> Floats:
    """Vectors that lie together far from the origin, where products are rounding error, as seen from one of them.

    These differences are exact, or nearly, so that equal distances stay equal; all other vectors stay as they are.
    """
    middle = x.mean(0, dtype=np.float64)
    away = np.concatenate([((x[i : i + ASKING] - middle) ** 2).sum(1) for i in range(0, len(x), ASKING)])
    if float(middle @ middle) < 25 * float(away.mean()):
        return x
    return np.asarray(x - x[int(np.argmin(away))], np.float32)


def directions(x: Floats) -> Floats:
    """Rows at length 1; a zero row stays zero."""
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.maximum(length, 1e-12), np.float32)


def _exact(x: Tensor, unit: bool) -> Tensor:
    """Every pair once: a block of products serves its rows and, by symmetry, its columns.

    Largest values are cheap to find, their places are not: the place is looked up only where a block beats what
    was found before, which for vectors in random order happens in H(blocks) = ln(blocks) + 0.6 blocks of a row.
    """
    n, step, table = len(x), BLOCK if device() == CPU else min(LARGE, len(x)), resident(x)
    best, row = moved(torch.full((n,), -math.inf)), moved(torch.zeros(n, dtype=torch.int64))
    half = None if unit else moved((x * x).sum(1) / 2)  # on the sphere it is the same for all
    buffer = moved(torch.empty(step * step))
    for i in range(0, n, step):
        a = moved(table[i : i + step])
        for j in range(i, n, step):
            b = moved(table[j : j + step])
            products = torch.mm(a, b.T, out=buffer[: len(a) * len(b)].view(len(a), len(b)))
            if i == j:
                products.fill_diagonal_(-math.inf)
            else:  # first the columns: for row j+k the rows i.. come before those of its own block
                scores = products if half is None else products - half[i : i + step, None]
                _improve(best, row, j, i, scores.amax(0), scores.T)
            scores = products if half is None else products.sub_(half[j : j + step])
            _improve(best, row, i, j, scores.amax(1), scores)
    return row


def _improve(best: Tensor, row: Tensor, at: int, offset: int, largest: Tensor, scores: Tensor) -> None:
    """Take the largest of each row of `scores` (whose columns start at `offset`) where it beats the best so far."""
    better = torch.nonzero(largest > best[at : at + len(largest)])[:, 0]
    if len(better):
        found = scores[better] if len(better) < len(scores) else scores
        row[at + better] = _first_largest(found) + offset
        best[at + better] = largest[better]


def _first_largest(scores: Tensor) -> Tensor:
    """The place of the largest number of each row, of equals the first."""
    if scores.device != CPU:
        return scores.argmax(1)
    return torch.from_numpy(np.argmax(scores.numpy(), axis=1))  # several times as fast as torch's


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
    half = moved((x * x).sum(1) / 2)
    best, row = moved(torch.full((len(x),), -math.inf)), moved(torch.full((len(x),), -1))
    x = resident(x)
    for named, asked_by in zip(members, asking, strict=True):
        here = moved(named)
        y = moved(x[here.to(x.device)])
        for start in range(0, len(asked_by) if len(here) else 0, ASKING):
            rows = moved(asked_by[start : start + ASKING])
            scores = torch.addmm(half[here], moved(x.index_select(0, rows.to(x.device))), y.T, beta=-1)
            own = torch.searchsorted(here, rows).clamp_max_(len(here) - 1)
            mine = torch.nonzero(here[own] == rows)[:, 0]
            scores[mine, own[mine]] = -math.inf
            at = _first_largest(scores)
            largest = scores.gather(1, at[:, None])[:, 0]
            before, found = best[rows], here[at]
            better = (largest > before) | ((largest == before) & (found < row[rows]))
            best[rows[better]], row[rows[better]] = largest[better], found[better]
    if bool((row < 0).any()):
        raise VisardError("a vector is alone in all lists that were looked into: use search = exact")
    return row.cpu().numpy()


def _by_list(of: npt.NDArray[np.int16], each: int, lists: int) -> list[Tensor]:
    """The rows that name each list, in order; `of` has `each` entries for a row."""
    order = np.argsort(of, kind="stable") // each
    return [torch.from_numpy(rows) for rows in np.split(order, np.cumsum(np.bincount(of, minlength=lists))[:-1])]


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
    apart: Apart | None = None,
) -> list[Level]:
    """The partitions of C-FINCH, finest first, until nothing merges; the last is the labelling.

    Centroids are means of the original vectors, not of centroids. If nothing at all is within d there is one level,
    in which every vector is alone. `first` are the neighbours of x itself, where they are known already; `apart` says
    which vectors are faces of one photograph.
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
        merged = (
            components(kappa, distance < d)
            if apart is None
            else apart.merged(centroids, labels, kappa, distance, d, metric)
        )
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


@dataclass(frozen=True, eq=False)
class Apart:
    r"""Faces of one photograph show different people: a soft penalty for merging them (ours).

    Clusters A and B that share k photographs count as $w\, k / \min(|A|, |B|)$ further apart than they are, both
    where each looks for its nearest and where they would merge. A photograph that shows one person twice (a mirror, a
    print on the wall) thus keeps two single faces apart, but hardly two large clusters.
    """

    photograph: Ints  # (n,) of each vector, -1: no other vector is of its photograph
    weight: float  # w, in units of the distance

    def merged(self, centroids: Floats, labels: Ints, kappa: Ints, distance: Floats, d: float, metric: Metric) -> Ints:
        """The next labels (m,) of the clusters (m, D), whose nearest neighbours and distances are given.

        Each cluster looks for its nearest by the penalised distance. Edges then merge in the order of that distance,
        unless the clusters they would join are, with the penalty, at least d apart: a chain of edges stops where it
        would join two faces of a photograph.
        """
        shared, sizes = self._shared(labels, len(centroids)), np.bincount(labels, minlength=len(centroids))
        kappa, plain, far = self._nearest(centroids, kappa, distance, shared, sizes, metric)
        of, pictures, photographs = list(range(len(centroids))), sizes.tolist(), self._photographs(labels)

        def root(i: int) -> int:
            while of[i] != i:
                of[i] = of[of[i]]
                i = of[i]
            return i

        for i in np.argsort(far, kind="stable").tolist():
            if not far[i] < d:
                break
            a, b = root(i), root(int(kappa[i]))
            mine, others = photographs.get(a, set()), photographs.get(b, set())
            if a == b or plain[i] + self.weight * len(mine & others) / min(pictures[a], pictures[b]) >= d:
                continue
            of[b], pictures[a] = a, pictures[a] + pictures[b]
            if mine or others:
                photographs[a] = mine | others
        return by_appearance(np.array([root(i) for i in range(len(of))]))

    def _photographs(self, labels: Ints) -> dict[int, set[int]]:
        """Of each cluster that has a face of a photograph with several."""
        found: dict[int, set[int]] = {}
        known = np.flatnonzero(self.photograph >= 0)
        for cluster, photograph in zip(labels[known].tolist(), self.photograph[known].tolist(), strict=True):
            found.setdefault(cluster, set()).add(photograph)
        return found

    def _shared(self, labels: Ints, clusters: int) -> csr_matrix:
        """How many photographs (m, m) two clusters have in common."""
        known = np.flatnonzero(self.photograph >= 0)
        shape = (clusters, int(self.photograph.max(initial=-1)) + 1)
        table = csr_matrix((np.ones(len(known)), (labels[known], self.photograph[known])), shape=shape)
        table.data[:] = 1  # once, however many faces of it a cluster has
        return csr_matrix(table @ table.T)

    def _nearest(
        self, x: Floats, kappa: Ints, distance: Floats, shared: csr_matrix, sizes: Ints, metric: Metric
    ) -> tuple[Ints, Floats, Floats]:
        """Neighbours by the penalised distance, how far they are without and with the penalty.

        A penalty only makes a distance larger, so that a nearest neighbour without one stays the nearest.
        """
        kappa, plain, far = kappa.copy(), distance.copy(), distance.copy()
        y = directions(x) if metric != "euclidean" else x
        struck = np.flatnonzero(np.asarray(shared[np.arange(len(x)), kappa]).ravel() > 0)
        for i in struck.tolist():
            to = np.concatenate([
                np.linalg.norm(y[at : at + ASKING].astype(np.float64) - y[i], axis=1)
                for at in range(0, len(y), ASKING)
            ])  # fmt: skip
            to = (to**2 / 2 if metric == "cosine" else to).astype(np.float32)
            row = shared[[i]]
            penalised = to.copy()
            penalised[row.indices] += self.weight * row.data / np.minimum(sizes[i], sizes[row.indices])
            penalised[i] = np.inf
            kappa[i] = int(np.argmin(penalised))
            plain[i], far[i] = to[kappa[i]], penalised[kappa[i]]
        return kappa, plain, far


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


HIGHEST = 0.99  # quantile of first-neighbour distances: beyond it everything merges
MOST, WORK = 20, 60_000  # candidates for d: at most so many, and fewer where there are many features
JUDGED = 10_000  # pictures whose separation is computed: their mean is known to about 0.005


def choose_d(
    u: Floats, metric: Metric = "chord", search: Search = "auto", labels_at: Callable[[float], Ints] | None = None
) -> float:
    """The d whose clusters are the most separate, among quantiles of the distances to first neighbours.

    `labels_at` gives the clusters (n,) for a d, numbered from 0; default C-FINCH.
    Too small a d splits identities, too large a one chains different identities together; `separation`
    sees both. The distances reach from the closest pairs to the pictures that resemble no other.
    """
    if len(u) < 3:
        return 1.0
    first = nearest(u, metric, search)
    count = max(5, min(MOST, WORK // len(u)))
    candidates = np.unique(np.quantile(first[1], np.linspace(0.05, HIGHEST, count)))
    scores = []
    for d in candidates:
        at = _above(float(d))
        labels = cfinch(u, at, metric, search, first)[-1].labels if labels_at is None else labels_at(at)
        scores.append(separation(u, labels, int(labels.max()) + 1))
    return _above(float(candidates[int(np.argmax(scores))]))


PLATEAU = 4  # steps of d over which a partition should not change
SPREAD = 24  # steps of d that are tried


def stable_d(
    u: Floats, metric: Metric = "chord", search: Search = "auto", labels_at: Callable[[float], Ints] | None = None
) -> float:
    r"""The d around which the clusters change least: the middle of the flattest PLATEAU (ours).

    d goes in SPREAD even steps through the distances to first neighbours, from the 5 % quantile to HIGHEST. Two
    partitions agree by F over the pairs of pictures that they put together. Plateaus that say nothing are left out:
    where most pictures are still alone, and where there is one cluster.
    """
    if len(u) < 3:
        return 1.0
    first = nearest(u, metric, search)
    low, high = np.quantile(first[1], [0.05, HIGHEST])
    steps = np.linspace(low, high, min(SPREAD, max(5, WORK // len(u))) + 1)
    found = []
    for d in steps:
        at = _above(float(d))
        found.append(cfinch(u, at, metric, search, first)[-1].labels if labels_at is None else labels_at(at))
    agree = [pairwise(overlap(a, b)).f for a, b in itertools.pairwise(found)]
    width = min(PLATEAU, len(agree))
    starts = range(len(agree) - width + 1)
    flat = [sum(agree[k : k + width]) if _says(found[k : k + width + 1]) else -1.0 for k in starts]
    best = int(np.argmax(flat)) if max(flat) >= 0 else len(flat) - 1
    return _above(float(steps[best : best + width + 1].mean()))


def _says(partitions: Sequence[Ints]) -> bool:
    """Whether in each of them there are two clusters or more and at most half of the pictures are alone."""
    sizes = [np.bincount(labels) for labels in partitions]
    return all(len(s) > 1 and 2 * int((s == 1).sum()) <= int(s.sum()) for s in sizes)


def _above(d: float) -> float:
    """Just above d and above 0: merging asks for a distance below."""
    return float(np.nextafter(np.float32(max(d, 1e-6)), np.float32(np.inf)))


def separation(u: Floats, labels: Ints, clusters: int, block: int = BLOCK) -> float:
    r"""A silhouette with centroids: the mean of $(b - a) / \max(a, b)$, where $a = 1 - \cos(u_i, m_{own})$ without
    $u_i$ itself in the mean, and b is the same to the nearest other cluster; 0 for a picture alone.

    Leaving the picture out matters for small clusters: a mean of two is half the picture itself. Of more than
    JUDGED pictures, as many are taken at even distances. Products are made in blocks of `block` pictures by as many
    clusters: there may be nearly as many clusters as pictures.
    """
    if clusters < 2:
        return 0.0
    judged = np.arange(JUDGED) * len(u) // JUDGED if len(u) > JUDGED else np.arange(len(u))
    return sum(float(values.sum()) for _, values in _silhouettes(u, labels, clusters, judged, block)) / len(judged)


def silhouettes(u: Floats, labels: Ints, clusters: int) -> Floats:
    """What each picture (n,) adds to `separation`: little where it is nearly as near to another cluster."""
    found = np.zeros(len(u), np.float32)
    if clusters > 1:
        for rows, values in _silhouettes(u, labels, clusters, np.arange(len(u)), BLOCK):
            found[rows] = values
    return found


def _silhouettes(u: Floats, labels: Ints, clusters: int, judged: Ints, block: int) -> Iterator[tuple[Ints, Floats]]:
    """Block by block the pictures that are not alone, and their values."""
    centroids, sizes = means(u, labels, clusters), np.bincount(labels, minlength=clusters)
    table = resident(torch.from_numpy(directions(centroids)))
    together = judged[sizes[labels[judged]] > 1]
    for start in range(0, len(together), block):
        rows = together[start : start + block]
        x, own = u[rows], labels[rows]
        a = 1 - (x * directions(centroids[own] * sizes[own, None] - x)).sum(1)
        b = 1 - _best_other(moved(torch.from_numpy(x)), table, moved(torch.from_numpy(own)), block).cpu().numpy()
        yield rows, (b - a) / np.maximum(np.maximum(a, b), 1e-12)


def _best_other(x: Tensor, table: Tensor, own: Tensor, block: int) -> Tensor:
    """The largest product (n,) of each row of x (n, D) with a row of `table` that is not its own."""
    best = x.new_full((len(x),), -2.0)
    for at in range(0, len(table), block):
        scores = x @ moved(table[at : at + block]).T
        here = torch.nonzero((own >= at) & (own < at + block))[:, 0]
        scores[here, own[here] - at] = -2
        torch.maximum(best, scores.amax(1), out=best)
    return best
