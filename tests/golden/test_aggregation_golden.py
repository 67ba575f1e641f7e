"""Aggregation: what `Network.reduce` makes of replies, against slow loops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest
import torch
from tests.toys import Toy, ToyDown, toy_engine, toy_world
from torch import Tensor

from visard.aggregation.reduction import Reduction
from visard.aggregation.registries import RULES
from visard.aggregation.rules import Gathered, Mean, Rule
from visard.config import load
from visard.core import Client, Disclosure, Weights, client_step
from visard.errors import UsageError


@dataclass(frozen=True)
class Up:
    theta: Weights
    W: Tensor | None
    n: int


UPS = [
    Up({"a": torch.tensor([1.0, 2.0]), "count": torch.tensor(4)}, torch.tensor([[1.0]]), 1),
    Up({"a": torch.tensor([3.0, 6.0]), "count": torch.tensor(9)}, None, 3),
    Up({"a": torch.tensor([5.0, 0.0]), "count": torch.tensor(2)}, torch.tensor([[4.0]]), 4),
]


def reduced(by: object, fields: tuple[str, ...] = ("theta", "W"), ups: list[Up] = UPS) -> dict[str, object]:
    reduction = Reduction(Mean(), fields, by, None)  # type: ignore[arg-type]
    rest = [reduction.take(f"c{i}", None, up) for i, up in enumerate(ups)]
    assert all(up.theta == {} for up in rest), "the replies are without the field"
    return reduction.result()


def test_the_mean_is_weighted_by_a_field_a_function_or_nothing() -> None:
    found = reduced("n")
    assert found["theta"]["a"].tolist() == [(1 + 9 + 20) / 8, (2 + 18 + 0) / 8]  # type: ignore[index]
    assert found["theta"]["count"] == 9, "the mean of a counter is its maximum"  # type: ignore[index]
    assert found["W"].item() == pytest.approx((1 * 1 + 4 * 4) / 5), "who lacks a field does not count for it"  # type: ignore[attr-defined]
    assert reduced(None)["theta"]["a"].tolist() == pytest.approx([3.0, 8 / 3])  # type: ignore[index]
    twice = reduced(lambda up: 2.0 * up.n)
    assert twice["theta"]["a"].tolist() == found["theta"]["a"].tolist()  # type: ignore[index]


def test_a_field_that_nobody_has_is_none() -> None:
    assert reduced("n", ups=[replace(up, W=None) for up in UPS])["W"] is None


def test_a_group_that_shares_one_value_counts_with_all_its_weight() -> None:
    shared = {"a": torch.tensor([2.0])}
    ups = [Up(shared, None, 1), Up(shared, None, 2), Up({"a": torch.tensor([8.0])}, None, 3)]
    reduction = Reduction(Mean(), ("theta",), "n", None)
    known = []
    for up in ups:
        known.append(reduction.known(up))
        reduction.take("c", None, up)
    assert known == [(), ("theta",), ()]
    assert reduction.result()["theta"]["a"].tolist() == [(2 * 3 + 8 * 3) / 6]


@dataclass(frozen=True)
class Largest(Rule):
    """The elementwise largest value, whatever the weights: to see that a run's rule is the one that is used."""

    name = "largest"
    title = "the largest"

    def begin(self, sent: Weights | None) -> Gathered:
        assert sent is None or sent["a"].shape == (2, 2)
        return _Largest()


class _Largest:
    def __init__(self) -> None:
        self.values: list[Weights] = []

    def add(self, weights: Weights, n: float) -> None:
        self.values.append(weights)

    def result(self) -> Weights:
        return {k: torch.stack([v[k] for v in self.values]).amax(0) for k in self.values[0]}


@dataclass(frozen=True)
class Numbered:
    theta: Annotated[Weights, Disclosure.weights]
    n: Annotated[int, Disclosure.count]


class Numbering(Toy):
    """Every client adds its own number to all weights."""

    @client_step
    def number(self, client: Client, msg: ToyDown) -> Numbered:
        return Numbered({"a": msg.theta["a"] + int(client.id[-1])}, len(client.data.train))


def test_the_rule_of_the_run_is_used(tmp_path: Path) -> None:
    for rule, expected in ((Mean(), None), (Largest(), 2.0)):
        net = toy_engine(tmp_path / rule.name, toy_world(tmp_path, aggregation=rule))
        down = ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)})
        means, ups = net.reduce(Numbering().number, dict.fromkeys(net.clients, down), mean="theta", by="n")
        n = {c: up.n for c, up in ups.items()}
        slow = sum(k * int(c[-1]) for c, k in n.items()) / sum(n.values()) if expected is None else expected
        torch.testing.assert_close(means["theta"]["a"], torch.full((2, 2), slow))


def test_settings_choose_the_rule_and_the_mean_goes_without_saying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES.built_in, "largest", Largest)
    chosen = load("fedavg", ["aggregation.rule=largest"])
    assert chosen.aggregation == Largest()
    assert chosen.to_dict()["aggregation"] == {"rule": "largest"}
    assert chosen.fingerprint() != load("fedavg").fingerprint()
    assert "aggregation" not in load("fedavg", ["aggregation.rule=mean"]).to_dict()
    for wrong in ("aggregation.rule=larges", "aggregation.rate=3", "aggregation=3"):
        with pytest.raises(UsageError, match="aggregation"):
            load("fedavg", [wrong])
