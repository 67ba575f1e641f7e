"""C-FINCH against the paper taken literally, FINCH against its own package, neighbours against all pairs."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from visard.clustering import finch as neighbours
from visard.clustering.finch import Metric, by_appearance, cfinch, components, finch, means, nearest

METRICS: tuple[Metric, ...] = ("euclidean", "chord", "cosine")


def literal_distance(a: np.ndarray, b: np.ndarray, metric: str) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    if metric == "euclidean":
        return float(np.sqrt(((a - b) ** 2).sum()))
    cos = float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))
    return 1 - cos if metric == "cosine" else math.sqrt(max(0.0, 2 - 2 * cos))


def close_call(dist: np.ndarray, x: np.ndarray, centroids: np.ndarray, metric: str, d: float = math.inf) -> bool:
    """Whether float32 could see another first neighbour than float64, or the other side of d.

    Neighbours are found by products, whose rounding is that of squared distances: some 1e-7 of a squared length. The
    direction of a short mean of long vectors is as much less certain as it is shorter.
    """
    longest, shortest = np.linalg.norm(x, axis=1).max(), np.linalg.norm(centroids, axis=1).min()
    size = max(1.0, float(longest**2 if metric == "euclidean" else longest / shortest))
    best, second = np.sort(2 * dist if metric == "cosine" else dist**2, axis=1).T[:2]
    return bool((second - best < 2e-6 * size).any() or (np.abs(dist.min(1) - d) < 1e-5 * size).any())


def literal_distances(x: np.ndarray, metric: str) -> np.ndarray:
    n = len(x)
    return np.array(
        [[math.inf if i == j else literal_distance(x[i], x[j], metric) for j in range(n)] for i in range(n)]
    )


def literal_cfinch(x: np.ndarray, d: float, metric: str, clear: bool = False) -> list[list[int]]:
    """Every pair of clusters is looked at: merged if first neighbours and closer than d; until nothing merges.

    With `clear` sets that hang on rounding are left out of a property test.
    """
    labels, levels = list(range(len(x))), []
    while True:
        names = sorted(set(labels))
        if len(names) == 1:
            break
        centroids = [x[[i for i, c in enumerate(labels) if c == name]].astype(np.float64).mean(0) for name in names]
        n = len(names)
        dist = literal_distances(np.stack(centroids), metric)
        if clear:
            assume(not close_call(dist, x, np.stack(centroids), metric, d))
        kappa = [min((dist[i][j], j) for j in range(n) if j != i)[1] for i in range(n)]
        group = list(range(n))
        for i in range(n):
            for j in range(i + 1, n):
                if (kappa[i] == j or kappa[j] == i or kappa[i] == kappa[j]) and dist[i][j] < d:
                    old, new = group[j], group[i]
                    group = [new if g == old else g for g in group]
        if len(set(group)) == n:
            break
        labels = [group[names.index(c)] for c in labels]
        levels.append(list(labels))
    return levels or [list(range(len(x)))]


def random_set(seed: int, n: int, size: int) -> np.ndarray:
    """Blobs of different density, so that the hierarchy has several levels."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.standard_normal((max(1, n // 5), size))
    spread = rng.uniform(0.1, 1.0, len(centres))
    own = rng.integers(0, len(centres), n)
    return (centres[own] + spread[own, None] * rng.standard_normal((n, size))).astype(np.float32)


def same(a: np.ndarray, b: list[int]) -> bool:
    return bool(np.array_equal(by_appearance(a), by_appearance(np.array(b))))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 30), st.integers(2, 6), st.floats(0.05, 4), st.sampled_from(METRICS))
def test_cfinch_is_the_paper_taken_literally(seed: int, n: int, size: int, d: float, metric: Metric) -> None:
    x = random_set(seed, n, size)
    found, slow = cfinch(x, d, metric), literal_cfinch(x, d, metric, clear=True)
    assert len(found) == len(slow)
    assert all(same(level.labels, s) for level, s in zip(found, slow, strict=True))
    assert all(level.clusters == len(set(s)) for level, s in zip(found, slow, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 60), st.sampled_from(METRICS))
def test_without_a_distance_it_is_finch(seed: int, n: int, metric: Metric) -> None:
    x = random_set(seed, n, 4)
    a, b = finch(x, metric), cfinch(x, math.inf, metric)
    assert [level.clusters for level in a] == [level.clusters for level in b]
    assert all(np.array_equal(i.labels, j.labels) for i, j in zip(a, b, strict=True))
    assert a[-1].clusters == 1
    slow = literal_cfinch(x, math.inf, metric, clear=True)
    assert all(same(level.labels, s) for level, s in zip(a, slow, strict=True))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("seed", range(20))
def test_finch_equals_its_own_package(metric: Metric, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns at import where pynndescent is missing
        package = pytest.importorskip("finch", reason="finch-clust is not installed (extra dev)")
    x = random_set(seed, 50 + 37 * seed, 3 + seed % 9)
    theirs, counts, _ = package.FINCH(x, distance=metric, ensure_early_exit=False, verbose=False)
    ours = finch(x, metric)
    assert counts == [level.clusters for level in ours[: len(counts)]]
    assert all(same(level.labels, theirs[:, k].tolist()) for k, level in enumerate(ours[: len(counts)]))
    left_out = ours[len(counts)].clusters  # the package drops a last level that is one cluster or one merger
    assert left_out == 1 or left_out == counts[-1] - 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 60))
def test_levels_are_nested_and_shrink(seed: int, n: int) -> None:
    x = random_set(seed, n, 3)
    levels = cfinch(x, 1.0)
    for fine, coarse in itertools.pairwise(levels):
        assert coarse.clusters < fine.clusters
        assert len(set(zip(fine.labels.tolist(), coarse.labels.tolist(), strict=True))) == fine.clusters


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 70), st.integers(1, 12), st.sampled_from(METRICS))
def test_neighbours_whatever_the_block(seed: int, n: int, block: int, metric: Metric) -> None:
    x = random_set(seed, n, 5)
    before = neighbours.BLOCK
    neighbours.BLOCK = block
    try:
        row, distance = nearest(x, metric)
    finally:
        neighbours.BLOCK = before
    dist = literal_distances(x, metric)
    assume(not close_call(dist, x, x, metric))
    assert np.array_equal(row, dist.argmin(1))
    np.testing.assert_allclose(distance, dist.min(1), rtol=1e-4, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 50), st.integers(1, 9))
def test_the_first_of_equal_neighbours(seed: int, n: int, block: int) -> None:
    """Whole numbers have exact products, so ties are ties."""
    x = np.random.default_rng(seed).integers(-2, 3, (n, 2)).astype(np.float32)
    before = neighbours.BLOCK
    neighbours.BLOCK = block
    try:
        row, _ = nearest(x, "euclidean")
    finally:
        neighbours.BLOCK = before
    dist = ((x[:, None] - x[None]) ** 2).sum(2)
    np.fill_diagonal(dist, np.inf)
    assert np.array_equal(row, dist.argmin(1))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 200))
def test_means_of_clusters(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    x, labels = random_set(seed, n, 7), by_appearance(rng.integers(0, 5, n))
    found = means(x, labels, labels.max() + 1)
    slow = np.stack([x[labels == c].astype(np.float64).mean(0) for c in range(labels.max() + 1)])
    np.testing.assert_allclose(found, slow, rtol=1e-6, atol=1e-6)


def test_components_of_a_chain() -> None:
    kappa = np.array([1, 2, 3, 2, 5, 4])
    assert components(kappa, np.ones(6, bool)).tolist() == [0, 0, 0, 0, 1, 1]
    assert components(kappa, np.array([True, False, True, True, False, True])).tolist() == [0, 0, 1, 1, 2, 2]
