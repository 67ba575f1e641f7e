"""Networks for readings: shapes, and a standardisation that stays that of the first training."""

from __future__ import annotations

import pytest
import torch
from tests.toys import weighted_mean

from visard.errors import UsageError
from visard.models import build, default_embedding
from visard.models.sensors import SEEN, Standardise


def test_shapes() -> None:
    assert build("cnn_gru", embedding=4, size=16 * 400)(torch.zeros(3, 16, 20, 20)).shape == (3, 4)
    assert build("mlp", embedding=4, size=10)(torch.zeros(3, 10)).shape == (3, 4)
    assert build("mlp128", size=10)(torch.zeros(3, 2, 5)).shape == (3, default_embedding("mlp128"))
    with pytest.raises(UsageError, match="frames of 20 x 20"):
        build("cnn_gru", size=401)
    with pytest.raises(UsageError, match="did you mean 'cnn_gru'"):
        build("cnn-gru")


def test_statistics_of_the_first_batches_stay() -> None:
    torch.manual_seed(0)
    x = torch.randn(SEEN * 32, 3) * torch.tensor([1.0, 5.0, 0.2]) + torch.tensor([0.0, 3.0, -1.0])
    layer = Standardise(3)
    assert torch.equal(layer.eval()(x[:4]), x[:4]), "nothing is known yet"
    layer.train()
    for start in range(0, len(x), 32):
        layer(x[start : start + 32])
    out = layer.eval()(x)
    torch.testing.assert_close(out.mean(0), torch.zeros(3), atol=0.02, rtol=0)
    torch.testing.assert_close(out.std(0), torch.ones(3), atol=0.03, rtol=0)
    before = layer.mean.clone()
    layer.train()(x[:32] + 100)
    assert torch.equal(layer.mean, before), "a target does not change them"
    assert float(layer(x + 1e6).abs().max()) == 5.0


def test_the_average_of_two_has_the_statistics_of_both_together() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(32, 2), torch.randn(32, 2) + 4
    layers = [Standardise(2), Standardise(2)]
    for layer, x in zip(layers, (a, b), strict=True):
        layer.train()(x)
    mean = weighted_mean([(layer.state_dict(), 1) for layer in layers])
    both = torch.cat([a, b])
    torch.testing.assert_close(mean["mean"], both.mean(0))
    torch.testing.assert_close(mean["square"] - mean["mean"] ** 2, both.var(0, unbiased=False))
