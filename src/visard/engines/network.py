"""What all engines share: asking, checking every reply, the ledger, client states, and who is missing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from visard.core import BoundStep, ClientId, M, R, Replies, Weights
from visard.engines.check import refusal
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import sizes_of
from visard.engines.cohort import Averaging, gather
from visard.engines.packs import StateFile
from visard.engines.perform import Place
from visard.engines.seeds import generator
from visard.engines.world import POOL, World
from visard.errors import VisardError
from visard.privacy.ledger import Ledger

LONGEST_TRACEBACK = 20_000


@dataclass
class Traffic:
    """What one round moved and lost."""

    bytes_up: int = 0
    bytes_down: int = 0
    asked: int = 0
    replied: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    clients: dict[ClientId, dict[str, float]] = field(default_factory=dict)  # of those that the method logged
    seconds: dict[ClientId, float] = field(default_factory=dict)  # that the steps of each client took
    problems: list[dict[str, Any]] = field(default_factory=list)  # events of refused and missing replies


def plain(text: str) -> str:
    """Words of a party as one short line without control characters."""
    return "".join(c for c in " ".join(text[:2000].split()) if c.isprintable())[:500]


@dataclass(frozen=True)
class Outcome:
    """A client's answer as an engine hands it over: a reply with the new state, or a failure."""

    client: ClientId
    reply: Any = None
    state: StateFile | None = None  # None: unchanged
    seconds: float = 0.0
    failure: str | None = None
    traceback: str | None = None


class EngineNetwork(ABC):
    """`Network` for the engines: they only say how outcomes come about."""

    def __init__(self, world: World, states: Checkpoint, ledger: Ledger | None) -> None:
        self.world = world
        self.clients, self.held_out = world.training, world.held_out
        self.states = states
        self.ledger = ledger
        self._streaming = False
        self.begin("start", 0)

    @abstractmethod
    def outcomes(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float
    ) -> Iterator[Outcome]:
        """One outcome for each message, in the order of `messages`."""

    def outcomes_together(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float, mean: str
    ) -> Iterator[Outcome]:
        """As `outcomes`, but the field `mean` of a reply may be the average over a cohort; here everyone is alone."""
        return self.outcomes(step, messages, place, timeout)

    def reach(self, clients: Collection[ClientId], needed: int) -> None:  # noqa: B027 (simulated clients are there)
        """Wait until so many of the clients can be asked."""

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Let go of processes and connections."""

    def begin(self, stage: str, round: int) -> None:
        """Start a round: fresh random streams and counters."""
        self.stage, self.round, self.asks = stage, round, 0
        self.rng = generator(self.world.seed, stage, round, "server")
        self.traffic = Traffic()

    def log(self, /, **figures: float) -> None:
        """See `Network.log`."""
        self.traffic.figures.update({k: float(v) for k, v in figures.items()})

    def log_client(self, client: ClientId, /, **figures: float) -> None:
        """See `Network.log_client`."""
        self.traffic.clients.setdefault(client, {}).update({k: float(v) for k, v in figures.items()})

    def ask(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Replies[R]:
        """See `Network.ask`."""
        missing: dict[ClientId, str] = {}
        return Replies(dict(self._replies(step, messages, timeout, min_replies, missing)), missing)

    def stream(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Iterator[tuple[ClientId, R]]:
        """See `Network.stream`."""
        return self._replies(step, messages, timeout, min_replies, {})

    def reduce(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        mean: str,
        by: str,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> tuple[Weights, Replies[R]]:
        """See `Network.reduce`."""
        missing: dict[ClientId, str] = {}
        averaging = Averaging(mean, by)
        return gather(self._replies(step, messages, timeout, min_replies, missing, averaging), averaging, missing)

    def _replies(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        timeout: float | None,
        min_replies: int | None,
        missing: dict[ClientId, str],
        averaging: Averaging | None = None,
    ) -> Iterator[tuple[ClientId, R]]:
        self.asks += 1
        good = 0
        timeout = self.world.timeout if timeout is None else timeout
        needed = self.world.replies_needed(len(messages)) if min_replies is None else min_replies
        self.reach(messages.keys(), needed)
        self.traffic.asked += len(messages)
        self.traffic.bytes_down += sizes_of([m for c, m in messages.items() if c != POOL])  # which is at the server
        place = Place(self.stage, self.round, self.asks)
        if averaging is not None and step.together is not None:
            outcomes = self.outcomes_together(step, messages, place, timeout, averaging.mean)
        else:
            outcomes = self.outcomes(step, messages, place, timeout)
        with self._only(step.name):
            for outcome in outcomes:
                client, reply = outcome.client, outcome.reply
                failure = outcome.failure
                if failure is None and outcome.seconds > timeout:
                    failure = f"took {outcome.seconds:.1f} s, over the limit of {timeout:g} s"
                if failure is not None:
                    missing[client] = plain(failure)
                    self._problem("missing", client, reason=failure, traceback=outcome.traceback)
                    continue
                checked = averaging.checked(reply) if averaging else ()
                if wrong := refusal(
                    step, messages[client], reply, self.world.pictures(client), self.world.embedding, checked
                ):
                    name, reason = wrong
                    kind = type(reply).__name__
                    missing[client] = plain(f"reply refused: {kind}{name and '.' + name} {reason}")
                    self._problem("refused", client, message=kind, field=name, reason=reason)
                    continue
                if self.ledger is not None and client != POOL:
                    self.traffic.bytes_up += self.ledger.record(self.stage, self.round, client, reply)
                if outcome.state is not None:
                    self.states.adopt(client, outcome.state)
                self.traffic.replied += 1
                self.traffic.seconds[client] = self.traffic.seconds.get(client, 0.0) + outcome.seconds
                good += 1
                yield client, reply
        if good < needed:
            why = "".join(f"; {c}: {reason}" for c, reason in list(missing.items())[:1])
            raise VisardError(
                f"{self.stage} round {self.round}: {good} good replies of {len(messages)}, {needed} needed{why}"
            )

    @contextmanager
    def _only(self, name: str) -> Iterator[None]:
        """One ask at a time: workers and nodes keep the order of what they are asked."""
        if self._streaming:
            raise VisardError(f"step {name} is asked for while replies of another ask are still to come")
        self._streaming = True
        try:
            yield
        finally:
            self._streaming = False

    def _problem(self, event: str, client: ClientId, traceback: str | None = None, **fields: str) -> None:
        told = {k: plain(v) for k, v in fields.items()}
        told |= {} if traceback is None else {"traceback": traceback[:LONGEST_TRACEBACK]}
        self.traffic.problems.append({"event": event, "client": client, **told})
