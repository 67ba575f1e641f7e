"""HTTP over an admitted connection, in which the body of a part goes from TLS to memory that serves again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from visard.deployment.listener import Body, Connection, Listener

SPARE = 16  # bodies whose memory is kept for the next ones


class Bodies:
    """Memory for the bodies of parts: new memory for each would cost more than moving it."""

    def __init__(self, size: int) -> None:
        self._size, self._spare = size, list[bytearray]()

    @contextmanager
    def taking(self, connection: Connection) -> Iterator[None]:
        """Within this, the body of a request may be put into `connection.body`."""
        memory = self._spare.pop() if self._spare else bytearray(self._size)
        connection.body = Body(memory)
        try:
            yield
        finally:
            connection.body = None
            if len(self._spare) < SPARE:
                self._spare.append(memory)


class Http(H11Protocol):
    """HTTP over an admitted connection. h11 bounds the bytes of a header, the listener its time."""

    def __init__(self, server: uvicorn.Server, listener: Listener, connection: Connection) -> None:
        super().__init__(server.config, server.server_state, {"connection": connection}, asyncio.get_running_loop())
        self.listener, self.connection = listener, connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.listener.entered(self.connection, transport)

    def data_received(self, data: bytes) -> None:
        if self.connection.due is None:  # the next request begins
            self.connection.due = time.monotonic() + self.listener.limits.header_seconds
        if self.connection.body is not None:
            data = self._past(data, self.connection.body)
        if data:
            super().data_received(data)

    def _past(self, data: bytes, body: Body) -> bytes:
        """Of the body of a part all but the last byte goes past h11, which would copy it four times, in small pieces.

        Only once the application has what came before; from the last byte h11 learns that the body is whole.
        """
        reader: Any = self.conn._reader
        left = getattr(reader, "_remaining", 0) - 1
        if self.cycle is None or self.cycle.body or not 0 < left <= body.room:
            return data
        taken = min(left, len(data))
        body.add(data[:taken])
        reader._remaining = left + 1 - taken
        if taken < left:
            self.transport.set_protocol(Rest(self, body, left - taken))
        return data[taken:]

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer had begun
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.listener.drop(self.connection)


class Rest(asyncio.BufferedProtocol):
    """Takes so many bytes of a body from TLS; then HTTP goes on."""

    def __init__(self, http: Http, body: Body, left: int) -> None:
        self._http, self._body, self._left = http, body, left

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body.free[: self._left] if self._wanted else memoryview(bytearray(self._left))

    @property
    def _wanted(self) -> bool:
        """Whether the call is not over yet; else its memory may serve another one."""
        return self._http.connection.body is self._body

    def buffer_updated(self, nbytes: int) -> None:
        if not self._wanted:
            return self._http.transport.abort()
        self._body.count += nbytes
        self._left -= nbytes
        reader: Any = self._http.conn._reader
        reader._remaining -= nbytes
        if not self._left:
            self._http.transport.set_protocol(self._http)
        return None

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def eof_received(self) -> None:
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)
