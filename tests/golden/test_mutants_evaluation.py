"""Evaluation where a slip is easy: mirror images, and the legacy gallery of Liu et al. 2022."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from visard.evaluation.benchmarks import ten_folds
from visard.evaluation.identification import identify
from visard.evaluation.protocols import personal_search_legacy
from visard.evaluation.roc import allowed
from visard.learning.features import embed_pictures


class Corner(nn.Module):
    """The feature of a picture is the red of its upper left corner."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0, 0, :1]


def test_the_mirror_image_is_left_and_right() -> None:
    """Not red and blue, and not up and down: red is 1 at the upper left and 0.6 at the upper right."""
    picture = np.zeros((1, 2, 2, 3), np.uint8)
    picture[0, 0, 0] = (255, 0, 51)  # as the network sees it: 1, -1, -0.6
    picture[0, 0, 1] = (204, 0, 0)
    assert float(embed_pictures(Corner(), picture)[0, 0]) == pytest.approx(1.0)
    assert float(embed_pictures(Corner(), picture, flip=True)[0, 0]) == pytest.approx(1.0 + 0.6)
    assert torch.is_grad_enabled()


def test_the_legacy_gallery_is_not_renormalised() -> None:
    """Person 1 has two pictures at right angles: the mean of both is 0.71 long, and so are its scores.

    Its probe lies right between: 0.71 with the mean as it is, 1 with the mean at length one. A stranger scores 0.8
    with person 2, which is the threshold.
    """
    gallery = np.array([[1, 0, 0], [0, 5, 0], [0, 0, 1], [0, 0, 2]], np.float32)
    probes = np.array([[3, 3, 0], [0.6, 0, 0.8]], np.float32)
    found = personal_search_legacy(gallery, np.array([1, 1, 2, 2]), probes, np.array([1, 99]), fpir=(0.5,))
    (point,) = found.tpir
    assert point.threshold == pytest.approx(0.8)
    assert point.tpir == 0.0
    nearer = np.array([[3, 3, 0], [0.8, 0, 0.6]], np.float32)  # the stranger scores 0.6 with person 2, 0.4 with 1
    (point,) = personal_search_legacy(gallery, np.array([1, 1, 2, 2]), nearer, np.array([1, 99]), fpir=(0.5,)).tpir
    assert point.threshold == pytest.approx(0.6)
    assert point.tpir == 1.0


def test_a_legacy_mate_at_the_threshold_is_missed() -> None:
    """The mate and the stranger have the very same picture."""
    gallery, probes = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 0.0], [1.0, 0.0]])
    (point,) = personal_search_legacy(gallery, np.array([1, 2]), probes, np.array([1, 99]), fpir=(0.5,)).tpir
    assert point.threshold == 1.0
    assert point.tpir == 0.0


def test_the_distance_of_a_rate_lies_between_those_of_the_grid() -> None:
    """Two folds, FAR 0.1. Of the second fold one of four impostors is between 0.500 and 0.501.

    So its FAR rises from 0 to 0.25 there and is 0.1 at 0.5004, which accepts 0.5002 of the first fold and not 0.5007.
    All impostors of the first fold are at 3: its FAR rises to 1 behind that, and all of the second are accepted.
    """
    first, second = [0.5002, 0.5007, 3.0, 3.0, 3.0, 3.0], [0.1, 0.1, 0.5005, 2.0, 2.0, 2.0]
    same = np.array([True, True, False, False, False, False] * 2)
    found = ten_folds(np.array(first + second), same, np.repeat([0, 1], 6), far=0.1, rates=(0.25,))
    assert found.fold_tar == (0.5, 1.0)
    assert found.fold_far == (0.0, 1.0)
    assert found.tar == 0.75
    # the ROC of all 4 x 8: only 0.5007 is further than an impostor; to accept two of them would accept four
    assert found.roc.auc == pytest.approx(31 / 32)
    (point,) = found.roc.tar
    assert point.tar == 1.0
    assert point.impostors_accepted == 1


def test_a_person_with_more_pictures_is_not_nearer() -> None:
    """The template of two pictures is as long as that of one: 0.6 against 0.8, not 1.2 against 0.8."""
    found = identify(
        np.array([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]]), np.array([1, 1, 2]),
        np.array([[0.6, 0.8], [1.0, 0.0]]), np.array([2, 99]), ranks=(1,), fpir=(1.0,),
    )  # fmt: skip
    assert found.rank[1] == 1.0
    (point,) = found.tpir
    assert point.tpir == 1.0
    assert point.threshold == pytest.approx(0.8)


@pytest.mark.parametrize(("below", "total", "k"), [(0.9, 10, 8), (23 / 30, 30, 22), (5 / 3000, 3000, 4)])
def test_a_rate_a_hair_below_k_impostors_allows_one_less(below: float, total: int, k: int) -> None:
    """The product of such a rate with their number rounds to k + 1."""
    target = math.nextafter(below, 0)
    assert target * total == k + 1
    assert allowed(target, total) == k
    assert allowed(below, total) == k + 1
