"""The parts of a deployment one by one, without processes: the door, greetings, fetching, a node's turn."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from visard.crypto.signatures import ORDER, Signer, fingerprint
from visard.deployment.flower import (
    PROCESS,
    REFUSAL,
    SIGNED,
    driver,
    link,
    objects,
    server,
    simulation,
    statement,
)
from visard.deployment.flower import callers as callers_module
from visard.deployment.flower import driver as fetching
from visard.deployment.flower.callers import Callers
from visard.deployment.flower.client import Fleet, clocks
from visard.deployment.flower.link import parts, record
from visard.deployment.flower.server import FleetOnly, serve
from visard.deployment.keys import Assignment, ServerKeys, make_keys, write_parties
from visard.deployment.listener import Limits
from visard.deployment.party_ledger import PartyLedger
from visard.deployment.remote import Link, Parts
from visard.engines.ledger import Received
from visard.engines.records import digest_of, files_of, read_records
from visard.engines.request import Reply, Request, pack, unpack
from visard.errors import UsageError, VisardError
from visard.processes import Recipe

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr

RUN = "ab" * 16

# The port for parties


OWN, OTHER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())


def known(say: Callable[[str], None] = lambda _: None) -> Callers:
    """Callers of which one key is registered."""
    callers = Callers(say)
    callers.admit([("node-1", OWN.public_key())])
    return callers


class Caller:
    """One request to the door: what it sends, what it hears, and what came through."""

    def __init__(self, path: str, headers: dict[str, str], parts: list[bytes]) -> None:
        pairs = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
        self.connection = SimpleNamespace(due=None)
        self.scope = {"type": "http", "path": path, "headers": pairs, "state": {"connection": self.connection}}
        self.parts, self.taken = parts, 0
        self.heard: list[Any] = []
        self.through: bytes | None = None
        self.proven: list[str] = []

    async def receive(self) -> dict[str, Any]:
        assert self.connection.due is not None, "a body has a time limit"
        self.taken += 1
        return {"type": "http.request", "body": self.parts[self.taken - 1], "more_body": self.taken < len(self.parts)}

    async def send(self, event: Any) -> None:
        self.heard.append(event)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.through = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def call(self, callers: Callers | None = None, parts: Any = None) -> int:
        door = FleetOnly(self.app, callers or known(), Limits(), parts)
        door.prove = lambda _, party: self.proven.append(party)
        asyncio.run(door(self.scope, self.receive, self.send))
        status: int = self.heard[0]["status"]
        return status


def headers(key: Any = OWN, signer: Any = OWN, process: str = "", second: int = 0) -> dict[str, str]:
    time = f"2026-01-01T00:00:0{second}+00:00"
    signature = b64encode(sign_message(signer, time.encode())).decode()
    public = b64encode(public_key_to_bytes(key.public_key())).decode()
    signed = {"flwr-public-key": public, "flwr-signature": signature, "flwr-timestamp": time}
    return signed | ({PROCESS: process} if process else {})


def signed(path: str, body: bytes, process: str = "", second: int = 0) -> dict[str, str]:
    """Headers of a call whose path and body are signed."""
    key, given = OWN, headers(OWN, OWN, process, second)
    return given | {SIGNED: Signer(key)(statement(path, given["flwr-timestamp"], process, body)).hex()}


PUSH = "/v1/fleet/push-messages"


def test_a_registered_key_comes_through_with_its_body() -> None:
    caller = Caller(PUSH, signed(PUSH, b"one two"), [b"one ", b"two"])
    assert (caller.call(), caller.through, caller.proven) == (200, b"one two", ["node-1"])


@pytest.mark.parametrize(
    "sent",
    [
        {},
        headers(OTHER, OTHER),  # signed by a key that is not registered
        headers(OWN, OTHER),  # names a registered key, which is no secret
        {**headers(), "flwr-timestamp": "2026-01-02T00:00:00+00:00"},
        {**headers(), "flwr-signature": "no base64!"},
        *({k: v for k, v in headers().items() if k != left} for left in headers()),
    ],
)
def test_who_brings_no_signature_of_a_registered_key_is_turned_away_before_the_body_is_read(
    sent: dict[str, str],
) -> None:
    caller = Caller(PUSH, sent, [b"x"] * 1000)
    assert (caller.call(), caller.taken, caller.through, caller.proven) == (401, 0, None, [])


@pytest.mark.parametrize(
    ("path", "change", "body"),
    [
        (PUSH, {}, b"changed"),
        ("/v1/fleet/pull-messages", {}, b"body"),  # the signature of another call
        (PUSH, {PROCESS: "another"}, b"body"),
        (PUSH, {SIGNED: "00"}, b"body"),
        (PUSH, {SIGNED: Signer(OTHER)(statement(PUSH, "2026-01-01T00:00:00+00:00", "", b"body")).hex()}, b"body"),
        (PUSH, {SIGNED: "no hexadecimal"}, b"body"),
    ],
)
def test_a_signature_is_of_one_path_and_one_body(path: str, change: dict[str, str], body: bytes) -> None:
    said: list[str] = []
    caller = Caller(path, signed(PUSH, b"body") | change, [body])
    assert (caller.call(known(said.append)), caller.through) == (401, None)
    assert len(said) == 1
    assert said[0].startswith(f"refused: a call of node-1 to {path} is ")


def test_a_call_that_comes_a_second_time_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    callers, call = known(said.append), signed(PUSH, b"body")
    assert [Caller(PUSH, call, [b"body"]).call(callers) for _ in range(3)] == [200, 401, 401]
    assert said == [f"refused: a call of node-1 to {PUSH} came a second time"], "once a minute"
    s = int(call[SIGNED][-96:], 16)
    twin = call | {SIGNED: call[SIGNED][:-96] + f"{ORDER - s:096x}"}  # as valid as the first one
    assert Caller(PUSH, twin, [b"body"]).call(callers) == 401
    assert Caller(PUSH, signed(PUSH, b"body", second=1), [b"body"]).call(callers) == 200, "a second later it is another"
    later = time.monotonic() + 311
    monkeypatch.setattr(callers_module.time, "monotonic", lambda: later)
    assert Caller(PUSH, signed(PUSH, b"next"), [b"next"]).call(callers) == 200
    assert len(callers._seen) == 1, "what is refused by its age alone is forgotten"


def test_a_call_of_another_connection_takes_no_partys_place() -> None:
    """Somebody who has heard a party connect, and changes the process, would otherwise end the party's process."""
    callers = known()
    activate, pull = "/v1/fleet/activate-node", "/v1/fleet/pull-messages"
    heard = signed(activate, b"", "one")
    assert Caller(activate, heard, [b""]).call(callers) == 200
    assert Caller(activate, heard | {PROCESS: "thief"}, [b""]).call(callers) == 401
    assert Caller(pull, signed(pull, b"", "one"), [b""]).call(callers) == 200, "the party goes on"


def test_a_key_that_is_not_taken_any_more_hears_why() -> None:
    callers = Callers()
    reasons = {"the key of node-1 was revoked on Monday: stolen": 403, "the entry of node-revoked ended on Monday": 401}
    for why, status in reasons.items():
        callers.admit([("node-1", OWN.public_key())], {fingerprint(OWN.public_key()): why})
        caller = Caller(PUSH, signed(PUSH, b"body"), [b"body"])
        assert (caller.call(callers), caller.taken, caller.proven) == (status, 0, [])
        assert (REFUSAL.encode(), why.encode()) in caller.heard[0]["headers"]
        stranger = Caller(PUSH, headers(OWN, OTHER), [b"body"])
        assert stranger.call(callers) == 401
        assert REFUSAL.encode() not in dict(stranger.heard[0]["headers"]), "others hear nothing"


def test_a_body_longer_than_any_part_of_a_message_is_not_read_to_its_end() -> None:
    caller = Caller(PUSH, headers(), [bytes(1 << 20)] * 1000)
    assert (caller.call(), caller.taken, caller.through) == (413, Limits().body_bytes // 2**20 + 1, None)


def test_of_two_processes_with_one_key_the_last_one_speaks_for_it() -> None:
    callers, numbers = known(), iter(range(10))

    def call(path: str, process: str) -> int:
        path, number = f"/v1/fleet/{path}", next(numbers)
        return Caller(path, signed(path, b"", process, number), [b""]).call(callers)

    assert [call("pull-messages", "one"), call("activate-node", "one"), call("pull-messages", "one")] == [200] * 3
    assert call("activate-node", "two") == 200
    assert [call("pull-messages", p) for p in ("one", "two", "one", "")] == [409, 200, 409, 409]


# Greetings


class Nodes(driver.DeploymentLink):
    """A link to one node, which answers what the test says, or not at all."""

    def __init__(self, folder: Path) -> None:
        self._asked: dict[str, int] = {}
        write_parties(folder, {1: "node-1"}, Assignment({"node-1": ("house-1",)}))
        self.where, self.wait, self.said, self.hellos = folder, 1.0, list[str](), 0
        self.say = self.said.append
        self._hello, self._clients, self._pending, self._again, self._said = Request(), {}, {}, {}, set()
        self._greetings = 0
        self._begun = False
        self.answer: Reply | None = None
        self.grid = self  # type: ignore[assignment]

    def get_node_ids(self) -> list[int]:
        return [1]

    def push(self, *_: Any) -> str:
        self.hellos += 1
        return str(self.hellos)

    def receive(self, numbers: Collection[str]) -> dict[str, Parts | str]:
        return {n: (pack(replace(self.answer, run="", ask=int(n))), b"") for n in numbers} if self.answer else {}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    return now


def test_a_node_that_could_not_take_part_is_asked_again(tmp_path: Path, clock: list[float]) -> None:
    link = Nodes(tmp_path)
    link.answer = Reply(RUN, "", "", 0, 0, failure="its data is not there yet")
    for _ in range(3):
        link._look()
        clock[0] += driver.HELLO_AGAIN + 1
    assert link.said == ["node-1 cannot take part: its data is not there yet"], "said once"
    link.answer = Reply(RUN, "", "", 0, 0, roles={"house-1": {}})
    link._look()
    assert link._placed() == {"house-1"}
    hellos = link.hellos
    clock[0] += 1000
    link._look()
    assert link.hellos == hellos, "a node with a role is left in peace"


def test_the_record_of_a_greeting_names_no_client_of_somebody_else(tmp_path: Path, clock: list[float]) -> None:
    """Its party would seem to have sent what is not in its own record."""
    link = Nodes(tmp_path)
    link.received = Received(tmp_path)
    for roles in ({"house-2": {}}, {"house-1": {}, "house-2": {}}):
        link.answer = Reply(roles=roles)
        link._look()
        clock[0] += driver.HELLO_AGAIN + 1
    rows = [line.record for line in read_records(files_of(tmp_path, "received"))]
    assert [(row["clients"], row["outcome"]) for row in rows[1:]] == [([], "refused"), (["house-1"], "read")]


def test_a_lost_hello_is_sent_again_and_late_answers_do_no_harm(tmp_path: Path, clock: list[float]) -> None:
    link = Nodes(tmp_path)
    for _ in range(3):
        link._look()
        link._look()
        clock[0] += driver.HELLO_AGAIN + 1
    assert link.hellos == 3
    link.answer = Reply(RUN, "", "", 0, 0, roles={"house-1": {}})
    link._look()
    assert (link._placed(), link._pending, link.said) == ({"house-1"}, {}, [])


def test_a_role_with_a_name_that_no_terminal_should_see_is_refused(tmp_path: Path, clock: list[float]) -> None:
    link = Nodes(tmp_path)
    link.answer = Reply(RUN, "", "", 0, 0, roles={"house\x1b[2J": {}, "house-1": {}})
    link._look()
    assert link._placed() == {"house-1"}
    assert link.said == ["refused: node-1 claims a role with an impossible name: house[2J"]


def test_a_key_that_claims_fifty_roles_gets_its_own_and_one_line(tmp_path: Path, clock: list[float]) -> None:
    link = Nodes(tmp_path)
    link.answer = Reply(RUN, "", "", 0, 0, roles={f"house-{i}": {} for i in range(50)})
    link._look()
    assert link.said == ["refused: node-1 claims to be house-0, but its key is for house-1 (and 48 more)"]
    assert link.parties(1) == {"house-1": {}}, "the run can start"


def test_a_key_without_a_role_cannot_keep_a_run_from_starting(tmp_path: Path, clock: list[float]) -> None:
    link = Nodes(tmp_path)
    write_parties(tmp_path, {1: "node-2"}, Assignment({"node-1": ("house-1",)}))
    link.answer = Reply(RUN, "", "", 0, 0, roles={"house-1": {}, "house-2": {}})
    link._look()
    assert link._placed() == set()
    (said,) = link.said
    assert said == "refused: node-2 claims to be house-1, which belongs to the key of node-1 (and 1 more)"


# Fetching


class Slow:
    """A runtime whose first replies never come whole."""

    def PullMessages(self, request: Any) -> Any:
        metadata = [SimpleNamespace(reply_to_message_id=n, message_id=f"reply-{n}") for n in request.message_ids]
        found = [SimpleNamespace(metadata=m) for m in metadata]
        return SimpleNamespace(messages_list=found, message_object_trees=[n.message_id for n in metadata])

    def ConfirmMessageReceived(self, _: Any) -> None: ...


def fetcher(monkeypatch: pytest.MonkeyPatch, stalled: int) -> tuple[fetching.Fetcher, set[str]]:
    """A fetcher of whose replies the first `stalled` wait for ever; and the names of those that still wait."""
    waiting: set[str] = set()

    def part(name: str) -> bytes:
        if int(name.removeprefix("reply-")) < stalled:
            waiting.add(name)
            raise ObjectUnavailableError(name)
        return b"Message  0\0"

    def fetched(number: str, tree: Any, pull: Any, shelf: Any) -> Message:
        try:
            pull(number)
        finally:
            waiting.discard(number)
        return Message(record(b"h", b"p"), 1, "query")

    monkeypatch.setattr(fetching, "fetched", fetched)
    monkeypatch.setattr(link, "ConfirmMessageReceivedRequest", lambda **_: None)
    return fetching.Fetcher(Slow(), 1, part), waiting  # type: ignore[arg-type]


def until(met: Any) -> None:
    end = time.monotonic() + 20
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_stalled_uploads_hold_up_no_other_and_end_when_they_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = Link.window - 1
    fetch, waiting = fetcher(monkeypatch, stalled)
    numbers = [str(i) for i in range(Link.window)]
    came: dict[str, Any] = {}

    def all_but_the_stalled() -> bool:
        came.update(fetch.replies(numbers, (), 600.0))
        return bool(came)

    until(all_but_the_stalled)
    assert list(came) == [str(stalled)]
    until(lambda: len(waiting) == stalled)
    fetch.replies([], (), 600.0)  # their requests are too late by now
    until(lambda: not waiting)
    fetch.close()


def test_a_reply_of_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, _ = fetcher(monkeypatch, 0)
    one = SimpleNamespace(object_id="reply-0")
    monkeypatch.setattr(fetching, "fetched", objects.fetched)
    monkeypatch.setattr(objects, "iterate_object_tree", lambda _: [one] * (objects.MOST_PARTS + 1))
    came: dict[str, Any] = {}
    until(lambda: came.update(fetch.replies(["0"], (), 1.0)) or came)
    assert came == {"0": "reply refused: it has 501 parts, more than 500"}
    fetch.close()


# A node's turn


class Turn(Fleet):
    """A node with one message to answer."""

    def __init__(self, header: bytes) -> None:
        self.message = Message(record(header, b""), 1, "query")
        self.message.metadata.__dict__["_message_id"] = "1"
        self.said: list[str] = []
        self.say, self._node, self._stop = self.said.append, None, threading.Event()  # type: ignore[assignment]
        metadata = SimpleNamespace(run_id=1, message_id="1")
        taken = SimpleNamespace(messages_list=[SimpleNamespace(metadata=metadata)], message_object_trees=[None])
        self.confirmed: list[str] = []
        self._client = SimpleNamespace(  # type: ignore[assignment]
            PullMessages=lambda _: taken, ConfirmMessageReceived=lambda r: self.confirmed.append(r.message_object_id)
        )
        self.pushed: list[Reply] = []
        self.leaving: Callable[[bytes, bytes], None] = lambda header, payload: None
        self._sent = None

    def _pull(self, *_: Any) -> Message:
        return self.message

    def _push(self, reply: Message, *_: Any) -> None:
        assert not self.confirmed, "the server keeps the message until its reply is there"
        self.leaving(*parts(reply))
        self.pushed.append(unpack(parts(reply)[0], Reply))


def raising(error: Exception) -> Any:
    def do(header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        unpack(header, Request)
        raise error

    return do


@pytest.fixture
def identified(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr("visard.deployment.flower.client.PullMessagesRequest", lambda **_: None)


@pytest.mark.usefixtures("identified")
def test_a_request_of_another_version_is_answered() -> None:
    turn = Turn(pack(Request(RUN, {})).replace(b'"version":3', b'"version":9'))
    assert turn._turn(raising(AssertionError())) is True
    assert [a.failure for a in turn.pushed] == ["request refused: wire format 9 is not format 3: update the older side"]
    assert turn.confirmed == ["1"]


@pytest.mark.usefixtures("identified")
def test_a_request_that_cannot_be_done_ends_no_node_and_tells_no_path() -> None:
    turn = Turn(pack(Request(RUN, {})))
    assert turn._turn(raising(OverflowError("/home/alice"))) is True
    assert [a.failure for a in turn.pushed] == ["request refused: OverflowError"]
    assert turn.said == ["a request was refused: /home/alice"]


def on_disk(folder: Path) -> list[str]:
    """Digests of the replies on a party's record."""
    rows = [line.record for line in read_records(files_of(folder, "ledger"))]
    return [row["digest"] for row in rows if row["event"] == "reply"]


@pytest.mark.usefixtures("identified")
def test_a_reply_is_on_the_partys_disk_before_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(pack(Request(RUN, {})))
    turn._sent = PartyLedger(tmp_path, "server:1", "1", lambda: b"")
    durable, fsync = list[list[str]](), os.fsync

    def synced(handle: int) -> None:
        fsync(handle)
        durable.append(on_disk(tmp_path))

    def leaving(header: bytes, payload: bytes) -> None:
        assert durable[-1] == on_disk(tmp_path) == [digest_of(header, payload)]

    monkeypatch.setattr(os, "fsync", synced)
    turn.leaving = leaving
    assert turn._turn(lambda *_: (pack(Reply(RUN)), b"payload")) is True
    assert len(turn.pushed) == 1


@pytest.mark.usefixtures("identified")
def test_a_reply_that_cannot_be_put_on_record_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    turn = Turn(pack(Request(RUN, {})))
    turn._sent = PartyLedger(tmp_path, "server:1", "1", lambda: b"")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(VisardError, match="No space left"):
        turn._turn(lambda *_: (pack(Reply(RUN)), b"payload"))
    assert (turn.pushed, turn.confirmed, on_disk(tmp_path)) == ([], [], [])


def test_clocks_that_differ_are_named() -> None:
    now = time.time()
    assert clocks(formatdate(now)) == ""
    assert clocks("") == ""
    assert clocks(formatdate(now - 60)).endswith("s ahead of the server's")
    assert clocks(formatdate(now + 1000)).endswith("s behind the server's")
    assert clocks(formatdate(now + 100)) == "", "Flower takes signatures that are five minutes old"


# Ray


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_ray_is_our_own_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    configured: list[Any] = []
    monkeypatch.setattr(simulation, "_run_simulation", lambda **how: configured.append(how["backend_config"]))
    link = simulation.SimulationLink(["client-000"], Recipe("x:y", {}), tmp_path, 3)
    link.close()
    given = {k: configured[0]["init_args"].get(k) for k in ("address", "num_cpus")}
    assert given == ({"address": None, "num_cpus": None} if address else {"address": "local", "num_cpus": 3})


# The server's keys


def test_a_certificate_that_is_none_or_of_another_key_is_one_line(tmp_path: Path) -> None:
    make_keys(tmp_path / "one", 1, ["127.0.0.1"])
    make_keys(tmp_path / "two", 1, ["127.0.0.1"])
    server = tmp_path / "one" / "server"
    (server / "server.key").write_bytes((tmp_path / "two" / "server" / "server.key").read_bytes())
    with pytest.raises(UsageError, match="are not a certificate and its key"):
        serve(ServerKeys.load(server), tmp_path, "127.0.0.1", 0, lambda: None, lambda _: None)
    (server / "server.crt").write_text("no certificate")
    with pytest.raises(UsageError, match="are not a certificate and its key"):
        serve(ServerKeys.load(server), tmp_path, "127.0.0.1", 0, lambda: None, lambda _: None)
    assert not list(tmp_path.glob("*.sock")) + list(tmp_path.glob("nodes.json")), "nothing was begun"


def test_a_run_can_connect_as_soon_as_the_socket_is_there() -> None:
    """The server is busy for a while after that: a run that begins then must wait and not be refused."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
        path = Path(folder) / server.SOCKET
        with closing(server._inside_socket(path)), socket.socket(socket.AF_UNIX) as run:
            run.connect(str(path))
