"""The outside door of a server: the fleet's paths for registered nodes, and a wall everywhere else.

Flower reads a request whole before it looks at the signature, so the door itself turns away who names no registered
key, and whoever sends more than any part of a message can be long.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

FLEET = "/v1/fleet/"
MOST = 2**23  # bytes of a request: Flower cuts payloads into parts of 5 MB
SIGNED = [h.encode() for h in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)]
CLOSED = (f"{FLEET}register-node", f"{FLEET}unregister-node")  # nodes are registered from the key folder alone

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def fleet_only(app: App, keys: Collection[bytes]) -> App:
    """The application with every door but the fleet's walled up, and that one open to the registered `keys` alone."""
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
