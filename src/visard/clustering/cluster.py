"""Pseudo labels for faces without labels: C-FINCH, FINCH, K-means and DBSCAN behind one setting.

A new algorithm is a function and its entry in `CLUSTERINGS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from visard.clustering.finch import Floats, Ints, Metric, Search, by_appearance, cfinch, choose_d, directions, finch
from visard.clustering.quality import quality
from visard.core.method import AtLeastOne, Number
from visard.data.faces import FaceView
from visard.errors import UsageError, VisardError
from visard.learning.features import class_means, features_of
from visard.plugins import Registry


@dataclass(frozen=True)
class Clustering:
    """How features become labels."""

    method: str = "cfinch"  # a name in CLUSTERINGS
    metric: Metric = "chord"  # of cfinch and finch: Euclidean between the directions of centroids, or between centroids
    d: float | Literal["auto"] = "auto"  # cfinch: merge below; dbscan: neighbours within; auto: from the features
    centre: bool = True  # subtract the mean feature first: what all faces of a new domain have in common
    min_size: AtLeastOne = 2  # pictures of a smaller cluster get no label
    partition: int = 0  # finch: which of its partitions, 0 = the finest, -1 or beyond: the last with two clusters
    clusters: Number = 0  # kmeans: how many; 0 = as many as there are identities, which only a simulation can know
    min_samples: AtLeastOne = 2  # dbscan: neighbours, itself included, that make a picture the core of a cluster
    search: Search = "auto"  # of neighbours: exact, faiss, or by size
    seed: int = 0  # kmeans

    def __post_init__(self) -> None:
        try:
            CLUSTERINGS.find(self.method)
        except UsageError as error:
            raise UsageError(f"clustering.method: {error}") from None
        if self.d != "auto" and not self.d > 0:
            raise UsageError(f"clustering.d = {self.d}: must be positive or auto")

    def packages(self) -> dict[str, str]:
        """What it needs beside visard's own dependencies; see `Method.packages`."""
        return {"sklearn": "cluster"} if self.method in ("kmeans", "dbscan") else {}

    @property
    def oracle(self) -> str:
        """What the method needs to know that only labels can tell; mostly nothing."""
        return "the number of people" if self.method == "kmeans" and not self.clusters else ""


class Clusters(NamedTuple):
    """What an algorithm makes of features (n, D) at length 1."""

    labels: Ints  # (n,), -1 = none
    d: float | None = None  # the distance that was used, where one was
    levels: tuple[int, ...] = ()  # clusters of each partition, finest first

    @property
    def clusters(self) -> int:
        """How many clusters there are, if they are numbered from 0."""
        return int(self.labels.max(initial=-1)) + 1


def prepare(features: Floats, centre: bool = False) -> Floats:
    """Features at length 1; with `centre` their mean is subtracted and they are scaled to length 1 again.

    Of two features the differences from their mean are opposite whatever they show: two stay as they are.
    """
    x = directions(np.ascontiguousarray(features, np.float32))
    if centre and len(x) > 2:
        x = directions(x - x.mean(axis=0, dtype=np.float64).astype(np.float32))
    return x


def cluster(features: Floats, settings: Clustering, identities: int | None = None) -> Clusters:
    """Cluster features (n, D): labels 0, 1, ... by first appearance. `identities`: their true number, for K-means."""
    if features.ndim != 2 or not features.size:
        raise VisardError(f"clustering needs features, got an array of shape {features.shape}")
    if not np.isfinite(features).all():
        raise VisardError("clustering of features that are not finite")
    found = CLUSTERINGS.find(settings.method)(prepare(features, settings.centre), settings, identities)
    return found._replace(labels=drop_small(found.labels, settings.min_size))


def drop_small(labels: Ints, min_size: int) -> Ints:
    """Take the label from pictures whose cluster has fewer than `min_size`; number the others by first appearance."""
    out = np.full(len(labels), -1, np.int64)
    known = np.flatnonzero(labels >= 0)
    _, inverse, sizes = np.unique(labels[known], return_inverse=True, return_counts=True)
    kept = known[sizes[inverse] >= min_size]
    out[kept] = by_appearance(labels[kept])
    return out


def _cfinch(x: Floats, settings: Clustering, identities: int | None) -> Clusters:
    d = choose_d(x, settings.metric, settings.search) if settings.d == "auto" else float(settings.d)
    levels = cfinch(x, d, settings.metric, settings.search)
    return Clusters(levels[-1].labels, d, tuple(level.clusters for level in levels))


def _finch(x: Floats, settings: Clustering, identities: int | None) -> Clusters:
    """The partition asked for among those with two clusters or more, or the nearest."""
    levels = finch(x, settings.metric, settings.search)
    useful = [level for level in levels if level.clusters > 1] or levels[:1]
    chosen = useful[max(-len(useful), min(settings.partition, len(useful) - 1))]
    return Clusters(chosen.labels, None, tuple(level.clusters for level in levels))


def _kmeans(x: Floats, settings: Clustering, identities: int | None) -> Clusters:
    """In small batches where there are many vectors."""
    count = settings.clusters or identities
    if not count:
        raise UsageError("kmeans needs the number of clusters")
    kind = _sklearn().MiniBatchKMeans if len(x) > 50_000 else _sklearn().KMeans
    found = kind(n_clusters=min(count, len(x)), n_init=3, random_state=settings.seed).fit(x).labels_
    return Clusters(np.asarray(found, np.int64))


def _dbscan(x: Floats, settings: Clustering, identities: int | None) -> Clusters:
    def within(d: float) -> Ints:
        found = _sklearn().DBSCAN(eps=d, min_samples=settings.min_samples).fit(x).labels_
        return np.asarray(found, np.int64)

    def alone(d: float) -> Ints:
        """Where DBSCAN sees noise, every picture is alone."""
        labels = within(d)
        noise = labels < 0
        return by_appearance(np.where(noise, labels.max(initial=-1) + np.cumsum(noise), labels))

    d = choose_d(x, "euclidean", settings.search, alone) if settings.d == "auto" else float(settings.d)
    return Clusters(within(d), d)


CLUSTERINGS: Registry[Callable[[Floats, Clustering, int | None], Clusters]] = Registry(
    "clusterings", {"cfinch": _cfinch, "finch": _finch, "kmeans": _kmeans, "dbscan": _dbscan}
)


def _sklearn() -> Any:
    try:
        return importlib.import_module("sklearn.cluster")
    except ImportError:
        raise UsageError("kmeans and dbscan need scikit-learn: pip install 'visard[cluster]'") from None


METRICS = ("pairwise_precision", "pairwise_recall", "pairwise_f", "bcubed_f", "nmi")


@dataclass(frozen=True)
class Pseudo:
    """Labels (n,) of the pictures of a view, -1 = none, and the mean direction (clusters, E) of each cluster."""

    labels: Tensor
    means: Tensor
    found: Clusters


def pseudo_labels(model: nn.Module, view: FaceView, how: Clustering, channels_last: bool = True) -> Pseudo:
    """Cluster the features of a view; its true labels serve only K-means that asks for the number of identities."""
    features = features_of(model, view, channels_last)
    found = cluster(features.numpy(), how, identities=len(set(view.labels.tolist())))
    labels = torch.from_numpy(found.labels)
    kept = labels >= 0
    return Pseudo(labels, class_means(features[kept], labels[kept], found.clusters), found)


def metrics_of(pseudo: Tensor, view: FaceView) -> dict[str, float]:
    """How well pseudo labels fit the true ones, for tests of a method."""
    found = quality(pseudo.numpy(), view.labels)
    return {name: getattr(found, name) for name in METRICS}
