"""The one channel between a method and its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol

import torch

from visard.core.client import BoundStep, ClientId, M, R


class Replies(dict[ClientId, R], Generic[R]):
    """Replies by client, in the order asked; `missing` says who did not answer and why."""

    def __init__(self, replies: Mapping[ClientId, R] = {}, missing: Mapping[ClientId, str] = {}) -> None:
        super().__init__(replies)
        self.missing = dict(missing)


class Network(Protocol):
    """All that a method can do with its clients."""

    clients: tuple[ClientId, ...]  # those that take part in training
    held_out: tuple[ClientId, ...]  # clients that take no part in training and are only tested
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
        mean: str | tuple[str, ...],
        by: str | Callable[[R], float] | None,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> tuple[dict[str, Any], Replies[R]]:
        """As `ask`, but the fields `mean` come back aggregated over all clients, by name.

        The run's aggregation rule says how, by default as the weighted mean. A client's weight is a
        field of its reply, a function of its reply, or the same for all (None). A field holds weights or a tensor;
        a client whose field is None does not count for it, and a field that no client has comes back as None. The
        replies come without these fields, so memory does not grow with the clients. An engine that simulates the
        clients may do many of them in one pass (`ClientStep.together`): the same mean up to rounding.
        """
        ...

    def hand_on(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        fields: tuple[str, ...],
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Replies[R]:
        """As `ask`, for replies from whose `fields` other clients go on: these keep the limits of the run's averages.

        A run whose aggregation is more than a mean with such limits refuses this.
        """
        ...

    def sample(self, share: float) -> list[ClientId]:
        """A random share of the clients (at least one), in their fixed order: a fixed number of them, unless the run's
        differential privacy wants each drawn by itself."""
        ...

    def log(self, /, **metrics: float) -> None:
        """Record metrics of this round (a loss, a diagnostic) for the event log and the report."""
        ...

    def log_client(self, client: ClientId, /, **metrics: float) -> None:
        """Record metrics of one client in this round; the engine adds the seconds that its steps took."""
        ...


def sample_clients(net: Network, share: float) -> list[ClientId]:
    """A random share of the clients (at least one), in their fixed order; see `Network.sample`."""
    return net.sample(share)


def mean_metrics(parts: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """The mean of each metric over (metrics, n) of clients; a client without a metric does not count for it."""
    total: dict[str, float] = {}
    weight: dict[str, float] = {}
    for metrics, n in parts:
        for name, value in metrics.items():
            total[name] = total.get(name, 0.0) + n * value
            weight[name] = weight.get(name, 0.0) + n
    return {name: total[name] / weight[name] for name in total if weight[name]}
