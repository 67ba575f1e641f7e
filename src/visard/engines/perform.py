"""One client step, the same on every engine: a fresh client, its own random streams, nothing shared."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Generic

from visard.core import BoundStep, Client, ClientId, M, R, State
from visard.engines.codec import own
from visard.engines.seeds import derive, generator, seed_default
from visard.engines.world import World


@dataclass(frozen=True)
class Place:
    """Where in a run a step stands; its random streams depend on this and on nothing else."""

    stage: str
    round: int
    ask: int


@dataclass(frozen=True)
class Done(Generic[R]):
    """What a step gave."""

    reply: R
    state: State
    seconds: float


def perform(
    world: World, step: BoundStep[M, R], client: ClientId, message: M, state: State, place: Place, sent: bool = False
) -> Done[R]:
    """Run `step` at `client`; reply and state share no memory with anything that lives on.

    A reply that is `sent` elsewhere before the next step is copied there, and not here.
    """
    party = enter(world, client, state, place)
    begun = time.perf_counter()
    reply = step(party, own(message))
    return Done(reply if sent else own(reply), party.state, time.perf_counter() - begun)


def enter(world: World, client: ClientId, state: State, place: Place) -> Client:
    """The client of a step, with random streams of its own."""
    path = (place.stage, place.round, place.ask, client)
    seed_default(derive(world.seed, *path, "default"))  # for layers that draw by themselves
    return Client(
        id=client,
        data=world.clients[client],
        state=state,
        rng=generator(world.seed, *path),
        network=world.network,
        embedding=world.embedding,
        numerics=world.numerics,
        benchmarks=world.benchmarks,
        public=world.public,
        others=world.others,
    )
