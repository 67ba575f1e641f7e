"""Verification on pair lists and on all pairs, pair lists themselves, bootstrap intervals, client summaries."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from visard.errors import UsageError, VisardError
from visard.evaluation.metrics import jain_index, summarise
from visard.evaluation.protocols import make_pairs
from visard.evaluation.scores import roc_of
from visard.evaluation.verification import (
    DISTANCES,
    best_threshold,
    bootstrap_share,
    consecutive,
    draws,
    held_out,
    pair_scores,
    pair_weights,
    verify_all,
    verify_pairs,
    weighted_metrics,
)


def faces(n: int = 400, people: int = 40, dim: int = 16, noise: float = 1.2, seed: int = 0):
    rng = np.random.default_rng(seed)
    identity = np.arange(n) % people
    centre = rng.standard_normal((people, dim))
    return (centre[identity] + noise * rng.standard_normal((n, dim))).astype(np.float32), identity


def fold_accuracy(scores, same, folds: int = 10):
    distance = 2.0 - 2.0 * scores.astype(np.float64)
    (accuracy,), (chosen,) = held_out(distance, same, np.ones((1, len(scores))), consecutive(len(scores), folds))
    return accuracy, DISTANCES[chosen]


def slow_folds(scores, same, folds: int):
    """The LFW protocol by plain loops: 400 distances, the first that is best on the other folds."""
    n = len(scores)
    sizes = [n // folds + (k < n % folds) for k in range(folds)]
    starts = [sum(sizes[:k]) for k in range(folds)]
    accuracy, chosen = [], []
    for start, size in zip(starts, sizes, strict=True):
        test = set(range(start, start + size))
        best, distance = -1, None
        for d in np.arange(0, 4, 0.01):
            right = sum((2 - 2 * float(scores[p]) < d) == same[p] for p in range(n) if p not in test)
            if right > best:
                best, distance = right, d
        accuracy.append(sum((2 - 2 * float(scores[p]) < distance) == same[p] for p in test) / size)
        chosen.append(distance)
    return accuracy, chosen


@pytest.mark.parametrize(("count", "folds"), [(40, 10), (43, 10), (12, 3)])
def test_fold_accuracy_is_the_lfw_protocol(count: int, folds: int) -> None:
    rng = np.random.default_rng(count)
    same = rng.random(count) < 0.5
    scores = np.clip(0.4 * same + 0.3 * rng.standard_normal(count), -1, 1).astype(np.float32)
    scores[:6] = np.float32(0.5)  # squared distance 1.0 sits on the grid
    accuracy, distance = fold_accuracy(scores, same, folds)
    expected = slow_folds(scores, same, folds)
    assert accuracy == pytest.approx(expected[0], abs=1e-15)
    assert distance == pytest.approx(expected[1], abs=1e-15)


def test_best_threshold_is_best() -> None:
    rng = np.random.default_rng(0)
    for trial in range(30):
        same = rng.random(25) < (0.5 if trial else 0.0)
        scores = (rng.integers(-5, 6, size=25) / 5).astype(np.float32)
        accuracy, threshold = best_threshold(scores, same)
        assert accuracy == np.mean((scores >= threshold) == same)
        assert accuracy == max(np.mean((scores >= t) == same) for t in [*scores, 2.0])


def test_verify_pairs_reports_the_parts() -> None:
    features, identity = faces()
    chosen = make_pairs(identity, 600, seed=1)
    result = verify_pairs(features, chosen.pairs, chosen.same, identity=identity, bootstrap=50)
    scores = pair_scores(features, chosen.pairs)
    roc = roc_of(scores[chosen.same], scores[~chosen.same], far=(0.1, 0.01, 0.001))
    assert (result.tar, result.eer, result.auc, result.curve) == (roc.tar, roc.eer, roc.auc, roc.curve)
    folds, _ = fold_accuracy(scores, chosen.same)
    assert result.accuracy == pytest.approx(folds.mean())
    assert result.accuracy_std == pytest.approx(folds.std(ddof=0))
    assert len(result.fold_accuracy) == 10
    assert result.best_accuracy is not None
    assert result.best_accuracy >= result.accuracy
    assert result.intervals is not None
    assert set(result.intervals) == {"accuracy", "auc", "best", "eer", "tar/0.1", "tar/0.01", "tar/0.001"}
    assert all(interval.unit == "identity" for interval in result.intervals.values())
    for name, value in (("auc", result.auc), ("accuracy", result.accuracy), ("eer", result.eer)):
        assert result.intervals[name].low <= value <= result.intervals[name].high
    again = verify_pairs(features, chosen.pairs, chosen.same, identity=identity, bootstrap=50)
    assert json.dumps(again.to_dict(), allow_nan=False) == json.dumps(result.to_dict(), allow_nan=False)


def test_pair_scores_are_cosines() -> None:
    features, _ = faces(30)
    pairs = np.random.default_rng(0).integers(30, size=(50, 2))
    for score, (i, j) in zip(pair_scores(features, pairs), pairs, strict=True):
        a, b = features[i].astype(float), features[j].astype(float)
        assert score == pytest.approx(a @ b / math.sqrt((a @ a) * (b @ b)), abs=1e-6)


def test_verify_all_with_bootstrap() -> None:
    features, identity = faces(300, 30)
    result = verify_all(features, identity, far=(0.1, 0.01), bootstrap=300)
    assert result.intervals is not None
    for point in result.tar:
        interval = result.intervals[f"tar/{point.far:g}"]
        assert interval.low < point.tar < interval.high
    assert result.accuracy is None
    assert verify_all(features, identity).intervals is None
    json.dumps(result.to_dict(), allow_nan=False)


def test_weights_of_one_give_the_plain_figures() -> None:
    rng = np.random.default_rng(0)
    same = rng.random(200) < 0.4
    scores = (rng.integers(-20, 21, size=200) / 20).astype(np.float32)
    far = (0.5, 0.1, 0.01)
    found = weighted_metrics(scores, same, np.ones((2, 200)), far)
    roc = roc_of(scores[same], scores[~same], far=far)
    assert found["auc"] == pytest.approx([roc.auc] * 2, abs=1e-12)
    assert found["eer"] == pytest.approx([roc.eer] * 2, abs=1e-12)
    assert found["best"] == pytest.approx([best_threshold(scores, same)[0]] * 2)
    for point in roc.tar:
        assert found[f"tar/{point.far:g}"] == pytest.approx([point.tar] * 2)


def test_weights_stand_for_repeated_pairs() -> None:
    rng = np.random.default_rng(1)
    same = rng.random(60) < 0.5
    scores = rng.uniform(-1, 1, 60).astype(np.float32)
    weights = rng.integers(0, 4, size=(3, 60)).astype(float)
    found = weighted_metrics(scores, same, weights, (0.2,))
    for row, w in enumerate(weights.astype(int)):
        s, g = np.repeat(scores, w), np.repeat(same, w)
        roc = roc_of(s[g], s[~g], far=(0.2,))
        assert found["auc"][row] == pytest.approx(roc.auc, abs=1e-12)
        assert found["eer"][row] == pytest.approx(roc.eer, abs=1e-12)
        assert found["tar/0.2"][row] == pytest.approx(roc.tar[0].tar)


def test_identity_weights_multiply() -> None:
    owners = np.array([[7, 7], [7, 9], [9, 9], [9, 4], [4, 7]])
    same = owners[:, 0] == owners[:, 1]
    weights = np.concatenate(list(pair_weights(same, owners, 40, seed=3)))
    drawn = draws(np.random.default_rng(3), 3, 40)  # persons 4, 7, 9
    assert (drawn.sum(axis=1) == 3).all()
    expected = [
        drawn[:, 1],
        drawn[:, 1] * drawn[:, 2],
        drawn[:, 2],
        drawn[:, 2] * drawn[:, 0],
        drawn[:, 0] * drawn[:, 1],
    ]
    assert np.array_equal(weights, np.stack(expected, axis=1))
    pairs = np.concatenate(list(pair_weights(same, None, 40, seed=3)))
    assert (pairs[:, same].sum(axis=1) == 2).all()
    assert (pairs[:, ~same].sum(axis=1) == 3).all()


def test_identity_bootstrap_is_wider_when_persons_differ() -> None:
    hits = np.array([100, 0] * 20)
    totals = np.full(40, 100)
    by_person = bootstrap_share(hits, totals, 400, 0)
    by_pair = bootstrap_share(np.repeat([1, 0], 2000), np.ones(4000, int), 400, 0)
    assert by_person.high - by_person.low > 5 * (by_pair.high - by_pair.low)


@pytest.mark.parametrize(
    ("count", "fraction", "people"), [(600, 0.5, 60), (601, 0.3, 60), (100, 1.0, 60), (95, 0.0, 30)]
)
def test_make_pairs_keeps_its_promises(count: int, fraction: float, people: int) -> None:
    identity = np.random.default_rng(2).integers(people, size=500)
    chosen = make_pairs(identity, count, seed=5, same_fraction=fraction)
    assert len(chosen.pairs) == len(chosen.same) == len(chosen.fold) == count
    assert np.array_equal(identity[chosen.pairs[:, 0]] == identity[chosen.pairs[:, 1]], chosen.same)
    assert (chosen.pairs[:, 0] != chosen.pairs[:, 1]).all()
    assert len(np.unique(np.sort(chosen.pairs, axis=1), axis=0)) == count
    assert chosen.same.sum() == round(count * fraction)
    assert chosen.disjoint
    owners = [set(identity[chosen.pairs[chosen.fold == k]].ravel()) for k in range(10)]
    assert all(not (a & b) for n, a in enumerate(owners) for b in owners[:n])
    assert np.array_equal(np.bincount(chosen.fold), [len(p) for p in np.array_split(np.arange(count), 10)])
    again = make_pairs(identity, count, seed=5, same_fraction=fraction)
    assert np.array_equal(again.pairs, chosen.pairs)
    assert not np.array_equal(make_pairs(identity, count, seed=6, same_fraction=fraction).pairs, chosen.pairs)


def test_make_pairs_with_few_persons_shares_them() -> None:
    identity = np.repeat(np.arange(3), 10)
    chosen = make_pairs(identity, 100)
    assert not chosen.disjoint
    assert len(np.unique(np.sort(chosen.pairs, axis=1), axis=0)) == 100
    everything = make_pairs(identity, 435, same_fraction=135 / 435)  # all pairs there are
    assert len(np.unique(np.sort(everything.pairs, axis=1), axis=0)) == 435


def test_make_pairs_draws_uniformly() -> None:
    identity = np.array([0] * 4 + [1] * 3)
    seen = np.zeros((7, 7), int)
    for seed in range(600):
        for i, j in np.sort(make_pairs(identity, 4, seed=seed, folds=1).pairs, axis=1):
            seen[i, j] += 1
    genuine = [seen[i, j] for i in range(7) for j in range(i + 1, 7) if identity[i] == identity[j]]
    impostor = [seen[i, j] for i in range(7) for j in range(i + 1, 7) if identity[i] != identity[j]]
    assert sum(genuine) == sum(impostor) == 1200
    assert np.abs(np.array(genuine) - 1200 / 9).max() < 60  # five standard deviations
    assert np.abs(np.array(impostor) - 1200 / 12).max() < 50


GOOD, IDS = faces(20, 5)
PAIRS = np.stack([np.arange(10), np.arange(10, 20)], axis=1)
SAME = IDS[PAIRS[:, 0]] == IDS[PAIRS[:, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_pairs(np.arange(50), 20), "every identity has only one picture"),
        (lambda: make_pairs(np.repeat(np.arange(5), 2), 100), "50 genuine pairs were asked for, the set has 5"),
        (lambda: make_pairs(np.zeros(30, int), 20), "10 impostor pairs were asked for, the set has 0"),
        (lambda: make_pairs(IDS, 5), "cannot fill 10 folds"),
        (lambda: make_pairs(IDS, 20, same_fraction=1.5), "same_fraction"),
        (lambda: make_pairs(IDS.astype(float), 20), "expected integers"),
        (lambda: verify_pairs(GOOD, PAIRS + 15, SAME), "pair 0 points outside"),
        (lambda: verify_pairs(GOOD, PAIRS - 1, SAME), "pair 0 points outside"),
        (lambda: verify_pairs(GOOD, PAIRS[:, :1], SAME), "expected integers of shape"),
        (lambda: verify_pairs(GOOD, PAIRS, SAME[:5]), "expected 10 booleans"),
        (lambda: verify_pairs(GOOD, PAIRS, SAME.astype(int)), "expected 10 booleans"),
        (lambda: verify_pairs(GOOD, PAIRS, np.ones(10, bool)), "no impostor pairs"),
        (lambda: verify_pairs(GOOD, PAIRS, np.arange(10) < 5, identity=IDS), "contradicts the identities"),
        (lambda: verify_pairs(GOOD, PAIRS, np.arange(10) < 5, folds=11), "folds: 11"),
        (lambda: summarise({}), "no clients"),
    ],
)
def test_bad_input_is_one_line(call, message: str) -> None:
    with pytest.raises(VisardError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_wrong_use_has_its_own_kind() -> None:
    with pytest.raises(UsageError):
        make_pairs(IDS, 5)


def test_summary_of_clients() -> None:
    found = summarise(
        {
            "b": {"tar": 0.5, "lfw/eer": 0.2, "rank1": None},
            "a": {"tar": 0.9, "lfw/eer": 0.1, "rank1": math.nan},
            "c": {"tar": 0.7, "lfw/eer": 0.3},
            "d": {"lfw/eer": 0.3},
        }
    )
    assert set(found) == {"tar", "lfw/eer"}
    tar, eer = found["tar"], found["lfw/eer"]
    assert (tar.worst_client, tar.best_client, tar.missing, tar.clients) == ("b", "a", ("d",), 3)
    assert (eer.worst_client, eer.best_client, eer.worst, eer.lower_is_better) == ("c", "a", 0.3, True)
    assert tar.mean == pytest.approx(0.7)
    assert tar.std == pytest.approx(math.sqrt(0.08 / 3))
    assert tar.gap == pytest.approx(0.4)
    assert tar.jain == pytest.approx(2.1**2 / (3 * (0.25 + 0.81 + 0.49)))
    assert summarise({"a": {"tar": 0.5}}, ddof=1)["tar"].to_dict()["std"] is None
    assert summarise({"a": {"x": 1.0}, "b": {"x": 3.0}}, ddof=1)["x"].std == pytest.approx(math.sqrt(2))


def test_jain_index() -> None:
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0, 0.0]) == 1.0
    assert jain_index([1e-200, 1e-200]) == pytest.approx(1.0)
    assert jain_index([-1.0, 1.0]) is None
