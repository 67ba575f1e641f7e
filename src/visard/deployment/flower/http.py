"""HTTP over an admitted connection."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from visard.deployment.listener import Connection, Listener


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
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer had begun
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.listener.drop(self.connection)
