"""Cohorts: many clients in one pass give the network, the rows and the ledger of the clients one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import noise_faces, toy_engine, toy_network
from torch import nn

from visard.core import BoundStep, ClientId
from visard.data.faces import FaceSet
from visard.data.partition import partition
from visard.data.partition_kinds import PartitionSettings
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import size_of
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork, cohorts
from visard.engines.network import EngineNetwork
from visard.engines.pool import PoolNetwork
from visard.engines.request import Reply, Request
from visard.engines.world import World, clients_of
from visard.errors import UsageError, VisardError
from visard.learning.positive import OneStep, SpreadOut
from visard.methods.fedface import Down, FedFace, Server
from visard.numerics import Numerics
from visard.processes import Recipe

TRAINING = OneStep(lr=0.3, weight_decay=0.01, momentum=0.9)
FEDFACE = FedFace(rounds=4, training=TRAINING, spread=SpreadOut(weight=1.0, margin=0.9))


def one_identity_each(folder: str, people: int = 14) -> World:
    """One person on each client, two public people, networks with batch norm whose weights are given."""
    where = Path(folder) / "faces"
    faces = FaceSet.open(where) if where.exists() else noise_faces(where, people + 5, images=5)
    settings = PartitionSettings(
        kind="one_identity", clients=people, test_identities=3, public_identities=2, split=(1.0, 0.0, 0.0)
    )
    federation = partition(faces, settings, 0).federation(faces)
    assert federation.public is not None
    world = World(
        seed=0, clients=clients_of(federation), training=tuple(federation.training), benchmarks={},
        classes=federation.identities, embedding=8, build=toy_network, numerics=Numerics(), public=federation.public,
    )  # fmt: skip
    world.start_from = world.new_weights()
    return world


def world_and_method(folder: str) -> tuple[World, FedFace]:
    """What a worker of the pool builds."""
    return one_identity_each(folder), FEDFACE


class OneByOne(LocalNetwork):
    """As a deployment does it: every client alone."""

    replies_together = EngineNetwork.replies_together


def engine(folder: Path, world: World, kind: type[LocalNetwork] = LocalNetwork) -> LocalNetwork:
    states = Checkpoint(folder / kind.__name__, "cohort")
    return kind(world, states, Ledger(states.ledger))


def run(net: EngineNetwork, method: FedFace, rounds: int = 3) -> Server:
    s = method.start(net.world.setup())
    for r in range(rounds):
        net.begin("federate", r)
        s = method.round(s, net)
        net.states.commit(s, net.ledger.flush() if net.ledger else 0)
    return s


def assert_close(a: Server, b: Server) -> None:
    assert list(a.W) == list(b.W)
    for key, value in a.theta.items():
        torch.testing.assert_close(value, b.theta[key], rtol=1e-4, atol=2e-6)
    for client, w in a.W.items():
        torch.testing.assert_close(w, b.W[client], rtol=1e-4, atol=1e-5)


@pytest.fixture
def small_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several cohorts of a few clients, so that their average matters."""
    monkeypatch.setattr("visard.engines.local.PICTURES", 15)


@pytest.mark.usefixtures("small_cohorts")
@pytest.mark.parametrize(
    "method",
    [
        FEDFACE,
        FedFace(training=OneStep(lr=0.3, batch_size=3), participation=0.5),
        FedFace(training=TRAINING, init="random", train_vectors=False, spread=SpreadOut(weight=0.0)),
        FedFace(training=TRAINING, enrol=True, participation=0.4, spread=SpreadOut(pairs="nearest", k=3)),
    ],
    ids=["all pictures", "some pictures, half of the clients", "random fixed vectors", "enrolled"],
)
def test_a_cohort_equals_its_clients_one_by_one(tmp_path: Path, method: FedFace) -> None:
    world = one_identity_each(str(tmp_path))
    assert len(list(cohorts(world, [Request(client=c) for c in world.training]))) > 3
    together, alone = engine(tmp_path, world), engine(tmp_path, world, OneByOne)
    a, b = run(together, method), run(alone, method)
    assert_close(a, b)
    moved = max(float((a.theta[k] - world.new_weights()[k]).abs().max()) for k in a.theta)
    assert moved > 1e-3, "or the test would say nothing"
    assert together.states.ledger.read_bytes() == alone.states.ledger.read_bytes(), "the same things left"
    assert together.traffic.bytes_up == alone.traffic.bytes_up > 0
    assert together.traffic.bytes_down == alone.traffic.bytes_down
    assert together.traffic.figures == pytest.approx(alone.traffic.figures, rel=1e-3, abs=1e-5)


@contextmanager
def pool(folder: Path, world: World) -> Iterator[PoolNetwork]:
    states = Checkpoint(folder / "pool", "cohort")
    recipe = Recipe("tests.engines.test_cohort:world_and_method", {"folder": str(folder)})
    net = PoolNetwork(world, states, Ledger(states.ledger), recipe, 2)
    try:
        yield net
    finally:
        net.close()


@pytest.mark.usefixtures("small_cohorts")
@pytest.mark.usefixtures("quick_children")
def test_the_pool_shares_a_cohort_out_and_gives_the_same_bits(tmp_path: Path) -> None:
    world = one_identity_each(str(tmp_path))
    expected = run(engine(tmp_path, world), FEDFACE)
    with pool(tmp_path, world) as net:
        got = run(net, FEDFACE)
        assert net.states.ledger.read_bytes() == (tmp_path / "LocalNetwork" / "ledger.jsonl").read_bytes()
    assert all(torch.equal(got.theta[k], expected.theta[k]) for k in expected.theta)
    assert all(torch.equal(got.W[c], expected.W[c]) for c in expected.W)


@pytest.mark.usefixtures("small_cohorts")
def test_one_bad_client_of_a_cohort_loses_only_itself(tmp_path: Path) -> None:
    world = one_identity_each(str(tmp_path))
    bad = world.training[4]
    data = world.clients[bad]
    none = data.train.take([])
    world.clients[bad] = type(data)(none, none, none)
    a = run(together := engine(tmp_path, world), FEDFACE, 2)
    b = run(engine(tmp_path, world, OneByOne), FEDFACE, 2)
    assert_close(a, b)
    assert bad not in a.W
    (problem,) = together.traffic.problems
    assert problem == {"event": "missing", "client": bad, "reason": "has no training pictures", "again": True}


@pytest.mark.usefixtures("small_cohorts")
@pytest.mark.usefixtures("quick_children")
def test_a_pool_finds_the_bad_client_of_a_cohort_too(tmp_path: Path) -> None:
    world = one_identity_each(str(tmp_path))
    message = Down(world.new_weights(), None, 0.1)
    asked = dict.fromkeys(world.training, message)
    bad = world.training[2]
    asked[bad] = Down({"no": torch.zeros(1)}, None, 0.1)
    with pool(tmp_path, world) as net:
        means, ups = net.reduce(FEDFACE.local, asked, mean="theta", by="n")
    assert set(ups) == set(world.training) - {bad}
    assert "weights do not fit" in ups.missing[bad]
    assert set(means["theta"]) == set(message.theta)


def test_several_steps_and_clipping_are_done_client_by_client() -> None:
    assert FEDFACE.local.together is not None
    for training in (
        OneStep(amount=2),
        OneStep(unit="epochs"),
        OneStep(clip=1.0),
    ):
        assert FedFace(training=training).local.together is None
    assert FedFace(batch_norm="train").local.together is None


class Watched(LocalNetwork):
    """Remembers every message."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.sent: list[tuple[ClientId, Any]] = []

    def replies(self, step: BoundStep[Any, Any], requests: Sequence[Request]) -> Iterator[Reply]:
        self.sent += [(request.client, request.message) for request in requests]
        return super().replies(step, requests)

    def replies_together(self, step: BoundStep[Any, Any], requests: Sequence[Request], mean: str) -> Iterator[Reply]:
        self.sent += [(request.client, request.message) for request in requests]
        return super().replies_together(step, requests, mean)


def test_client_i_never_gets_another_row(tmp_path: Path) -> None:
    """Partial participation, and a client that is away for a while: rows stay with their owners, on both ways."""
    world = one_identity_each(str(tmp_path))
    net = engine(tmp_path, world, Watched)
    assert isinstance(net, Watched)
    method = FedFace(rounds=9, training=TRAINING, participation=0.4, spread=SpreadOut(weight=0.5, margin=0.9))
    s = method.start(world.setup())
    gone, everyone = world.training[0], net.clients
    for r in range(9):
        net.sent.clear()
        net.clients = tuple(c for c in everyone if c != gone) if 3 <= r < 6 else everyone
        net.begin("federate", r)
        before, s = s, method.round(s, net)
        asked = {c: m for c, m in net.sent if isinstance(m, Down)}
        assert 0 < len(asked) < len(everyone)
        for c, message in asked.items():
            assert set(vars(message)) == {"theta", "w", "lr"}
            if c not in before.W:
                assert message.w is None
                continue
            assert message.w is not None
            assert message.w.shape == (1, 8)
            for owner, row in before.W.items():
                assert torch.equal(message.w, row) == (owner == c)
        assert set(s.W) == set(before.W) | set(asked), "who is away keeps its row"
    assert gone in s.W
    assert net.ledger is not None
    net.ledger.flush()
    rows = [json.loads(line) for line in net.states.ledger.read_text().splitlines()]
    vectors = [row for row in rows if row[5] == "class_vectors"]
    assert vectors
    assert {row[6] for row in vectors} == {size_of(torch.zeros(1, 8))}, "one row of eight numbers"
    assert {row[4] for row in vectors} == {"w"}


def test_untrained_batch_norm_is_refused_and_one_identity_may_not_train_it(tmp_path: Path) -> None:
    world = one_identity_each(str(tmp_path))
    fresh = one_identity_each(str(tmp_path))
    fresh.start_from = None
    with pytest.raises(UsageError, match="it is untrained: give model.weights"):
        FEDFACE.start(fresh.setup())
    fresh.build = lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 8))
    FEDFACE.start(fresh.setup())  # without batch norm there is nothing to refuse
    with pytest.raises(VisardError, match="one identity alone spoils batch norm's statistics: set method.batch_norm"):
        run(engine(tmp_path, world), FedFace(training=TRAINING, batch_norm="train"))


def test_enrolling_makes_all_class_vectors_and_trains_nothing(tmp_path: Path) -> None:
    world = one_identity_each(str(tmp_path))
    s = run(engine(tmp_path, world), FedFace(training=TRAINING, enrol=True, participation=0.2), 1)
    assert set(s.W) == set(world.training)
    assert all(torch.equal(s.theta[k], v) for k, v in world.new_weights().items())


def test_frozen_statistics_stay_and_several_steps_train(tmp_path: Path) -> None:
    world = one_identity_each(str(tmp_path))
    s = run(engine(tmp_path, world), FedFace(training=OneStep(lr=0.1, amount=3), init="random"), 1)
    start = world.new_weights()
    for key, value in s.theta.items():
        kept = "running" in key or "tracked" in key
        assert torch.equal(value, start[key]) == kept or not kept
    assert not torch.equal(s.theta["0.weight"], start["0.weight"])


def test_reduce_averages_like_the_method_by_itself(tmp_path: Path) -> None:
    """`net.reduce` of a step without cohorts is the weighted mean of the replies to `net.ask`."""
    world = one_identity_each(str(tmp_path))
    net = toy_engine(tmp_path, world)
    method = FedFace(training=OneStep(lr=0.3, amount=2))
    asked = dict.fromkeys(world.training, Down(world.new_weights(), None, 0.3))
    net.begin("federate", 0)
    replies = net.ask(method.local, asked)
    net.begin("federate", 0)
    means, ups = net.reduce(method.local, asked, mean="theta", by="n")
    assert all(up.theta == {} for up in ups.values())
    n = sum(up.n for up in replies.values())
    expected = sum((up.n / n * up.theta["0.weight"].double() for up in replies.values()), torch.zeros(1).double())
    torch.testing.assert_close(means["theta"]["0.weight"].double(), expected, rtol=1e-6, atol=1e-7)
