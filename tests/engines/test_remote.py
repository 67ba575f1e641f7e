"""Clients at the other end of a link, without any transport: order, states, and every reply that must be refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import OtherUp, Toy, ToyDown, ToyServer, party_world, toy_engine, toy_world

from visard.aggregation import limits
from visard.aggregation.outgoing import Clip
from visard.aggregation.reduction import Reduction
from visard.aggregation.rules import Mean
from visard.deployment.party import Basis, OwnStates, Party
from visard.deployment.remote import Link, Parts, RemoteNetwork
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import encode
from visard.engines.ledger import Ledger
from visard.engines.request import Reply, Request, WireError, check_names, pack, step_of, unpack
from visard.errors import VisardError
from visard.models.files import read_model

CLIENTS = ("client-000", "client-001", "client-002")
RUN = "ab" * 16

Forge = Callable[[Request, bytes, bytes], tuple[bytes, bytes] | None]


class DictLink(Link):
    """Requests are answered at once by parties in this process; `forge` changes or loses answers."""

    poll = 0.001

    def __init__(self, parties: dict[str, Party], forge: Forge | None = None) -> None:
        self.at, self.forge = parties, forge
        self.answers: dict[str, Parts | str] = {}
        self.count = 0

    def gather(self, clients: Collection[str], needed: int) -> None: ...

    def close(self) -> None: ...

    def send(self, client: str, header: bytes, payload: bytes, timeout: float) -> str | None:
        if client not in self.at:
            return None
        self.count += 1
        answer: tuple[bytes, bytes] | None = self.at[client].do(header, payload)
        if self.forge and answer:
            answer = self.forge(unpack(header, Request), *answer)
        if answer is not None:
            self.answers[str(self.count)] = answer
        return str(self.count)

    def receive(self, numbers: Collection[str]) -> dict[str, Parts | str]:
        return {n: self.answers.pop(n) for n in reversed(list(numbers)) if n in self.answers}


def party(folder: Path, role: str) -> Party:
    def make(run: dict[str, Any], policy: Any) -> Any:
        return party_world(run, policy, str(folder), [role])

    return Party(make, OwnStates(folder / "at" / role), None)


def network(folder: Path, link: Link, faults: dict[str, str] | None = None, **changes: object) -> RemoteNetwork:
    toy_world(folder)
    states = Checkpoint(folder / "far", "toy", remote=True)
    states.resume()
    told = {"method": "toy", "clients": 3, "faults": faults or {}}
    return RemoteNetwork(
        toy_world(folder, **changes), states, Ledger(states.ledger, states.committed.ledger_bytes), link, RUN, told
    )


def parties(folder: Path) -> dict[str, Party]:
    return {c: party(folder, c) for c in CLIENTS}


def rounds(net: Any, method: Toy, first: int, count: int, server: ToyServer | None = None) -> ToyServer:
    server = server or method.start(net.world.setup())
    for r in range(first, first + count):
        net.begin("add", r)
        server = method.round(server, net)
        net.states.commit(server, net.ledger.flush())
    return server


def expected(folder: Path, count: int) -> ToyServer:
    return rounds(toy_engine(folder, toy_world(folder)), Toy(), 0, count)


def test_same_bits_and_ledger_as_local_though_answers_come_in_another_order(tmp_path: Path) -> None:
    net = network(tmp_path, DictLink(parties(tmp_path)))
    assert torch.equal(rounds(net, Toy(), 0, 3).w, expected(tmp_path, 3).w)
    assert net.states.ledger.read_bytes() == (tmp_path / "checkpoint" / "ledger.jsonl").read_bytes()


def test_replies_before_their_turn_are_checked_and_measured_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one may keep all others waiting: then their norms are known already, and are those of any other way."""
    early, known, measure, norms = list[str](), list[float](), Reduction.measure, limits.norms

    def measured(reduction: Reduction, client: str, message: Any, reply: Any) -> None:
        early.append(client)
        measure(reduction, client, message, reply)

    def counted(*given: Any) -> dict[str, float]:
        found = norms(*given)
        known.extend(found.values())
        return found

    monkeypatch.setattr(Reduction, "measure", measured)
    monkeypatch.setattr(limits, "norms", counted)
    bounded = Mean(bound=3.0, max_weight=0.5)

    def means(net: Any) -> dict[str, Any]:
        net.begin("add", 0)
        down = ToyDown(torch.ones(4), {"a": torch.zeros(2, 2)})
        found, ups = net.reduce(Toy().add, dict.fromkeys(CLIENTS, down), mean=("w", "theta"), by="n")
        assert list(ups) == list(CLIENTS)
        return dict(found)

    far = means(network(tmp_path, DictLink(parties(tmp_path)), aggregation=bounded))
    assert early == [CLIENTS[2], CLIENTS[1]], "all but the first, whose turn it is"
    each = sorted(known)
    known.clear()
    near = means(toy_engine(tmp_path, toy_world(tmp_path, aggregation=bounded)))
    assert torch.equal(far["w"], near["w"])
    assert torch.equal(far["theta"]["a"], near["theta"]["a"])
    assert each == sorted(known), "each was measured once"


def test_parties_postprocess_their_replies_as_local_clients_do(tmp_path: Path) -> None:
    clip = (Clip(norm=0.5),)
    theirs = parties(tmp_path)
    for client, there in theirs.items():
        world, method = party_world({"method": "toy", "clients": 3, "faults": {}}, None, str(tmp_path), [client])
        made = replace(world, outgoing=clip), method
        there.make_world = lambda run, policy, made=made: made  # type: ignore[misc]
    far = rounds(network(tmp_path, DictLink(theirs)), Toy(), 0, 2)
    near = rounds(toy_engine(tmp_path, toy_world(tmp_path, outgoing=clip)), Toy(), 0, 2)
    assert torch.equal(far.theta["a"], near.theta["a"])
    assert torch.equal(near.theta["a"], torch.full((2, 2), 0.5)), "two rounds of an update of length 2, cut to 0.5"
    assert torch.equal(far.w, near.w)


def test_the_server_has_no_state_of_a_client(tmp_path: Path) -> None:
    net = network(tmp_path, DictLink(parties(tmp_path)))
    rounds(net, Toy(), 0, 1)
    assert not list((tmp_path / "far" / "clients").iterdir())
    with pytest.raises(VisardError, match="is at its party"):
        net.states.client_state(CLIENTS[0])


def test_a_resumed_run_and_restarted_parties_continue_bit_for_bit(tmp_path: Path) -> None:
    net = network(tmp_path, DictLink(parties(tmp_path)))
    server = rounds(net, Toy(), 0, 1)
    net.begin("add", 1)
    Toy().round(server, net)  # the server dies before it commits this round: its states must not count
    again = network(tmp_path, DictLink(parties(tmp_path)))
    server = rounds(again, Toy(), 1, 2, again.states.server_state(ToyServer))
    assert torch.equal(server.w, expected(tmp_path, 3).w)
    states = OwnStates(tmp_path / "at" / CLIENTS[0])
    file = again.states.committed.clients[CLIENTS[0]]
    request = Request(RUN, {}, CLIENTS[0], state=file, committed=file.name, new_state=file.name)
    assert states.read(request) == {"steps": 3}


def test_a_party_keeps_the_last_two_committed_states_and_no_debris(tmp_path: Path) -> None:
    net = network(tmp_path, DictLink(parties(tmp_path)))
    rounds(net, Toy(), 0, 5)
    names = sorted(p.name for p in (tmp_path / "at" / CLIENTS[1] / RUN / "clients").iterdir())
    assert [step_of(f"clients/{n}") for n in names] == [3, 4, 5]  # 5 was written when 4 was the committed one


def test_a_party_with_two_roles_sweeps_each_alone(tmp_path: Path) -> None:
    states = OwnStates(tmp_path)

    def request(client: str, step: int, state: Any = None, committed: str = "") -> Request:
        name = f"clients/{client}-{step:06d}-1.bin"
        return Request(RUN, {}, client, state=state, committed=committed, new_state=name)

    other = states.write(request("paris-2", 1), {"x": 1})
    own = states.write(request("paris", 1), {"x": 2})
    assert own is not None
    assert other is not None
    assert states.read(request("paris", 2, own, own.name)) == {"x": 2}
    assert states.read(request("paris-2", 2, other, other.name)) == {"x": 1}, "the state of another role"


@pytest.mark.parametrize("name", ["my run", "x" * 300, "a+b/../c", "données"])
def test_a_party_keeps_its_model_whatever_the_run_is_called(tmp_path: Path, name: str) -> None:
    some = parties(tmp_path)
    for role, one in some.items():
        one.models = tmp_path / "models" / role
    net = network(tmp_path, DictLink(some))
    net.settings["spec"] = {"model": "tiny", "embedding": 8, "size": 32}
    rounds(net, Toy(), 0, 1)
    assert net.keep({"w": torch.zeros(2)}, name) == {}
    kept = [p.name for p in (tmp_path / "models").rglob("*.safetensors")]
    assert sorted(k.rpartition(f"-{RUN}-")[2] for k in kept) == [f"{c}.safetensors" for c in CLIENTS]


def test_a_server_cannot_replace_a_model_that_a_party_has(tmp_path: Path) -> None:
    own = party(tmp_path, CLIENTS[0])
    own.models = tmp_path / "models"
    toy_world(tmp_path)
    spec = {"model": "tiny", "embedding": 8, "size": 32}
    told = {"method": "toy", "clients": 3, "faults": {}, "spec": spec}

    def keep(value: float, run: str = RUN) -> str:
        request = Request(run, told, CLIENTS[0], "", "keep", 0, 1, keep="ours")
        header, _ = own.do(pack(request), encode(Basis({"w": torch.full((2,), value)})))
        return unpack(header, Reply).failure or ""

    def kept() -> list[float]:
        return sorted(float(read_model(p)[0]["w"][0]) for p in own.models.iterdir())  # type: ignore[union-attr]

    assert [keep(1.0), keep(2.0), keep(2.0), keep(3.0, RUN[:-1] + "c")] == [""] * 4
    assert kept() == [1.0, 2.0, 3.0], "one file for the same model; run ids count whole"
    assert [keep(float(i)) for i in range(10, 18)] == [""] * 8
    assert keep(99.0) == "this party keeps at most 10 models of a run"
    assert kept()[:3] == [1.0, 2.0, 3.0]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.bin")}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state": None, "committed": ""}, "goes on without the state that this party keeps"),
        ({"state": None}, "goes on without the state that this party keeps"),
        (
            {"state": None, "committed": "", "new_state": "clients/client-000-000003-9.bin"},
            "goes on without the state that this party keeps",
        ),
        ({"committed": "clients/client-000-000009-1.bin"}, "is not in the party's state folder"),
        ({"committed": "clients/client-001-000002-1.bin"}, "names a state that is not one of this client"),
        ({"new_state": "clients/client-001-000009-1.bin"}, "names a state that is not one of this client"),
        ({"new_state": "clients/client-000-000002-1.bin"}, "would replace clients/client-000-000002-1.bin"),
    ],
)
def test_a_server_can_neither_delete_nor_replace_states(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    own = parties(tmp_path)
    sent: list[bytes] = []

    def note(request: Request, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        if request.client == CLIENTS[0]:
            sent.append(pack(request))
        return header, payload

    net = network(tmp_path, DictLink(own, note))
    rounds(net, Toy(), 0, 3)
    message = encode(ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}))
    before = files(tmp_path / "at")
    bad = replace(unpack(sent[-1], Request), round=7, **change)
    assert says in (unpack(own[CLIENTS[0]].do(pack(bad), message)[0], Reply).failure or "")
    assert files(tmp_path / "at") == before
    good = replace(unpack(sent[-1], Request), round=7)
    assert unpack(own[CLIENTS[0]].do(pack(good), message)[0], Reply).failure is None, "the run itself goes on"


@pytest.mark.parametrize("tested", [False, True])
def test_a_round_that_was_never_committed_begins_again_without_a_state(tmp_path: Path, tested: bool) -> None:
    """A run that is killed in its first round, after a state of that round was named, starts that round anew."""
    own = party(tmp_path, CLIENTS[0])
    toy_world(tmp_path)
    told = {"method": "toy", "clients": 3, "faults": {}}
    first = Request(RUN, told, CLIENTS[0], "add", "add", 0, 1, new_state="clients/client-000-000001-1.bin")
    message = encode(ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}))

    def do(request: Request) -> Reply:
        return unpack(own.do(pack(request), message)[0], Reply)

    state = do(first).state
    later = {"ask": 2, "state": state, "new_state": "clients/client-000-000001-2.bin"}
    assert do(replace(first, **({"stage": "add/evaluation"} if tested else {}), **later)).failure is None
    assert do(first).failure is None
    later["state"] = do(first).state
    assert do(replace(first, **later)).failure is None
    assert "goes on without" in (do(replace(first, round=1, new_state="clients/client-000-000002-1.bin")).failure or "")


def test_a_run_waits_for_as_many_as_the_method_asks_for(tmp_path: Path) -> None:
    waited: list[int] = []

    class Counting(DictLink):
        def gather(self, clients: Collection[str], needed: int) -> None:
            waited.append(needed)

    net = network(tmp_path, Counting(parties(tmp_path)))
    messages = {c: ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}) for c in CLIENTS}
    for needed in (0, 3, None):
        net.ask(Toy().add, messages, min_replies=needed)
    assert waited == [0, 3, 2]


def test_a_lost_reply_does_not_move_the_state(tmp_path: Path) -> None:
    def lose(request: Request, header: bytes, payload: bytes) -> tuple[bytes, bytes] | None:
        return None if (request.client, request.round) == (CLIENTS[1], 0) else (header, payload)

    net = network(tmp_path, DictLink(parties(tmp_path), lose), timeout=0.2)
    server = rounds(net, Toy(), 0, 1)
    assert net.traffic.problems == [
        {"event": "missing", "client": CLIENTS[1], "reason": "no reply before the time limit"}
    ]
    assert CLIENTS[1] not in net.states.committed.clients
    rounds(net, Toy(), 1, 1, server)
    folder = tmp_path / "at" / CLIENTS[1] / RUN / "clients"
    assert len(list(folder.iterdir())) == 1, "the state of the lost reply is swept"


def test_a_request_that_stands_in_line_has_the_time_of_those_before_it_too(tmp_path: Path) -> None:
    def lose(request: Request, header: bytes, payload: bytes) -> tuple[bytes, bytes] | None:
        return None if request.client == CLIENTS[1] else (header, payload)

    link = DictLink(parties(tmp_path), lose)
    link.queue = 8  # as in Flower's simulation
    net = network(tmp_path, link, timeout=0.1)
    rounds(net, Toy(), 0, 1)
    begun = time.monotonic()
    net.ask(Toy().add, {CLIENTS[1]: ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)})}, min_replies=0)
    assert time.monotonic() - begun >= 0.8
    assert net.traffic.problems[-1]["reason"] == "no reply before the time limit"


@pytest.mark.parametrize(
    ("fault", "event", "says"),
    [
        ("raise", "missing", "the disk is full"),
        ("bug", "missing", "ZeroDivisionError: the party's log says more"),
        ("path", "missing", "VisardError: the party's log says more"),
        ("nan", "refused", "not finite"),
        ("shape", "refused", "has shape (3,), expected (4,)"),
        ("key", "refused", "lacks entry 'a'"),
        ("no weight", "refused", "is 0, but the client has"),
        ("beyond floats", "missing", "its reply is not sent: ToyUp.n is not what the method declares"),
        ("picture as count", "missing", "its reply is not sent: ToyUp.n is not what the method declares"),
        ("figure with a bad name", "missing", "its reply is not sent: ToyUp.loss is not what the method declares (see"),
        ("other type", "missing", "its reply is not sent: ToyUp is not what the method declares"),
    ],
)
def test_a_bad_client_loses_only_itself(tmp_path: Path, fault: str, event: str, says: str) -> None:
    net = network(tmp_path, DictLink(parties(tmp_path)), {CLIENTS[1]: fault})
    rounds(net, Toy(), 0, 1)
    (problem,) = net.traffic.problems
    assert (problem["event"], problem["client"]) == (event, CLIENTS[1])
    assert says in problem["reason"]
    assert "traceback" not in problem, "tracebacks stay at the party"
    assert sorted(net.states.committed.clients) == [CLIENTS[0], CLIENTS[2]]


def forged(change: Callable[[Reply], Reply]) -> Forge:
    def forge(request: Request, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        if request.client != CLIENTS[1]:
            return header, payload
        return pack(change(unpack(header, Reply))), payload

    return forge


def resent(old: bytes, new: bytes) -> Forge:
    """The payload of one client with another header, whose length is put right."""

    def forge(request: Request, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        if request.client != CLIENTS[1]:
            return header, payload
        assert old in payload
        length = int.from_bytes(payload[5:9], "little")
        tree = payload[9 : 9 + length].replace(old, new)
        rest = payload[9 + length :].replace(old, new)
        return header, payload[:5] + len(tree).to_bytes(4, "little") + tree + rest

    return forge


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (forged(lambda a: replace(a, round=7)), "reply refused: it belongs to add round 7, ask 1"),
        (forged(lambda a: replace(a, run="cd" * 16)), "reply refused: it belongs to"),
        (forged(lambda a: replace(a, client=CLIENTS[0])), "reply refused: it belongs to"),
        (forged(lambda a: replace(a, state=("clients/x-000001-1.bin", "00" * 32, 0, 0))), "its state has another name"),
        (forged(lambda a: replace(a, failure="bad\x1b[31m news\n")), "bad[31m news"),
        (forged(lambda a: replace(a, seconds=1e9)), "over the limit"),
        (lambda r, h, p: (b"\xff", p) if r.client == CLIENTS[1] else (h, p), "reply refused: malformed reply"),
        (lambda r, h, p: (h, p[:40]) if r.client == CLIENTS[1] else (h, p), "reply refused: message"),
        (resent(b'"F32"', b'"I32"'), "has dtype torch.int32, expected torch.float32"),
        (resent(b'"F32"', b'"F9Z"'), "reply refused: message cannot be read"),
        (resent(b'"theta":{"d":{"a":', b'"theta":{"d":{"\\u001b":'), "has the unexpected entry '\\x1b'"),
        (
            resent(b'"theta":{"d":{"a":{"t":"1"}', b'"theta":{"d":{"\\u001b[2J\\n":5'),
            "reply refused: ToyUp.theta[[2J ]",
        ),
        (resent(b'"n":', b'"n": '), "reply refused: its bytes hold more than its fields"),
        (resent(b'"loss":{"f":', b'"loss":{"d":{"a secret":1.0},"f":'), "reply refused: "),
        (lambda r, h, p: (h + b" ", p) if r.client == CLIENTS[1] else (h, p), "header holds more than its fields"),
        (
            lambda r, h, p: (h[:-1] + b',"note":"a secret"}', p) if r.client == CLIENTS[1] else (h, p),
            "header holds more than its fields",
        ),
        (
            lambda r, h, p: (h, p + bytes(8)) if r.client == CLIENTS[1] else (h, p),
            "reply refused: message cannot be read",
        ),
        (
            lambda r, h, p: (h, encode(OtherUp(torch.zeros(3, 8, 8)))) if r.client == CLIENTS[1] else (h, p),
            "undeclared field 'face'",
        ),
        (lambda r, h, p: (h, encode({"x": 1})) if r.client == CLIENTS[1] else (h, p), "reply refused: ToyUp"),
    ],
)
def test_a_forged_answer_is_refused(tmp_path: Path, forge: Forge, says: str) -> None:
    net = network(tmp_path, DictLink(parties(tmp_path), forge))
    rounds(net, Toy(), 0, 1)
    (problem,) = net.traffic.problems
    assert problem["client"] == CLIENTS[1]
    assert says in problem["reason"]
    assert problem["reason"].isprintable(), "nothing that a terminal would obey"
    assert CLIENTS[1] not in net.states.committed.clients


def test_a_reply_that_cannot_even_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes, kind: type) -> Any:
        raise NotImplementedError("a bug in the codec")

    net = network(tmp_path, DictLink(parties(tmp_path)), min_replies=0.0)
    monkeypatch.setattr("visard.deployment.remote.decode", broken)
    with pytest.raises(VisardError, match="0 good replies of 3"):
        rounds(net, Toy(), 0, 1)
    assert [p["reason"] for p in net.traffic.problems] == ["reply refused: it cannot be read (NotImplementedError)"] * 3


def test_an_old_answer_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    first: list[tuple[bytes, bytes]] = []

    def replay(request: Request, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        if request.client != CLIENTS[2]:
            return header, payload
        first.append((header, payload))
        return first[0]

    net = network(tmp_path, DictLink(parties(tmp_path), replay))
    server = rounds(net, Toy(), 0, 1)
    assert not net.traffic.problems
    rounds(net, Toy(), 1, 1, server)
    (problem,) = net.traffic.problems
    assert problem["reason"] == "reply refused: it belongs to add round 0, ask 1"


def test_a_client_that_is_not_connected_is_named(tmp_path: Path) -> None:
    some = {c: p for c, p in parties(tmp_path).items() if c != CLIENTS[0]}
    net = network(tmp_path, DictLink(some))
    rounds(net, Toy(), 0, 1)
    assert net.traffic.problems[0]["reason"] == "its party is not connected"


def test_a_window_smaller_than_the_clients(tmp_path: Path) -> None:
    link = DictLink(parties(tmp_path))
    link.window = 1
    assert torch.equal(rounds(network(tmp_path, link), Toy(), 0, 2).w, expected(tmp_path, 2).w)


def test_a_party_refuses_roles_steps_and_settings_that_are_not_its_own(tmp_path: Path) -> None:
    toy_world(tmp_path)
    own = party(tmp_path, CLIENTS[0])
    told = {"method": "toy", "clients": 3, "faults": {}}
    good = Request(RUN, told, CLIENTS[0], "add", "add", 0, 1, new_state="clients/client-000-000001-1.bin")
    message = encode(ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}))

    def failure(request: Request, payload: bytes = message) -> str:
        return unpack(own.do(pack(request), payload)[0], Reply).failure or ""

    assert failure(good) == ""
    assert "is not a role of this party" in failure(replace(good, client=CLIENTS[1]))
    assert "no client step 'start'" in failure(replace(good, step="start"))
    assert "only toys" in failure(replace(good, settings={}))
    assert "malformed name" in failure(replace(good, new_state="clients/../../escape-000001-1.bin"))
    assert "malformed name" in failure(replace(good, state=("/etc/passwd", "00", 0, 0)))
    assert "malformed run id" in failure(replace(good, run="../" + RUN))
    assert "is not in the party's state folder" in failure(
        replace(good, state=("clients/client-000-000009-1.bin", "00", 0, 0))
    )
    assert "not a visard message" in failure(good, b"x" * 50)
    with pytest.raises(WireError, match="malformed request"):
        own.do(b"{}", b"")


def test_a_damaged_state_is_noticed(tmp_path: Path) -> None:
    net = network(tmp_path, DictLink(parties(tmp_path)))
    server = rounds(net, Toy(), 0, 1)
    (file,) = (tmp_path / "at" / CLIENTS[0] / RUN / "clients").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    rounds(net, Toy(), 1, 1, server)
    assert "is damaged" in net.traffic.problems[0]["reason"]


def test_small_states_cannot_be_guessed_from_their_digests(tmp_path: Path) -> None:
    one, two = OwnStates(tmp_path / "one"), OwnStates(tmp_path / "two")
    assert one.digest(b"3") != two.digest(b"3")
    assert OwnStates(tmp_path / "one").digest(b"3") == one.digest(b"3"), "the key survives a restart"


def test_headers_of_another_format_say_so() -> None:
    header = json.loads(pack(Reply(RUN, "c", "s", 0, 1)))
    with pytest.raises(WireError, match="wire format 1 is not format 3"):
        unpack(json.dumps(header | {"version": 1}).encode(), Reply)
    check_names(Request(RUN, {}))


def test_a_run_is_not_resumed_with_states_elsewhere(tmp_path: Path) -> None:
    rounds(network(tmp_path, DictLink(parties(tmp_path))), Toy(), 0, 1)
    with pytest.raises(VisardError, match="states of this run are at the parties"):
        Checkpoint(tmp_path / "far", "toy").resume()
