"""Pseudo labels for faces without labels: C-FINCH, FINCH, K-means and DBSCAN behind one setting.

A new algorithm is a function and its entry in `CLUSTERINGS`. For all algorithms the same pictures get a label:
those of sufficient quality (`min_quality`), in clusters that are not too small (`min_size`) and that they
clearly belong to (`min_separation`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from visard.clustering.finch import (
    Apart,
    Floats,
    Ints,
    Metric,
    Search,
    by_appearance,
    cfinch,
    choose_d,
    directions,
    finch,
    silhouettes,
    stable_d,
)
from visard.clustering.quality import quality
from visard.core.method import AtLeastOne, NotNegative, Number
from visard.data.faces import FaceView
from visard.errors import PublicError, UsageError, VisardError
from visard.learning.features import class_means, features_of
from visard.plugins import Registry


@dataclass(frozen=True)
class Clustering:
    """How features become labels."""

    method: str = "cfinch"  # a name in CLUSTERINGS
    metric: Metric = "chord"  # of cfinch and finch: Euclidean between the directions of centroids, or between centroids
    # cfinch: merge below; dbscan: neighbours within; from the features: auto, where clusters are the most separate, or
    # stable, where they change least
    d: float | Literal["auto", "stable"] = "auto"
    centre: bool = True  # subtract the mean feature first: what all faces of a new domain have in common
    min_size: AtLeastOne = 2  # pictures of a smaller cluster get no label
    partition: int = 0  # finch: which of its partitions, 0 = the finest, -1 or beyond: the last with two clusters
    clusters: Number = 0  # kmeans: how many; 0 = as many as there are identities, which only a simulation can know
    min_samples: AtLeastOne = 2  # dbscan: neighbours, itself included, that make a picture the core of a cluster
    search: Search = "auto"  # of neighbours: exact, faiss, or by size
    seed: int = 0  # kmeans
    min_quality: NotNegative = 0.0  # pictures whose face set gives them a lower quality score are not clustered
    min_separation: float = -1.0  # pictures that are nearly as close to another cluster get no label; -1: all do
    apart: NotNegative = 0.0  # cfinch: distance added between clusters that share a photograph

    def __post_init__(self) -> None:
        try:
            CLUSTERINGS.find(self.method)
        except UsageError as error:
            raise UsageError(f"clustering.method: {error}") from None
        if not isinstance(self.d, str) and not self.d > 0:
            raise UsageError(f"clustering.d = {self.d}: must be positive, auto or stable")
        if not -1 <= self.min_separation < 1:
            raise UsageError(f"clustering.min_separation = {self.min_separation}: must be from -1 to below 1")
        if self.min_quality > 1:
            raise UsageError(f"clustering.min_quality = {self.min_quality}: scores are from 0 to 1")
        if self.apart and self.method != "cfinch":
            raise UsageError(f"clustering.apart = {self.apart}: cfinch keeps faces apart, {self.method} does not")

    def packages(self) -> dict[str, str]:
        """The modules that it needs; see `Method.packages`."""
        return {"sklearn": "cluster"} if self.method in ("kmeans", "dbscan") else {}

    @property
    def oracle(self) -> str:
        """What the method needs to know that only labels tell; usually empty."""
        return "the number of people" if self.method == "kmeans" and not self.clusters else ""


class Clusters(NamedTuple):
    """The clusters of features (n, D) of length 1."""

    labels: Ints  # (n,), -1 = none
    d: float | None = None  # the distance that was used, where one was
    levels: tuple[int, ...] = ()  # clusters of each partition, finest first

    @property
    def clusters(self) -> int:
        """How many clusters there are, if they are numbered from 0."""
        return int(self.labels.max(initial=-1)) + 1


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of pictures (n,) beside their features."""

    quality: Floats | None = None  # score from 0 to 1
    photograph: Ints | None = None  # its number, -1 where it shows one face

    @classmethod
    def of(cls, view: FaceView, settings: Clustering) -> Known:
        """What the settings ask for, from the face set."""
        score = None
        if settings.min_quality:
            try:
                score = view.faces.quality(view.index)
            except UsageError:
                raise PublicError(
                    "clustering.min_quality: these pictures have no quality scores: import them with --align five"
                ) from None
        return cls(score, view.faces.photographs(view.index) if settings.apart else None)


def prepare(features: Floats, centre: bool = False) -> Floats:
    """Features at length 1; with `centre` their mean is subtracted and they are scaled to length 1 again.

    Two features are not centred: their differences from the mean are always opposite.
    """
    x = directions(np.ascontiguousarray(features, np.float32))
    if centre and len(x) > 2:
        x = directions(x - x.mean(axis=0, dtype=np.float64).astype(np.float32))
    return x


def cluster(
    features: Floats, settings: Clustering, identities: int | None = None, known: Known | None = None
) -> Clusters:
    """Cluster features (n, D): labels 0, 1, ... by first appearance. `identities`: their true number, for K-means."""
    if features.ndim != 2 or not features.size:
        raise VisardError(f"clustering needs features, got an array of shape {features.shape}")
    if not np.isfinite(features).all():
        raise VisardError("clustering of features that are not finite")
    known, good = known or Known(), np.arange(len(features))
    if settings.min_quality:
        if known.quality is None:
            raise UsageError("clustering.min_quality: features alone have no quality scores; give a face set")
        good = np.flatnonzero(known.quality >= settings.min_quality)
    labels = np.full(len(features), -1, np.int64)
    if not len(good):
        return Clusters(labels)
    x = prepare(features[good], settings.centre)
    if settings.apart and known.photograph is not None:
        found = _cfinch(x, settings, identities, Apart(known.photograph[good], settings.apart))
    else:
        found = CLUSTERINGS.find(settings.method)(x, settings, identities)
    labels[good] = drop_unsure(x, drop_small(found.labels, settings.min_size), settings)
    return found._replace(labels=labels)


def drop_unsure(x: Floats, labels: Ints, settings: Clustering) -> Ints:
    """Remove the label of pictures whose separation is below `min_separation`.

    See `finch.separation`: 0 is as close to another cluster as to the rest of its own. A cluster that becomes too small
    loses its label too.
    """
    kept = np.flatnonzero(labels >= 0)
    if settings.min_separation == -1 or labels.max(initial=-1) < 1:  # there is no other cluster
        return labels
    sure = silhouettes(x[kept], labels[kept], int(labels.max()) + 1) >= settings.min_separation
    out = np.full(len(labels), -1, np.int64)
    out[kept[sure]] = labels[kept[sure]]
    return drop_small(out, settings.min_size)


def drop_small(labels: Ints, min_size: int) -> Ints:
    """Remove the label of clusters with fewer than `min_size` pictures; number the others by first appearance."""
    out = np.full(len(labels), -1, np.int64)
    known = np.flatnonzero(labels >= 0)
    _, inverse, sizes = np.unique(labels[known], return_inverse=True, return_counts=True)
    kept = known[sizes[inverse] >= min_size]
    out[kept] = by_appearance(labels[kept])
    return out


def _cfinch(x: Floats, settings: Clustering, identities: int | None, apart: Apart | None = None) -> Clusters:
    metric, search = settings.metric, settings.search
    at = None if apart is None else lambda d: cfinch(x, d, metric, search, apart=apart)[-1].labels
    d = CHOICES[settings.d](x, metric, search, at) if isinstance(settings.d, str) else settings.d
    levels = cfinch(x, d, metric, search, apart=apart)
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
        """Pictures that DBSCAN calls noise become clusters of one."""
        labels = within(d)
        noise = labels < 0
        return by_appearance(np.where(noise, labels.max(initial=-1) + np.cumsum(noise), labels))

    chosen = isinstance(settings.d, str)
    d = CHOICES[str(settings.d)](x, "euclidean", settings.search, alone) if chosen else float(settings.d)
    return Clusters(within(d), d)


CHOICES = {"auto": choose_d, "stable": stable_d}  # how d follows from features


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
    found = cluster(features.numpy(), how, len(set(view.labels.tolist())), Known.of(view, how))
    labels = torch.from_numpy(found.labels)
    kept = labels >= 0
    return Pseudo(labels, class_means(features[kept], labels[kept], found.clusters), found)


def metrics_of(pseudo: Tensor, view: FaceView) -> dict[str, float]:
    """How well pseudo labels fit the true ones, for tests of a method."""
    found = quality(pseudo.numpy(), view.labels)
    return {name: getattr(found, name) for name in METRICS}
