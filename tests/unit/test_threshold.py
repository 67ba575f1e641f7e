"""The distance that is chosen without labels."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from tests.unit.test_clusters import people

from visard.clustering import finch
from visard.clustering.cluster import Clustering, cluster, prepare
from visard.clustering.finch import cfinch, choose_d, separation
from visard.clustering.quality import quality


def slow_separation(u: np.ndarray, labels: np.ndarray) -> float:
    values = []
    for i in range(len(u)):
        own = [j for j in range(len(u)) if labels[j] == labels[i] and j != i]
        if not own:
            values.append(0.0)
            continue
        others = [np.flatnonzero(labels == c) for c in set(labels.tolist()) - {labels[i]}]
        a, *b = (1 - u[i] @ m / np.linalg.norm(m) for m in (u[rows].mean(0) for rows in (own, *others)))
        values.append((min(b) - a) / max(a, min(b)))
    return float(np.mean(values))


@pytest.mark.parametrize("seed", range(5))
def test_separation_by_loops(seed: int) -> None:
    u = prepare(people(6, 5, noise=0.8, seed=seed)[0])
    for d in (0.4, 0.8, 1.0):
        level = cfinch(u, d, "chord")[-1]
        expected = slow_separation(u.astype(np.float64), level.labels) if level.clusters > 1 else 0.0
        for block in (1, 7, 1024):
            assert separation(u, level.labels, level.clusters, block) == pytest.approx(expected, abs=1e-5)


def test_separation_of_many_pictures_is_judged_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    u = prepare(people(80, 10, noise=0.8, seed=1)[0])
    level = cfinch(u, 0.8, "chord")[-1]
    of_all = separation(u, level.labels, level.clusters)
    monkeypatch.setattr(finch, "JUDGED", 300)
    sampled = separation(u, level.labels, level.clusters)
    assert sampled != of_all
    assert sampled == pytest.approx(of_all, abs=0.05)


@pytest.mark.parametrize("noise", [0.2, 0.5, 0.8])
def test_the_chosen_distance_is_near_the_best(noise: float) -> None:
    x, identity = people(25, 10, noise=2 * noise, seed=3)
    u = prepare(x, centre=True)
    found = cluster(x, Clustering(min_size=1))
    best = max(
        quality(cfinch(u, d, "chord")[-1].labels, identity).pairwise_f for d in np.arange(0.3, 1.35, 0.05).tolist()
    )
    assert quality(found.labels, identity).pairwise_f > 0.85 * best
    assert found.d == choose_d(u)


def test_few_or_equal_vectors() -> None:
    assert choose_d(np.eye(2, dtype=np.float32)) == 1.0
    same = np.tile(np.array([[1.0, 0.0]], np.float32), (5, 1))
    assert choose_d(same) > 0
    assert cluster(same, Clustering(centre=False)).clusters == 1
    assert separation(same, np.zeros(5, np.int64), 1) == 0


MEMORY = """
import re, numpy as np
from pathlib import Path
from visard.clustering.cluster import prepare
from visard.clustering.finch import separation
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
u, labels = prepare(np.random.default_rng(0).standard_normal((16_000, 8), np.float32)), np.arange(16_000) // 2
separation(u[:2000], labels[:2000], 1000)
before = peak()
separation(u, labels, 8_000)
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for the peak")
def test_memory_does_not_grow_with_the_number_of_clusters() -> None:
    """16,000 pictures in 8,000 clusters: all their products at once would be 512 MB, 4,096 rows of them 131 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40
