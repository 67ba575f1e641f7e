"""Connections that carry parts alone: the party's own client over a socket pair, answered by the server's thread."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

import httpx
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from tests.engines.test_flower_parts import OWN, PUSH, Caller, headers, known, signed

from visard.crypto.signatures import Signer, fingerprint
from visard.deployment.client_hello import PARTS
from visard.deployment.flower import CALL_KEY, FLEET, MAC, PROCESS, REFUSAL, SIGNED, mac, statement
from visard.deployment.flower.callers import Callers
from visard.deployment.flower.calls import Calls, outside
from visard.deployment.flower.part import GIVEN, GONE, NOT_YET, OVER, REFUSED, TAKEN, Part
from visard.deployment.flower.part_connections import PartConnections
from visard.deployment.flower.parts import Parts
from visard.deployment.flower.room import FULL, Room
from visard.deployment.flower.store import Store, name_of_object
from visard.deployment.listener import Limits
from visard.processes import Data

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr

CONTENT = b"ArrayChunk  7\0content"
PART = Part(17, "0f" * 18, name_of_object([CONTENT]))
ACTIVATE = f"{FLEET}activate-node"
KEY_FOR_MACS = "5a" * 32


class Kept:
    """Takes and gives parts as the server's store would."""

    def __init__(self) -> None:
        self.taken: list[tuple[Part, bytes]] = []

    def do(self, part: Part, body: Sequence[Data], counted: bool) -> tuple[int, Sequence[Data]]:
        assert counted
        self.taken.append((part, b"".join(body)))
        return (TAKEN, ()) if part.session else (GIVEN, [b"head ", CONTENT])


class Plain(socket.socket):
    """An end of a socket pair in place of one with TLS."""

    def do_handshake(self) -> None: ...


class Served:
    """A server that answers connections for parts; `callers` are known to it, and what it takes is kept."""

    def __init__(self, callers: Callers | None = None, parts: Any = None, **limits: int) -> None:
        self.callers, bounds = callers or connected(), Limits(**limits)  # type: ignore[arg-type]
        self.kept = parts or Kept()
        self.direct = PartConnections(self.callers, self.kept, Room(bounds), bounds)
        self.last: Any = None  # connection

    @contextmanager
    def pair(self, party: str = "node-1") -> Iterator[socket.socket]:
        """The party's end of a connection."""
        ours, theirs = socket.socketpair()
        tls = Plain(fileno=theirs.detach())
        self.last = SimpleNamespace(due=None, party=party, called=False)

        failed: list[Exception] = []

        def serve() -> None:
            with closing(tls):
                try:
                    self.direct.serve(self.last, tls)
                except Exception as error:
                    failed.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        ours.settimeout(10)
        with ours:
            yield ours
        thread.join(10)
        assert not thread.is_alive()
        assert failed == []

    @contextmanager
    def calls(self, party: str = "node-1") -> Iterator[Calls]:
        """The party's client, over one connection."""
        with self.pair(party) as ours:

            class One(http.client.HTTPConnection):
                def connect(self) -> None:
                    self.sock = ours

            yield Calls(lambda: One("visard"))

    def call(
        self, part: Part, given: dict[str, str], body: bytes = b"", party: str = "node-1", path: str = ""
    ) -> httpx.Response:
        with self.calls(party) as calls:
            return calls.post(path or part.path(FLEET), [body] if body else [], given)


def connected(process: str = "process", key: str = KEY_FOR_MACS, callers: Callers | None = None) -> Callers:
    """Callers of which a party has connected and handed over its key for MACs."""
    callers = callers or known()
    given = headers(OWN, OWN, process, len(callers._seen))
    said = statement(ACTIVATE, given["flwr-timestamp"], f"{process} {key}".strip(), b"hello")
    given |= {SIGNED: Signer(OWN)(said).hex()} | ({CALL_KEY: key} if key else {})
    assert Caller(ACTIVATE, given, [b"hello"]).call(callers) == 200
    return callers


def of_part(
    part: Part, key: str = KEY_FOR_MACS, process: str = "process", age: float = 0.0, path: str = "", digest: str = ""
) -> dict[str, str]:
    """Headers of a call for a part, with the MAC of its path."""
    said = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
    public = b64encode(public_key_to_bytes(OWN.public_key())).decode()
    of = mac(key, statement(path or part.path(FLEET), said, process, b"", digest or part.digest))
    return {"flwr-public-key": public, "flwr-timestamp": said, PROCESS: process, MAC: of}


def test_parts_come_and_go_over_one_connection() -> None:
    served, wanted = Served(), PART._replace(session="")
    with served.calls() as calls:
        for number in range(3):
            answer = calls.post(PART.path(FLEET), [CONTENT[:5], CONTENT[5:]], of_part(PART))
            assert (answer.status_code, answer.content) == (204, b"")
            answer = calls.post(wanted.path(FLEET), [], of_part(wanted))
            assert (answer.status_code, answer.content) == (200, b"head " + CONTENT)
            assert served.kept.taken == [(PART, CONTENT), (wanted, b"")] * (number + 1)
    assert served.callers.heard.keys() == {"node-1"}


def test_a_long_body_comes_whole_into_memory_that_serves_again() -> None:
    served = Served()
    bodies = [os.urandom(5 * 2**20 + n) for n in (0, 17, -1000)]
    with served.calls() as calls:
        for body in bodies:
            part = PART._replace(name=sha256(body).hexdigest())
            assert calls.post(part.path(FLEET), [body], of_part(part)).status_code == TAKEN
    assert [content for _, content in served.kept.taken] == bodies
    assert len(served.direct._spare) == 1


@pytest.mark.parametrize(
    "given",
    [
        {},
        of_part(PART, key="00" * 32),  # the key that it names is registered, which is no secret
        of_part(PART, key=""),
        of_part(PART._replace(name="0" * 64)),  # the MAC of another part
        of_part(PART, digest="0" * 64),
        of_part(PART, path=PART._replace(run=18).path(FLEET)),  # of another run
        of_part(PART, age=400.0),
        of_part(PART, age=-60.0),
        of_part(PART) | {"flwr-timestamp": "yesterday"},
        of_part(PART) | {"flwr-timestamp": datetime.now(UTC).isoformat()},
        of_part(PART) | {CALL_KEY: KEY_FOR_MACS},  # a key for MACs comes with a signature
        of_part(PART) | {MAC: "not a mac, \u00e9"},
        of_part(PART) | {MAC: ""},
        {k: v for k, v in of_part(PART).items() if k != MAC},
    ],
)
def test_a_part_without_its_mac_is_turned_away(given: dict[str, str]) -> None:
    served = Served()
    with served.calls() as calls:
        assert calls.post(PART.path(FLEET), [CONTENT], of_part(PART)).status_code == TAKEN
        assert calls.post(PART.path(FLEET), [CONTENT], given).status_code == 401
        assert len(served.kept.taken) == 1
        assert calls.post(PART.path(FLEET), [CONTENT], of_part(PART)).status_code == TAKEN, "the next call is served"


def test_who_has_a_copy_of_a_proof_and_no_key_does_not_keep_a_thread() -> None:
    """It is sent in the clear, and valid a few times."""
    served, most = Served(), Limits()
    with served.pair() as ours:
        given = "".join(f"{k}: {v}\r\n" for k, v in of_part(PART, key="00" * 32).items())
        length, begun = f"content-length: {most.body_bytes}", time.monotonic()
        ours.sendall(f"POST {PART.path(FLEET)} HTTP/1.1\r\nhost: a\r\n{given}{length}\r\n\r\n".encode())
        assert b"\r\nconnection: close\r\n" in ours.recv(1000)
        assert served.last.due < begun + most.header_seconds + 5, "nor for long"
        ours.sendall(bytes(most.body_bytes))
        assert ours.recv(1000) == b""
    assert served.kept.taken == []


def test_a_connection_serves_the_party_that_has_opened_it() -> None:
    served = Served()
    assert served.call(PART, of_part(PART), CONTENT, party="node-2").status_code == 401
    assert served.kept.taken == []


@pytest.mark.parametrize("path", ["/v1/fleet/pull-messages", "/", f"{FLEET}part/17/-/short"])
def test_only_parts_are_served(path: str) -> None:
    served = Served()
    assert served.call(PART, of_part(PART, path=path), CONTENT, path=path).status_code == 404
    assert served.kept.taken == []


def test_a_part_that_is_too_long_is_not_read() -> None:
    served = Served(body_bytes=len(CONTENT) - 1)
    assert served.call(PART, of_part(PART), CONTENT).status_code == 413
    assert served.kept.taken == []


HEAD = "".join(f"{k}: {v}\r\n" for k, v in of_part(PART).items())


@pytest.mark.parametrize(
    "said",
    [
        "content-length: many",
        "content-length: -1",
        "content-length: " + "9" * 5000,
        "transfer-encoding: chunked",
        "x: y",  # a body of no known length
        f"content-length: {len(CONTENT) - 1}",  # and one byte more than it says
    ],
)
def test_a_body_has_a_length(said: str) -> None:
    served = Served()
    with served.pair() as ours:
        ours.sendall(f"POST {PART.path(FLEET)} HTTP/1.1\r\nhost: a\r\n{HEAD}{said}\r\n\r\n".encode() + CONTENT)
        heard = b"".join(iter(lambda: ours.recv(1000), b""))
    assert heard == b"" or heard.startswith(b"HTTP/1.1 413 ")
    assert served.kept.taken == []


@pytest.mark.parametrize("sent", [b"", b"PO", b"\0" * 100, b"a" * 2**20, b"GET / HTTP/1.1\r\n\r\n"])
def test_a_connection_that_says_something_else_is_closed(sent: bytes) -> None:
    served = Served()
    with served.pair() as ours:
        try:
            ours.sendall(sent)
            ours.shutdown(socket.SHUT_WR)
            heard = ours.recv(1000)
        except ConnectionError:
            heard = b""
    assert heard == b"" or heard.startswith(b"HTTP/1.1 413 ")


def test_a_header_has_a_bound() -> None:
    served = Served()
    with served.pair() as ours:
        ours.sendall(f"POST {PART.path(FLEET)} HTTP/1.1\r\nhost: a\r\n".encode())
        more = b"".join(b"x%d: %s\r\n" % (number, b"a" * 10_000) for number in range(1000))
        with pytest.raises(ConnectionError):
            ours.sendall(more)


def test_a_body_that_ends_too_soon_is_not_taken() -> None:
    served = Served()
    with served.pair() as ours:
        length = f"content-length: {len(CONTENT)}"
        ours.sendall(f"POST {PART.path(FLEET)} HTTP/1.1\r\nhost: a\r\n{HEAD}{length}\r\n\r\n".encode() + CONTENT[:-1])
        ours.shutdown(socket.SHUT_WR)
        assert ours.recv(1000) == b""
    assert served.kept.taken == []
    assert len(served.direct._spare) == 1, "its memory serves the next one"


def test_each_wait_has_its_time() -> None:
    """The listener closes what is due."""
    seen, served = list[float](), Served()
    do = served.kept.do
    served.kept.do = lambda *given, **more: (seen.append(served.last.due), do(*given, **more))[1]
    with served.pair() as ours:
        while served.last.due is None:
            pass
        idle = served.last.due
        ours.sendall(b"POST ")
        while served.last.due == idle:
            pass
        header = served.last.due
        ours.sendall(
            f"{PART.path(FLEET)} HTTP/1.1\r\nhost: a\r\n{HEAD}content-length: {len(CONTENT)}\r\n\r\n".encode() + CONTENT
        )
        assert ours.recv(1000).startswith(b"HTTP/1.1 204 ")
        while served.last.due in (header, *seen):
            pass
    limits = Limits()
    assert header - idle == pytest.approx(limits.header_seconds - 5, abs=2)
    assert seen[0] - header == pytest.approx(limits.request_seconds - limits.header_seconds, abs=2)
    assert served.last.due - seen[0] == pytest.approx(5 - limits.request_seconds, abs=2)


def test_a_call_for_a_part_counts_once() -> None:
    served, call = Served(), of_part(PART)
    assert [served.call(PART, call, CONTENT).status_code for _ in range(2)] == [TAKEN, 401]


def test_a_mac_counts_only_with_a_key_that_was_handed_over() -> None:
    assert Served(connected(key="")).call(PART, of_part(PART, key=""), CONTENT).status_code == 401
    assert Served(known()).call(PART, of_part(PART), CONTENT).status_code == 401, "it has not connected"
    assert Caller(PUSH, of_part(PART) | headers(), [b"body"]).call(connected()) == 401, "other calls are signed"


def test_of_two_processes_with_one_key_the_first_one_hears_of_the_second() -> None:
    """It ends then; if it were refused like a stranger it would connect again, and the two would take turns."""
    served = Served(connected("second", "11" * 32, connected("first")))
    assert served.call(PART, of_part(PART, process="first"), CONTENT).status_code == 409
    assert served.call(PART, of_part(PART, "11" * 32, "second"), CONTENT).status_code == TAKEN


def test_the_key_for_macs_is_signed_with_the_call_that_brings_it() -> None:
    call = signed(ACTIVATE, b"hello", "process") | {CALL_KEY: KEY_FOR_MACS}
    assert Caller(ACTIVATE, call, [b"hello"]).call(known()) == 401


def test_a_key_that_is_not_taken_any_more_hears_why() -> None:
    served = Served()
    why = "the key of node-1 was revoked on Monday: stolen\r\nx: y"
    served.callers.admit([("node-1", OWN.public_key())], {fingerprint(OWN.public_key()): why})
    answer = served.call(PART, of_part(PART), CONTENT)
    assert (answer.status_code, served.kept.taken) == (403, [])
    assert answer.headers[REFUSAL] == "the key of node-1 was revoked on Monday: stolen x: y"


def test_parts_come_over_other_connections_too() -> None:
    """As behind a proxy that ends TLS."""
    served, path = Served(), PART.path(FLEET)
    caller = Caller(path, of_part(PART), [CONTENT[:3], CONTENT[3:]])
    assert caller.call(served.callers, served.direct) == TAKEN
    assert (served.kept.taken, caller.through, caller.proven) == ([(PART, CONTENT)], None, ["node-1"])
    again = Caller(path, of_part(PART, key="00" * 32), [CONTENT])
    assert (again.call(served.callers, served.direct), again.taken, again.proven) == (401, 0, [])
    long = Caller(path, of_part(PART), [bytes(2**20)] * 1000)
    assert (long.call(served.callers, served.direct), long.taken) == (413, Limits().body_bytes // 2**20 + 1)
    full = Served(party_bytes=len(CONTENT) - 1)
    assert Caller(path, of_part(PART), [CONTENT]).call(full.callers, full.direct) == FULL
    assert len(served.kept.taken) == 1


def test_a_proxy_that_ends_tls_finds_a_protocol_that_it_knows() -> None:
    """Else it refuses the connection (RFC 7301, 3.2)."""
    said = list[str]()

    class Context(ssl.SSLContext):
        def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
            said.extend(alpn_protocols)

    outside("127.0.0.1:1", lambda: Context(ssl.PROTOCOL_TLS_CLIENT), 1.0)._connection()
    assert said == [PARTS, "http/1.1"]


class Linked:
    """As much of Flower's state as parts need."""

    def __init__(self, store: Store) -> None:
        self.store, self._object_push_sessions, self.over = store, {PART.session: object()}, False

    def store_object(self, run: int, session: str, name: str, content: bytes) -> bool:
        if (run, session) != PART[:2] or not self._object_push_sessions:
            return False
        self.store.put(name, content)
        self._object_push_sessions.clear()
        return True

    def get_object(self, run: int, name: str) -> bytes | None:
        return self.store.get(name)

    def store_traffic(self, run: int, bytes_sent: int, bytes_recv: int) -> None: ...


def test_parts_are_taken_under_their_own_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.preregister(17, ObjectTree(object_id=PART.name))
    linked = Linked(store)
    taking = Parts(linked, store)  # type: ignore[arg-type]
    monkeypatch.setattr("visard.deployment.flower.parts.check_abort", lambda *_: linked.over)

    def answer(part: Part, body: list[bytes]) -> tuple[int, bytes]:
        status, content = taking.do(part, body, counted=True)
        return status, b"".join(content)

    wanted = PART._replace(session="")
    assert answer(wanted, []) == (NOT_YET, b"")
    assert answer(PART, [CONTENT[:-1], b"!"]) == (REFUSED, b""), "another content"
    assert (answer(wanted, []), taking.news) == ((NOT_YET, b""), 0)
    linked.over = True
    assert answer(PART, [CONTENT]) == (OVER, b"")
    linked.over = False
    assert answer(PART, [CONTENT[:5], CONTENT[5:]]) == (TAKEN, b"")
    assert (answer(wanted, []), taking.news) == ((GIVEN, CONTENT), 1)
    assert answer(PART, [CONTENT]) == (GONE, b""), "nobody waits for it any more"
    assert answer(wanted._replace(name="0" * 64), []) == (GONE, b"")
    assert answer(wanted, [b"a body"]) == (REFUSED, b"")


def test_what_is_no_part_and_what_is_for_no_run_is_refused(tmp_path: Path) -> None:
    """An error would end the thread, and fill the log of the server as often as a party likes."""
    served, store = Served(parts="none"), Store(tmp_path)
    junk = PART._replace(name=sha256(b"junk").hexdigest())
    store.preregister(17, ObjectTree(object_id=junk.name))
    linked: Any = Linked(store)
    linked.get_run_status = lambda runs: {}
    served.direct._parts = taking = Parts(linked, store)
    assert served.call(junk, of_part(junk), b"junk").status_code == OVER
    taking._over = lambda part: False  # type: ignore[method-assign]
    assert served.call(junk, of_part(junk), b"junk").status_code == REFUSED
    assert not store.is_here(junk.name)
