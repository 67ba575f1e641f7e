"""Paired intervals: the same people drawn for both models; and what a report says of a change."""

from __future__ import annotations

import numpy as np
import pytest

from visard.config import EvaluationSettings
from visard.evaluation.identification import split_gallery
from visard.evaluation.metrics import describe
from visard.evaluation.paired import change, change_of_clients, resampled
from visard.evaluation.protocols import identification, verification
from visard.evaluation.scores import roc_of
from visard.evaluation.verification import draws, pair_scores
from visard.files import mapping
from visard.report.change import Change

SETTINGS = EvaluationSettings(bootstrap=50, pairs=200, far=(0.1, 0.01))
SEED = 7


def world(noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of 30 people with 6 pictures each; the people and the noise are the same for the same seed."""
    rng = np.random.default_rng(seed)
    identity = np.repeat(np.arange(30), 6)
    features = rng.normal(size=(30, 16))[identity] + noise * rng.normal(size=(180, 16))
    return features.astype(np.float32), identity


def record_of(features: np.ndarray, identity: np.ndarray) -> dict[str, object]:
    return {
        "verification": verification(features, identity, SETTINGS, SEED),
        "identification": identification(features, identity, SEED),
    }


def test_resamples_have_the_intervals_of_the_test() -> None:
    features, identity = world(1.4)
    test = record_of(features, identity)
    record, samples = mapping(test["verification"]), resampled(features, identity, test, SETTINGS, SEED)
    for name, key in (("accuracy", "accuracy"), ("tar@far=0.1", "tar/0.1"), ("tar@far=0.01", "tar/0.01")):
        low, high = np.nanquantile(samples[name], [0.025, 0.975])
        assert record["intervals"][key]["low"] == pytest.approx(low)
        assert record["intervals"][key]["high"] == pytest.approx(high)
    assert resampled(features, identity, test, EvaluationSettings(bootstrap=0), SEED) == {}


def test_the_interval_is_of_differences_in_the_same_draws() -> None:
    (one, identity), (two, _) = world(1.6), world(1.3)
    before, after = record_of(one, identity), record_of(two, identity)
    was, now = (resampled(x, identity, t, SETTINGS, SEED) for x, t in ((one, before), (two, after)))
    found = change(before, after, was, now)["tar@far=0.1"]
    # by hand: genuine pairs above the threshold of each model, person by person, drawn together
    drawn = draws(np.random.default_rng(SEED), 30, 50)
    shares = []
    for features, test in ((one, before), (two, after)):
        unit = features / np.linalg.norm(features, axis=1, keepdims=True)
        threshold = test["verification"]["tar"][0]["threshold"]  # type: ignore[index]
        hits = [
            sum(float(unit[a] @ unit[b]) >= threshold for a in range(p, p + 6) for b in range(a + 1, p + 6))
            for p in range(0, 180, 6)
        ]
        shares.append([(row * np.array(hits)).sum() / (15 * row.sum()) for row in drawn])
    low, high = np.quantile(np.array(shares[1]) - np.array(shares[0]), [0.025, 0.975])
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-9)
    assert found["difference"] == pytest.approx(found["after"] - found["before"])
    apart = np.quantile(np.array(shares[1])[::-1] - np.array(shares[0]), [0.025, 0.975])
    assert high - low < apart[1] - apart[0], "other draws for each model would make it wider"


def test_rates_without_a_threshold_are_resampled_over_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """EER and AUC of each draw, by a list in which every pair stands as often as it was drawn; also with ties."""
    features, identity = world(1.4)
    for x in (features, np.sign(features[:, :5])):  # of the second many scores are equal
        samples = resampled(x, identity, record_of(x, identity), SETTINGS, SEED)
        drawn = draws(np.random.default_rng(SEED), 30, 50).astype(int)
        one, two = np.triu_indices(len(x), 1)
        scores, same = pair_scores(x, np.column_stack([one, two])), identity[one] == identity[two]
        for row in (0, 17, 49):
            a, b = drawn[row][identity[one]], drawn[row][identity[two]]
            times = np.where(same, a, a * b)
            whole = roc_of(np.repeat(scores, times * same), np.repeat(scores, times * ~same), far=(0.1,))
            assert samples["eer"][row] == pytest.approx(whole.eer, abs=1e-9)
            assert samples["auc"][row] == pytest.approx(whole.auc, abs=1e-9)
    monkeypatch.setattr("visard.evaluation.paired.MOST_PAIRS", 180 * 179 // 2 - 1)
    assert not {"eer", "auc"} & resampled(features, identity, record_of(features, identity), SETTINGS, SEED).keys()


def test_searches_are_resampled_by_the_person_searched_for() -> None:
    features, identity = world(1.4)
    test = record_of(features, identity)
    samples, parts = resampled(features, identity, test, SETTINGS, SEED), split_gallery(identity, SEED)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    mated = [row for row in parts.probe if identity[row] not in parts.unmated]
    people = sorted({int(identity[row]) for row in mated})
    drawn = draws(np.random.default_rng(SEED), len(people), 50)
    point = mapping(test["identification"])["tpir"][-1]
    found: dict[str, list[tuple[float, bool]]] = {"rank1": [], "rank5": [], f"tpir@fpir={point['fpir']:g}": []}
    for row in mated:
        scores = unit[parts.gallery] @ unit[row]
        mate = scores[identity[parts.gallery] == identity[row]][0]
        rank, weight = int((scores >= mate).sum()), drawn[11][people.index(int(identity[row]))]
        for name, hit in zip(found, (rank <= 1, rank <= 5, rank == 1 and mate >= point["threshold"]), strict=True):
            found[name].append((weight, hit))
    for name, probes in found.items():
        by_hand = sum(w for w, hit in probes if hit) / sum(w for w, _ in probes)
        assert samples[name][11] == pytest.approx(by_hand), name


def test_a_model_does_not_differ_from_itself() -> None:
    features, identity = world(1.4)
    test = record_of(features, identity)
    samples = resampled(features, identity, test, SETTINGS, SEED)
    assert {"eer", "auc", "rank1", "accuracy", "tar@far=0.1"} <= samples.keys()
    for record in change(test, test, samples, samples).values():
        assert record["difference"] == 0
        assert record.get("low", 0) == record.get("high", 0) == 0


def test_clients_are_compared_with_themselves() -> None:
    before = {"a": {"eer": 0.3, "auc": 0.8}, "b": {"eer": 0.1}, "c": {"eer": 0.5}, "gone": {"eer": 0.9}}
    after = {"a": {"eer": 0.2, "auc": 0.7}, "b": {"eer": 0.2}, "c": {"eer": 0.2}, "new": {"eer": 0.5}}
    found = change_of_clients(before, after)
    assert found["eer"] == pytest.approx({"before": 0.3, "after": 0.2, "difference": -0.1, "clients": 3, "better": 2})
    assert found["auc"]["better"] == 0
    assert found["auc"]["clients"] == 1


@pytest.mark.parametrize(
    ("metric", "low", "high", "word"),
    [
        ("accuracy", 0.01, 0.03, "better"), ("accuracy", -0.03, -0.01, "worse"), ("eer", -0.03, -0.01, "better"),
        ("eer", 0.01, 0.02, "worse"), ("accuracy", -0.01, 0.02, "not clear"),
        ("accuracy", 0.0, 0.02, "not clear"),
    ],
)  # fmt: skip
def test_a_change_is_clear_where_its_interval_leaves_out_zero(metric: str, low: float, high: float, word: str) -> None:
    assert Change(describe(metric), 0.5, 0.5 + (low + high) / 2, low, high).verdict[1] == word
