"""Parts of messages between a run and the server on the same machine, through the Unix socket of the server."""

from __future__ import annotations

import http.client
import select
import socket
import threading
from pathlib import Path

import httpx
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError

from visard.deployment.flower.part import GONE, INSIDE, NEWS, NOT_YET, Part

SECONDS = 120.0  # for an answer


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("visard", timeout=SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    @property
    def stale(self) -> bool:
        """Whether the other side has closed it, or sent what nobody asked for."""
        return self.sock is None or bool(select.select([self.sock], [], [], 0)[0])


class PartsInside:
    """Sends and fetches parts; several threads may do so at once. Trouble is raised as by Flower's own calls."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._idle: list[_Connection] = []

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def put(self, run: int, session: str, name: str, content: bytes) -> None:
        """Send a part of an upload that was announced."""
        self._call(Part(run, session, name), content)

    def get(self, run: int, name: str) -> bytes:
        """Fetch a part."""
        return self._call(Part(run, "", name), b"")

    def news(self) -> int:
        """How many messages the server has got whole so far: a look that costs next to nothing."""
        return int(self._post(NEWS, b"")[1])

    def _call(self, part: Part, body: bytes) -> bytes:
        status, content = self._post(path := part.path(INSIDE), body)
        if status == GONE and part.session:
            raise ObjectPushError(part.name, part.run, part.session)
        if status == GONE:
            raise ObjectPullError(part.name, "the server does not have it any more")
        if status == NOT_YET:
            raise ObjectUnavailableError(part.name)
        httpx.Response(status, request=httpx.Request("POST", f"http://visard{path}")).raise_for_status()
        return content

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request("POST", path, body)
            answer = connection.getresponse()
            content = answer.read()
        except TimeoutError as error:
            connection.close()
            raise httpx.ReadTimeout(str(error)) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise httpx.ReadError(f"{type(error).__name__}: {error}") from None
        with self._lock:
            self._idle.append(connection)
        return answer.status, content

    def _connection(self) -> _Connection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else _Connection(self._path)
            if connection.sock is None or not connection.stale:
                return connection
            connection.close()
