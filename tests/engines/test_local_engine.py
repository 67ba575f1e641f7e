"""The in-process engine: what survives a step, what is refused, what the ledger says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import Toy, ToyDown, toy_engine, toy_world

from visard.engines.codec import size_of
from visard.engines.loop import asking
from visard.engines.watchers import Watcher
from visard.errors import VisardError

CLIENTS = ("client-000", "client-001", "client-002")


def test_the_clients_are_asked_in_order_and_state_survives(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = Toy()
    server = method.start(net.world.setup())
    for r in range(2):
        net.begin("add", r)
        server = method.round(server, net)
    assert net.clients == CLIENTS
    assert [net.states.client_state(c)["steps"] for c in CLIENTS] == [2, 2, 2]
    assert server.theta["a"].tolist() == [[2, 2], [2, 2]]


def test_the_server_is_not_touched_by_a_client_that_scribbles(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    w = torch.ones(4)
    net.ask(Toy().add, {CLIENTS[0]: ToyDown(w, {"a": torch.zeros(2, 2)})})
    assert w.tolist() == [1, 1, 1, 1]


def test_randomness_does_not_depend_on_the_order(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    messages = {c: ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}) for c in CLIENTS}
    net.begin("add", 0)
    forward = net.ask(Toy().add, messages)
    net.begin("add", 0)
    backward = net.ask(Toy().add, dict(reversed(messages.items())))
    net.begin("add", 1)
    other_round = net.ask(Toy().add, messages)
    for c in CLIENTS:
        assert torch.equal(forward[c].w, backward[c].w)
        assert not torch.equal(forward[c].w, other_round[c].w)
    assert list(backward) == list(reversed(CLIENTS))


def test_two_asks_of_a_round_draw_different_numbers(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    message = {CLIENTS[0]: ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)})}
    first, second = (net.ask(Toy().add, message)[CLIENTS[0]].w for _ in range(2))
    assert not torch.equal(first, second)


class Kept(Watcher):
    """Problems as they are said, and events as they are written."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.written: list[str] = []

    def problem(self, text: str) -> None:
        self.said.append(text)

    def write(self, event: str, **fields: Any) -> None:
        self.written.append(event)


def test_a_client_that_stays_away_is_said_once(tmp_path: Path) -> None:
    net, kept, bad = toy_engine(tmp_path, toy_world(tmp_path)), Kept(), Toy(faults={CLIENTS[1]: "raise"})
    server = bad.start(net.world.setup())
    for round, method in enumerate((bad, bad, Toy(), bad)):
        with asking(net, "add", round, kept, kept):
            server = method.round(server, net)
    assert [text.split(":")[0] for text in kept.said] == ["add round 1", "add round 4"], "it was back in the third"
    assert kept.written == ["missing"] * 3, "the log has every one"


@pytest.mark.parametrize(
    ("fault", "event", "says"),
    [
        ("raise", "missing", "the disk is full"),
        ("bug", "missing", "ZeroDivisionError: division by zero"),
        ("nan", "refused", "not finite"),
        ("inf in theta", "refused", "not finite in a"),
        ("shape", "refused", "has shape (3,), expected (4,)"),
        ("dtype", "refused", "has dtype torch.float64, expected torch.float32"),
        ("key", "refused", "lacks entry 'a'"),
        ("entry shape", "refused", "entry 'a' has shape (3,), expected (2, 2)"),
        ("picture as count", "refused", "declared as count but is a Tensor"),
        ("picture as metric", "refused", "declared as metric but holds more than numbers"),
        ("no weight", "refused", "is 0, but the client has 18 pictures"),
        ("negative weight", "refused", "holds an integer that is negative or too large"),
        ("too heavy", "refused", "is 1000000000000, but the client has 18 pictures"),
        ("beyond floats", "refused", "holds an integer that is negative or too large"),
        ("figure beyond floats", "refused", "holds an integer that is too large"),
        ("figure with a bad name", "refused", "has the name '\\x1b[2J', which ToyUp.loss does not list"),
        ("float8", "refused", "cannot be checked: NotImplementedError"),
        ("other type", "refused", "is a OtherUp, the step declares ToyUp"),
    ],
)
def test_a_bad_client_loses_only_itself(tmp_path: Path, fault: str, event: str, says: str) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = Toy(faults={CLIENTS[1]: fault})
    method.round(method.start(net.world.setup()), net)
    (problem,) = net.traffic.problems
    assert problem["event"] == event
    assert problem["client"] == CLIENTS[1]
    assert says in problem["reason"]
    assert net.traffic.figures["missing"] == 1
    assert net.states.client_state(CLIENTS[1]) == {}, "a refused client's state must not move on"
    rows = [json.loads(line) for line in _ledger_lines(net)]
    assert {row[2] for row in rows} == {CLIENTS[0], CLIENTS[2]}


def _ledger_lines(net: object) -> list[str]:
    net.ledger.flush()  # type: ignore[attr-defined]
    return net.states.ledger.read_text().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_the_ledger_counts_every_field(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    Toy().round(Toy().start(net.world.setup()), net)
    rows = [json.loads(line) for line in _ledger_lines(net)]
    assert [row[2:] for row in rows[:4]] == [
        [CLIENTS[0], "ToyUp", "w", "class_vectors", 16 + 9 + 53, False],
        [CLIENTS[0], "ToyUp", "theta", "weights", 16 + 21 + 55, False],
        [CLIENTS[0], "ToyUp", "n", "count", len("12"), False],
        [CLIENTS[0], "ToyUp", "loss", "metric", len('{"f":"0x1.8000000000000p+1"}'), False],
    ]
    assert net.traffic.bytes_up == sum(row[6] for row in rows)
    assert net.traffic.bytes_down == 3 * size_of(ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}))


def test_an_undeclared_kind_is_refused(tmp_path: Path) -> None:
    class Narrow(Toy):
        discloses = frozenset(
            {*Toy.discloses} - {*Toy.discloses}.intersection({k for k in Toy.discloses if k.value == "weights"})
        )

    net = toy_engine(tmp_path, toy_world(tmp_path))
    with pytest.raises(VisardError, match="kind weights, which toy does not declare"):
        Narrow().round(Toy().start(net.world.setup()), net)


def test_too_few_replies_end_the_round_with_one_line(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = Toy(faults={CLIENTS[0]: "raise", CLIENTS[1]: "nan"})
    with pytest.raises(VisardError, match="1 good replies of 3, 2 needed; client-000: the disk is full"):
        method.round(method.start(net.world.setup()), net)


def test_a_step_over_the_time_limit_is_dropped(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path, timeout=1e-9, min_replies=0.0))
    with pytest.raises(VisardError, match="over the limit"):
        Toy().round(Toy().start(net.world.setup()), net)


def test_an_ask_inside_a_stream_is_one_line(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    messages = {c: ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}) for c in CLIENTS}
    stream = net.stream(Toy().add, messages)
    next(stream)
    with pytest.raises(VisardError, match="step add is asked for while replies of another ask are still to come"):
        net.ask(Toy().add, messages)
    assert len(list(stream)) == 2
    for _ in net.stream(Toy().add, messages):
        break
    assert len(net.ask(Toy().add, messages)) == 3, "a stream that was left is over"


def test_figures_may_have_any_name(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    net.log(self=1.0, figures=2)
    assert net.traffic.figures == {"self": 1.0, "figures": 2.0}
