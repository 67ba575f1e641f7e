"""Averages, robust rules and momentum of the server against Flower's own strategies, where Flower is installed.

Its adaptive optimisers are left out: they start at v = 0 and correct the bias of the first steps, the paper does not.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from visard.aggregation.optimisers import Sgd
from visard.aggregation.reduction import Reduction
from visard.aggregation.robust import Krum, Median, MultiKrum, TrimmedMean
from visard.aggregation.rules import Mean, Rule
from visard.core import Weights

flower = pytest.importorskip("flwr.serverapp.strategy", reason="visard[flower] is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flwr
COUNT = 10


@dataclass(frozen=True)
class Up:
    theta: Weights
    n: int


def replies(seed: int, equal: bool = False) -> list[Up]:
    rng = torch.Generator().manual_seed(seed)

    def weights() -> Weights:
        return {"a": torch.randn(4, 3, generator=rng), "b": torch.randn(7, generator=rng)}

    return [Up(weights(), 1 if equal else 3 * number + 1) for number in range(COUNT)]


def ours(rule: Rule, ups: list[Up]) -> Weights:
    with closing(Reduction(rule, ("theta",), "n", None)) as found:
        for number, up in enumerate(ups):
            found.take(f"c{number}", None, up)
        result: Weights = found.result()["theta"]
    return result


def theirs(strategy: Any, ups: list[Up], round: int = 1) -> Weights:
    """What one of Flower's strategies makes of the same replies."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict

    contents = [
        RecordDict({
            "arrays": ArrayRecord({k: v.clone() for k, v in up.theta.items()}),
            "metrics": MetricRecord({"num-examples": up.n}),
        })
        for up in ups
    ]  # fmt: skip
    sent = [SimpleNamespace(content=content, has_error=lambda: False) for content in contents]  # messages of a run
    arrays, _ = strategy.aggregate_train(round, sent)
    return {k: torch.from_numpy(v.numpy().copy()) for k, v in arrays.items()}


def agree(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_by_pictures_and_robust_rules(seed: int) -> None:
    ups = replies(seed)
    agree(ours(Mean(), ups), theirs(flower.FedAvg(), ups))
    agree(ours(Median(), ups), theirs(flower.FedMedian(), ups))
    agree(ours(TrimmedMean(hostile=0.2), ups), theirs(flower.FedTrimmedAvg(beta=0.2), ups))
    alike = replies(seed, equal=True)  # Flower weighs the replies that Krum chooses by pictures, visard does not
    agree(ours(Krum(hostile=0.3), alike), theirs(flower.Krum(num_malicious_nodes=3), alike))
    several = flower.MultiKrum(num_malicious_nodes=3, num_nodes_to_select=4)
    agree(ours(MultiKrum(hostile=0.3, chosen=4), alike), theirs(several, alike))


def test_momentum_of_the_server() -> None:
    from flwr.app import ArrayRecord

    strategy = flower.FedAvgM(server_learning_rate=0.7, server_momentum=0.8)
    rule, state = Sgd(lr=0.7, momentum=0.8), dict[str, Any]()
    theta = replies(99)[0].theta
    for round in range(4):
        ups = replies(round)
        strategy.current_arrays = ArrayRecord({k: v.clone() for k, v in theta.items()})
        expected = theirs(strategy, ups, round)
        theta = rule.apply(theta, ours(Mean(), ups), state)
        agree(theta, expected)
