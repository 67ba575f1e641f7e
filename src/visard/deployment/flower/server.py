"""Flower's SuperLink inside `visard server`: one application behind two doors.

The outside door speaks TLS and serves nothing but the fleet paths, which ask every caller for the signature of a
registered node key. The control and runtime paths, which Flower leaves without authentication, are behind a Unix
socket that only the account of the server can open. No application code is ever run here or sent to a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, TIMESTAMP_HEADER
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.main import create_app

from visard.deployment.keys import ServerKeys, write_parties
from visard.errors import UsageError, VisardError

SOCKET = "control.sock"
FLEET = "/v1/fleet/"
MOST = 2**23  # bytes of a request: Flower cuts payloads into parts of 5 MB
SIGNED = [h.encode() for h in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)]
CLOSED = (f"{FLEET}register-node", f"{FLEET}unregister-node")  # nodes are registered from the key folder alone

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def fleet_only(app: App, keys: Collection[bytes]) -> App:
    """The application for calls from outside: the fleet's paths for registered `keys`, and nothing else.

    Flower reads a call whole before it looks at the signature, so callers that name no registered key, or send more
    than any part of a message can be long, are turned away here.
    """
    known = {b64encode(key) for key in keys}

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            return
        elif not path.startswith(FLEET) or path in CLOSED:
            await _turn_away(send, 404)
        elif not _names_a_key(scope, known):
            await _turn_away(send, 401)
        elif (body := await _whole(receive)) is None:
            await _turn_away(send, 413)
        else:
            await app(scope, _handed(body, receive), send)

    return guarded


def _names_a_key(scope: Scope, known: Collection[bytes]) -> bool:
    """Whether the headers name a registered key and bring a signature, which Flower checks."""
    headers = dict(scope.get("headers", ()))
    return all(name in headers for name in SIGNED) and headers[SIGNED[0]] in known


async def _whole(receive: Receive) -> bytes | None:
    """The body of a request; None if it is too long or the caller went away."""
    body = bytearray()
    while (part := await receive())["type"] == "http.request":
        body += part.get("body", b"")
        if len(body) > MOST:
            return None
        if not part.get("more_body", False):
            return bytes(body)
    return None


def _handed(body: bytes, receive: Receive) -> Receive:
    """What is left to receive after the body was read: the body once more, then whatever comes."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return first.pop() if first else await receive()

    return again


async def _turn_away(send: Send, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def serve(keys: ServerKeys, state: Path, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Serve until SIGINT or SIGTERM; `ready` hears how many parties are registered."""
    os.environ.pop("FLWR_DATABASE", None)  # in memory: no update of a client touches the server's disk
    app = create_app()
    app.state.enable_supernode_auth = True
    link = app.state.linkstate_factory.state()
    public = {node: public_key_to_bytes(key) for node, key in keys.parties.items()}
    numbers = {_register(link, node, key): node for node, key in public.items()}
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "lifespan": "off"}
    fleet = uvicorn.Config(
        fleet_only(app, public.values()), ssl_certfile=str(keys.certificate), ssl_keyfile=str(keys.key), **quiet
    )
    _load(fleet, keys)
    outside, inside = _outside_socket(host, port), _inside_socket(state / SOCKET)
    write_parties(state, numbers, keys.assignment)
    doors = ((uvicorn.Server(uvicorn.Config(app, **quiet)), inside), (uvicorn.Server(fleet), outside))
    try:
        asyncio.run(_serve(doors, lambda: ready(len(keys.parties))))
    finally:
        (state / SOCKET).unlink(missing_ok=True)


def _load(fleet: uvicorn.Config, keys: ServerKeys) -> None:
    """Read certificate and key; one line where they are not, or do not belong together."""
    try:
        fleet.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        what = getattr(error, "reason", None) or error
        raise UsageError(f"{keys.certificate} and {keys.key} are not a certificate and its key ({what})") from None
    assert fleet.ssl is not None
    fleet.ssl.minimum_version = ssl.TLSVersion.TLSv1_2


def _register(link: LinkState, node: str, key: bytes) -> int:
    return link.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_MIN_INTERVAL, name=node)


async def _serve(doors: tuple[tuple[uvicorn.Server, socket.socket], ...], ready: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for server, _ in doors:
            server.should_exit = True

    with contextlib.ExitStack() as stack:
        for server, _ in doors:
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        tasks = [asyncio.create_task(server.serve(sockets=[door])) for server, door in doors]
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
            stack.callback(loop.remove_signal_handler, number)
        while not all(server.started for server, _ in doors) and not any(t.done() for t in tasks):
            await asyncio.sleep(0.02)
        if not any(t.done() for t in tasks):
            ready()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        stop()
        await asyncio.gather(*tasks)


def _inside_socket(path: Path) -> socket.socket:
    """The Unix socket of the control and runtime paths; only this account can open it."""
    if len(str(path)) > 100:
        raise UsageError(f"--state {path.parent}: the path is too long for a Unix socket")
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if path.exists() and probe.connect_ex(str(path)) == 0:
            raise UsageError(f"a server is already running with --state {path.parent}")
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        door.bind(str(path))
    finally:
        os.umask(before)
    return door


def _outside_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise VisardError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
