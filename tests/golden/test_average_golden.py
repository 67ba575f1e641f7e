"""Weighted averages against literal numbers and a slow loop."""

from __future__ import annotations

import pytest
import torch
from tests.toys import weighted_mean

from visard.aggregation.rules import RunningMean
from visard.errors import VisardError
from visard.learning.weights import kept_local, without


def test_literal_numbers() -> None:
    a = {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}
    b = {"w": torch.tensor([5.0, 4.0]), "count": torch.tensor(7)}
    mean = weighted_mean([(a, 1), (b, 3)])
    assert mean["w"].tolist() == [4.0, 3.5]
    assert mean["count"].item() == 7
    assert mean["count"].dtype == torch.int64


def test_against_a_slow_loop() -> None:
    torch.manual_seed(0)
    parts = [({"w": torch.randn(4, 3)}, n) for n in (5, 1, 17, 2)]
    mean = weighted_mean(parts)["w"]
    total = sum(n for _, n in parts)
    for i in range(4):
        for j in range(3):
            expected = sum(n * float(w["w"][i, j]) for w, n in parts) / total
            assert float(mean[i, j]) == pytest.approx(expected, abs=1e-7)


def test_types_and_order_are_those_of_the_first() -> None:
    first = {"b": torch.zeros(1, dtype=torch.bfloat16), "a": torch.zeros(1)}
    mean = weighted_mean([(first, 1), ({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.bfloat16)}, 1)])
    assert list(mean) == ["b", "a"]
    assert mean["b"].dtype == torch.bfloat16
    assert mean["b"].item() == 0.5


def test_inputs_are_not_changed() -> None:
    a = {"w": torch.ones(3, dtype=torch.float64)}
    weighted_mean([(a, 2), ({"w": torch.zeros(3, dtype=torch.float64)}, 2)])
    assert a["w"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("n", [0, -1])
def test_weights_must_be_positive(n: int) -> None:
    with pytest.raises(VisardError, match="must be positive"):
        weighted_mean([({"w": torch.zeros(1)}, n)])


def test_no_clients_is_an_error() -> None:
    with pytest.raises(VisardError, match="no clients"):
        RunningMean().result()


KEYS = [
    "conv.weight",
    "bn.weight",
    "bn.bias",
    "bn.running_mean",
    "bn.running_var",
    "bn.num_batches_tracked",
    "fc.bias",
]


@pytest.mark.parametrize(
    ("policy", "stays"),
    [
        ("average", set()),
        ("parameters", {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}),
        ("local", {k for k in KEYS if k.startswith("bn.")}),
    ],
)
def test_batch_norm_policies(policy: str, stays: set[str]) -> None:
    assert kept_local(KEYS, policy) == stays  # type: ignore[arg-type]
    weights = {k: torch.zeros(1) for k in KEYS}
    assert set(without(weights, stays)) == set(KEYS) - stays
