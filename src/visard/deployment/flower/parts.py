"""The server's side of parts of messages: taken and given as they are, hashed once (see `part`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from flwr.common.constant import Status
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.superlink.utils import check_abort
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError

from visard.deployment.flower.part import GIVEN, GONE, INSIDE, NEWS, NOT_YET, OVER, REFUSED, TAKEN, Part
from visard.deployment.flower.store import Store, name_of_object
from visard.processes import Data, Filed

AT_ONCE = 2  # threads that hash: while they do, others can work

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Parts:
    """Takes and gives parts. `counted`: as traffic of the run, which is Flower's figure of what goes to nodes."""

    def __init__(self, link: InMemoryLinkState, store: Store) -> None:
        self._link, self._store = link, store
        self.news = 0  # messages that have come whole

    def do(self, part: Part, body: Sequence[Data], counted: bool) -> tuple[int, Sequence[Data]]:
        """What a call asks for: the status of the answer, and what it holds."""
        return self._take(part, body, counted) if part.session else self._give(part, body, counted)

    def _take(self, part: Part, body: Sequence[Data], counted: bool) -> tuple[int, Sequence[Data]]:
        if name_of_object(body) != part.name:
            return REFUSED, ()
        if counted and self._over(part):
            return OVER, ()
        try:
            with self._store.coming(part.name, body, filed=counted):
                stored = self._link.store_object(part.run, part.session, part.name, b"")
        except UnexpectedObjectContentError:  # it is no part of a message
            return REFUSED, ()
        if not stored:
            return GONE, ()
        if part.session not in self._link._object_push_sessions:  # that was the last part
            self.news += 1
        if counted:
            self._link.store_traffic(part.run, bytes_sent=0, bytes_recv=sum(map(len, body)))
        return TAKEN, ()

    def adopt(self, run: int, session: str, names: Sequence[str], file: Filed) -> bool:
        """Take the parts of a payload in the file that a run on this machine has written; it has hashed them."""
        if not self._store.adopt(names, file):
            return False
        for name in names:
            with self._store.adopted(name):
                self._link.store_object(run, session, name, b"")
        return True

    def _give(self, part: Part, body: Sequence[Data], counted: bool) -> tuple[int, Sequence[Data]]:
        if any(body):
            return REFUSED, ()
        if counted and self._over(part):
            return OVER, ()
        content = self._store.get_pieces(part.name)
        if content is None:
            return GONE if self._link.get_object(part.run, part.name) is None else NOT_YET, ()
        if counted:
            self._link.store_traffic(part.run, bytes_sent=sum(map(len, content)), bytes_recv=0)
        return GIVEN, content

    def _over(self, part: Part) -> bool:
        """Whether the run of a part does not run."""
        try:
            return bool(check_abort(part.run, [Status.PENDING, Status.STARTING, Status.FINISHED], self._link))
        except KeyError:  # there is no such run
            return True


class Inside:
    """The application behind the Unix socket: Flower's, and parts."""

    def __init__(self, app: App, parts: Parts) -> None:
        self.app, self.parts, self._threads = app, parts, ThreadPoolExecutor(AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == NEWS:
            return await say(send, GIVEN, [b"%d" % self.parts.news])
        part = Part.at(scope["path"], INSIDE) if scope["type"] == "http" else None
        if part is None:
            return await self.app(scope, receive, send)
        if (body := await whole(receive, 2**31)) is not None:
            work = partial(self.parts.do, part, body, counted=False)
            await say(send, *await asyncio.get_running_loop().run_in_executor(self._threads, work))
        return None


async def say(send: Send, status: int, content: Sequence[Data]) -> None:
    """Answer a call."""
    headers = [] if status == TAKEN else [(b"content-length", b"%d" % sum(map(len, content)))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for piece in content:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def whole(receive: Receive, most: int) -> list[Data] | None:
    """The body of a request in pieces; None if it is too long or the caller went away."""
    body, size = list[Data](), 0
    while (event := await receive())["type"] == "http.request":
        body.append(bytes(event.get("body", b"")))
        size += len(body[-1])
        if size > most:
            return None
        if not event.get("more_body", False):
            return body
    return None
