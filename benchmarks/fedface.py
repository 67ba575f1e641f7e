"""A round of FedFace over very many one-person clients, next to the machine's limit and next to the plain loop.

`bare` is one forward and backward pass of PyTorch over the same pictures in batches of the cohorts' size, with the
same loss and nothing else. `cohort` is a whole round of the in-process engine: messages, random streams, checks,
ledger, spread-out, checkpoint. `loop` is the same round client by client, as a deployment would do it.

    python -m benchmarks.fedface round [--clients 1000] [--rounds 3]
    python -m benchmarks.fedface memory [--clients 10000] [--rounds 1]
    python -m benchmarks.fedface steps [--clients 64] [--steps 4]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

from visard import models
from visard.data.augment import to_float
from visard.data.faces import ClientData, FaceSet, FaceSetWriter, FaceView
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.local import PICTURES, LocalNetwork
from visard.engines.network import EngineNetwork
from visard.engines.world import World
from visard.learning.positive import OneStep, squared_hinge
from visard.methods.fedface import FedFace, Server
from visard.numerics import Numerics

SIZE = 64
EACH = 7  # pictures of a person


class OneByOne(LocalNetwork):
    """Every client alone."""

    replies_together = EngineNetwork.replies_together


def noise(folder: Path, people: int) -> FaceSet:
    """Pictures of noise."""
    rng = np.random.default_rng(0)
    n = people * EACH
    with FaceSetWriter(
        folder, count=n, size=SIZE, names=[str(i) for i in range(people)], domains=["noise"], attributes=[],
        info={"kind": "synthetic"},
    ) as writer:  # fmt: skip
        for start in range(0, n, 4096):
            rows = np.arange(start, min(start + 4096, n))
            pictures = rng.integers(0, 255, (len(rows), SIZE, SIZE, 3), np.uint8)
            marks = np.zeros((len(rows), 0), np.int8)
            writer.write(
                start, pictures, (rows // EACH).astype(np.int32), np.zeros(len(rows), np.int16), marks, [""] * len(rows)
            )
    return FaceSet.open(folder)


def phones(folder: Path, people: int) -> World:
    """One person on each client, network `tiny` with weights that count as trained."""
    faces = noise(folder / "faces", people)
    clients = {}
    for i in range(people):
        view = FaceView.of(faces, np.arange(i * EACH, (i + 1) * EACH))
        none = view.take([])
        clients[f"client-{i:05d}"] = ClientData(view, none, none)
    world = World(
        seed=0, clients=clients, training=tuple(clients), benchmarks={}, classes=people, embedding=128,
        build=partial(models.build, "tiny", size=SIZE), numerics=Numerics(),
    )  # fmt: skip
    world.start_from = world.new_weights()
    return world


def engine(kind: type[LocalNetwork], folder: Path, world: World) -> LocalNetwork:
    states = Checkpoint(folder / kind.__name__, "benchmark")
    return kind(world, states, Ledger(states.ledger))


def one_round(net: LocalNetwork, method: FedFace, server: Server, number: int) -> tuple[Server, float]:
    begun = time.perf_counter()
    net.begin("federate", number)
    server = method.round(server, net)
    assert net.ledger is not None
    net.states.commit(server, net.ledger.flush())
    return server, time.perf_counter() - begun


def bare_pass(world: World) -> float:
    """Seconds of a forward and a backward pass over all pictures, gradients summed up."""
    model = world.network()
    model.eval()  # as in the round: statistics are frozen
    model.zero_grad(set_to_none=True)
    views = [data.train for data in world.clients.values()]
    rows = np.concatenate([view.index for view in views])
    w = torch.randn(len(views), 128)
    begun = time.perf_counter()
    for start in range(0, len(rows), PICTURES):
        part = rows[start : start + PICTURES]
        x = to_float(views[0].faces.pixels[part], channels_last=True)
        loss = squared_hinge(model(x), w[torch.from_numpy(part // EACH)], 0.9).mean()
        loss.backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - begun


def rounds(clients: int, count: int, folder: Path) -> None:
    """Cohort, bare pass and loop in turns; the first turn of each warms up and does not count."""
    world = phones(folder, clients)
    method = FedFace(rounds=100, training=OneStep(lr=0.1))
    nets = {"cohort": engine(LocalNetwork, folder, world), "loop": engine(OneByOne, folder, world)}
    servers = {name: method.start(world.setup()) for name in nets}
    taken: dict[str, list[float]] = {"bare": [], **{name: [] for name in nets}}
    for r in range(count + 1):
        taken["bare"].append(bare_pass(world))
        for name, net in nets.items():
            servers[name], seconds = one_round(net, method, servers[name], r)
            taken[name].append(seconds)
    a, b = servers["cohort"].theta, servers["loop"].theta
    apart = max(float((a[k] - b[k]).abs().max()) for k in a)
    base = statistics.median(taken["bare"][1:])
    print(f"{clients} clients, {clients * EACH} pictures; the networks differ by at most {apart:.1g}")
    for name, seconds in taken.items():
        middle = statistics.median(seconds[1:])
        print(f"  {name:7s} {middle:7.2f} s a round, {middle / base:6.2f} times the bare pass")


def memory(clients: int, count: int, folder: Path) -> None:
    """Peak memory of this process; the first round also makes the class vectors."""
    world = phones(folder, clients)
    net, method = engine(LocalNetwork, folder, world), FedFace(rounds=100, training=OneStep(lr=0.1))
    server = method.start(world.setup())
    for r in range(count):
        server, seconds = one_round(net, method, server, r)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        print(
            f"{clients} clients: round {r} in {seconds:.0f} s, peak {used / 2**30:.2f} GB so far; limit 4 GB",
            flush=True,
        )


def steps(clients: int, count: int, folder: Path) -> None:
    """Several local steps: one client after the other, against stacked copies of the network under `vmap`."""
    world = phones(folder, clients)
    method = FedFace(rounds=100, training=OneStep(lr=0.1, amount=count))
    net = engine(LocalNetwork, folder, world)
    server = method.start(world.setup())
    loop = [one_round(net, method, server, r)[1] for r in range(3)][1:]
    stacked = [_vmapped(world, clients, count) for _ in range(3)][1:]
    print(f"{clients} clients, {count} steps each: loop {min(loop):.2f} s, vmap over all networks {min(stacked):.2f} s")


def _vmapped(world: World, clients: int, count: int, lr: float = 0.1) -> float:
    network = models.build("tiny", size=SIZE).eval()
    parameters, buffers = stack_module_state([network] * clients)
    views = [data.train for data in list(world.clients.values())[:clients]]
    x = torch.stack([to_float(view.batch(np.arange(EACH))) for view in views])
    w = torch.nn.functional.normalize(torch.randn(clients, 128))

    def loss(p, b, pictures, vector):  # type: ignore[no-untyped-def]
        return squared_hinge(functional_call(network, (p, b), (pictures,)), vector.expand(EACH, -1), 0.9).mean()

    begun = time.perf_counter()
    for _ in range(count):
        slope = vmap(grad(loss))(parameters, buffers, x, w)
        parameters = {k: (v - lr * slope[k]).detach() for k, v in parameters.items()}
    return time.perf_counter() - begun


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=["round", "memory", "steps"], nargs="?", default="round")
    options.add_argument("--clients", type=int)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if chosen.what == "round":
            rounds(chosen.clients or 1000, chosen.rounds, Path(scratch))
        elif chosen.what == "memory":
            memory(chosen.clients or 10000, chosen.rounds, Path(scratch))
        else:
            steps(chosen.clients or 64, chosen.steps, Path(scratch))


if __name__ == "__main__":
    main()
