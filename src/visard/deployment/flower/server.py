"""Flower's SuperLink inside `visard server`: one application behind two sockets.

The outside one speaks TLS and serves nothing but the fleet paths, which ask every caller for the signature of a
registered node key. The control and runtime paths, which Flower leaves without authentication, are behind a Unix
socket that only the account of the server can open. No application code is ever run here or sent to a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from flwr.app import Message
from flwr.common.constant import (
    SubStatus,
)
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NodeStatus
from flwr.superlink.main import create_app

from visard.deployment.client_hello import Proofs
from visard.deployment.flower import FLEET, REFUSAL
from visard.deployment.flower.callers import Callers, Headers, TurnedAway
from visard.deployment.flower.handover import FILES, Giver
from visard.deployment.flower.http import Http
from visard.deployment.flower.part import Part
from visard.deployment.flower.part_connections import PartConnections
from visard.deployment.flower.parts import App, Inside, Parts, Receive, Scope, Send, say, whole
from visard.deployment.flower.register import Register, tls_context
from visard.deployment.flower.room import Room
from visard.deployment.flower.store import Store
from visard.deployment.health import Health
from visard.deployment.keys import ServerKeys
from visard.deployment.listener import Connection, Limits, Listener
from visard.errors import UsageError, VisardError
from visard.processes import Data, settle, share_memory_of_threads

SOCKET = "control.sock"
# nodes are registered from the key folder alone, and parts come by the path of parts, where they are counted
CLOSED = tuple(f"{FLEET}{call}" for call in ("register-node", "unregister-node", "push-object"))
GRACE = 5  # seconds for calls at hand when the server stops
BACKLOG = 4096  # connections that the kernel may hold before they are accepted


class FleetOnly:
    """The application for calls from outside: the fleet's paths for registered keys, and nothing else.

    Flower reads a call whole before it looks at the signature, so callers that bring no signature of a registered key,
    or send more than any part of a message can be long, are turned away here. Parts mostly come over connections of
    their own; here they come where TLS ends before the server.
    """

    def __init__(self, app: App, callers: Callers, limits: Limits, parts: PartConnections) -> None:
        self.app, self.callers, self.limits, self.parts = app, callers, limits, parts
        # called for whoever brings a signature
        self.prove: Callable[[Connection, str], None] = lambda connection, party: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = scope["state"]["connection"]
        connection.due = time.monotonic() + self.limits.request_seconds
        path, headers = scope["path"], dict(scope["headers"])
        try:
            if (part := Part.at(path, FLEET)) is not None:
                await say(send, *await self._part(path, part, headers, receive, connection))
            else:
                body = await self._body(path, headers, receive, connection)
                await self.app(scope, _handed(body, receive), send)
        except TurnedAway as turned:
            await _turn_away(send, turned.status, turned.why)
        finally:
            connection.due = None

    async def _part(
        self, path: str, part: Part, headers: Headers, receive: Receive, connection: Connection
    ) -> tuple[int, Sequence[Data]]:
        """The answer to a call for a part."""
        party = self.callers.of_part(path, part, headers)
        self.prove(connection, party)
        if (pieces := await whole(receive, self.limits.body_bytes)) is None:
            raise TurnedAway(413)
        return await asyncio.to_thread(self.parts.do, part, party, pieces)

    async def _body(self, path: str, headers: Headers, receive: Receive, connection: Connection) -> bytes:
        """The body of a call, once it is known to be that of a party."""
        if not path.startswith(FLEET) or path in CLOSED:
            raise TurnedAway(404)
        party, own = self.callers.signer(headers)
        self.prove(connection, party)
        activates = path == f"{FLEET}activate-node"
        if not activates:
            self.callers.check_process(party, headers)
        if (pieces := await whole(receive, self.limits.body_bytes)) is None:
            raise TurnedAway(413)
        self.callers.check_call(party, own, path, headers, body := b"".join(pieces))
        if activates:
            self.callers.connected(party, own, headers)
        self.callers.note(party, headers)
        return body


def _handed(body: bytes, receive: Receive) -> Receive:
    """What is left to receive after the body was read: the body once more, then whatever comes."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return first.pop() if first else await receive()

    return again


async def _turn_away(send: Send, status: int, why: str = "") -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    if why:
        headers.append((REFUSAL.encode(), why.encode("ascii", "replace")[:1000]))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def serve(
    keys: ServerKeys,
    state: Path,
    host: str,
    port: int,
    ready: Callable[[], None],
    say: Callable[[str], None],
    limits: Limits | None = None,
    health: str = "",
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called once parties can connect. `health` is [HOST:]PORT."""
    share_memory_of_threads()
    limits = limits or Limits()
    os.environ.pop("FLWR_DATABASE", None)  # in memory: no update of a client touches the server's disk
    app = create_app()
    app.state.enable_supernode_auth = True
    link = app.state.linkstate_factory.state()
    store = link._object_store = Store(state)
    _outlive_kills(link)
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "lifespan": "off"}
    quiet["timeout_graceful_shutdown"] = GRACE
    context, callers, parts = tls_context(keys), Callers(say), Parts(link, store)
    direct = PartConnections(callers, parts, Room(limits, state, store.is_here, store.shrink), limits)
    guarded, store.say = FleetOnly(app, callers, limits, direct), callers.tell
    fleet = uvicorn.Server(
        uvicorn.Config(guarded, h11_max_incomplete_event_size=limits.header_bytes, ws="none", **quiet)
    )
    outside, inside = _outside_socket(host, port), _inside_socket(state / SOCKET)
    listener = Listener(
        outside, context, Proofs([]), limits, lambda connection: Http(fleet, listener, connection),
        direct.serve, say,
    )  # fmt: skip
    guarded.prove = listener.prove
    register = Register(keys, state, link, callers.admit, listener, say, callers.heard)
    watched = Health(health, register.health) if health else None
    giver = Giver(_inside_socket(state / FILES), store.whole, partial(_end_run, link, store), parts.adopt)
    settle()
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            control = uvicorn.Server(uvicorn.Config(Inside(app, parts), **quiet))
            runner.run(_serve(control, inside, fleet, register, ready))
    finally:
        giver.close()
        for path in (state / SOCKET, state / FILES):
            path.unlink(missing_ok=True)
        store.close()
        if watched is not None:
            watched.close()


def _loop() -> asyncio.AbstractEventLoop:
    """uvloop, which comes with Flower where there is one: it sends long answers with a fifth of the work."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _outlive_kills(link: InMemoryLinkState) -> None:
    """Let a node whose process was killed connect again at once, and give it again what that process left undone.

    Flower would refuse it until it has missed its signs of life, would never again hand out the message that the
    killed process had taken, and would let the run wait for the rest of a reply that it had begun to upload.
    """
    activate, replies = link.activate_node, link.get_message_res
    link._lock_object_push_sessions = link.lock  # Flower takes these two in either order, and could wait for ever

    def half(number: str) -> str:
        """The session in which the reply to a message is being uploaded; empty if there is no reply, or all of it."""
        session = link._object_push_session_by_root.get(link.message_ins_id_to_message_res_id.get(number, ""), "")
        return session if session and link._object_push_sessions[session].pending_object_ids else ""

    def again(node_id: int, heartbeat_interval: float) -> bool:
        with link.lock:
            link.deactivate_node(node_id)
            for number, message in link.message_ins_store.items():
                if message.metadata.dst_node_id == node_id:
                    link._cleanup_push_session(half(number), cleanup_messages=True)
                    if number not in link.message_ins_id_to_message_res_id:
                        message.metadata.delivered_at = ""
            return bool(activate(node_id, heartbeat_interval))

    def whole(message_ids: set[str], run_id: int) -> list[Message]:
        with link.lock:
            online = {node.node_id for node in link.get_node_info(statuses=[NodeStatus.ONLINE])}
            for number in [n for n in message_ids if half(n)]:
                if link.message_ins_store[number].metadata.dst_node_id in online:
                    message_ids = message_ids - {number}
                else:
                    link._cleanup_push_session(half(number), cleanup_messages=True)
            return list(replies(message_ids, run_id))

    link.activate_node = again  # type: ignore[method-assign]
    link.get_message_res = whole  # type: ignore[method-assign]


def _end_run(link: InMemoryLinkState, store: Store, number: int) -> None:
    """A run has ended. If it did not say so it was killed, and parties must not wait for the rest of a request.

    Flower would let them wait until the run has missed its signs of life, which takes a minute.
    """
    run = link.run_ids.get(number)
    if run is not None and link.finish_task(int(run.run.primary_task_id or 0), SubStatus.FAILED, "its process ended"):
        link.cleanup_run(number)
    store.shrink()


async def _serve(
    control: uvicorn.Server, inside: socket.socket, fleet: uvicorn.Server, register: Register, ready: Callable[[], None]
) -> None:
    listener = register.listener
    loop = asyncio.get_running_loop()
    servers = (control, fleet)

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    with contextlib.ExitStack() as stack:
        for server in servers:
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        tasks = [asyncio.create_task(control.serve([inside])), asyncio.create_task(fleet.serve([]))]
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
            stack.callback(loop.remove_signal_handler, number)
        while not all(server.started for server in servers) and not any(t.done() for t in tasks):
            await asyncio.sleep(0.02)
        if not any(t.done() for t in tasks):
            listener.open()
            ready()
            while not any(server.should_exit for server in servers) and not any(t.done() for t in tasks):
                register.look()
                await asyncio.sleep(0.1)
            listener.close()
        stop()
        await asyncio.gather(*tasks)


def _inside_socket(path: Path) -> socket.socket:
    """A Unix socket for runs on this machine; only this account can open it."""
    if len(str(path)) > 100:
        raise UsageError(f"--state {path.parent}: the path is too long for a Unix socket")
    inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if path.exists() and probe.connect_ex(str(path)) == 0:
            raise UsageError(f"a server is already running with --state {path.parent}")
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        inside.bind(str(path))
        inside.listen(BACKLOG)  # from now on a run can connect, and waits until it is answered
    finally:
        os.umask(before)
    return inside


def _outside_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise VisardError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
