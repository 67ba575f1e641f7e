"""The one channel between a method and its clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, Protocol

import torch

from visard.core.client import BoundStep, ClientId, M, R, Weights


class Replies(dict[ClientId, R], Generic[R]):
    """Replies by client, in the order asked; `missing` says who did not answer and why."""

    def __init__(self, replies: Mapping[ClientId, R] = {}, missing: Mapping[ClientId, str] = {}) -> None:
        super().__init__(replies)
        self.missing = dict(missing)


class Network(Protocol):
    """All that a method can do with its clients."""

    clients: tuple[ClientId, ...]  # those that take part in training
    held_out: tuple[ClientId, ...]  # those that only come when a model is there, to be tested on
    round: int  # in this stage, from 0
    rng: torch.Generator  # the server's, seeded by (run seed, stage, round)

    def ask(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Replies[R]:
        """Send each client its message and gather the replies.

        `timeout` (seconds) and `min_replies` default to the run's settings. Fewer than `min_replies` good
        replies end the round with a clear error.
        """
        ...

    def stream(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Iterator[tuple[ClientId, R]]:
        """As `ask`, but one reply at a time in the order of `messages`: memory does not grow with the clients."""
        ...

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
        """As `ask`, but of the field `mean` only the average comes back, each client weighted by its field `by`.

        The replies have {} in its place, so memory does not grow with the clients. An engine that simulates the
        clients may do many of them in one pass (`ClientStep.together`): the same average up to rounding.
        """
        ...

    def log(self, /, **figures: float) -> None:
        """Record figures of this round (a loss, a diagnostic) for the event log and the report."""
        ...

    def log_client(self, client: ClientId, /, **figures: float) -> None:
        """Record figures of one client in this round; the seconds that its steps took are put beside them."""
        ...
