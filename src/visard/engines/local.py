"""The in-process engine: one client after the other, each built anew for every step."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from visard.core import BoundStep, Client, ClientId, M, R, Replies
from visard.engines.check import refusal
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import own, size_of
from visard.engines.seeds import derive, generator
from visard.engines.world import World
from visard.errors import VisardError
from visard.privacy.ledger import Ledger


@dataclass
class Traffic:
    """What one round moved and lost."""

    bytes_up: int = 0
    bytes_down: int = 0
    asked: int = 0
    replied: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[dict[str, Any]] = field(default_factory=list)  # events of refused and missing replies


class LocalNetwork:
    """Runs client steps in this process; `Network` for the in-process engine."""

    def __init__(self, world: World, states: Checkpoint, ledger: Ledger | None) -> None:
        self.world = world
        self.clients = world.training
        self.states = states
        self.ledger = ledger
        self.begin("start", 0)

    def begin(self, stage: str, round: int) -> None:
        """Start a round: fresh random streams and counters."""
        self.stage, self.round, self.asks = stage, round, 0
        self.rng = generator(self.world.seed, stage, round, "server")
        self.traffic = Traffic()

    def log(self, **figures: float) -> None:
        self.traffic.figures.update({k: float(v) for k, v in figures.items()})

    def ask(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Replies[R]:
        missing: dict[ClientId, str] = {}
        replies = dict(self._replies(step, messages, timeout, min_replies, missing))
        return Replies(replies, missing)

    def stream(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Iterator[tuple[ClientId, R]]:
        return self._replies(step, messages, timeout, min_replies, {})

    def _replies(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        timeout: float | None,
        min_replies: int | None,
        missing: dict[ClientId, str],
    ) -> Iterator[tuple[ClientId, R]]:
        self.asks += 1
        ask, good = self.asks, 0
        timeout = self.world.timeout if timeout is None else timeout
        self.traffic.asked += len(messages)
        for client, message in messages.items():
            self.traffic.bytes_down += size_of(message)
            try:
                reply, state, seconds = self._step(step, client, message, ask)
            except Exception as error:  # one client's failure must not end the round
                self._lose(missing, client, error)
                continue
            if seconds > timeout:
                self._lose(missing, client, VisardError(f"took {seconds:.1f} s, over the limit of {timeout:g} s"))
                continue
            if wrong := refusal(step, message, reply):
                self._refuse(missing, client, reply, *wrong)
                continue
            if self.ledger is not None:
                self.traffic.bytes_up += self.ledger.record(self.stage, self.round, client, reply)
            self.states.put_client_state(client, state)
            self.traffic.replied += 1
            good += 1
            yield client, own(reply)
        needed = self.world.replies_needed(len(messages)) if min_replies is None else min_replies
        if good < needed:
            first = next(iter(missing.items()), None)
            why = f"; {first[0]}: {first[1]}" if first else ""
            raise VisardError(f"{self.stage} round {self.round}: {good} good replies of {len(messages)}, {needed} needed{why}")

    def _step(self, step: BoundStep[M, R], client: ClientId, message: M, ask: int) -> tuple[R, dict[str, Any], float]:
        path = (self.stage, self.round, ask, client)
        state = self.states.client_state(client)
        torch.manual_seed(derive(self.world.seed, *path, "default"))  # layers that draw by themselves
        party = Client(
            id=client,
            data=self.world.clients[client],
            state=state,
            rng=generator(self.world.seed, *path),
            network=self.world.network,
            embedding=self.world.embedding,
            numerics=self.world.numerics,
            benchmarks=self.world.benchmarks,
        )
        begun = time.perf_counter()
        reply = step(party, own(message))
        return reply, party.state, time.perf_counter() - begun

    def _lose(self, missing: dict[ClientId, str], client: ClientId, error: Exception) -> None:
        text = str(error) if isinstance(error, VisardError) else f"{type(error).__name__}: {error}"
        missing[client] = (text.splitlines() or [type(error).__name__])[0]
        problem = {"event": "missing", "client": client, "reason": missing[client]}
        if not isinstance(error, VisardError):
            problem["traceback"] = "".join(traceback.format_exception(error))
        self.traffic.problems.append(problem)

    def _refuse(self, missing: dict[ClientId, str], client: ClientId, reply: object, name: str, reason: str) -> None:
        message = type(reply).__name__
        missing[client] = f"reply refused: {message}{name and '.' + name} {reason}"
        self.traffic.problems.append(
            {"event": "refused", "client": client, "message": message, "field": name, "reason": reason}
        )
