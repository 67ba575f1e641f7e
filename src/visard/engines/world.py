"""What an engine needs to build clients: their data, the network, the seed and the limits of a run."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from visard.aggregation.rules import Mean, Rule
from visard.core import PUBLIC, BoundStep, Client, ClientId, Disclosure, M, Method, R, Setup, State, Weights
from visard.data.faces import ClientData, FaceView
from visard.engines.codec import own
from visard.errors import UsageError
from visard.numerics import Numerics

# ----------
# Random streams that depend on what is computed, never on where or in which order.


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed from the run's seed and a path such as (stage, round, ask, client)."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A torch generator seeded by `derive`."""
    return torch.Generator().manual_seed(derive(seed, *parts))


def seed_default(seed: int) -> None:
    """Seed the default generator of the CPU, and no other: `torch.manual_seed` also keeps a traceback for each
    call until a GPU is first used, which thousands of steps would feel."""
    torch.default_generator.manual_seed(seed)


POOL: ClientId = "pool"  # where a method that pools puts everybody's pictures: what leaves it has left before


@dataclass
class World:
    """The parties of a run and the rules that all of them share."""

    seed: int
    clients: dict[ClientId, ClientData]
    training: tuple[ClientId, ...]
    benchmarks: Mapping[str, FaceView]  # public test sets of people whom no client knows
    classes: int
    embedding: int
    build: Callable[[], nn.Module]
    numerics: Numerics
    timeout: float = 3600.0  # seconds of one step
    min_replies: float = 0.5  # share of the asked clients
    held_out: tuple[ClientId, ...] = ()  # clients that take no part in training
    public: FaceView | None = None  # pictures that every party has
    others: FaceView | None = None  # the test pictures of all parties, where tests may use them
    class_vectors: Tensor | None = field(default=None, repr=False)  # of the public identities, from a file
    biases: Tensor | None = field(default=None, repr=False)  # from the same file
    start_from: Weights | None = field(default=None, repr=False)  # instead of fresh weights
    aggregation: Rule = Mean()  # how replies become one
    told: Mapping[ClientId, int] = field(default_factory=dict)  # how many pictures parties said that they bring
    _network: nn.Module | None = field(default=None, repr=False)

    def network(self) -> nn.Module:
        """The one backbone of this process, reused by all clients; its weights are whatever the last one left."""
        if self._network is None:
            with torch.random.fork_rng(devices=[]):  # a step draws the same whether it is the first here or not
                self._network = self.numerics.prepare(self.build())
            if self.numerics.compile:
                self._network.compile()  # in place, so that the names of the weights stay
        return self._network

    def new_weights(self) -> Weights:
        """The weights a run starts from: given ones, or fresh ones that are the same for the same seed."""
        if self.start_from is not None:
            return dict(self.start_from)
        seed_default(derive(self.seed, "weights"))
        return {k: v.detach().clone() for k, v in self.build().state_dict().items()}

    def setup(self) -> Setup:
        """What the server knows before the first round; the default generator is seeded for heads."""
        seed_default(derive(self.seed, "setup"))
        return Setup(
            self.training, self.classes, self.embedding, self.new_weights, self.seed,
            given=self.start_from is not None,
            public_classes=0 if self.public is None else self.public.n_classes,
            class_vectors=self.class_vectors,
            biases=self.biases,
        )  # fmt: skip

    def pictures(self, client: ClientId) -> int:
        """How many pictures a client has, as far as the server knows."""
        data = self.clients.get(client)
        return self.told.get(client, 0) if data is None else len(data.train) + len(data.val) + len(data.test)

    def replies_needed(self, asked: int) -> int:
        """The smallest number of good replies with which a round counts."""
        return max(1, math.ceil(self.min_replies * asked))


def centralised(world: World, method: Method[Any]) -> tuple[World, dict[ClientId, dict[Disclosure, int]]]:
    """The world of a method that pools data: one client with everything, and what left each real one."""
    if not method.centralises:
        return world, {}
    kinds = {c: kinds for c in world.training if (kinds := method.centralises_from(c))}
    if not kinds:
        raise UsageError(f"{method.name} pools no client's pictures: it needs partition.kind = domains")
    left = {c: centralised_bytes(world.clients[c], kinds[c]) for c in kinds}
    parts = [world.clients[c] for c in kinds]
    if method.centralises_public():
        if world.public is None:
            raise UsageError("method.with_public = true, but partition.public_identities = 0")
        parts.append(world.clients[PUBLIC])
    classes = np.unique(np.concatenate([p.train.classes for p in parts]))

    def merge(views: list[FaceView]) -> FaceView:
        return FaceView.of(views[0].faces, np.concatenate([v.index for v in views]), classes)

    train, val, test = (merge([getattr(p, name) for p in parts]) for name in ("train", "val", "test"))
    pool = ClientData(train, val, test, parts={c: world.clients[c].train for c in kinds})
    clients = {**world.clients, POOL: pool}
    return replace(world, clients=clients, training=(POOL,), held_out=(), _network=None), left


def centralised_bytes(data: ClientData, kinds: frozenset[Disclosure]) -> dict[Disclosure, int]:
    """Bytes of a client's training data that pooling moves out, by kind."""
    picture = data.train.faces.pixels[0].nbytes
    each = {Disclosure.pictures: picture, Disclosure.labels: 8}
    return {k: each[k] * (len(data.train) + len(data.val)) for k in sorted(kinds, key=lambda k: k.value)}


# ----------
# One client step, the same on every engine: a fresh client, its own random streams, nothing shared.


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
