"""Parts of Kang et al. 2022 with literal numbers: kernels, the ball, the regulariser, predictions and their figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.sealed_wire import wire
from torch import Tensor, nn

from visard.data.augment import Augment
from visard.learning.mmd import Compare, median_alpha, taylor
from visard.learning.train import Training
from visard.methods.encrypted_mmd_party import Learner, Regressor, classification_metrics, mean_output


def test_taylor_coefficients_with_literal_numbers() -> None:
    """exp(-2 d) = 1 - 2 d + 4/2 d^2 - 8/6 d^3 + 16/24 d^4."""
    assert taylor(2.0, 4).c == pytest.approx((1, -2, 2, -4 / 3, 2 / 3))


def test_alpha_is_one_over_the_median() -> None:
    """Of 0, 1 and 3 the squared distances are 1, 4 and 9."""
    assert median_alpha(torch.tensor([[0.0], [1.0], [3.0]])) == pytest.approx(1 / 4)


def test_long_features_are_shortened_to_the_ball() -> None:
    """A length of 5 of 10 is half a radius; 50 is outside and comes to lie on the sphere."""
    found = Compare(unit=False, radius=10.0).inside(torch.tensor([[3.0, 4.0], [30.0, -40.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.3, 0.4], [0.6, -0.8]]), rtol=0, atol=2e-6)
    assert float(found.norm(dim=1).max()) < 1
    directed = Compare(unit=True).inside(torch.tensor([[3.0, 4.0], [30.0, -40.0]]))
    torch.testing.assert_close(directed, torch.tensor([[0.6, 0.8], [0.6, -0.8]]), rtol=0, atol=2e-6)


def test_the_regulariser_is_half_the_squared_length() -> None:
    """24 weights of 0.5 and 4 biases of 1: their squares sum to 10, and the weight decay is 0.02."""
    client = wire(1, 4).parties["s0"]
    client.state = {"theta": {"weight": torch.full((4, 6), 0.5), "bias": torch.ones(4)}}
    training = Training(weight_decay=0.02, augment=Augment(flip=False))
    assert Learner(client, training, Compare(), None, False, 0.1).decay() == pytest.approx(0.5 * 0.02 * 10)


class Says(nn.Module):
    """A classifier whose logits are the same for everybody."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.said = torch.tensor([logits])

    def logits(self, features: Tensor) -> Tensor:
        return self.said.expand(len(features), -1)


def test_predictions_are_means_of_probabilities() -> None:
    """(0.8, 0.2) and (0.25, 0.75), the second from logits that are all 5 larger: mean (0.525, 0.475)."""
    heads: list[Any] = [Says(math.log(8), math.log(2)), Says(5.0, 5 + math.log(3))]
    found = mean_output(heads, torch.zeros(2, 3))
    torch.testing.assert_close(found, torch.tensor([[0.525, 0.475]] * 2))


def test_predictions_of_regressors_are_means_of_values() -> None:
    heads = [Regressor(1), Regressor(1)]
    for head, (w, b) in zip(heads, ((2.0, 1.0), (4.0, -2.0)), strict=True):
        head.linear.weight.data.fill_(w)
        head.linear.bias.data.fill_(b)
    found = mean_output(heads, torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(found, torch.tensor([[-0.5], [2.5]]))  # (1 - 2) / 2 and (3 + 2) / 2


def test_balanced_accuracy_and_weighted_f1_by_hand() -> None:
    """Class 0: 3 of 4 found, said 4 times, F1 3/4. Class 1: 1 of 2 found, said twice, F1 1/2."""
    labels, found = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 0])
    figures = classification_metrics(labels, found)
    assert figures["balanced_accuracy"] == pytest.approx((0.75 + 0.5) / 2)
    assert figures["weighted_f1"] == pytest.approx(4 / 6 * 0.75 + 2 / 6 * 0.5)
