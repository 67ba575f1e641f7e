"""The network of a run whose clients are elsewhere: requests go out over a link, replies come back.

A link does little, so that the same code runs over Flower's simulation, a Flower deployment and a dictionary in a test.
This file handles order, time limits, and the check that a reply belongs to its request.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from visard.core import BoundStep, ClientId, Weights
from visard.deployment.party import Basis
from visard.engines.asking import plain
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import CodecError, decode, encoded, encoded_size, sizes_of
from visard.engines.ledger import Ledger, Place, Received, parts_of
from visard.engines.network import EngineNetwork
from visard.engines.records import digest_of
from visard.engines.request import LATE, PACK_NAME, Reply, Request, StateFile, WireError, pack, unpack
from visard.engines.world import World
from visard.errors import VisardError
from visard.files import safe_name
from visard.processes import Data, Filed, let_go

# header and payload, and the names of its parts where they came with names that were checked
Parts = tuple[bytes, Data] | tuple[bytes, Data, Sequence[str]]
LAST_LOOK = 2.0  # seconds to wait for late replies when a run ends
MOST_ROLES = 1000  # of one party, on record
QUIET, LONGEST_POLL = 0.03, 1.0  # seconds between polls for each second without a reply, and at most
REFUSED = "reply refused"


class Link(ABC):
    """A way to the parties."""

    window = 64  # requests on their way at once
    queue = 1  # requests that may wait for one worker at the other side
    poll = 0.05  # seconds between polls for replies
    recorded = False  # whether every reply is recorded, as between real parties
    folder: Path | None = None  # where long replies wait, in unnamed files

    @functools.cached_property
    def late(self) -> dict[str, tuple[Request, type | None]]:
        """Requests that timed out, with the types of their replies: late replies are still recorded."""
        return {}

    @abstractmethod
    def gather(self, clients: Collection[ClientId], needed: int) -> None:
        """Wait until `needed` of the clients can be reached; one clear error if that takes too long."""

    def payload(self, pieces: Sequence[Data]) -> Data | Filed:
        """The pieces of a payload in the form in which they are sent."""
        return b"".join(pieces)

    @abstractmethod
    def send(self, client: ClientId, header: bytes, payload: Data | Filed, timeout: float) -> str | None:
        """Send a request; returns its number, or None if the client cannot be reached now."""

    def all_sent(self) -> None:  # noqa: B027 (most links hold nothing)
        """No more requests for now: the memory of the last one can be freed."""

    def forget(self, number: str) -> None:  # noqa: B027
        """A request is over, answered or not: its memory can be freed."""

    @abstractmethod
    def receive(self, numbers: Collection[str]) -> dict[str, Parts | str]:
        """The replies to these requests so far: header and payload, or why there is none."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and processes."""


class PartyLink(Link):
    """A link to parties: they learn about the run, and say which clients they are."""

    recorded = True
    received: Received | None = None  # where the replies to greetings are recorded

    def greetings(self) -> list[int]:
        """Which greetings have no reply yet, by their number."""
        return []

    @abstractmethod
    def introduce(self, run: str, run_spec: dict[str, Any]) -> None:
        """Set what parties learn about the run when they are asked which clients they are."""

    @abstractmethod
    def parties(self, count: int) -> dict[ClientId, dict[str, int]]:
        """Wait until the parties of `count` clients are connected; returns what each says of its data."""


class RemoteNetwork(EngineNetwork):
    """Clients at the other end of a link."""

    def __init__(
        self,
        world: World,
        states: Checkpoint,
        ledger: Ledger | None,
        link: Link,
        run: str,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(world, states, ledger)
        self.link, link.folder = link, states.folder
        self.run = self.place = run
        self.settings = dict(settings or {})
        self._have_trunk: set[ClientId] = set()
        self.received = ledger.received if ledger is not None and link.recorded else None

    def close(self) -> None:
        if self.received is not None:
            self._end(self.received)
        self.link.close()

    def _end(self, received: Received) -> None:
        """Look once more for late replies, and end the record in order, as far as the link still works."""
        late = self.link.late
        with suppress(VisardError):
            until = time.monotonic() + LAST_LOOK
            while late and time.monotonic() < until:
                for number, parts in self.link.receive(list(late)).items():
                    self._late(number, parts)
                time.sleep(self.link.poll)
            greetings = self.link.greetings() if isinstance(self.link, PartyLink) else []
            received.end([*(place_of(request) for request, _ in late.values()), *(("", "", 0, n) for n in greetings)])

    def reach(self, clients: Collection[ClientId], needed: int) -> None:
        self.link.gather(clients, needed)

    def replies(self, step: BoundStep[Any, Any], requests: Sequence[Request]) -> Iterator[Reply]:
        self._give_trunk([request.client for request in requests])
        return self._exchange(requests, step.types[1])

    def _give_trunk(self, clients: Sequence[ClientId]) -> None:
        """Send the frozen part of the network to parties that lack it; simulated parties build it."""
        trunk = self.world.trunk
        if trunk is None or not self.settings:
            return
        for weights in (None, trunk.weights):
            lacking, message = [c for c in clients if c not in self._have_trunk], Basis(weights)
            requests = [replace(self.request(c, "", message, self.world.timeout), trunk=trunk.digest) for c in lacking]
            if weights is not None:  # a question alone does not count: a resumed run asks again
                sent = sizes_of([r.message for r in requests])
                self.traffic.bytes_down += sent
                self.traffic.once += sent
            self._have_trunk |= {r.client for r in self._exchange(requests, None) if r.failure is None}

    def request(self, client: ClientId, step: str, message: Any, timeout: float) -> Request:
        committed = self.states.committed.clients.get(client)
        return replace(
            super().request(client, step, message, timeout),
            run=self.run, session=self.received.session if self.received else "", settings=self.settings,
            committed=committed.name if committed else "",
        )  # fmt: skip

    def keep(self, theta: Weights | None, name: str) -> dict[ClientId, str]:
        """Let every client make its own model from `theta` and keep it at its party; returns who failed and why."""
        self.begin("keep", 0)
        self.asks, basis = 1, Basis(theta)
        name = safe_name(name)[:80]
        self.link.gather(self.clients, 0)
        requests = [replace(self.request(c, "", basis, self.world.timeout), keep=name) for c in self.clients]
        return {r.client: plain(r.failure) for r in self._exchange(requests, None) if r.failure is not None}

    def _exchange(self, requests: Sequence[Request], kind: type | None) -> Iterator[Reply]:
        """Send requests with their messages; replies with values of type `kind` come in the same order."""
        sent: dict[str, tuple[int, float]] = {}  # number -> position and deadline
        try:
            yield from self._exchanged(requests, kind, sent)
        finally:
            for number in list(sent):  # the run does not wait for them
                self._give_up(number, requests[sent.pop(number)[0]], kind)

    def _exchanged(
        self, requests: Sequence[Request], kind: type | None, sent: dict[str, tuple[int, float]]
    ) -> Iterator[Reply]:
        finished: dict[int, Reply] = {}
        heard = time.monotonic()  # when the last reply came
        given, position = 0, 0
        last: tuple[Any, Data | Filed] = object(), b""
        while given < len(requests):
            while len(sent) + len(finished) < self.link.window and position < len(requests):
                request = requests[position]
                if request.message is not last[0]:
                    last = request.message, self.link.payload(encoded(request.message))
                deadline = time.monotonic() + request.timeout * self.link.queue
                number = self.link.send(request.client, pack(request), last[1], request.timeout)
                if number is None:
                    finished[position] = request.reply(failure="its party is not connected")
                else:
                    sent[number] = position, deadline
                position += 1
                if position == len(requests):
                    last = (object(), b"")
                    self.link.all_sent()
            now = time.monotonic()  # before looking: what comes while we look is not late
            for number, parts in self.link.receive([*sent, *self.link.late]).items():
                if number in self.link.late:
                    self._late(number, parts)
                    continue
                at = sent.pop(number)[0]
                self.link.forget(number)
                heard = time.monotonic()
                finished[at] = read(requests[at], parts, kind)
                self._arrived(requests[at], parts, finished[at])
                if at != given:
                    if finished[at].failure is None and kind is not None:
                        self._early(finished[at])
                    set_aside(parts)
                del parts
            for number in [n for n, (_, deadline) in sent.items() if now > deadline]:
                at = sent.pop(number)[0]
                finished[at] = requests[at].reply(failure=LATE)
                self._give_up(number, requests[at], kind)
            if self.received is not None:
                self.received.flush()
            if given not in finished and sent:
                quiet = time.monotonic() - heard  # after a long wait, polling less often does not matter
                time.sleep(min(max(self.link.poll, QUIET * quiet), LONGEST_POLL))
            while given in finished:
                yield finished.pop(given)
                given += 1

    def _arrived(self, request: Request, parts: Parts | str, reply: Reply, late: bool = False) -> None:
        """Record a reply as it arrived, before it is used."""
        if self.received is None:
            return
        refused = reply.failure is not None and reply.failure.startswith(REFUSED)
        outcome = "late" if late else "refused" if refused else "read" if reply.failure is None else "failed"
        on_record(self.received, request, parts, outcome, reply, self.world.statistics)

    def _give_up(self, number: str, request: Request, kind: type | None) -> None:
        """Continue without a reply; if it comes later it is only recorded."""
        self.link.forget(number)
        if self.received is not None:
            self.link.late[number] = replace(request, message=None), kind
            self.received.add("given up", place_of(request))

    def _late(self, number: str, parts: Parts | str) -> None:
        request, kind = self.link.late.pop(number)
        self._arrived(request, parts, read(request, parts, kind), late=True)


def set_aside(parts: Parts | str) -> None:
    """Free the memory of a reply that waits for its turn, if it is mapped from a file."""
    if not isinstance(parts, str):
        let_go(parts[1])


def place_of(request: Request) -> Place:
    """Where in a run a request belongs, for the record."""
    return request.client, request.stage, request.round, request.ask


def on_record(
    received: Received,
    request: Request,
    parts: Parts | str,
    outcome: str,
    reply: Reply,
    statistics: Collection[str] = (),
) -> None:
    """Record the reply to a request: its exact size and digest, and its parts as far as they can be read."""
    if isinstance(parts, str):
        received.add("unreadable", place_of(request), reason=plain(parts))
        return
    header, payload, names = parts if len(parts) == 3 else (*parts, ())
    what: dict[str, Any] = {"outcome": outcome, "header": len(header), "payload": len(payload)}
    if reply.failure is not None:
        what["reason"] = plain(reply.failure)
    if not request.client:
        what["clients"] = [plain(client) for client in list(reply.roles)[:MOST_ROLES]]
    named = "" if reply.value is None else type(reply.value).__name__
    found = [] if reply.value is None else parts_of(reply.value, statistics)
    received.add(
        "reply", place_of(request), digest=digest_of(header, payload, names), **what, message=named, parts=found
    )


def read(request: Request, parts: Parts | str, kind: type | None) -> Reply:
    """The reply to a request; a failure where it is malformed or does not belong to the request."""
    if isinstance(parts, str):
        return request.reply(failure=parts)
    try:
        reply = unpack(parts[0], Reply)
        if reply.failure is not None:  # a party that could not read the request does not know its place in the run
            return request.reply(failure=reply.failure, traceback=reply.traceback)
        if reply.place != request.place:
            raise WireError(f"it belongs to {reply.stage} round {reply.round}, ask {reply.ask}")
        if reply.state is not None and not _asked_for(reply.state, request.new_state):
            raise WireError("its state has another name than asked for")
        value = None if kind is None else decode(parts[1], kind)
        if len(parts[1]) != (0 if kind is None else encoded_size(value)):  # such bytes would be in no ledger
            raise WireError("its bytes hold more than its fields")
        return replace(reply, value=value)
    except (WireError, CodecError) as error:
        return request.reply(failure=f"{REFUSED}: {error}")
    except Exception as error:  # nothing that a party sends may end the run
        return request.reply(failure=f"{REFUSED}: it cannot be read ({type(error).__name__})")


def _asked_for(state: StateFile, new_state: str) -> bool:
    """Whether a new state has the requested name: the party's file, or a pack with the requested prefix."""
    name, _, offset, length = state
    if new_state.endswith(".bin"):
        return (name, offset, length) == (new_state, 0, 0)
    return name.startswith(f"{new_state}-") and PACK_NAME.fullmatch(name) is not None and offset >= 0 and length > 0
