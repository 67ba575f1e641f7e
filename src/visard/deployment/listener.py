"""Accepts the connections to a server's port, limits how many there are and how long they last.

A connection costs a descriptor and a few hundred bytes until its first TLS message has arrived whole, which the kernel
waits for. If that message proves a party's key (`client_hello`), the TLS handshake begins at once. All other
connections are unknown: they wait, and only a few at a time, at a bounded rate, get a TLS handshake and one request.
Where there are too many unknown connections the oldest is closed, once it has had a short minimum of time. So unknown
connections displace one another and never a party, not even a party behind the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from visard.deployment.client_hello import LONGEST, PARTS, Proofs, alpn_names, bytes_needed

MIN_SECONDS = 0.25  # that an unknown connection stays open, however many others wait
MAX_UNKNOWN = 32  # unknown connections with TLS at once; each takes 0.3 MB
HANDSHAKES = 20.0  # of unknown connections a second; one costs milliseconds
ACCEPTED = 64  # connections at once, before other work has its turn
SPARE = 128  # descriptors for everything else
REPORT_EVERY = 60.0  # seconds
FOR_PARTS = 8  # connections of one party that carry parts alone: each has a thread
MOST_THREADS = 2 * FOR_PARTS  # of one party; those of closed connections first end what they do
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, and leave nothing in the kernel


@dataclass(frozen=True)
class Limits:
    """What a server allows the connections to its port, and parties."""

    connections: int = 4096  # unknown ones; fewer where the system allows fewer descriptors
    address_connections: int = 2048  # unknown ones from one address
    party_connections: int = 32  # of one party
    handshake_seconds: float = 10.0  # for the TLS handshake
    header_seconds: float = 10.0  # for the header of a request
    request_seconds: float = 300.0  # for the rest of a request, and its answer
    header_bytes: int = 2**14
    body_bytes: int = 2**23  # Flower cuts payloads into parts of 5 MB
    party_bytes: int = 2**32  # of one party that wait at the server: two of the longest messages
    free_bytes: int = 2**30  # of the disk that stay free


class Connection:
    """One connection and how far it has got."""

    __slots__ = ("address", "called", "due", "gone", "needs", "party", "since", "sock", "task", "tls", "transport")

    def __init__(self, sock: socket.socket, address: str, since: float) -> None:
        self.sock, self.address, self.since = sock, address, since
        self.needs: int | None = 0  # bytes of its first message, as far as is known; None: it is no TLS message
        self.party = ""  # whose key it has proved; empty: unknown
        self.due: float | None = None  # when it is closed; None while it is idle between two requests
        self.task: asyncio.Task[None] | None = None
        self.tls: ssl.SSLSocket | None = None  # of a connection that carries parts alone
        self.called = False  # whether a call of the party came over it; its proof can also be a copy of another one's
        self.transport: asyncio.Transport | None = None
        self.gone = False


Queue = dict[Connection, None]  # in the order of arrival


class Listener:
    """Accepts connections on a listening socket; `protocol` serves an admitted one, and `parts`, in a thread, one of a
    party that carries parts alone."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        proofs: Proofs,
        limits: Limits,
        protocol: Callable[[Connection], asyncio.Protocol],
        parts: Callable[[Connection, ssl.SSLSocket], None],
        say: Callable[[str], None],
    ) -> None:
        self.socket, self.context, self.proofs, self.limits = listening, context, proofs, limits
        self.protocol, self.parts, self.say = protocol, parts, say
        self.most = limits.connections
        self.waiting: Queue = {}  # unknown, before their TLS handshake
        self.admitted: Queue = {}  # unknown, with TLS
        self.parties: dict[str, Queue] = {}
        self._threads: Counter[str] = Counter()  # party -> threads that serve it
        self._by_address: dict[str, Queue] = {}  # unknown, waiting and admitted
        self._ready: deque[Connection] = deque()  # waiting connections whose first message is there
        self._tokens, self._counted = float(MAX_UNKNOWN), 0.0  # handshakes that may begin, as of when
        self._buffer = bytearray(LONGEST)
        self._closed, self._report_at = 0, 0.0
        self._timers: list[asyncio.TimerHandle] = []
        listening.setblocking(False)

    def open(self) -> None:
        """Start to accept connections, in a running event loop."""
        self._loop = asyncio.get_running_loop()
        self.most = min(self.limits.connections, allowed_connections(self.limits.connections, len(self.proofs)))
        self._loop.add_reader(self.socket, self._accept)
        self._sweep()

    def close(self) -> None:
        """Stop accepting, and close all unknown connections."""
        self._loop.remove_reader(self.socket)
        self.socket.close()
        for timer in self._timers:
            timer.cancel()
        for connection in [*self.waiting, *self.admitted, *self._for_parts()]:
            self.drop(connection)

    def _for_parts(self, party: str = "") -> list[Connection]:
        """The connections for parts, of one party or of all, the oldest first."""
        queues = [self.parties.get(party, {})] if party else self.parties.values()
        return [connection for queue in queues for connection in queue if connection.tls is not None]

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        now = self._loop.time()
        self._timers = [t for t in self._timers if t.when() > now and not t.cancelled()]
        self._timers.append(self._loop.call_later(seconds, act))

    # Before the handshake

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(ACCEPTED):
            full = len(self.waiting) + len(self.admitted) >= self.most
            first = next(iter(self.waiting or self.admitted), None)
            if full and first is not None and (wait := first.since + MIN_SECONDS - now) > 0:
                return self._pause(wait)
            try:
                sock, address = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return None
            except OSError:  # no descriptors are left
                if first is not None:
                    self._displace(first)
                return self._pause(0.05)
            if full and first is not None:
                self._displace(first)
            self._add(sock, address, now)
        return None

    def _pause(self, seconds: float) -> None:
        """Leave new connections to the kernel for a moment."""
        self._loop.remove_reader(self.socket)
        self._later(seconds, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self.socket, self._accept)

    def _add(self, sock: socket.socket, address: Any, now: float) -> None:
        connection = Connection(sock, network_of(address[0]), now)
        neighbours = self._by_address.setdefault(connection.address, {})
        if len(neighbours) >= self.limits.address_connections:
            self._displace(next(iter(neighbours)))
            self._by_address[connection.address] = neighbours
        neighbours[connection] = self.waiting[connection] = None
        try:
            sock.setblocking(False)
            self._expect(connection, b"")
            self._loop.add_reader(sock, self._read, connection)
        except OSError:
            self.drop(connection)

    def _expect(self, connection: Connection, data: bytes) -> None:
        """Let the kernel wait for the whole first message: single bytes then do not wake this process."""
        connection.needs = bytes_needed(data)
        if connection.needs is not None:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, connection.needs)

    def _read(self, connection: Connection) -> None:
        """Peek at the first message: it stays in the socket for the TLS handshake."""
        try:
            count = connection.sock.recv_into(self._buffer, 0, socket.MSG_PEEK)
            data, before = bytes(self._buffer[:count]), connection.needs
            self._expect(connection, data)
        except BlockingIOError:
            return
        except OSError:
            return self.drop(connection)
        if connection.needs is None:  # no TLS: it waits for its timeout, which costs less than its next attempt
            self._loop.remove_reader(connection.sock)
        elif count >= connection.needs:
            self._loop.remove_reader(connection.sock)
            self._arrived(connection, data)
        elif connection.needs == before:  # nothing new has come: the other side has closed
            self.drop(connection)

    def _arrived(self, connection: Connection, hello: bytes) -> None:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if (party := self.proofs.party(hello, time.time())) is not None:
            self.prove(connection, party)
            if PARTS.encode() in alpn_names(hello):
                self._begin_thread(connection)
            else:
                self._begin_handshake(connection)
        else:
            self._ready.append(connection)
            if len(self._ready) == 1:
                self._admit_waiting()

    # Handshake and after

    def _admit_waiting(self) -> None:
        """Begin handshakes with waiting connections, as many as the rate allows now."""
        now = time.monotonic()
        self._tokens = min(float(MAX_UNKNOWN), self._tokens + (now - self._counted) * HANDSHAKES)
        self._counted = now
        while self._ready and (self._ready[0].gone or self._tokens >= 1):
            connection = self._ready.popleft()
            if connection.gone:
                continue
            if len(self.admitted) >= MAX_UNKNOWN:
                self._displace(next(iter(self.admitted)))
            self._tokens -= 1
            del self.waiting[connection]
            self.admitted[connection] = None
            self._begin_handshake(connection)
        if self._ready:
            self._later(1 / HANDSHAKES, self._admit_waiting)

    def _begin_handshake(self, connection: Connection) -> None:
        connection.due = time.monotonic() + self.limits.handshake_seconds
        connection.task = self._loop.create_task(self._handshake(connection))

    def _begin_thread(self, connection: Connection) -> None:
        """Hand a connection for parts to a thread of its own. Here it is closed, and cut off to end the thread."""
        if self._threads[connection.party] >= MOST_THREADS:
            return self.drop(connection)
        for first in sorted(self._for_parts(connection.party), key=lambda c: c.called)[: 1 - FOR_PARTS]:
            self.drop(first)
        connection.due = time.monotonic() + self.limits.handshake_seconds
        try:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.setblocking(True)  # the listener watches the time
            tls = self.context.wrap_socket(connection.sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # the caller is gone
            connection.gone = True
            self._forget(connection)
            return connection.sock.close()
        connection.tls = tls
        self._threads[connection.party] += 1
        try:
            threading.Thread(target=self._serve_parts, args=(connection, tls), daemon=True).start()
        except RuntimeError:  # the system allows no more of them
            self._ended(connection)

    def _serve_parts(self, connection: Connection, tls: ssl.SSLSocket) -> None:
        try:
            self.parts(connection, tls)
        finally:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                self._loop.call_soon_threadsafe(self._ended, connection)

    def _ended(self, connection: Connection) -> None:
        self._threads[connection.party] -= 1
        self.drop(connection)
        if connection.tls is not None:
            connection.tls.close()

    async def _handshake(self, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(
                partial(self.protocol, connection),
                connection.sock,
                ssl=self.context,
                ssl_handshake_timeout=self.limits.handshake_seconds,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, asyncio.CancelledError):  # cancelled by `drop`; TimeoutError is an OSError
            self.drop(connection)

    def entered(self, connection: Connection, transport: asyncio.Transport) -> None:
        """The TLS handshake is done."""
        connection.transport = transport
        connection.due = time.monotonic() + self.limits.header_seconds
        if connection.gone:
            transport.abort()

    def prove(self, connection: Connection, party: str) -> None:
        """Note which party's key a connection has proved; of too many, one that is idle or the oldest is closed."""
        if connection.gone or connection.party:
            return
        self._forget(connection)
        connection.party = party
        own = self.parties.setdefault(party, {})
        if len(own) >= self.limits.party_connections:
            self.drop(next((c for c in own if c.due is None), next(iter(own))))
            self.parties[party] = own
        own[connection] = None

    # Closing

    def expel(self, party: str) -> None:
        """Close all connections of a party; the next ones must prove a key again."""
        for connection in list(self.parties.get(party, ())):
            self.drop(connection)

    def _displace(self, connection: Connection) -> None:
        self._closed += 1
        self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection."""
        if connection.gone:
            return
        connection.gone = True
        self._forget(connection)
        if connection.tls is not None:  # its thread ends then; the method of SSLSocket would go on in the clear
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection.tls, socket.SHUT_RDWR)
        elif connection.transport is not None:
            connection.transport.abort()
        elif connection.task is not None:
            connection.task.add_done_callback(lambda _: connection.sock.close())
            connection.task.cancel()
        else:
            self._loop.remove_reader(connection.sock)
            with contextlib.suppress(OSError):
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.sock.close()

    def _forget(self, connection: Connection) -> None:
        self.waiting.pop(connection, None)
        self.admitted.pop(connection, None)
        for queues, name in ((self._by_address, connection.address), (self.parties, connection.party)):
            if (queue := queues.get(name)) is not None:
                queue.pop(connection, None)
                if not queue:
                    del queues[name]

    def _sweep(self) -> None:
        """Close connections that have taken too long; runs twice a second."""
        now = time.monotonic()
        while (first := next(iter(self.waiting), None)) and now > first.since + self.limits.handshake_seconds:
            self._displace(first)
        for connection in [*self.admitted, *(c for queue in self.parties.values() for c in queue)]:
            if connection.due is not None and now > connection.due:
                self.drop(connection) if connection.party else self._displace(connection)
        if self._closed and now > self._report_at:
            here = len(self.waiting) + len(self.admitted)
            self.say(f"{self._closed} connections without a key were closed, {here} wait; parties still get in")
            self._closed, self._report_at = 0, now + REPORT_EVERY
        self._later(0.5, self._sweep)


def network_of(address: str) -> str:
    """An IPv4 address, or the /64 network of an IPv6 address: one machine has all addresses of such a network."""
    if ":" not in address:
        return address
    whole = ipaddress.IPv6Address(address.partition("%")[0])
    return str(whole.ipv4_mapped) if whole.ipv4_mapped else f"{int(whole) >> 64:x}::/64"


def allowed_connections(connections: int, parties: int) -> int:
    """How many unknown connections the system has descriptors for, after raising the limit of this process."""
    needed = SPARE + 8 * parties
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = connections + needed if hard == resource.RLIM_INFINITY else min(hard, connections + needed)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return connections if soft == resource.RLIM_INFINITY else max(16, soft - needed)
