r"""Choosing C-FINCH's distance d without labels.

u   unit features (n, D)            m_c   mean of the features of cluster c
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from visard.ops.finch import cfinch, means
from visard.ops.neighbours import BLOCK, Floats, Ints, Metric, Search, directions, nearest

HIGHEST = 0.99  # quantile of first-neighbour distances: beyond, everybody merges with somebody
MOST, WORK = 20, 60_000  # candidates for d: at most so many, and fewer where there are many features
JUDGED = 10_000  # pictures whose separation is computed: their mean is known to about 0.005


def choose_d(
    u: Floats,
    metric: Metric = "chord",
    search: Search = "auto",
    labels_at: Callable[[float], Ints] | None = None,
) -> float:
    """The d whose clusters are the most separate, among quantiles of the distances to first neighbours.

    `labels_at` gives the clusters (n,) for a d, numbered from 0; default C-FINCH.
    Too small a d leaves people in pieces and pictures alone, too large a one chains strangers together; `separation`
    sees both. The distances reach from the closest pairs to the pictures that are like nobody else.
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


def _above(d: float) -> float:
    """Just above d and above 0: merging asks for a distance below."""
    return float(np.nextafter(np.float32(max(d, 1e-6)), np.float32(np.inf)))


def separation(u: Floats, labels: Ints, clusters: int, block: int = BLOCK) -> float:
    r"""A silhouette with centroids: the mean of $(b - a) / \max(a, b)$, where $a = 1 - \cos(u_i, m_{own})$ without
    $u_i$ itself in the mean, and b is the same to the nearest other cluster; 0 for a picture alone.

    Leaving the picture out is what makes small clusters honest: a mean of two is half the picture itself. Of more than
    JUDGED pictures, as many are taken at even distances. Products are made in blocks of `block` pictures by as many
    clusters: there may be nearly as many clusters as pictures.
    """
    if clusters < 2:
        return 0.0
    centroids, sizes = means(u, labels, clusters), np.bincount(labels, minlength=clusters)
    table, total = torch.from_numpy(directions(centroids)), 0.0
    judged = np.arange(JUDGED) * len(u) // JUDGED if len(u) > JUDGED else np.arange(len(u))
    together = judged[sizes[labels[judged]] > 1]
    for start in range(0, len(together), block):
        rows = together[start : start + block]
        x, own = u[rows], labels[rows]
        a = 1 - (x * directions(centroids[own] * sizes[own, None] - x)).sum(1)
        b = 1 - _best_other(torch.from_numpy(x), table, torch.from_numpy(own), block).numpy()
        total += float(((b - a) / np.maximum(np.maximum(a, b), 1e-12)).sum())
    return total / len(judged)


def _best_other(x: Tensor, table: Tensor, own: Tensor, block: int) -> Tensor:
    """The largest product (n,) of each row of x (n, D) with a row of `table` that is not its own."""
    best = torch.full((len(x),), -2.0)
    for at in range(0, len(table), block):
        scores = x @ table[at : at + block].T
        here = torch.nonzero((own >= at) & (own < at + block))[:, 0]
        scores[here, own[here] - at] = -2
        torch.maximum(best, scores.amax(1), out=best)
    return best
