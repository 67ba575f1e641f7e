"""The network of a run whose clients are somewhere else: requests go out over a link, answers come back.

What a link must do is small, so that the same code runs over Flower's simulation, over a Flower deployment and
over a dictionary in a test. Order, time limits, and the check that an answer belongs to its request are here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from visard.core import BoundStep, ClientId, M, R, Weights
from visard.deployment.party import Basis
from visard.deployment.wire import PACK_NAME, Answer, Request, Where, WireError, pack, unpack
from visard.engines.checkpoint import Checkpoint, StateFile
from visard.engines.codec import CodecError, decode, encode
from visard.engines.ledger import Ledger
from visard.engines.network import EngineNetwork, Outcome, plain
from visard.engines.world import Place, World

LATE = "no reply before the time limit"


@dataclass(frozen=True)
class Reply:
    """What came back for one sent request: header and payload, or why there is none."""

    header: bytes = b""
    payload: bytes = b""
    failure: str | None = None


class Link(ABC):
    """A way to the parties."""

    window = 64  # requests on their way at once
    queue = 1  # requests that one worker at the other side may have in line
    poll = 0.05  # seconds between looks for answers

    @abstractmethod
    def gather(self, clients: Collection[ClientId], needed: int) -> None:
        """Wait until `needed` of the clients can be reached; one clear error if that takes too long."""

    @abstractmethod
    def send(self, client: ClientId, header: bytes, payload: bytes, timeout: float) -> str | None:
        """Send a request; returns its number, or None if the client cannot be reached now."""

    @abstractmethod
    def receive(self, numbers: Collection[str]) -> dict[str, Reply]:
        """Answers that have come in for these requests."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and processes."""


class PartyLink(Link):
    """A way to parties that are elsewhere, who have to be told of the run and to say who they are."""

    @abstractmethod
    def introduce(self, run: str, told: dict[str, Any]) -> None:
        """Set what parties are told of the run when they are asked for their roles."""

    @abstractmethod
    def parties(self, count: int) -> dict[ClientId, dict[str, int]]:
        """Wait for `count` roles to be taken; returns what each party says of its data."""


@dataclass
class Sent:
    """A request on its way."""

    position: int
    request: Request
    deadline: float

    @property
    def client(self) -> ClientId:
        return self.request.client


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
        self.link = link
        self.run = run
        self.settings = dict(settings or {})

    def close(self) -> None:
        self.link.close()

    def reach(self, clients: Collection[ClientId], needed: int) -> None:
        self.link.gather(clients, needed)

    def outcomes(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float
    ) -> Iterator[Outcome]:
        requests = ((self.request(c, step.name, place, timeout), m) for c, m in messages.items())
        for sent, reply in self._exchange(requests, len(messages)):
            yield read(step, sent, reply)

    def keep(self, theta: Weights | None, name: str) -> dict[ClientId, str]:
        """Let every client make its own model from `theta` and keep it at its party; returns who failed and why."""
        place, basis = Place("keep", 0, 1), Basis(theta)
        name = f"{quote(name, safe='')[:80]}-{self.run[:8]}"  # of a file, and of two runs with one name never the same
        self.link.gather(self.clients, 0)
        timeout = self.world.timeout
        requests = ((self.request(c, "", place, timeout, f"{name}-{quote(c, safe='')}"), basis) for c in self.clients)
        answers = self._exchange(requests, len(self.clients))
        failures = {sent.client: failure_of(sent, reply) for sent, reply in answers}
        return {client: plain(failure) for client, failure in failures.items() if failure is not None}

    def _exchange(self, requests: Iterator[tuple[Request, Any]], count: int) -> Iterator[tuple[Sent, Reply]]:
        """Send requests with their messages and hand over the replies in the same order."""
        sent: dict[str, Sent] = {}
        finished: dict[int, tuple[Sent, Reply]] = {}
        given, position, last = 0, 0, (object(), b"")
        while given < count:
            while len(sent) + len(finished) < self.link.window and (entry := next(requests, None)) is not None:
                request, message = entry
                if message is not last[0]:
                    last = (message, encode(message))
                deadline = time.monotonic() + request.timeout * self.link.queue
                going = Sent(position, request, deadline)
                number = self.link.send(request.client, pack(request), last[1], request.timeout)
                if number is None:
                    finished[position] = going, Reply(failure="its node is not connected")
                else:
                    sent[number] = going
                position += 1
            now = time.monotonic()  # before looking: what comes while we look is not late
            for number, reply in self.link.receive(list(sent)).items():
                done = sent.pop(number)
                finished[done.position] = done, reply
            for number in [n for n, s in sent.items() if now > s.deadline]:
                late = sent.pop(number)
                finished[late.position] = late, Reply(failure=LATE)
            if given not in finished and sent:
                time.sleep(self.link.poll)
            while given in finished:
                yield finished.pop(given)
                given += 1

    def request(self, client: ClientId, step: str, place: Place, timeout: float, keep: str = "") -> Request:
        """The request for a step, with the state that the run stands at."""
        before, committed = self.states.state_file(client), self.states.committed.clients.get(client)
        new_state = self.states.new_state_name(client) if self.states.remote else self.states.new_pack
        return Request(
            run=self.run,
            settings=self.settings,
            client=client,
            step=step,
            stage=place.stage,
            round=place.round,
            ask=place.ask,
            state=before.place if before else None,
            committed=committed.name if committed else "",
            new_state=new_state,
            timeout=timeout,
            keep=keep,
        )


def failure_of(sent: Sent, reply: Reply) -> str | None:
    """Why a reply does not count: it failed, is malformed, or does not belong to its request."""
    if reply.failure is not None:
        return reply.failure
    try:
        answer = unpack(reply.header, Answer)
    except WireError as error:
        return f"reply refused: {error}"
    if answer.failure is not None:  # a party that could not read the request does not know its place
        return answer.failure
    if answer.place != sent.request.place:
        return f"reply refused: it belongs to {answer.stage} round {answer.round}, ask {answer.ask}"
    if answer.state is not None and not _asked_for(answer.state, sent.request.new_state):
        return "reply refused: its state has another name than asked for"
    return None


def _asked_for(state: Where, new_state: str) -> bool:
    """Whether a new state is where it should be: the party's file, or a pack that begins as asked for."""
    name, _, offset, length = state
    if new_state.endswith(".bin"):
        return (name, offset, length) == (new_state, 0, 0)
    return name.startswith(f"{new_state}-") and PACK_NAME.fullmatch(name) is not None and offset >= 0 and length > 0


def read(step: BoundStep[Any, Any], sent: Sent, reply: Reply) -> Outcome:
    """The outcome of a reply."""
    if failure := failure_of(sent, reply):
        trace = unpack(reply.header, Answer).traceback if reply.header and "refused" not in failure else None
        return Outcome(sent.client, failure=failure, traceback=trace)
    answer = unpack(reply.header, Answer)
    try:
        value = decode(reply.payload, step.types[1])
    except CodecError as error:
        return Outcome(sent.client, failure=f"reply refused: {error}")
    except Exception as error:  # nothing that a party sends may end the run
        return Outcome(sent.client, failure=f"reply refused: it cannot be read ({type(error).__name__})")
    state = StateFile(*answer.state) if answer.state else None
    return Outcome(sent.client, value, state, answer.seconds)
