"""The door of a server that parties reach over the internet: who is let in, for how long, and who has to go.

A connection costs a descriptor and a few hundred bytes until its first TLS message is there whole, which the kernel
waits for. If that message holds the proof of a party's key (`hello`), it goes in at once. Everyone else is a stranger:
strangers wait outside, and only a few at a time are let in for a TLS handshake and one request, at a bounded rate.
Where there are too many of them the one that came first has to go, but no sooner than it has had a short time. So
strangers take one another's place, never a party's, not even of a party behind the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from visard.deployment.hello import LONGEST, Proofs, wanted

SLICE = 0.25  # seconds that a stranger keeps its place, however many others want it
INSIDE = 32  # strangers with TLS at once; each takes 0.3 MB
HANDSHAKES = 20.0  # of strangers a second; one costs milliseconds
ACCEPTED = 64  # at once, before other work has its turn
SPARE = 128  # descriptors for everything else
TELL_EVERY = 60.0
RESET = struct.pack("ii", 1, 0)  # close at once, and leave nothing in the kernel


@dataclass(frozen=True)
class Limits:
    """What a server allows the connections to its port."""

    connections: int = 4096  # of strangers; less where the system allows fewer descriptors
    address_connections: int = 2048  # of strangers from one address
    party_connections: int = 32  # with one key
    handshake_seconds: float = 10.0  # until the TLS connection stands
    header_seconds: float = 10.0  # for the header of a request to come whole
    request_seconds: float = 300.0  # for the rest of a request, and its answer
    header_bytes: int = 2**14
    body_bytes: int = 2**23  # Flower cuts payloads into parts of 5 MB


class Visitor:
    """A connection to the door."""

    __slots__ = ("address", "due", "gone", "held", "needs", "party", "since", "sock", "taking", "task", "transport")

    def __init__(self, sock: socket.socket, address: str, since: float) -> None:
        self.sock, self.address, self.since = sock, address, since
        self.needs: int | None = 0  # bytes of its first message, as far as is known
        self.party = ""  # whose key it showed
        self.due: float | None = None  # when its patience ends; None while it is idle between two requests
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.gone = False
        self.taking = False  # whether the body of its request may come in any pieces,
        self.held: list[bytes] = []  # which are these


Line = dict[Visitor, None]  # in the order of arrival


class Door:
    """Accepts connections on a listening socket; `protocol` serves one that is let in."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        proofs: Proofs,
        limits: Limits,
        protocol: Callable[[Visitor], asyncio.Protocol],
        say: Callable[[str], None],
    ) -> None:
        self.listener, self.context, self.proofs, self.limits = listener, context, proofs, limits
        self.protocol, self.say = protocol, say
        self.most = limits.connections
        self.outside: Line = {}  # strangers whose first message is not there, is none, or waits for its turn
        self.inside: Line = {}  # strangers that were let in
        self.parties: dict[str, Line] = {}
        self._by_address: dict[str, Line] = {}  # strangers, outside and inside
        self._ready: deque[Visitor] = deque()  # strangers that wait for a handshake
        self._handshakes, self._counted = float(INSIDE), 0.0  # how many may begin now, and as of when
        self._buffer = bytearray(LONGEST)
        self._shed, self._tell = 0, 0.0
        self._timers: list[asyncio.TimerHandle] = []
        listener.setblocking(False)

    def open(self) -> None:
        """Begin to accept, inside a running loop."""
        self._loop = asyncio.get_running_loop()
        self.most = min(self.limits.connections, descriptors(self.limits.connections, len(self.proofs)))
        self._loop.add_reader(self.listener, self._accept)
        self._sweep()

    def close(self) -> None:
        """Accept nothing more, and let everyone go that was not let in."""
        self._loop.remove_reader(self.listener)
        self.listener.close()
        for timer in self._timers:
            timer.cancel()
        for visitor in [*self.outside, *self.inside]:
            self.drop(visitor)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        now = self._loop.time()
        self._timers = [t for t in self._timers if t.when() > now and not t.cancelled()]
        self._timers.append(self._loop.call_later(seconds, act))

    # Outside

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(ACCEPTED):
            full = len(self.outside) + len(self.inside) >= self.most
            first = next(iter(self.outside or self.inside), None)
            if full and first is not None and (wait := first.since + SLICE - now) > 0:
                return self._pause(wait)
            try:
                sock, address = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return None
            except OSError:  # no descriptors are left
                if first is not None:
                    self._send_away(first)
                return self._pause(0.05)
            if full and first is not None:
                self._send_away(first)
            self._admit(sock, address, now)
        return None

    def _pause(self, seconds: float) -> None:
        """Leave newcomers to the kernel for a moment."""
        self._loop.remove_reader(self.listener)
        self._later(seconds, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self.listener, self._accept)

    def _admit(self, sock: socket.socket, address: Any, now: float) -> None:
        visitor = Visitor(sock, place(address[0]), now)
        neighbours = self._by_address.setdefault(visitor.address, {})
        if len(neighbours) >= self.limits.address_connections:
            self._send_away(next(iter(neighbours)))
            self._by_address[visitor.address] = neighbours
        neighbours[visitor] = self.outside[visitor] = None
        try:
            sock.setblocking(False)
            self._expect(visitor, b"")
            self._loop.add_reader(sock, self._read, visitor)
        except OSError:
            self.drop(visitor)

    def _expect(self, visitor: Visitor, data: bytes) -> None:
        """Let the kernel wait for the whole first message: what comes byte by byte wakes only it."""
        visitor.needs = wanted(data)
        if visitor.needs is not None:
            visitor.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, visitor.needs)

    def _read(self, visitor: Visitor) -> None:
        """Look at the first message and leave it where it is, for the TLS of whoever is let in."""
        try:
            count = visitor.sock.recv_into(self._buffer, 0, socket.MSG_PEEK)
            data, before = bytes(self._buffer[:count]), visitor.needs
            self._expect(visitor, data)
        except BlockingIOError:
            return
        except OSError:
            return self.drop(visitor)
        if visitor.needs is None:  # no TLS; it waits for its end, which costs less than its next attempt
            self._loop.remove_reader(visitor.sock)
        elif count >= visitor.needs:
            self._loop.remove_reader(visitor.sock)
            self._arrived(visitor, data)
        elif visitor.needs == before:  # woken, and not by what was waited for: the other side has closed
            self.drop(visitor)

    def _arrived(self, visitor: Visitor, hello: bytes) -> None:
        visitor.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if (party := self.proofs.party(hello, time.time())) is not None:
            self.prove(visitor, party)
            self._let_in(visitor)
        else:
            self._ready.append(visitor)
            if len(self._ready) == 1:
                self._take_turns()

    # Inside

    def _take_turns(self) -> None:
        """Let waiting strangers in, as many as may begin a handshake now."""
        now = time.monotonic()
        self._handshakes = min(float(INSIDE), self._handshakes + (now - self._counted) * HANDSHAKES)
        self._counted = now
        while self._ready and (self._ready[0].gone or self._handshakes >= 1):
            visitor = self._ready.popleft()
            if visitor.gone:
                continue
            if len(self.inside) >= INSIDE:
                self._send_away(next(iter(self.inside)))
            self._handshakes -= 1
            del self.outside[visitor]
            self.inside[visitor] = None
            self._let_in(visitor)
        if self._ready:
            self._later(1 / HANDSHAKES, self._take_turns)

    def _let_in(self, visitor: Visitor) -> None:
        visitor.due = time.monotonic() + self.limits.handshake_seconds
        visitor.task = self._loop.create_task(self._handshake(visitor))

    async def _handshake(self, visitor: Visitor) -> None:
        try:
            await self._loop.connect_accepted_socket(
                partial(self.protocol, visitor),
                visitor.sock,
                ssl=self.context,
                ssl_handshake_timeout=self.limits.handshake_seconds,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, asyncio.CancelledError):  # cancelled by `drop`; TimeoutError is an OSError
            self.drop(visitor)

    def entered(self, visitor: Visitor, transport: asyncio.Transport) -> None:
        """Its TLS connection stands."""
        visitor.transport = transport
        visitor.due = time.monotonic() + self.limits.header_seconds
        if visitor.gone:
            transport.abort()

    def prove(self, visitor: Visitor, party: str) -> None:
        """A visitor has shown the key of a party: it is no stranger. Of too many with one key the first has to go."""
        if visitor.gone or visitor.party:
            return
        self._forget(visitor)
        visitor.party = party
        line = self.parties.setdefault(party, {})
        if len(line) >= self.limits.party_connections:
            idle = next((v for v in line if v.due is None), next(iter(line)))
            self.drop(idle)
            self.parties[party] = line
        line[visitor] = None

    # Ends

    def expel(self, party: str) -> None:
        """Close all connections with a party's keys; what it opens next is looked at anew."""
        for visitor in list(self.parties.get(party, ())):
            self.drop(visitor)

    def _send_away(self, visitor: Visitor) -> None:
        self._shed += 1
        self.drop(visitor)

    def drop(self, visitor: Visitor) -> None:
        """Close a connection, whatever it is about."""
        if visitor.gone:
            return
        visitor.gone = True
        self._forget(visitor)
        if visitor.transport is not None:
            visitor.transport.abort()
        elif visitor.task is not None:
            visitor.task.add_done_callback(lambda _: visitor.sock.close())
            visitor.task.cancel()
        else:
            self._loop.remove_reader(visitor.sock)
            with contextlib.suppress(OSError):
                visitor.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            visitor.sock.close()

    def _forget(self, visitor: Visitor) -> None:
        self.outside.pop(visitor, None)
        self.inside.pop(visitor, None)
        for lines, name in ((self._by_address, visitor.address), (self.parties, visitor.party)):
            if (line := lines.get(name)) is not None:
                line.pop(visitor, None)
                if not line:
                    del lines[name]

    def _sweep(self) -> None:
        """Close what has taken too long, twice a second."""
        now = time.monotonic()
        while (first := next(iter(self.outside), None)) and now > first.since + self.limits.handshake_seconds:
            self._send_away(first)
        for visitor in [*self.inside, *(v for line in self.parties.values() for v in line)]:
            if visitor.due is not None and now > visitor.due:
                self.drop(visitor) if visitor.party else self._send_away(visitor)
        if self._shed and now > self._tell:
            here = len(self.outside) + len(self.inside)
            self.say(f"{self._shed} connections without a key were closed, {here} wait; parties still get in")
            self._shed, self._tell = 0, now + TELL_EVERY
        self._later(0.5, self._sweep)


def place(address: str) -> str:
    """What counts as one address: of IPv6 the first half, of which each connection can have another second half."""
    if ":" not in address:
        return address
    whole = ipaddress.IPv6Address(address.partition("%")[0])
    return str(whole.ipv4_mapped) if whole.ipv4_mapped else f"{int(whole) >> 64:x}::/64"


def descriptors(connections: int, parties: int) -> int:
    """How many connections of strangers the system allows, once this process has asked for as many as it may."""
    needed = SPARE + 8 * parties
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = connections + needed if hard == resource.RLIM_INFINITY else min(hard, connections + needed)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return connections if soft == resource.RLIM_INFINITY else max(16, soft - needed)
