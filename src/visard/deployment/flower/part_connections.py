"""Connections of parties that carry parts of messages alone: each has a thread, which reads from TLS into memory that
serves again and again.

A party names their protocol in the ClientHello in which it proves its key, so the server tells them apart before TLS.
They speak plain HTTP: a POST whose length is known, then its answer.
"""

from __future__ import annotations

import http
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import h11

from visard.deployment.flower import FLEET, REFUSAL
from visard.deployment.flower.callers import Callers, TurnedAway
from visard.deployment.flower.part import TAKEN, Part
from visard.deployment.flower.parts import Parts
from visard.deployment.flower.room import FULL, Room
from visard.deployment.listener import Connection, Limits
from visard.processes import Data
from visard.text import line

SPARE = 16  # bodies whose memory is kept for the next ones
IDLE = 5.0  # seconds that a connection, and its thread, wait for another call


class PartConnections:
    """Answers the calls that come over such connections."""

    def __init__(self, callers: Callers, parts: Parts, room: Room, limits: Limits) -> None:
        self._callers, self._parts, self._room, self._limits = callers, parts, room, limits
        self._spare: list[bytearray] = []

    def serve(self, connection: Connection, tls: ssl.SSLSocket) -> None:
        """Answer calls until the party hangs up or waits too long, or the listener closes the connection."""
        with suppress(OSError, h11.RemoteProtocolError):
            tls.do_handshake()
            connection.due = time.monotonic() + IDLE
            while self._answer(connection, tls):
                connection.due = time.monotonic() + IDLE

    def _answer(self, connection: Connection, tls: ssl.SSLSocket) -> bool:
        """Answer one call; False if it was the last one."""
        reader = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.header_bytes)
        while (request := reader.next_event()) is h11.NEED_DATA:
            if not (data := tls.recv(self._limits.header_bytes)):
                return False
            if reader.trailing_data == (b"", False):
                connection.due = time.monotonic() + self._limits.header_seconds
            reader.receive_data(data)
        if not isinstance(request, h11.Request):
            return False
        headers, begun = dict(request.headers), reader.trailing_data[0]
        length = headers.get(b"content-length", b"")
        size = int(length) if length.isdigit() and len(length) < 20 else -1
        if not len(begun) <= size <= self._limits.body_bytes or request.method != b"POST":
            _say(tls, 413, close=True)
            return False
        with self._memory() as memory:
            body = memory[:size]
            body[: len(begun)] = begun
            unread = body[len(begun) :]
            try:
                path = request.target.decode("ascii")
                if (part := Part.at(path, FLEET)) is None:
                    raise TurnedAway(404)
                party = self._callers.of_part(path, part, headers)
                if party != connection.party:
                    raise TurnedAway(401)
                connection.called, connection.due = True, time.monotonic() + self._limits.request_seconds
                _fill(tls, unread)
                unread = unread[:0]
                status, content = self.do(part, party, [body])
            except TurnedAway as turned:
                _say(tls, turned.status, why=turned.why, close=not connection.called)
                _fill(tls, unread)  # else what is on its way would reset the connection, and the answer with it
                return connection.called
            else:
                _say(tls, status, content)
        return True

    def do(self, part: Part, party: str, body: Sequence[Data]) -> tuple[int, Sequence[Data]]:
        """What a call of a party asks for, as far as there is room."""
        if not part.session:
            return self._parts.do(part, body, counted=True)
        with self._room.taking(party, part.name, sum(map(len, body))) as why:
            if not why:
                return self._parts.do(part, body, counted=True)
        self._callers.tell(why)
        raise TurnedAway(FULL, why)

    @contextmanager
    def _memory(self) -> Iterator[memoryview]:
        """Memory for a body: new memory for each would cost more than moving it."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = bytearray(self._limits.body_bytes)
        try:
            yield memoryview(memory)
        finally:
            if len(self._spare) < SPARE:
                self._spare.append(memory)


def _fill(tls: ssl.SSLSocket, memory: memoryview) -> None:
    """Read so many bytes."""
    while memory:
        if not (count := tls.recv_into(memory)):
            raise ConnectionError("a body that ends too soon")
        memory = memory[count:]


def _say(tls: ssl.SSLSocket, status: int, content: Sequence[Data] = (), why: str = "", close: bool = False) -> None:
    """Answer a call."""
    head = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"]
    if status != TAKEN:
        head.append(f"content-length: {sum(map(len, content))}")
    if why:
        head.append(f"{REFUSAL}: {line(why, 1000)}")
    if close:
        head.append("connection: close")
    tls.sendall("\r\n".join([*head, "\r\n"]).encode("ascii", "replace"))
    for piece in content:
        tls.sendall(piece)
