"""Vectors behind the interface of faces, and predictors on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score
from tests.vectors import VectorData, VectorView
from torch import nn

from visard.core import Client
from visard.data.augment import to_float
from visard.errors import VisardError
from visard.learning.heads import HeadSettings
from visard.methods.encrypted_mmd_party import Regressor, classification_metrics, mean_output, new_head, quality
from visard.numerics import Numerics


def some(n: int = 20) -> VectorData:
    rng = np.random.default_rng(0)
    return VectorData.of(rng.normal(size=(n, 3)), rng.integers(0, 2, n), 2, 0.25, 0)


def test_a_split_covers_and_does_not_overlap() -> None:
    data = some()
    assert (len(data.train), len(data.val), len(data.test)) == (15, 0, 5)
    rows = {row.tobytes() for view in (data.train, data.test) for row in view.x}
    assert len(rows) == 20
    target = VectorData.of(data.train.x, data.train.labels, 2, 1.0, 0)
    assert len(target.train) == len(target.test) == 15


def test_batches_and_masks() -> None:
    view = some().train
    assert np.array_equal(view.batch([3, 1]), view.x[[3, 1]])
    assert len(view.take(view.labels == 1)) == int((view.labels == 1).sum())
    assert torch.equal(to_float(view.batch([0])), torch.from_numpy(view.x[:1])), "floats pass as they are"


def test_bad_vectors_are_refused() -> None:
    with pytest.raises(VisardError, match="2 vectors with 3 labels"):
        VectorView(np.zeros((2, 1), np.float32), np.zeros(3, np.int64), 2)
    with pytest.raises(VisardError, match="not finite"):
        VectorView(np.full((1, 1), np.nan, np.float32), np.zeros(1, np.int64), 2)


def test_figures_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    labels, found = rng.integers(0, 4, 200), rng.integers(0, 5, 200)
    figures = classification_metrics(labels, found)
    with pytest.warns(UserWarning, match="y_pred contains classes"):
        assert figures["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, found))
    assert figures["weighted_f1"] == pytest.approx(f1_score(labels, found, average="weighted"))


def test_the_target_predicts_with_the_average_of_the_classifiers() -> None:
    heads = [new_head(HeadSettings("softmax"), 2, 3) for _ in range(2)]
    x = torch.randn(7, 3)
    expected = sum((x @ h.weight.t() + h.bias).softmax(1) for h in heads) / 2
    assert torch.allclose(mean_output(heads, x), expected, atol=1e-6)


def test_regressors_are_judged_by_their_error() -> None:
    data: Any = some()
    head = Regressor(3)
    client = Client("a", data, {}, torch.Generator(), nn.Identity, 3, Numerics(channels_last=False))
    expected = ((head.logits(torch.from_numpy(data.test.x))[:, 0].detach().numpy() - data.test.labels) ** 2).mean()
    assert quality(client, nn.Identity(), [head])["mse"] == pytest.approx(expected, rel=1e-5)
