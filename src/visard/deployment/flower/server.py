"""Flower's SuperLink inside `visard server`: one application behind two sockets.

The outside one speaks TLS and serves nothing but the fleet paths, which ask every caller for the signature of a
registered node key. The control and runtime paths, which Flower leaves without authentication, are behind a Unix
socket that only the account of the server can open. No application code is ever run here or sent to a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import signal
import socket
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.constant import (
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    SubStatus,
)
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, verify_signature
from flwr.superlink.main import create_app

from visard.crypto.signatures import fingerprint, signed_by
from visard.deployment.client_hello import Proofs
from visard.deployment.flower import CALL_KEY, FLEET, MAC, PROCESS, REFUSAL, SIGNED, VERSION, mac, statement
from visard.deployment.flower.handover import FILES, Giver
from visard.deployment.flower.http import Bodies, Http
from visard.deployment.flower.part import Part
from visard.deployment.flower.parts import App, Inside, Parts, Receive, Scope, Send, whole
from visard.deployment.flower.register import Register, tls_context
from visard.deployment.flower.room import FULL, Room
from visard.deployment.flower.store import Store
from visard.deployment.health import Health
from visard.deployment.keys import ServerKeys
from visard.deployment.listener import Connection, Limits, Listener
from visard.errors import PublicError, UsageError, VisardError
from visard.processes import settle, share_memory_of_threads
from visard.text import line

SOCKET = "control.sock"
KEY, SIGNATURE, TIME = (
    h.encode() for h in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
)
# nodes are registered from the key folder alone, and parts come by the path of parts, where they are counted
CLOSED = tuple(f"{FLEET}{call}" for call in ("register-node", "unregister-node", "push-object"))
REMEMBER = TIMESTAMP_TOLERANCE + 2 * SYSTEM_TIME_TOLERANCE  # seconds after which the age alone refuses a call
TELL_EVERY = 60.0  # seconds between lines about the same trouble
GRACE = 5  # seconds for calls at hand when the server stops
BACKLOG = 4096  # connections that the kernel may hold before they are accepted


class FleetOnly:
    """The application for calls from outside: the fleet's paths for registered keys, and nothing else.

    Flower reads a call whole before it looks at the signature, so callers that bring no signature of a registered key,
    or send more than any part of a message can be long, are turned away here. Flower's signature is of the time alone;
    a second one is of path, time, process and body, and counts once. Calls for parts of messages have a MAC in place of
    it, with a key that came in the signed call with which the party connected. Of two processes with the same key, the
    one that connected last speaks for it.
    """

    def __init__(
        self,
        app: App,
        keys: Iterable[tuple[str, ec.EllipticCurvePublicKey]],
        limits: Limits,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.app, self.limits, self._say = app, limits, say
        self.parts: Parts | None = None
        self._bodies = Bodies(limits.body_bytes)
        self.room = Room(limits)
        self.prove: Callable[[Connection, str], None] = lambda connection, party: (
            None
        )  # called for whoever brings a signature
        self._processes: dict[str, bytes] = {}  # party -> its process
        self._call_keys: dict[str, str] = {}  # fingerprint of a party's key -> its key for MACs
        self._refusals: dict[str, str] = {}  # fingerprint of a known key -> why it is not taken
        self._seen: dict[bytes, None] = {}  # digests of what calls say, each of which counts once
        self._ages: deque[tuple[float, bytes]] = deque()  # until when, in order
        self.heard: dict[str, tuple[float, str]] = {}  # party -> when it last called, and its version
        self._told: dict[str, float] = {}  # what was said, and when to say it again
        self.admit(keys)

    def admit(
        self, keys: Iterable[tuple[str, ec.EllipticCurvePublicKey]], refused: Mapping[str, str] | None = None
    ) -> None:
        """From now on these keys of parties are taken. The `refused` (fingerprint -> why) among them hear why not."""
        found = [(public_key_to_bytes(key), party, key) for party, key in keys]
        self._keys = {b64encode(data): (party, key, fingerprint(key)) for data, party, key in found}
        self._refusals = dict(refused or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = scope["state"]["connection"]
        connection.due = time.monotonic() + self.limits.request_seconds
        try:
            await self._answer(scope, receive, send, connection)
        finally:
            connection.due = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send, connection: Connection) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if not path.startswith(FLEET) or path in CLOSED:
            return await _turn_away(send, 404)
        part = Part.at(path, FLEET) if self.parts is not None else None
        process, activates = headers.get(PROCESS.encode(), b""), path == f"{FLEET}activate-node"
        if part is not None and self._superseded(self._keys.get(headers.get(KEY, b""), ("",))[0], process):
            return await _turn_away(send, 409)  # its MAC cannot be checked any more
        if (signer := self._signer(headers) if part is None else self._signer_of(path, headers, part)) is None:
            return await _turn_away(send, 401)
        party, own = signer
        if why := self._refusals.get(own):
            self._tell(f"refused: {why}")
            return await _turn_away(send, 403 if " was revoked " in why else 401, why)
        self.prove(connection, party)
        if not activates and self._superseded(party, process):
            return await _turn_away(send, 409)
        if part is not None and self.parts is not None:
            length = headers.get(b"content-length", b"")
            if not length.isdigit() or int(length) > self.limits.body_bytes:
                return await _turn_away(send, 413)
            with self._bodies.taking(connection):
                if (content := await whole(receive, self.limits.body_bytes, connection.body)) is None:
                    return await _turn_away(send, 413)
                self._heard(party, headers)
                if not part.session:
                    return await self.parts.answer(part, content, send, counted=True)
                with self.room.taking(party, part.name, sum(map(len, content))) as why:
                    if not why:
                        return await self.parts.answer(part, content, send, counted=True)
            self._tell(why)
            return await _turn_away(send, FULL, why)
        if (pieces := await whole(receive, self.limits.body_bytes)) is None:
            return await _turn_away(send, 413)
        body = b"".join(pieces)
        if wrong := self._wrong(path, headers, body, own):
            self._tell(f"refused: a call of {party} to {path} {wrong}")
            return await _turn_away(send, 401, f"the call {wrong}")
        if activates:
            self._processes[party] = process
            self._call_keys[own] = headers.get(CALL_KEY.encode(), b"").decode("latin-1")
        self._heard(party, headers)
        await self.app(scope, _handed(body, receive), send)

    def _superseded(self, party: str, process: bytes) -> bool:
        """Whether another process of a party has connected since."""
        return self._processes.get(party, process) != process

    def _heard(self, party: str, headers: Mapping[bytes, bytes]) -> None:
        self.heard[party] = time.time(), line(headers.get(VERSION.encode(), b"").decode("latin-1"), 40)

    def _signer_of(self, path: str, headers: Mapping[bytes, bytes], part: Part) -> tuple[str, str] | None:
        """As `_signer`, of a call for a part: its path says what its body is, so the whole call can be checked here."""
        party, key, own = self._keys.get(headers.get(KEY, b""), ("", None, ""))
        if key is None or not _lately(headers.get(TIME, b"")):
            return None
        if wrong := self._wrong(path, headers, b"", own, part.digest):
            self._tell(f"refused: a call with the key of {party} to {FLEET}part {wrong}")
            return None
        return party, own

    def _wrong(self, path: str, headers: Mapping[bytes, bytes], body: bytes, own: str, digest: str = "") -> str:
        """What is wrong with the signature of a whole call; empty if it is the party's, and new.

        Of a call for a part, the `digest` of whose body is known, with its MAC.
        """
        said, process, call_key, code, signature = (
            headers.get(name, b"").decode("latin-1")
            for name in (TIME, PROCESS.encode(), CALL_KEY.encode(), MAC.encode(), SIGNED.encode())
        )
        signed = statement(path, said, f"{process} {call_key}".strip(), body, digest)
        try:
            if digest:
                if not (known := self._call_keys.get(own)) or not hmac.compare_digest(mac(known, signed), code):
                    return "has no MAC with the key of its last connection"
            elif signed_by(signed, bytes.fromhex(signature)) != own:
                return "is signed by another key"
        except (ValueError, TypeError, PublicError):  # TypeError: a MAC that is not ASCII
            return "is not signed with its path and body (another version, or changed on the way)"
        now = time.monotonic()
        while self._ages and self._ages[0][0] < now:
            self._seen.pop(self._ages.popleft()[1], None)
        said_once = hashlib.sha256(f"{own} ".encode() + signed).digest()  # a signature can be written in two ways
        if said_once in self._seen:
            return "came a second time"
        self._seen[said_once] = None
        self._ages.append((now + REMEMBER, said_once))
        return ""

    def _tell(self, text: str) -> None:
        """Say something, but not over and over."""
        now = time.monotonic()
        self._told = {said: until for said, until in self._told.items() if until > now}
        if text not in self._told and len(self._told) < 1000:
            self._told[text] = now + TELL_EVERY
            self._say(text)

    def _signer(self, headers: Mapping[bytes, bytes]) -> tuple[str, str] | None:
        """The party that signed a call, and the fingerprint of its key. Flower also checks the age of the signature."""
        party, key, own = self._keys.get(headers.get(KEY, b""), ("", None, ""))
        try:
            signature = b64decode(headers.get(SIGNATURE, b""), validate=True)
        except ValueError:
            return None
        if key is None or not verify_signature(key, headers.get(TIME, b""), signature):
            return None
        return party, own


def _lately(said: bytes) -> bool:
    """Whether a call was signed a short time ago, as Flower has it."""
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(said.decode("ascii"))).total_seconds()
    except (ValueError, TypeError):
        return False
    return -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


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
    guarded, context = FleetOnly(app, [], limits, say), tls_context(keys)
    guarded.parts, store.say = (parts := Parts(link, store)), guarded._tell
    guarded.room = Room(limits, state, store.is_here, store.shrink)
    fleet = uvicorn.Server(
        uvicorn.Config(guarded, h11_max_incomplete_event_size=limits.header_bytes, ws="none", **quiet)
    )
    outside, inside = _outside_socket(host, port), _inside_socket(state / SOCKET)
    listener = Listener(outside, context, Proofs([]), limits, lambda connection: Http(fleet, listener, connection), say)
    guarded.prove = listener.prove
    register = Register(keys, state, link, guarded.admit, listener, say, guarded.heard)
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
