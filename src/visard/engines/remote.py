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

from visard.core import BoundStep, ClientId, M, R
from visard.engines.checkpoint import Checkpoint, StateFile
from visard.engines.codec import CodecError, decode, encode
from visard.engines.network import EngineNetwork, Outcome
from visard.engines.perform import Place
from visard.engines.wire import Answer, Request, WireError, pack, unpack
from visard.engines.world import World
from visard.privacy.ledger import Ledger

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

    def close(self) -> None:
        """Let go of connections and processes."""


@dataclass
class Sent:
    """A request on its way."""

    position: int
    client: ClientId
    request: Request
    deadline: float


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

    def outcomes(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float
    ) -> Iterator[Outcome]:
        self.link.gather(list(messages), self.world.replies_needed(len(messages)))
        line = iter(enumerate(messages.items()))
        sent: dict[str, Sent] = {}
        finished: dict[int, Outcome] = {}
        given, last = 0, (object(), b"")
        while given < len(messages):
            while len(sent) + len(finished) < self.link.window and (entry := next(line, None)) is not None:
                position, (client, message) = entry
                if message is not last[0]:
                    last = (message, encode(message))
                request = self.request(client, step.name, place, timeout)
                number = self.link.send(client, pack(request), last[1], timeout)
                if number is None:
                    finished[position] = Outcome(client, failure="its node is not connected")
                else:
                    deadline = time.monotonic() + timeout * self.link.queue
                    sent[number] = Sent(position, client, request, deadline)
            for number, reply in self.link.receive(list(sent)).items():
                done = sent.pop(number)
                finished[done.position] = read(step, done, reply)
            for number in [n for n, s in sent.items() if time.monotonic() > s.deadline]:
                late = sent.pop(number)
                finished[late.position] = Outcome(late.client, failure=LATE)
            if given not in finished and sent:
                time.sleep(self.link.poll)
            while given in finished:
                yield finished.pop(given)
                given += 1

    def request(self, client: ClientId, step: str, place: Place, timeout: float, keep: str = "") -> Request:
        """The request for a step, with the state that the run stands at."""
        before = self.states.state_file(client)
        return Request(
            run=self.run,
            settings=self.settings,
            client=client,
            step=step,
            stage=place.stage,
            round=place.round,
            ask=place.ask,
            state=(before.name, before.digest) if before else None,
            committed=self.states.committed.clients.get(client, ""),
            new_state=self.states.new_state_name(client),
            timeout=timeout,
            keep=keep,
        )


def plain(text: str) -> str:
    """Words of a party as one short line without control characters."""
    return "".join(c for c in text if c.isprintable())[:500]


def read(step: BoundStep[Any, Any], sent: Sent, reply: Reply) -> Outcome:
    """The outcome of a reply; one that does not belong to its request, or is malformed, is refused."""
    if reply.failure is not None:
        return Outcome(sent.client, failure=reply.failure)
    try:
        answer = unpack(reply.header, Answer)
    except WireError as error:
        return Outcome(sent.client, failure=f"reply refused: {error}")
    if answer.place != sent.request.place:
        stage, number, ask = plain(answer.stage), answer.round, answer.ask
        return Outcome(sent.client, failure=f"reply refused: it belongs to {stage} round {number}, ask {ask}")
    if answer.failure is not None:
        return Outcome(sent.client, failure=plain(answer.failure), traceback=answer.traceback)
    if answer.state is not None and answer.state[0] != sent.request.new_state:
        return Outcome(sent.client, failure="reply refused: its state has another name than asked for")
    try:
        value = decode(reply.payload, step.types[1])
    except CodecError as error:
        return Outcome(sent.client, failure=f"reply refused: {error}")
    state = StateFile(*answer.state) if answer.state else None
    return Outcome(sent.client, value, state, answer.seconds)
