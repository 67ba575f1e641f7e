"""Faults of single parties in a deployment, each a process with toys: what they cost, and that they cost no others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from tests.engines.deployed import Deployment, until
from tests.toys import Toy, ToyServer, toy_engine, toy_world

from visard.deployment.flower.driver import DeploymentLink
from visard.deployment.ledger_check import compare
from visard.deployment.remote import RemoteNetwork
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.runs.run import run_id

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of flwr
]

TOYS = ("client-000", "client-001", "client-002")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server and three nodes with toys."""
    there = Deployment(
        tmp_path_factory.mktemp("toys"), 4, ["1=client-000", "1=client-002", "2=client-001", "3=client-003"]
    )
    try:
        toy_world(there.folder)
        there.start_toy(1, '["client-000", "client-002"]')
        there.start_toy(2, '["client-001", "client-003"]')  # the second is not its own
        there.start_toy(4, '["client-000", "client-001", "client-002", "client-003"]')  # it has none
        there.wait_server()
        there.wait_connected("node-1", "node-2", "node-4")
        yield there
    finally:
        there.close()


def toy_rounds(net: Any, method: Toy, count: int) -> ToyServer:
    server = method.start(net.world.setup())
    for r in range(count):
        net.begin("add", r)
        server = method.round(server, net)
        net.states.commit(server, net.ledger.flush())
    return server


def toy_problems(
    there: Deployment,
    out: Path,
    faults: dict[str, str],
    forge: dict[str, str],
    rounds: int = 2,
    wait: float = 60.0,
    say: Callable[[str], None] = lambda _: None,
    between: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Any:
    """Some rounds with toys; returns the network and its problems."""
    link = DeploymentLink(there.state, wait, say)
    states = Checkpoint(out / "checkpoint", "toy", remote=True)
    told = {"method": "toy", "clients": 3, "faults": faults, "forge": forge}
    run = run_id(states.folder)
    net = RemoteNetwork(toy_world(there.folder, **changes), states, Ledger(states.ledger), link, run, told)
    link.received = net.received
    link.introduce(net.run, told)
    problems = []
    try:
        server = Toy().start(net.world.setup())
        for r in range(rounds):
            if r:
                between()
            net.begin("add", r)
            server = Toy().round(server, net)
            problems += net.traffic.problems
            states.commit(server, net.ledger.flush())  # type: ignore[union-attr]
    finally:
        net.close()
    return server, problems


def test_good_toys(tmp_path: Path, toys: Deployment) -> None:
    server, problems = toy_problems(toys, tmp_path, {}, {})
    assert not problems
    expected = toy_rounds(toy_engine(tmp_path, toy_world(toys.folder)), Toy(), 2)
    assert torch.equal(server.w, expected.w)


@pytest.mark.parametrize(
    ("fault", "forge", "says"),
    [
        ("nan", "", ["not finite"] * 2),
        ("shape", "", ["has shape (3,), expected (4,)"] * 2),
        ("raise", "", ["the disk is full"] * 2),
        ("", "undeclared", ["undeclared field 'face'"] * 2),
        ("", "old", ["it belongs to add round 0, ask 1"]),
    ],
)
def test_a_bad_client_loses_only_itself(
    tmp_path: Path, toys: Deployment, fault: str, forge: str, says: list[str]
) -> None:
    faults, forges = ({TOYS[1]: f} if f else {} for f in (fault, forge))
    _, problems = toy_problems(toys, tmp_path, faults, forges)
    assert [p["client"] for p in problems] == [TOYS[1]] * len(says)
    assert all(part in p["reason"] for part, p in zip(says, problems, strict=True))


def test_a_client_that_kills_its_worker_is_missing_and_named(tmp_path: Path, toys: Deployment) -> None:
    _, problems = toy_problems(toys, tmp_path, {TOYS[1]: "die"}, {}, rounds=1)
    assert [(p["client"], p["reason"]) for p in problems] == [(TOYS[1], "its worker process died")]


def test_a_client_that_hangs_is_dropped_at_the_time_limit(tmp_path: Path, toys: Deployment) -> None:
    toy_problems(toys, tmp_path / "warm", {}, {}, rounds=1)  # the worker is up
    _, problems = toy_problems(toys, tmp_path / "hang", {TOYS[1]: "hang"}, {}, rounds=1, timeout=4.0)
    assert [(p["client"], p["reason"]) for p in problems] == [(TOYS[1], "no reply before the time limit")]


def test_a_party_that_is_killed_and_restarted_at_once_does_its_step_after_all(tmp_path: Path, toys: Deployment) -> None:
    toy_problems(toys, tmp_path / "warm", {}, {}, rounds=1)  # the worker is up
    mark, begun = tmp_path / "in the middle of a step", time.monotonic()

    def kill() -> None:
        until(mark.exists, "the step")
        toys.end("node-2", signal.SIGKILL)
        toys.restart("node-2")

    killer = threading.Thread(target=kill)
    killer.start()
    server, problems = toy_problems(toys, tmp_path, {TOYS[1]: f"hang once {mark}"}, {}, rounds=2)
    killer.join()
    assert not problems
    assert time.monotonic() - begun < 50, "not only when the step had hung for a minute"
    assert torch.equal(server.w, toy_rounds(toy_engine(tmp_path, toy_world(toys.folder)), Toy(), 2).w)


def test_a_party_that_is_killed_while_it_uploads_is_waited_for_no_longer_than_it_is_away(
    tmp_path: Path, toys: Deployment
) -> None:
    toy_problems(toys, tmp_path / "warm", {}, {}, rounds=1)  # the worker is up
    mark, back = tmp_path / "in the middle of an upload", list[float]()

    def restart() -> None:
        until(mark.exists, "the upload")
        toys.processes["node-2"].wait(30)
        before = toys.log("node-2").count("connected")
        toys.restart("node-2")
        until(lambda: toys.log("node-2").count("connected") > before, "the party")
        back.append(time.monotonic())

    out, restarting = tmp_path / "run", threading.Thread(target=restart)
    restarting.start()
    server, problems = toy_problems(toys, out, {}, {TOYS[1]: f"die uploading {mark}"}, rounds=2)
    ended = time.monotonic()
    restarting.join()
    assert not problems
    assert ended - back[0] < 30, "Flower would wait for the rest of the reply until a time limit"
    assert torch.equal(server.w, toy_rounds(toy_engine(tmp_path, toy_world(toys.folder)), Toy(), 2).w)
    found = compare(out, [toys.folder / "party-1", toys.folder / "party-2"])
    assert found.differences == []
    assert len(found.open) == 1, "the reply that was half uploaded"


def test_a_node_cannot_take_the_role_of_another_key(toys: Deployment) -> None:
    said: list[str] = []
    link = DeploymentLink(toys.state, 60.0, said.append)
    try:
        link.introduce(os.urandom(16).hex(), {"method": "toy", "clients": 4, "faults": {}})
        assert list(link.parties(3)) == list(TOYS), "each node gets its own roles and no others"
        until(lambda: link._look() or len(said) >= 2, "the node without roles")  # type: ignore[func-returns-value]
    finally:
        link.close()
    assert "refused: node-2 claims to be client-003, which belongs to the key of node-3" in said
    assert "refused: node-4 claims to be client-000, which belongs to the key of node-1 (and 3 more)" in said
