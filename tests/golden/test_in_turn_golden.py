"""Clients that train one after the other (FedSeq) against slow loops; clients that fail, updates that are too long."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.test_fedavg_golden import TRAINING, slow_local
from tests.toys import toy_engine, toy_world
from torch import Tensor

from visard.aggregation.optimisers import Adam
from visard.aggregation.robust import Median
from visard.aggregation.rules import Mean
from visard.config import load
from visard.core import Replies
from visard.engines.local import LocalNetwork
from visard.engines.world import generator
from visard.errors import UsageError, VisardError
from visard.learning.heads import HeadSettings
from visard.methods.fedavg import FedAvg, Server, Up

HEAD = HeadSettings("cosface", 16.0, 0.2)


def slow_rows(net: LocalNetwork, in_turn: int) -> list[list[str]]:
    """Which clients follow which in the first round."""
    rng = generator(net.world.seed, "federate", 0, "server")
    net.sample(1.0)  # the method draws its clients first
    torch.randperm(len(net.clients), generator=rng)
    order = [net.clients[i] for i in torch.randperm(len(net.clients), generator=rng).tolist()]
    count = math.ceil(len(order) / in_turn)
    rows: list[list[str]] = [[] for _ in range(count)]
    for place, client in enumerate(order):
        rows[place % count].append(client)
    return rows


def slow_round(net: LocalNetwork, method: FedAvg, s: Server, fails: str = "") -> tuple[dict[str, Tensor], Tensor]:
    """The plain mean over rows, each of which is a loop over its clients; theta and W."""
    ends = []
    rows = slow_rows(net, method.in_turn)
    longest = max(len(row) for row in rows)
    for row in rows:
        now = s
        for place, client in enumerate(row):
            if client != fails:
                ask = longest - len(row) + place + 1  # a shorter row begins later, so that all end together
                theta, W = slow_local(net, method, client, now, 0.05, ask)
                now = replace(now, theta=theta, W=W if s.W is not None else None)
        ends.append((now.theta, now.W if now.W is not None else torch.zeros(1)))
    theta = {
        k: sum(end[k].double() for end, _ in ends) / len(ends)
        if v.is_floating_point()
        else torch.stack([end[k] for end, _ in ends]).max()
        for k, v in s.theta.items()
    }
    return theta, torch.stack([W.double() for _, W in ends]).mean(0)  # type: ignore[return-value]


@pytest.mark.parametrize("share_head", [False, True])
@pytest.mark.parametrize(("clients", "in_turn"), [(3, 3), (3, 2), (4, 2), (2, 5)])
def test_one_round(tmp_path: Path, clients: int, in_turn: int, share_head: bool) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path, clients=clients))
    method = FedAvg(rounds=3, training=TRAINING, head=HEAD, in_turn=in_turn, share_head=share_head)
    start = method.start(net.world.setup())
    expected, W = slow_round(net, method, start)
    net.begin("federate", 0)
    after = method.round(start, net)
    for key, value in after.theta.items():
        torch.testing.assert_close(value.double(), expected[key].double(), rtol=1e-3, atol=1e-4)
    if share_head:
        assert after.W is not None
        torch.testing.assert_close(after.W.double(), W, rtol=1e-3, atol=1e-4)
    assert net.traffic.replied == clients
    drawn = net.traffic.figures["samples"]
    net.begin("federate", 0)
    replace(method, in_turn=1).round(start, net)
    assert drawn == net.traffic.figures["samples"], "all clients count in what is logged, not only the last ones"


def test_rows_differ_from_round_to_round(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path, clients=4))
    method = FedAvg(rounds=9, training=TRAINING, head=HEAD, in_turn=4)
    s, last = method.start(net.world.setup()), set()
    reduce: Any = net.reduce

    def watched(step: Any, messages: Any, **more: Any) -> Any:
        last.update(messages)
        return reduce(step, messages, **more)

    net.reduce = watched  # type: ignore[method-assign]
    for r in range(9):
        net.begin("federate", r)
        s = method.round(s, net)
    assert len(last) > 1, "not always the same client has the last word"


def test_a_client_that_fails_is_passed_over(tmp_path: Path) -> None:
    world = toy_world(tmp_path, clients=3)
    world.min_replies = 0.0
    net = toy_engine(tmp_path, world)
    method = FedAvg(rounds=3, training=TRAINING, head=HEAD, in_turn=3)
    start = method.start(net.world.setup())
    (row,) = slow_rows(net, 3)
    expected, _ = slow_round(net, method, start, fails=row[1])
    ask: Any = net._ask

    def failing(step: Any, messages: Any, *more: Any) -> Replies[Up]:
        return Replies({c: up for c, up in ask(step, messages, *more).items() if c != row[1]})

    net._ask = failing  # type: ignore[method-assign]
    net.begin("federate", 0)
    after = method.round(start, net)
    for key, value in after.theta.items():
        torch.testing.assert_close(value.double(), expected[key].double(), rtol=1e-3, atol=1e-4)


def test_updates_that_are_handed_on_keep_the_limits(tmp_path: Path) -> None:
    """Three rows of two; the first client of one row takes a step a thousand times too long."""
    world = toy_world(tmp_path, clients=6, aggregation=Mean(bound=2.0))
    net = toy_engine(tmp_path, world)
    method = FedAvg(rounds=3, training=replace(TRAINING, lr=3.0), head=HEAD, in_turn=2)
    start = method.start(net.world.setup())
    hostile = slow_rows(net, 2)[0][0]
    sent = start.theta
    replies: Any = net.replies

    def poisoned(step: Any, requests: Any) -> Any:
        for reply in replies(step, requests):
            if reply.client == hostile:
                long = {k: v + 1000.0 if v.is_floating_point() else v for k, v in reply.value.theta.items()}
                reply = replace(reply, value=replace(reply.value, theta=long))
            yield reply

    net.replies = poisoned  # type: ignore[method-assign]
    handed: dict[str, Up] = {}
    hand_on: Any = net.hand_on

    def watched(step: Any, messages: Any, **more: Any) -> Any:
        found = hand_on(step, messages, **more)
        handed.update(found)
        return found

    net.hand_on = watched  # type: ignore[method-assign]
    net.begin("federate", 0)
    method.round(start, net)

    def length(up: Up) -> float:
        squares = [
            float(((up.theta[k] - v).double() ** 2).sum())
            for k, v in sent.items()
            if "running" not in k and "num" not in k
        ]
        return math.sqrt(sum(squares))

    lengths = sorted(length(up) for up in handed.values())
    assert len(lengths) == 3
    assert length(handed[hostile]) == pytest.approx(2.0 * lengths[1], rel=1e-3), "twice the median, no more"
    named = [p["client"] for p in net.traffic.problems if p["event"] == "far"]
    assert named[:2] == [hostile] * 2, "its weights and its statistics, before the others' of the average"


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (Mean(secure=True), "aggregation.secure"),
        (Mean(optimiser=Adam()), "aggregation.optimiser = adam"),
        (Median(), "aggregation.rule = median"),
    ],
)
def test_more_than_a_mean_is_refused(tmp_path: Path, rule: Any, named: str) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path, clients=2, aggregation=rule))
    method = FedAvg(rounds=3, training=TRAINING, head=HEAD, in_turn=2)
    net.begin("federate", 0)
    with pytest.raises(VisardError, match=f"local of fedavg hands on single replies: it goes without {named}"):
        method.round(method.start(net.world.setup()), net)


@pytest.mark.parametrize(
    "setting",
    ["aggregation.secure=true", "aggregation.dp.noise=1", "aggregation.optimiser=adam", "aggregation.rule=median"],
)
def test_such_settings_are_refused_before_a_run(setting: str) -> None:
    with pytest.raises(
        UsageError, match=r"method\.in_turn: clients go on from the weights of single others, so leave out"
    ):
        load("fedavg", ["method.in_turn=2", setting])
