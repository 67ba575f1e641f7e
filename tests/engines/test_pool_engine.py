"""The pool: the same bits as the in-process engine, and what dead and hanging workers cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.toys import Toy, ToyServer, noise_faces, toy_engine, toy_world

from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.pool import AGAIN, JobQueue, Pace, PoolNetwork
from visard.engines.request import DIED, LATE
from visard.engines.worker import Job, pack_jobs
from visard.errors import VisardError
from visard.processes import Recipe

CLIENTS = 5
quick = pytest.mark.usefixtures("quick_children")  # not everywhere: workers really begin in the first tests


@contextmanager
def pool(
    folder: Path, faults: dict[str, str] | None = None, workers: int = 2, clients: int = CLIENTS, **changes: object
) -> Iterator[PoolNetwork]:
    world = toy_world(folder, clients, **changes)
    states = Checkpoint(folder / "pool-checkpoint", "toy")
    recipe = Recipe("tests.toys:pool_world", {"folder": str(folder), "clients": clients, "faults": faults})
    net = PoolNetwork(world, states, Ledger(states.ledger), recipe, workers)
    try:
        yield net
    finally:
        net.close()


def rounds(net: object, method: Toy, count: int = 3) -> ToyServer:
    server = method.start(net.world.setup())  # type: ignore[attr-defined]
    for r in range(count):
        net.begin("add", r)  # type: ignore[attr-defined]
        server = method.round(server, net)  # type: ignore[arg-type]
    return server


def test_same_bits_states_and_ledger_as_local(tmp_path: Path) -> None:
    local = toy_engine(tmp_path, toy_world(tmp_path, CLIENTS))
    expected = rounds(local, Toy())
    with pool(tmp_path) as net:
        got = rounds(net, Toy())
        assert torch.equal(got.w, expected.w)
        assert net.states.client_state("client-003") == local.states.client_state("client-003") == {"steps": 3}
        local.ledger.flush()  # type: ignore[union-attr]
        net.ledger.flush()  # type: ignore[union-attr]
        assert net.states.ledger.read_bytes() == local.states.ledger.read_bytes()
        assert net.traffic.bytes_up == local.traffic.bytes_up


def test_a_worker_that_dies_costs_one_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISARD_TOY_MARK", str(tmp_path / "died"))
    expected = rounds(toy_engine(tmp_path, toy_world(tmp_path, CLIENTS)), Toy(), 1)
    with pool(tmp_path, {"client-001": "die once"}) as net:
        got = rounds(net, Toy(), 1)
    assert (tmp_path / "died").exists()
    assert torch.equal(got.w, expected.w)


@quick
def test_a_replacement_that_is_killed_while_it_starts_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISARD_TOY_MARK", str(tmp_path / "died"))
    expected = rounds(toy_engine(tmp_path, toy_world(tmp_path, CLIENTS)), Toy(), 1)
    with pool(tmp_path, {"client-001": "die once"}, workers=1) as net:
        hire, hired = net._start_worker, []

        def short_lived() -> None:
            hire()
            hired.append(net.workers[-1])
            if len(hired) <= AGAIN:
                hired[-1].process.kill()

        monkeypatch.setattr(net, "_start_worker", short_lived)
        got = rounds(net, Toy(), 1)
    assert len(hired) == AGAIN + 1
    assert torch.equal(got.w, expected.w)


@quick
def test_an_ask_inside_a_stream_is_one_line(tmp_path: Path) -> None:
    from tests.toys import ToyDown

    with pool(tmp_path) as net:
        server = Toy().start(net.world.setup())
        messages = {c: ToyDown(server.w, server.theta) for c in net.clients}
        stream = net.stream(Toy().add, messages)
        next(stream)
        with pytest.raises(VisardError, match="step add is asked for while replies of another ask are still to come"):
            net.ask(Toy().add, messages)
        assert len(list(stream)) == CLIENTS - 1
        assert len(net.ask(Toy().add, messages)) == CLIENTS, "the next ask is answered"


@quick
def test_a_client_that_kills_its_worker_twice_is_missing_and_named(tmp_path: Path) -> None:
    with pool(tmp_path, {"client-001": "die"}) as net:
        rounds(net, Toy(), 1)
        (problem,) = net.traffic.problems
    assert problem == {"event": "missing", "client": "client-001", "reason": "its worker process died"}


@quick
def test_a_hanging_client_is_dropped_at_the_time_limit(tmp_path: Path) -> None:
    with pool(tmp_path, {"client-002": "hang"}, timeout=3.0) as net:
        rounds(net, Toy(), 1)
        (problem,) = net.traffic.problems
    assert problem == {"event": "missing", "client": "client-002", "reason": "no reply before the time limit"}


@quick
@pytest.mark.parametrize(
    ("fault", "says"), [("nan", "not finite"), ("raise", "the disk is full"), ("bug", "ZeroDivision")]
)
def test_bad_replies_are_refused_as_in_process(tmp_path: Path, fault: str, says: str) -> None:
    with pool(tmp_path, {"client-000": fault}) as net:
        rounds(net, Toy(), 1)
        (problem,) = net.traffic.problems
        assert says in problem["reason"]
        assert net.states.client_state("client-000") == {}


@quick
def test_a_world_that_cannot_be_built_is_one_line(tmp_path: Path) -> None:
    world = toy_world(tmp_path, CLIENTS)
    states = Checkpoint(tmp_path / "pool-checkpoint", "toy")
    net = PoolNetwork(world, states, None, Recipe("tests.toys:pool_world", {"wrong": 1}), 1)
    try:
        with pytest.raises(VisardError, match="ended while starting"):
            rounds(net, Toy(), 1)
    finally:
        net.close()


@quick
def test_a_method_that_stops_listening_leaves_the_pool_usable(tmp_path: Path) -> None:
    with pool(tmp_path) as net:
        method = Toy()
        server = method.start(net.world.setup())
        from tests.toys import ToyDown

        messages = {c: ToyDown(server.w, server.theta) for c in net.clients}
        next(iter(net.stream(method.add, messages)))
        net.begin("add", 1)
        assert len(net.ask(method.add, messages)) == CLIENTS


MANY = 9  # of them a single worker gets four at once


def light(net: PoolNetwork) -> None:
    """Let the pool think that steps are light, so that it hands out several at once."""
    net._paces["add"] = pace = Pace()
    pace.heard(1e-3)


@quick
def test_several_clients_at_once_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []
    real = JobQueue.next

    def counted(self: JobQueue, given: int) -> list[Job]:
        handed.append(len(tasks := real(self, given)))
        return tasks

    monkeypatch.setattr(JobQueue, "next", counted)
    expected = rounds(toy_engine(tmp_path, toy_world(tmp_path, MANY)), Toy())
    with pool(tmp_path, workers=1, clients=MANY) as net:
        light(net)
        got = rounds(net, Toy())
    assert torch.equal(got.w, expected.w)
    assert max(handed) == 4


@quick
@pytest.mark.parametrize(("fault", "says"), [("die", DIED), ("hang", LATE), ("raise", "the disk is full")])
def test_a_bad_client_among_several_loses_only_itself(tmp_path: Path, fault: str, says: str) -> None:
    local = toy_engine(tmp_path, toy_world(tmp_path, MANY))
    expected = rounds(local, Toy(faults={"client-001": "raise"}), 1)
    with pool(tmp_path, {"client-001": fault}, workers=1, clients=MANY, timeout=4.0) as net:
        light(net)
        got = rounds(net, Toy(), 1)
        (problem,) = net.traffic.problems
        assert (problem["client"], problem["reason"]) == ("client-001", says)
        assert [net.states.client_state(c) for c in net.clients] == [
            {} if c == "client-001" else {"steps": 1} for c in net.clients
        ]
    assert torch.equal(got.w, expected.w)


@quick
@pytest.mark.parametrize("fault", [None, "die", "hang"])
def test_light_tasks_are_handed_over_early_and_no_reply_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    areas: list[int] = []

    def noted(jobs: list[Job], bundle: Path, area: int) -> bytes:
        areas.append(area)
        return pack_jobs(jobs, bundle, area)

    monkeypatch.setattr("visard.engines.pool.pack_jobs", noted)
    noise_faces(tmp_path / "faces", identities=60)
    lost = {"client-020": fault} if fault else None
    local = toy_engine(tmp_path, toy_world(tmp_path, 48))
    expected = rounds(local, Toy(faults={"client-020": "raise"} if fault else {}), 1)
    with pool(tmp_path, lost, workers=1, clients=48, timeout=4.0) as net:
        light(net)
        got = rounds(net, Toy(), 1)
        assert [p["client"] for p in net.traffic.problems] == (["client-020"] if fault else [])
        states = [net.states.client_state(c) for c in net.clients]
    assert set(areas) == {0, 1}
    assert torch.equal(got.w, expected.w)
    assert states == [{} if fault and i == 20 else {"steps": 1} for i in range(48)]
