"""Many clients in one pass, for engines that simulate them: the average is the same, up to rounding.

A cohort is cut by the clients' pictures alone, so every engine and every number of workers gives the same bits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from visard.core import BoundStep, ClientId, M, R, Replies, State, Weights
from visard.engines.check import refusal
from visard.engines.codec import own
from visard.engines.perform import Done, Place, enter
from visard.engines.world import World
from visard.errors import VisardError
from visard.ops.average import RunningMean

PICTURES = 256  # of one pass at most, unless a single client has more: this bounds the memory


def cohorts(world: World, clients: Iterable[ClientId], pictures: int = PICTURES) -> Iterator[list[ClientId]]:
    """The clients in their order, cut into groups of at most `pictures` training pictures."""
    group: list[ClientId] = []
    held = 0
    for client in clients:
        size = len(world.clients[client].train)
        if group and held + size > pictures:
            yield group
            group, held = [], 0
        group.append(client)
        held += size
    if group:
        yield group


def perform_together(
    world: World,
    step: BoundStep[M, R],
    messages: Mapping[ClientId, M],
    states: Mapping[ClientId, State],
    place: Place,
    mean: str,
) -> tuple[Weights, list[Done[R]]]:
    """Run `step` at all clients of `messages` in one pass: the mean, and what each client gave without it.

    Anything wrong with one of them ends the pass: the engine then asks its clients one by one, to find out whose.
    """
    assert step.together is not None
    copies: dict[int, torch.Tensor] = {}
    parties = [enter(world, c, states[c], place) for c in messages]
    begun = time.perf_counter()
    value, replies = step.together(step.owner, parties, [own(m, copies) for m in messages.values()])
    each = (time.perf_counter() - begun) / len(parties)
    checked: tuple[str, ...] = ()
    for (client, message), reply in zip(messages.items(), replies, strict=True):
        if wrong := refusal(
            step, message, with_mean(reply, mean, value), world.pictures(client), world.embedding, checked
        ):
            raise VisardError(f"{mean} of a cohort: {' '.join(wrong)}")
        checked = (mean,)
    return own(value), [Done(own(r), p.state, each) for p, r in zip(parties, replies, strict=True)]


def with_mean(reply: R, mean: str, value: Weights) -> R:
    """A reply of a cohort with the average of all in place of its own: as many bytes, and the same average."""
    return dataclasses.replace(reply, **{mean: value})  # type: ignore[type-var]


class Averaging:
    """Takes the averaged field out of replies as they come in; the replies of a cohort share one value of it."""

    def __init__(self, mean: str, by: str) -> None:
        self.mean, self.by = mean, by
        self._running = RunningMean()
        self._last: tuple[Any, float] | None = None

    def checked(self, reply: Any) -> tuple[str, ...]:
        """The fields of a reply that an earlier reply has brought already."""
        return (self.mean,) if self._last and getattr(reply, self.mean, None) is self._last[0] else ()

    def add(self, reply: R) -> R:
        """Count a reply in; returns it with {} in place of the averaged field."""
        value, weight = getattr(reply, self.mean), getattr(reply, self.by)
        if self._last and value is self._last[0]:
            self._last = (value, self._last[1] + weight)
        else:
            self._flush()
            self._last = (value, weight)
        return with_mean(reply, self.mean, {})

    def result(self) -> Weights:
        """The average over all replies."""
        self._flush()
        return self._running.mean()

    def _flush(self) -> None:
        if self._last:
            self._running.add(*self._last)
        self._last = None


def gather(
    replies: Iterable[tuple[ClientId, R]], averaging: Averaging, missing: dict[ClientId, str]
) -> tuple[Weights, Replies[R]]:
    """The average, and the replies without it."""
    small = {client: averaging.add(reply) for client, reply in replies}
    return averaging.result(), Replies(small, missing)
