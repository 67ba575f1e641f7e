"""How well a clustering agrees with the truth, from the table of how many of each identity are in each cluster.

n_ck   pictures of identity k in cluster c        a_c, b_k   sizes of cluster c and of identity k
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from visard.errors import VisardError

Ints = npt.NDArray[np.int64]


class PRF(NamedTuple):
    """Precision, recall and their harmonic mean."""

    precision: float
    recall: float

    @property
    def f(self) -> float:
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


@dataclass(frozen=True)
class Quality:
    """Agreement with the true identities."""

    pairwise_precision: float
    pairwise_recall: float
    pairwise_f: float
    bcubed_precision: float
    bcubed_recall: float
    bcubed_f: float
    nmi: float
    identities: int


@dataclass(frozen=True)
class Overlap:
    """The table as its cells that are not empty: memory grows with the pictures, not with clusters x identities."""

    cell: npt.NDArray[np.float64]  # n_ck
    a: npt.NDArray[np.float64]  # a_c of each cell
    b: npt.NDArray[np.float64]  # b_k of each cell
    cluster_sizes: Ints
    identity_sizes: Ints
    n: int


def overlap(labels: Ints, truth: Ints) -> Overlap:
    """The table of two labellings (n,) of the same pictures."""
    if labels.shape != truth.shape or labels.ndim != 1 or not len(labels):
        raise VisardError(f"cannot compare labels {labels.shape} with identities {truth.shape}")
    _, c, a = np.unique(labels, return_inverse=True, return_counts=True)
    _, k, b = np.unique(truth, return_inverse=True, return_counts=True)
    code, cell = np.unique(c * len(b) + k, return_counts=True)
    return Overlap(cell.astype(float), a[code // len(b)].astype(float), b[code % len(b)].astype(float), a, b, len(c))


def pairwise(table: Overlap) -> PRF:
    r"""Over pairs of pictures: $P = \sum \binom{n_{ck}}{2} / \sum \binom{a_c}{2}$, R with $b_k$; 1 where no pair is."""
    same = float((table.cell * (table.cell - 1)).sum())
    claimed, true = (float((s * (s - 1.0)).sum()) for s in (table.cluster_sizes, table.identity_sizes))
    return PRF(same / claimed if claimed else 1.0, same / true if true else 1.0)


def bcubed(table: Overlap) -> PRF:
    """Mean over pictures of the share of its cluster that is its identity (P), of its identity that is there (R)."""
    square = table.cell**2
    return PRF(float((square / table.a).sum()) / table.n, float((square / table.b).sum()) / table.n)


def nmi(table: Overlap) -> float:
    r"""Mutual information over the arithmetic mean of the two entropies; 1 if both labellings have one class."""
    p = table.cell / table.n
    mutual = float((p * np.log(table.cell * table.n / (table.a * table.b))).sum())
    shares = (sizes / table.n for sizes in (table.cluster_sizes, table.identity_sizes))
    entropies = [float(-(p * np.log(p)).sum()) for p in shares]
    total = sum(entropies) / 2
    return max(0.0, min(1.0, mutual / total)) if total > 0 else 1.0


def quality(labels: Ints, identity: Ints) -> Quality:
    """Compare labels (n,) with identities (n,); each picture with label -1 is in a cluster of its own.

    So leaving pictures out costs recall, and nothing is gained by labelling only the easy ones.
    """
    alone = labels < 0
    filled = np.where(alone, labels.max(initial=-1) + 1 + np.cumsum(alone), labels)
    table = overlap(filled, identity)
    pairs, cubed = pairwise(table), bcubed(table)
    return Quality(
        pairwise_precision=pairs.precision, pairwise_recall=pairs.recall, pairwise_f=pairs.f,
        bcubed_precision=cubed.precision, bcubed_recall=cubed.recall, bcubed_f=cubed.f,
        nmi=nmi(table), identities=len(table.identity_sizes),
    )  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """What one sees without knowing who is who."""

    pictures: int
    clusters: int
    singletons: int  # clusters of one picture
    largest: int  # pictures in the largest cluster
    dropped: int  # pictures without a label, because their cluster was too small


def counts(labels: Ints) -> Counts:
    """Sizes of the clusters of labels (n,); -1 is a picture without a label."""
    kept = labels[labels >= 0]
    sizes = np.unique(kept, return_counts=True)[1]
    return Counts(
        pictures=len(labels), clusters=len(sizes), singletons=int((sizes == 1).sum()),
        largest=int(sizes.max(initial=0)), dropped=len(labels) - len(kept),
    )  # fmt: skip
