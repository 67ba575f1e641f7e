"""The change of the true accept rate against loops over pairs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from visard.clustering.cluster import Clustering
from visard.errors import VisardError
from visard.evaluation.paired import compare
from visard.runs.before_after import BeforeAndAfter


def slow(features: np.ndarray, identity: np.ndarray, far: float) -> tuple[float, dict[int, list[bool]], list[float]]:
    """TAR, whether each genuine pair of each person is accepted, and between which two impostors the threshold is."""
    x = features / np.linalg.norm(features, axis=1, keepdims=True)
    genuine: dict[int, list[float]] = {}
    impostors = []
    for i in range(len(x)):
        for j in range(i):
            score = float(x[i].astype(np.float64) @ x[j])
            if identity[i] == identity[j]:
                genuine.setdefault(int(identity[i]), []).append(score)
            else:
                impostors.append(score)
    impostors.sort(reverse=True)
    allowed = int(far * len(impostors))
    first_refused = impostors[allowed]
    kept = {person: [s > first_refused for s in scores] for person, scores in genuine.items()}
    accepted = [a for scores in kept.values() for a in scores]
    return sum(accepted) / len(accepted), kept, [first_refused, impostors[allowed - 1]]


def test_change_and_its_interval() -> None:
    rng = np.random.default_rng(3)
    identity = np.repeat(np.arange(12), [3, 4, 5, 2, 3, 4, 5, 2, 3, 4, 5, 6])
    centres = rng.normal(size=(12, 8))
    before = (centres[identity] + 1.2 * rng.normal(size=(len(identity), 8))).astype(np.float32)
    after = (before + 0.5 * centres[identity]).astype(np.float32)
    (lax, strict) = compare(before, after, identity, (0.1, 0.02), bootstrap=4000)
    for change, far in ((lax, 0.1), (strict, 0.02)):
        old, old_pairs, below = slow(before, identity, far)
        new, new_pairs, later = slow(after, identity, far)
        assert change.far == far
        assert change.before == pytest.approx(old)
        assert change.after == pytest.approx(new)
        assert change.difference == pytest.approx(new - old)
        strangers = sum(a != b for k, a in enumerate(identity) for b in identity[:k])
        assert change.false_accepts == pytest.approx(far * strangers)
        assert below[0] < change.threshold_before <= below[1] + 1e-6
        assert later[0] < change.threshold_after <= later[1] + 1e-6
        assert below[1] < later[0] or later[1] < below[0], "they are not the same"
        draw = np.random.default_rng(99)
        spread = []
        for _ in range(4000):  # people with replacement, the same ones before and after
            people = draw.integers(12, size=12)
            pairs = sum(len(old_pairs[p]) for p in people)
            spread.append(sum(sum(new_pairs[p]) - sum(old_pairs[p]) for p in people) / pairs)
        low, high = np.quantile(spread, [0.025, 0.975])
        assert change.low == pytest.approx(float(low), abs=0.02)
        assert change.high == pytest.approx(float(high), abs=0.02)
    assert lax.difference > 0


def test_groups_of_two_sites_are_different_people() -> None:
    """An estimate over two sites, each with two groups of five: four people, and 150 pairs of strangers."""

    class View:
        labelled = False

        def __init__(self, axes: tuple[int, int]) -> None:
            rng = np.random.default_rng(axes[0])
            self.features = (10 * np.eye(8)[np.repeat(axes, 5)] + rng.normal(size=(10, 8)) / 10).astype(np.float32)

        def __len__(self) -> int:
            return len(self.features)

        def take(self, rows: np.ndarray) -> View:
            assert rows.tolist() == list(range(10))
            return self

    class Sites(BeforeAndAfter):
        def features(self, view: View) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
            return view.features, view.features

    views = {"a": SimpleNamespace(train=View((0, 1))), "b": SimpleNamespace(train=View((2, 3)))}
    world = SimpleNamespace(training=["a", "b"], clients=views)
    found = Sites(world, {}, {}, (0.1,), Clustering(d=0.9)).estimate()  # type: ignore[arg-type]
    assert (found.people, found.pictures, found.estimate) == (4, 20, True)
    assert found.changes[0].false_accepts == pytest.approx(0.1 * 150)
    assert found.changes[0].before == 1.0


def test_equal_networks_do_not_differ() -> None:
    rng = np.random.default_rng(0)
    x, identity = rng.normal(size=(20, 4)).astype(np.float32), np.repeat(np.arange(5), 4)
    (change,) = compare(x, x, identity, (0.1,))
    assert (change.difference, change.low, change.high) == (0, 0, 0)
    with pytest.raises(VisardError, match="features of 20 pictures before and of 19 after"):
        compare(x, x[:-1], identity, (0.1,))
