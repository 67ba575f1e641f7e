"""Figures worked out by hand for small sets: literal numbers, one test per definition."""

from __future__ import annotations

import numpy as np
import pytest

from visard.evaluation.identification import identify
from visard.evaluation.metrics import summarise
from visard.evaluation.scores import roc_of
from visard.evaluation.verification import verify_all, verify_pairs

GENUINE = np.array([0.9, 0.8, 0.6, 0.4])
IMPOSTOR = np.array([0.7, 0.5, 0.5, 0.3, 0.2, 0.1, 0.0, -0.1, -0.2, -0.3])


def test_tar_at_far_conservative() -> None:
    """FAR <= 0.1 allows one impostor (0.7): accept >= 0.6. FAR <= 0.2: the two at 0.5 are tied, so still 0.6."""
    roc = roc_of(GENUINE, IMPOSTOR, far=(0.1, 0.2, 0.3, 0.05))
    assert [p.tar for p in roc.tar] == [0.75, 0.75, 1.0, 0.5]
    assert [p.far_reached for p in roc.tar] == [0.1, 0.1, 0.3, 0.0]
    assert [p.threshold for p in roc.tar] == [0.6, 0.6, 0.4, 0.8]


def test_equal_error_rate() -> None:
    """At 0.6: FAR 0.1, FRR 0.25; at 0.5: FAR 0.3, FRR 0.25. Between them FAR = FRR = 0.25."""
    assert roc_of(GENUINE, IMPOSTOR).eer == pytest.approx(0.25, abs=1e-15)


def test_area_under_curve() -> None:
    """0.9 and 0.8 beat 10 impostors each, 0.6 beats 9, 0.4 beats 7: 36 of 40. A tie is a half."""
    assert roc_of(GENUINE, IMPOSTOR).auc == 36 / 40
    assert roc_of([0.5], [0.5, 0.1]).auc == 0.75


def test_all_pairs_of_four_pictures() -> None:
    """Directions 0, 60, 90, 180 degrees, persons 1 1 2 2: genuine cos 60 and cos 90, impostors cos 90, 180, 30, 120."""
    angle = np.radians([0.0, 60.0, 90.0, 180.0])
    features = np.stack([np.cos(angle), np.sin(angle)], axis=1) * [[1.0], [2.0], [3.0], [4.0]]
    result = verify_all(features, np.array([1, 1, 2, 2]), far=(0.25,))
    assert (result.genuine, result.impostors) == (2, 4)
    assert result.tar[0].tar == 0.5
    assert result.tar[0].threshold == pytest.approx(0.5, abs=1e-6)
    assert result.tar[0].far_reached == 0.25


def test_fold_accuracy_by_hand() -> None:
    """Two folds; squared distances 0.5 1.5 | 0.7 1.1, same different | same same.

    Fold 1 is judged with the first distance that is best on fold 2 (just above 1.1), rightly: 2 of 2.
    Fold 2 with the first that is best on fold 1 (just above 0.5): both are called different, 0 of 2.
    """
    distance = np.array([0.5, 1.5, 0.7, 1.1])
    cosine = 1 - distance / 2
    features = np.concatenate([np.tile([[1.0, 0.0]], (4, 1)), np.stack([cosine, np.sqrt(1 - cosine**2)], axis=1)])
    pairs = np.stack([np.arange(4), np.arange(4, 8)], axis=1)
    result = verify_pairs(features, pairs, np.array([True, False, True, True]), folds=2, bootstrap=0)
    assert result.fold_accuracy == (1.0, 0.0)
    assert result.fold_distance == pytest.approx((1.11, 0.51), abs=0.0101)
    assert (result.accuracy, result.accuracy_std, result.best_accuracy) == (0.5, 0.5, 1.0)


def test_identification_by_hand() -> None:
    """Gallery at 0 and 90 degrees. Probes of person 0 at 10 and 50 degrees (rank 1, rank 2), strangers at 20 and 45."""
    angle = np.radians([10.0, 50.0, 20.0, 45.0])
    probes = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    result = identify(np.eye(2), np.array([0, 1]), probes, np.array([0, 0, 7, 8]), ranks=(1, 2), fpir=(0.5, 0.1))
    assert result.rank == {1: 0.5, 2: 1.0}
    assert [p.tpir for p in result.tpir] == [0.5, 0.5]  # cos 10 is above both strangers
    assert [p.fpir_reached for p in result.tpir] == [0.5, 0.0]
    assert result.tpir[1].threshold == pytest.approx(np.cos(np.radians(10)), abs=1e-6)


def test_mean_template_is_normalised_after_the_mean() -> None:
    """Person 0 at ±60 degrees: mean direction 0. A probe at 0 scores 1 by the mean, 0.5 by the best picture."""
    angle = np.radians([60.0, -60.0, 40.0])
    gallery = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    args = (gallery, np.array([0, 0, 1]), np.array([[1.0, 0.0]]), np.array([0]))
    assert identify(*args, ranks=(1,)).rank[1] == 1.0
    assert identify(*args, ranks=(1,), template="max").rank[1] == 0.0


def test_jain_index_by_hand() -> None:
    """(1 + 2 + 3)² / (3 · 14) = 6/7."""
    found = summarise({"a": {"x": 1.0}, "b": {"x": 2.0}, "c": {"x": 3.0}})["x"]
    assert found.jain == pytest.approx(6 / 7, abs=1e-15)
    assert found.std == pytest.approx((2 / 3) ** 0.5, abs=1e-15)
