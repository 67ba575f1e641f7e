"""Small worlds for tests of engines: a face set of coloured noise and a network that trains in no time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from visard.aggregation.rules import RunningMean
from visard.core import (
    BoundStep,
    Client,
    ClientId,
    Disclosure,
    M,
    Method,
    Network,
    R,
    Setup,
    Stage,
    State,
    Weights,
    client_step,
    nothing,
)
from visard.data.faces import FaceSet, FaceSetWriter
from visard.data.partition import partition
from visard.data.partition_kinds import PartitionSettings
from visard.engines.checkpoint import Checkpoint, PackStates
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork, perform
from visard.engines.request import Request, StateFile
from visard.engines.world import World
from visard.errors import PublicError, VisardError
from visard.numerics import Numerics

SIZE = 32


def noise_faces(out: Path, identities: int = 12, images: int = 6, seed: int = 0, size: int = SIZE) -> FaceSet:
    """Each identity is a colour, each picture that colour with noise."""
    rng = np.random.default_rng(seed)
    colour = rng.integers(40, 215, (identities, 1, 1, 3))
    names = [f"person-{i:03d}" for i in range(identities)]
    n = identities * images
    with FaceSetWriter(
        out, count=n, size=size, names=names, domains=["noise"], attributes=["Male"],
        info={"kind": "synthetic", "name": "noise"},
    ) as writer:  # fmt: skip
        identity = np.repeat(np.arange(identities), images)
        noise = rng.integers(-40, 40, (n, size, size, 3))
        pictures = np.clip(colour[identity] + noise, 0, 255).astype(np.uint8)
        attributes = np.where(identity[:, None] % 2, 1, -1).astype(np.int8)
        files = [f"{names[i]}/{k}.png" for k, i in enumerate(identity)]
        writer.write(0, pictures, identity.astype(np.int32), np.zeros(n, np.int16), attributes, files)
    return FaceSet.open(out)


def weighted_mean(parts: Iterable[tuple[Weights, float]]) -> Weights:
    """The mean of (weights, n) pairs."""
    running = RunningMean()
    for weights, n in parts:
        running.add(weights, n)
    return running.result()


def toy_network() -> nn.Module:
    """A network with batch norm, so that averaging has buffers to deal with."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=4),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 8),
    )


def toy_world(folder: Path, clients: int = 3, seed: int = 0, **changes: object) -> World:
    """A world of noise faces; the face set is made on first use."""
    faces = FaceSet.open(folder / "faces") if (folder / "faces").exists() else noise_faces(folder / "faces")
    settings = PartitionSettings(kind="equal", clients=clients, test_identities=3, split=(0.7, 0.0, 0.3))
    federation = partition(faces, settings, seed).federation(faces)
    world = World(
        seed=seed, clients=federation.clients, training=tuple(federation.training), benchmarks=federation.unseen,
        classes=federation.identities, embedding=8, build=toy_network, numerics=Numerics(),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def toy_engine(folder: Path, world: World) -> LocalNetwork:
    """A network with its checkpoint and ledger in `folder`."""
    states = Checkpoint(folder / "checkpoint", "toy")
    return LocalNetwork(world, states, Ledger(states.ledger))


def written(states: Checkpoint, client: ClientId, state: State) -> StateFile | None:
    """A state on disk as a step leaves it, not yet adopted."""
    request = Request(client=client, state=states.state_file(client), new_state=states.new_state(client))
    return PackStates(states.packs).write(request, state)


class Kept:
    """The state that a step left, for tests of single steps."""

    state: State

    def read(self, request: Request) -> State:
        return {}

    def write(self, request: Request, state: State) -> None:
        self.state = state


def first_step(
    world: World, step: BoundStep[M, R], client: ClientId, message: M, stage: str = "federate"
) -> tuple[R, State]:
    """What the first step of a round gives at one client, and the state that it leaves."""
    kept = Kept()
    reply = perform(world, step, Request(client=client, stage=stage, ask=1, message=message), kept)
    return reply.value, kept.state


@dataclass(frozen=True)
class ToyServer:
    w: Tensor
    theta: Weights


@dataclass(frozen=True)
class ToyDown:
    w: Tensor
    theta: Weights


@dataclass(frozen=True)
class ToyUp:
    w: Annotated[Tensor, Disclosure.class_vectors]
    theta: Annotated[Weights, Disclosure.weights]
    n: Annotated[int, Disclosure.count]
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class OtherUp:
    face: Annotated[Tensor, Disclosure.pictures]


@dataclass(frozen=True)
class Toy(Method[ToyServer]):
    """Adds random numbers; `faults` makes chosen clients misbehave."""

    name = "toy"
    title = "a toy"
    discloses = frozenset({Disclosure.class_vectors, Disclosure.weights, Disclosure.count, Disclosure.metric})

    rounds: int = 3
    faults: dict[str, str] = field(default_factory=dict)

    def start(self, setup: Setup) -> ToyServer:
        return ToyServer(torch.zeros(4), {"a": torch.zeros(2, 2)})

    def stages(self) -> list[Stage[ToyServer]]:
        return [Stage("add", self.rounds, self.round)]

    def round(self, s: ToyServer, net: Network) -> ToyServer:
        ups = net.ask(self.add, {c: ToyDown(s.w, s.theta) for c in net.clients})
        net.log(loss=sum(u.loss for u in ups.values()), missing=len(ups.missing))
        return ToyServer(sum((u.w for u in ups.values()), torch.zeros(4)), next(iter(ups.values())).theta)

    @client_step(trains=nothing)
    def add(self, client: Client, msg: ToyDown) -> ToyUp:
        fault = self.faults.get(client.id)
        client.state["steps"] = client.state.get("steps", 0) + 1
        w = msg.w + torch.rand(4, generator=client.rng) + torch.rand(4)
        msg.w.zero_()  # a client that scribbles on its message harms nobody
        up = ToyUp(w, {"a": msg.theta["a"] + 1}, len(client.data.train), float(w.sum()))
        return _break(fault, up) if fault else up


def _break(fault: str, up: ToyUp) -> ToyUp:
    if fault == "raise":
        raise PublicError("the disk is full")
    if fault == "path":
        raise VisardError("no face set at /home/alice/ward-7")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "die once":
        mark = Path(os.environ["VISARD_TOY_MARK"])
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return up
    if fault == "hang":
        time.sleep(60)
    if fault.startswith("hang once "):
        mark = Path(fault.removeprefix("hang once "))
        if not mark.exists():
            mark.touch()
            time.sleep(60)
        return up
    if fault == "bug":
        raise ZeroDivisionError("division by zero")
    wrong = {
        "nan": ToyUp(up.w * float("nan"), up.theta, up.n, up.loss),
        "inf in theta": ToyUp(up.w, {"a": up.theta["a"] / 0}, up.n, up.loss),
        "shape": ToyUp(up.w[:3], up.theta, up.n, up.loss),
        "dtype": ToyUp(up.w.double(), up.theta, up.n, up.loss),
        "key": ToyUp(up.w, {"b": up.theta["a"]}, up.n, up.loss),
        "entry shape": ToyUp(up.w, {"a": torch.zeros(3)}, up.n, up.loss),
        "picture as count": ToyUp(up.w, up.theta, torch.zeros(8, 8), up.loss),  # type: ignore[arg-type]
        "picture as metric": ToyUp(up.w, up.theta, up.n, {"x": torch.zeros(8, 8)}),  # type: ignore[arg-type]
        "no weight": ToyUp(up.w, up.theta, 0, up.loss),
        "negative weight": ToyUp(up.w, up.theta, -5, up.loss),
        "too heavy": ToyUp(up.w, up.theta, 10**12, up.loss),
        "beyond floats": ToyUp(up.w, up.theta, 10**400, up.loss),
        "figure beyond floats": ToyUp(up.w, up.theta, up.n, 10**400),
        "figure with a bad name": ToyUp(up.w, up.theta, up.n, {"\x1b[2J": 1.0}),  # type: ignore[arg-type]
        "float8": ToyUp(up.w.to(torch.float8_e4m3fn), up.theta, up.n, up.loss),
        "other type": OtherUp(torch.zeros(3, 8, 8)),
    }
    return wrong[fault]  # type: ignore[return-value]


def pool_world(folder: str, clients: int = 3, seed: int = 0, faults: dict[str, str] | None = None) -> tuple[World, Toy]:
    """What a worker process of the pool builds in these tests."""
    return toy_world(Path(folder), clients, seed), Toy(faults=faults or {})


def party_world(run: dict[str, Any], _: Any, folder: str, roles: list[str]) -> tuple[World, Toy]:
    """What a party of a deployment builds in these tests; the run says who misbehaves."""
    if run.get("method") != "toy":
        raise PublicError("only toys are played here")
    world = toy_world(Path(folder), int(run["clients"]))
    here = {role: world.clients[role] for role in roles if role in world.clients}
    return replace(world, clients=here), Toy(faults=run["faults"])
