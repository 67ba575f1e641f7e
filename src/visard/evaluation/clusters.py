"""The quality of a clustering of faces, next to the truth and without it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visard.ops.agreement import Ints, Quality, quality

__all__ = ["Counts", "Quality", "counts", "quality"]


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
        pictures=len(labels),
        clusters=len(sizes),
        singletons=int((sizes == 1).sum()),
        largest=int(sizes.max()) if len(sizes) else 0,
        dropped=len(labels) - len(kept),
    )
