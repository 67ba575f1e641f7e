"""Labels for pictures that have none: features of a network, clustered where the pictures are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from visard.data.faces import FaceView
from visard.ops.agreement import quality
from visard.ops.cluster import Clustering, Clusters, cluster
from visard.ops.features import class_means, features_of

FIGURES = ("pairwise_precision", "pairwise_recall", "pairwise_f", "bcubed_f", "nmi")


@dataclass(frozen=True)
class Pseudo:
    """Labels (n,) of the pictures of a view, -1 = none, and the mean direction (clusters, E) of each cluster."""

    labels: Tensor
    means: Tensor
    found: Clusters


def pseudo_labels(model: nn.Module, view: FaceView, how: Clustering, channels_last: bool = True) -> Pseudo:
    """Cluster the features of a view; its true labels serve only K-means that asks for the number of people."""
    features = features_of(model, view, channels_last)
    found = cluster(features.numpy(), how, people=len(set(view.labels.tolist())))
    labels = torch.from_numpy(found.labels)
    kept = labels >= 0
    return Pseudo(labels, class_means(features[kept], labels[kept], found.clusters), found)


def figures_of(pseudo: Tensor, view: FaceView) -> dict[str, float]:
    """How well pseudo labels fit the true ones, for tests of a method."""
    found = quality(pseudo.numpy(), view.labels)
    return {name: getattr(found, name) for name in FIGURES}
