"""The listener of a server: unknown connections that come in numbers, slowly or without end, and parties among them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("cryptography") is None:
    pytest.skip("needs the package cryptography: pip install 'visard[flower]'", allow_module_level=True)

from tests.unit.test_client_hello import hello

from visard.deployment import listener as module
from visard.deployment.client_hello import PARTS, Proofs, party_context
from visard.deployment.keys import PartyKeys, ServerKeys, make_keys
from visard.deployment.listener import Connection, Limits, Listener, network_of

pytestmark = pytest.mark.flower  # run by make flower, which installs the package


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "keys", 1, ["127.0.0.1"])
    return folder / "keys"


class Echo(asyncio.Protocol):
    """Sends back what it gets; the word `signed` proves the key of node-1."""

    def __init__(self, there: There, connection: Connection) -> None:
        self.there, self.connection = there, connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.there.listener.entered(self.connection, transport)

    def data_received(self, data: bytes) -> None:
        if data == b"signed":
            self.connection.due = None
            self.there.listener.prove(self.connection, "node-1")
        self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.there.listener.drop(self.connection)


class There:
    """A listener on loopback, and ways to come to it."""

    def __init__(self, keys: Path, limits: Limits) -> None:
        self.own, server = PartyKeys.load(keys, "1"), ServerKeys.load(keys)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.certificate, server.key)
        self.stranger = ssl.create_default_context(cafile=str(server.ca))
        listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = listening.getsockname()[1]
        self.said: list[str] = []
        self.ends: list[Callable[[], None]] = []  # close what was opened
        proofs = Proofs(server.parties.items())
        self.threads: list[threading.Thread] = []  # that serve connections for parts
        self.listener = Listener(
            listening, context, proofs, limits, lambda connection: Echo(self, connection), self.echo, self.said.append
        )

    def echo(self, connection: Connection, tls: ssl.SSLSocket) -> None:
        """Serve a connection for parts."""
        self.threads.append(threading.current_thread())
        with contextlib.suppress(OSError):
            tls.do_handshake()
            connection.due = None
            while data := tls.recv(100):
                tls.sendall(data)

    async def raw(self, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        """A connection that sends something and waits."""
        sock = socket.socket()
        self.ends.append(sock.close)
        sock.setblocking(False)
        sock.bind((source, 0))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", self.port))
        await loop.sock_sendall(sock, data)
        await asyncio.sleep(0.02)
        return sock

    async def tls(
        self, party: bool, says: bytes = b"", protocol: str = "http/1.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A TLS connection, with the proof of a party or without."""
        context = self.stranger
        if party:
            context = party_context(self.own.ca, self.own.private)
        context.set_alpn_protocols([protocol])
        opened = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self.port, ssl=context), 10)
        self.ends.append(lambda: opened[1].transport.abort())
        if says:
            opened[1].write(says)
            assert await asyncio.wait_for(opened[0].readexactly(len(says)), 10) == says
        return opened


async def closed(sock: socket.socket, seconds: float = 0.2) -> bool:
    """Whether the other side has closed."""
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), seconds) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def with_listener(keys: Path, limits: Limits, act: Callable[[There], Awaitable[None]]) -> There:
    there = There(keys, limits)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        there.listener.open()
        try:
            yield
        finally:
            for end in there.ends:
                end()
            there.listener.close()
            for connection in [v for line in there.listener.parties.values() for v in line]:
                there.listener.drop(connection)
            await asyncio.sleep(0.05)

    async def run() -> None:
        async with opened():
            await act(there)

    asyncio.run(asyncio.wait_for(run(), 60))
    return there


def test_who_came_first_has_to_go_and_a_party_gets_in(keys: Path) -> None:
    async def act(there: There) -> None:
        first = await there.raw()
        await asyncio.sleep(module.MIN_SECONDS)
        rest = [await there.raw(hello()[:9], f"127.0.0.{i}") for i in range(2, 9)]
        assert await closed(first)
        assert not any([await closed(sock, 0.01) for sock in rest])
        assert len(there.listener.waiting) == 7
        await asyncio.sleep(module.MIN_SECONDS)
        begun = time.monotonic()
        await there.tls(party=True, says=b"hello")
        assert time.monotonic() - begun < 2
        assert list(there.listener.parties) == ["node-1"]

    with_listener(keys, Limits(connections=7), act)


def test_a_newcomer_has_a_short_time_however_many_come(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_SECONDS", 1.0)

    async def act(there: There) -> None:
        begun = time.monotonic()
        came = [await there.raw() for _ in range(12)]
        assert len(there.listener.waiting) == 4, "the kernel holds the rest"
        assert not await closed(came[0], 0.01)
        while not await closed(came[3], 0.05):
            pass
        assert time.monotonic() - begun >= 1.0

    with_listener(keys, Limits(connections=4), act)


def test_one_address_does_not_take_the_places_of_others(keys: Path) -> None:
    async def act(there: There) -> None:
        other = await there.raw(source="127.0.0.9")
        many = [await there.raw(source="127.0.0.2") for _ in range(6)]
        assert [await closed(sock, 0.02) for sock in many] == [True, True, True, False, False, False]
        assert not await closed(other, 0.01)

    there = with_listener(keys, Limits(address_connections=3), act)
    assert not there.listener._by_address, "nothing is kept of who has gone"


@pytest.mark.parametrize("data", [b"", b"\x16", hello()[:-1], b"GET / HTTP/1.1\r\n\r\n" + bytes(50_000)])
def test_what_does_not_become_a_connection_is_closed_in_time(keys: Path, data: bytes) -> None:
    async def act(there: There) -> None:
        sock = await there.raw(data)
        assert not await closed(sock, 0.3)
        assert await closed(sock, 2.0)
        sock.close()

    there = with_listener(keys, Limits(handshake_seconds=0.6), act)
    assert there.said == ["1 connections without a key were closed, 0 wait; parties still get in"]


def test_bytes_that_come_one_by_one_do_not_wake_the_server(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Connection] = []
    look = Listener._read

    def counted(self: Listener, connection: Connection) -> None:
        looks.append(connection)
        look(self, connection)

    monkeypatch.setattr(Listener, "_read", counted)

    async def act(there: There) -> None:
        first = hello()
        sock = await there.raw(first[:1])
        for at in range(1, 60):
            await asyncio.get_running_loop().sock_sendall(sock, first[at : at + 1])
            await asyncio.sleep(0.002)
        assert len(looks) == 1, "for the length of the message"
        await asyncio.get_running_loop().sock_sendall(sock, first[60:])
        assert (await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 3), 5)) == b"\x16\x03\x03"
        assert len(looks) == 2
        sock.close()
        gone = await there.raw(first[:9])
        gone.close()
        await asyncio.sleep(0.1)
        assert len(looks) < 6, "one that has gone is not looked at for ever"
        assert not there.listener.waiting

    with_listener(keys, Limits(), act)


def test_a_connection_with_half_a_request_is_closed_in_time(keys: Path) -> None:
    async def act(there: There) -> None:
        for party in (False, True):
            reader, _ = await there.tls(party, b"half a header")
            begun = time.monotonic()
            assert await asyncio.wait_for(reader.read(1), 5) == b""
            assert 0.2 < time.monotonic() - begun < 3

    there = with_listener(keys, Limits(header_seconds=0.6), act)
    assert not there.listener.parties


def test_strangers_have_few_places_inside_and_few_handshakes(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNKNOWN", 3)

    async def act(there: There) -> None:
        begun = time.monotonic()
        opened = [await there.tls(party=False, says=b"?") for _ in range(13)]
        assert time.monotonic() - begun > 0.4, "ten of them at twenty a second"
        assert len(there.listener.admitted) == 3
        assert [reader.at_eof() for reader, _ in opened] == [True] * 10 + [False] * 3
        for _ in range(20):
            await there.raw(hello())
        begun = time.monotonic()
        await there.tls(party=True, says=b"hello")
        assert time.monotonic() - begun < 0.4, "a party does not stand in this line"

    monkeypatch.setattr(module, "HANDSHAKES", 20.0)
    with_listener(keys, Limits(), act)


def test_who_signs_its_call_is_no_stranger_any_more(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNKNOWN", 2)

    async def act(there: There) -> None:
        old = await there.tls(party=False, says=b"signed")  # a version of visard that has no proof
        assert (len(there.listener.admitted), len(there.listener.parties["node-1"])) == (0, 1)
        for _ in range(4):
            await there.tls(party=False, says=b"?")
        await asyncio.sleep(0.8)
        assert not old[0].at_eof(), "it is idle, as between two requests"

    with_listener(keys, Limits(header_seconds=0.5), act)


def test_one_key_has_so_many_connections_and_idle_ones_go_first(keys: Path) -> None:
    async def act(there: There) -> None:
        busy = await there.tls(party=True, says=b"?")
        idle = await there.tls(party=True, says=b"signed")
        next(v for i, v in enumerate(there.listener.parties["node-1"]) if i == 1).due = None
        more = await there.tls(party=True, says=b"?")
        assert [r.at_eof() for r, _ in (busy, idle, more)] == [False, True, False]
        assert len(there.listener.parties["node-1"]) == 2

    with_listener(keys, Limits(party_connections=2), act)


async def ended(there: There) -> None:
    """Wait until no thread serves a connection any more."""
    for _ in range(500):
        if not any(thread.is_alive() for thread in there.threads):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a thread goes on")


def test_connections_for_parts_have_threads_until_they_are_closed(keys: Path) -> None:
    async def act(there: There) -> None:
        stranger = await there.tls(party=False, says=b"?", protocol=PARTS)
        assert (there.threads, len(there.listener.admitted)) == ([], 1), "it has proved no key"
        other, (_, writer) = [await there.tls(party=True, says=b"part", protocol=PARTS) for _ in range(2)]
        assert (len(there.threads), len(there.listener.parties["node-1"])) == (2, 2)
        writer.close()
        while len(there.listener.parties["node-1"]) == 2:
            await asyncio.sleep(0.01)
        there.listener.expel("node-1")
        assert await asyncio.wait_for(other[0].read(1), 5) == b""
        await ended(there)
        assert not there.listener.parties
        assert not stranger[0].at_eof()
        again = await there.tls(party=True, says=b"part", protocol=PARTS)
        there.listener.close()
        there.listener.close = lambda: None  # type: ignore[method-assign]
        assert await asyncio.wait_for(again[0].read(1), 5) == b""
        await ended(there)

    with_listener(keys, Limits(), act)


def test_a_party_has_so_many_connections_for_parts(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOR_PARTS", 3)

    async def act(there: There) -> None:
        call = await there.tls(party=True, says=b"call")
        opened = [await there.tls(party=True, says=b"part", protocol=PARTS) for _ in range(5)]
        assert await asyncio.wait_for(opened[1][0].read(1), 5) == b""
        assert [reader.at_eof() for reader, _ in (call, *opened)] == [False, True, True, False, False, False]
        assert sum(thread.is_alive() for thread in there.threads) == 3

    with_listener(keys, Limits(), act)


def test_who_has_copies_of_proofs_does_not_displace_a_party(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent in the clear, and valid a few times."""
    monkeypatch.setattr(module, "FOR_PARTS", 3)

    async def act(there: There) -> None:
        party = await there.tls(party=True, says=b"part", protocol=PARTS)
        next(iter(there.listener.parties["node-1"])).called = True
        copies = [await there.tls(party=True, says=b"part", protocol=PARTS) for _ in range(5)]
        assert await asyncio.wait_for(copies[2][0].read(1), 5) == b""
        assert [reader.at_eof() for reader, _ in (party, *copies)] == [False, True, True, True, False, False]

    with_listener(keys, Limits(), act)


def test_a_party_has_so_many_threads(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a connection that is closed the thread goes on, if it waits for the disk."""
    monkeypatch.setattr(module, "FOR_PARTS", 2)
    monkeypatch.setattr(module, "MOST_THREADS", 4)
    go = threading.Event()

    async def act(there: There) -> None:
        def slow(connection: Connection, tls: ssl.SSLSocket) -> None:
            there.threads.append(threading.current_thread())
            with contextlib.suppress(OSError):
                tls.do_handshake()
            go.wait(10)

        echo, there.listener.parts = there.listener.parts, slow
        for number in range(7):
            with contextlib.suppress(OSError):
                await there.tls(party=True, protocol=PARTS)
            assert len(there.threads) == min(number + 1, 4)
        go.set()
        await ended(there)
        await asyncio.sleep(0.05)
        there.listener.parts = echo
        await there.tls(party=True, says=b"part", protocol=PARTS)

    with_listener(keys, Limits(), act)


def test_where_no_thread_can_start_a_connection_for_parts_is_closed(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(there: There) -> None:
        def full(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", full)
            context = party_context(there.own.ca, there.own.private)
            context.set_alpn_protocols([PARTS])
            assert await closed(await there.raw(hello(context=context)))
        assert not there.listener.parties
        await there.tls(party=True, says=b"part", protocol=PARTS)

    with_listener(keys, Limits(), act)


@pytest.mark.parametrize("handshake", [True, False])
def test_a_connection_for_parts_that_is_due_is_closed(keys: Path, handshake: bool) -> None:
    async def act(there: There) -> None:
        context = party_context(there.own.ca, there.own.private)
        context.set_alpn_protocols([PARTS])
        if handshake:
            reader, _ = await there.tls(party=True, says=b"part", protocol=PARTS)
            assert not await closed_within(reader, 1.0), "it is idle"
            next(iter(there.listener.parties["node-1"])).due = time.monotonic()
            assert await closed_within(reader, 3.0)
        else:
            sock = await there.raw(hello(context=context))
            assert len(there.listener.parties["node-1"]) == 1
            while not await closed(sock, 3.0):  # the server's side of the handshake
                pass
        await ended(there)
        assert not there.listener.parties

    with_listener(keys, Limits(handshake_seconds=0.6), act)


async def closed_within(reader: asyncio.StreamReader, seconds: float) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1), seconds) == b""
    except TimeoutError:
        return False


def test_what_comes_after_a_connection_was_closed_is_not_read_in_the_clear(keys: Path) -> None:
    """An SSLSocket that is shut down would go on without TLS."""
    read, go = list[bytes](), threading.Event()

    async def act(there: There) -> None:
        def slow(connection: Connection, tls: ssl.SSLSocket) -> None:
            with contextlib.suppress(OSError):
                tls.do_handshake()
                connection.due = None
                tls.sendall(tls.recv(100))
                go.wait(5)
                read.append(tls.recv(100))

        there.listener.parts = slow
        _, writer = await there.tls(party=True, says=b"part", protocol=PARTS)
        writer.write(b"more")
        await asyncio.sleep(0.1)
        there.listener.expel("node-1")
        go.set()
        await asyncio.sleep(0.1)
        assert read in ([], [b""], [b"more"])

    with_listener(keys, Limits(), act)


def test_without_descriptors_the_first_stranger_has_to_go(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(there: There) -> None:
        came = [await there.raw() for _ in range(3)]
        await asyncio.sleep(module.MIN_SECONDS)
        real, failed = there.listener.socket, [OSError(24, "Too many open files")]

        class Full:
            def accept(self) -> object:
                if failed:
                    raise failed.pop()
                return real.accept()

            def fileno(self) -> int:
                return real.fileno()

            def close(self) -> None:
                real.close()

        there.listener.socket = Full()  # type: ignore[assignment]
        await there.raw()
        assert await closed(came[0])
        await there.tls(party=True, says=b"hello")

    with_listener(keys, Limits(), act)


@pytest.mark.parametrize(
    ("soft", "hard", "gives"), [(300, 300, 164), (300, 4000, 1000), (100, 100, 16), (2000, 4000, 1864)]
)
def test_descriptors_are_raised_as_far_as_needed_and_allowed(soft: int, hard: int, gives: int) -> None:
    code = "from visard.deployment.listener import allowed_connections; print(allowed_connections(1000, 1))"
    shell = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$0" -c "$1"'
    done = subprocess.run(["sh", "-c", shell, sys.executable, code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == gives


@pytest.mark.parametrize(
    ("address", "counts_as"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "20010db800010002::/64"),
        ("2001:db8:1:2::1", "20010db800010002::/64"),
        ("fe80::1%eth0", "fe80000000000000::/64"),
    ],
)
def test_what_counts_as_one_address(address: str, counts_as: str) -> None:
    assert network_of(address) == counts_as
