"""Calls for parts of messages, to a server on the same machine or over TLS: HTTP that copies no body.

Flower's own client is httpx, which takes longer for each part in Python than the processor takes to encrypt it.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError

from visard.deployment.client_hello import PARTS
from visard.deployment.flower.answers import MOST, BadAnswer
from visard.deployment.flower.part import GONE, INSIDE, NEWS, NOT_YET, Part
from visard.processes import Data

SECONDS = 120.0  # for an answer, on the same machine
Connection = http.client.HTTPConnection


class Calls:
    """Sends and fetches parts over connections that `new` makes; several threads may do so at once.

    Trouble with a connection is raised as by httpx. An answer is taken as the party's other calls take theirs: so many
    bytes, not packed, and no redirect is followed.
    """

    def __init__(self, new: Callable[[], Connection]) -> None:
        self._new, self._lock = new, threading.Lock()
        self._idle: list[Connection] = []

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def post(self, path: str, body: Sequence[Data] = (), headers: Mapping[str, str] | None = None) -> httpx.Response:
        """The answer to a call."""
        connection = self._connection()
        try:
            answer = _exchange(connection, path, body, headers or {})
        except TimeoutError as error:
            connection.close()
            raise httpx.ReadTimeout(str(error)) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise httpx.ReadError(f"{type(error).__name__}: {error}") from None
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:  # else it is over: the next one is new
            with self._lock:
                self._idle.append(connection)
        return answer

    def _connection(self) -> Connection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else self._new()
            if connection.sock is None or not _stale(connection.sock):
                return connection
            connection.close()


def content_of(answer: httpx.Response, part: Part) -> bytes:
    """What the answer to a call for a part holds."""
    if answer.status_code == GONE and part.session:
        raise ObjectPushError(part.name, part.run, part.session)
    if answer.status_code == GONE:
        raise ObjectPullError(part.name, "the server does not have it any more")
    if answer.status_code == NOT_YET:
        raise ObjectUnavailableError(part.name)
    answer.raise_for_status()
    return answer.content


def _exchange(connection: Connection, path: str, body: Sequence[Data], headers: Mapping[str, str]) -> httpx.Response:
    with suppress(ConnectionError):  # the server has hung up: perhaps it has said why
        connection.putrequest("POST", path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.putheader("content-length", str(sum(map(len, body))))
        connection.endheaders()
        for piece in body:
            connection.send(piece)
    found = connection.getresponse()
    if found.headers.get("content-encoding", "identity") != "identity":  # a few bytes could become any number
        raise BadAnswer("an answer of the server is packed")
    content = found.read(MOST + 1)
    if len(content) > MOST:
        raise BadAnswer(f"an answer of the server is longer than {MOST} bytes")
    if found.length:
        raise http.client.IncompleteRead(content, found.length)
    if found.will_close:
        connection.close()
    return httpx.Response(
        found.status, headers=found.getheaders(), content=content, request=httpx.Request("POST", f"http://visard{path}")
    )


def _stale(sock: socket.socket) -> bool:
    """Whether the other side has closed a connection, or sent what it was not asked for."""
    return bool(select.select([sock], [], [], 0)[0])


def inside(path: Path) -> Calls:
    """Calls to a server on this machine, through its Unix socket."""

    class Local(Connection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(path))

    return Calls(lambda: Local("visard", timeout=SECONDS))


def outside(server: str, context: Callable[[], ssl.SSLContext], seconds: float) -> Calls:
    """Calls to a server over TLS, with a `context` for each connection, through the proxy of the environment where
    there is one."""

    def new() -> Connection:
        made = context()
        made.set_alpn_protocols([PARTS, "http/1.1"])  # a proxy that ends TLS takes none but what it knows
        own = http.client.HTTPSConnection(server, timeout=seconds, context=made)
        proxies = getproxies()
        proxy = urlsplit(proxies.get("https", proxies.get("all", "")))
        if not proxy.hostname or proxy_bypass(own.host):
            return own
        through = http.client.HTTPSConnection(proxy.hostname, proxy.port or 80, timeout=seconds, context=made)
        through.set_tunnel(own.host, own.port)
        return through

    return Calls(new)


class PartsInside:
    """Parts between a run and the server on the same machine."""

    def __init__(self, path: Path) -> None:
        self._calls = inside(path)
        self.close = self._calls.close

    def put(self, run: int, session: str, name: str, content: Sequence[Data]) -> None:
        """Send a part of an upload that was announced."""
        self._call(Part(run, session, name), content)

    def get(self, run: int, name: str) -> bytes:
        """Fetch a part."""
        return self._call(Part(run, "", name), ())

    def news(self) -> int:
        """How many messages the server has got whole so far: a look that costs next to nothing."""
        return int(self._calls.post(NEWS).content)

    def _call(self, part: Part, body: Sequence[Data]) -> bytes:
        return content_of(self._calls.post(part.path(INSIDE), body), part)
