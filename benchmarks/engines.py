"""Engines next to each other: heavy clients on the pool against in process, and a thousand light clients a round.

All of them run the same FedAvg on the same data with one torch thread for each step; results are the same bits.

    python -m benchmarks.engines heavy [--clients 8] [--steps 60]
    python -m benchmarks.engines light [--clients 1000] [--rounds 5] [--flower] [--ours-on-flower] [--pfl ITS_PYTHON]
    python -m benchmarks.engines memory [--clients 10000]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from visard import models
from visard.core import Method
from visard.data.faces import FaceSet, FaceSetWriter
from visard.data.partition import PartitionSettings, partition
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork
from visard.engines.network import EngineNetwork
from visard.engines.pool import PoolNetwork, Recipe
from visard.engines.world import World
from visard.learning.train import Training
from visard.methods.fedavg import FedAvg
from visard.numerics import Numerics

SIZE = 32
PICTURES = 4


def perceptron() -> nn.Module:
    """About 100,000 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 32), nn.ReLU(), nn.Linear(32, 32))


def noise(folder: Path, people: int) -> FaceSet:
    """Pictures of noise; made once in a folder."""
    if not folder.exists():
        rng = np.random.default_rng(0)
        identity = np.repeat(np.arange(people), PICTURES).astype(np.int32)
        n = len(identity)
        with FaceSetWriter(
            folder, count=n, size=SIZE, names=[str(i) for i in range(people)], domains=["noise"], attributes=[],
            info={"kind": "synthetic"},
        ) as writer:  # fmt: skip
            for start in range(0, n, 4096):
                stop = min(start + 4096, n)
                pictures = rng.integers(0, 255, (stop - start, SIZE, SIZE, 3), np.uint8)
                domain = np.zeros(stop - start, np.int16)
                marks = np.zeros((stop - start, 0), np.int8)
                writer.write(start, pictures, identity[start:stop], domain, marks, [""] * (stop - start))
    return FaceSet.open(folder)


def world_of(folder: str, clients: int, steps: int, network: str) -> tuple[World, Method[Any]]:
    """What every engine and every worker builds."""
    faces = noise(Path(folder) / "faces", 2 * clients)
    settings = PartitionSettings(kind="equal", clients=clients, split=(1.0, 0.0, 0.0))
    federation = partition(faces, settings, 0).federation(faces)
    build: Callable[[], nn.Module] = perceptron if network == "perceptron" else partial(models.build, "tiny", size=SIZE)
    world = World(
        seed=0, clients=federation.clients, training=tuple(federation.training), benchmarks={},
        classes=federation.identities, embedding=32 if network == "perceptron" else 128, build=build,
        numerics=Numerics(),
    )  # fmt: skip
    batch = 4 if network == "perceptron" else 32
    return world, FedAvg(rounds=100, training=Training(lr=0.01, unit="iterations", amount=steps, batch_size=batch))


def open_engine(name: str, folder: Path, arguments: dict[str, Any], workers: int = 2) -> tuple[EngineNetwork, FedAvg]:
    world, method = world_of(**arguments)
    assert isinstance(method, FedAvg)
    states = Checkpoint(folder / f"checkpoint-{name}", "benchmark")
    ledger = Ledger(states.ledger)
    recipe = Recipe("benchmarks.engines:world_of", arguments)
    if name == "local":
        return LocalNetwork(world, states, ledger), method
    if name == "pool":
        return PoolNetwork(world, states, ledger, recipe, workers), method
    from visard.deployment.flower.simulation import SimulationLink
    from visard.deployment.remote import RemoteNetwork

    link = SimulationLink(world.clients, recipe, states.folder.absolute(), workers)
    return RemoteNetwork(world, states, ledger, link, "0" * 32), method


class Peer:
    """Another framework with the same workload in a process of its own, one round at a time."""

    def __init__(self, script: list[str], clients: int, rounds: int) -> None:
        script = [*script, "--turns"]
        self._process = subprocess.Popen(
            [*script, "--clients", str(clients), "--rounds", str(rounds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def round(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin)
        while not (line := self._process.stdout.readline()).replace(".", "").strip().isdigit():
            if not line:
                raise SystemExit("the peer ended early")
        return float(line)

    def close(self) -> None:
        """No more turns: it ends by itself, and with it what it started."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def seconds_of_rounds(
    engines: dict[str, tuple[EngineNetwork, FedAvg]], rounds: int, peers: dict[str, Peer]
) -> dict[str, list[float]]:
    """Seconds of each round, the engines taking turns; the first round warms up and does not count."""
    servers = {name: method.start(net.world.setup()) for name, (net, method) in engines.items()}
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for r in range(rounds + 1):
        for name, (net, method) in engines.items():
            begun = time.perf_counter()
            net.begin("federate", r)
            servers[name] = method.round(servers[name], net)
            net.states.commit(servers[name], net.ledger.flush() if net.ledger else 0)
            if r:
                taken[name].append(time.perf_counter() - begun)
        for name, peer in peers.items():
            seconds = peer.round()
            taken.setdefault(name, []).extend([seconds] if r else [])
    first = next(iter(servers.values()))
    for server in servers.values():
        assert all(torch.equal(first.theta[k], server.theta[k]) for k in first.theta), "the same bits"
    return taken


def compare(
    names: list[str], arguments: dict[str, Any], rounds: int, folder: Path, scripts: dict[str, list[str]]
) -> None:
    engines = {name: open_engine(name, folder, arguments) for name in names}
    peers = {name: Peer(script, arguments["clients"], rounds) for name, script in scripts.items()}
    try:
        taken = seconds_of_rounds(engines, rounds, peers)
    finally:
        for net, _ in engines.values():
            net.close()
        for peer in peers.values():
            peer.close()
    base = statistics.median(taken["local"])
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"  {name:14s} {middle:7.2f} s a round ({spread}), {base / middle:5.2f} times the speed of local")


def memory(clients: int, folder: Path) -> None:
    """Peak memory of a round with very many clients, over all processes of the engine."""
    arguments = {"folder": str(folder), "clients": clients, "steps": 2, "network": "perceptron"}
    net, method = open_engine("pool", folder, arguments)
    me = psutil.Process()
    peak = 0
    begun = time.perf_counter()
    server = method.start(net.world.setup())
    try:
        for number, _ in enumerate(net.stream(method.local, {c: _down(method, server) for c in net.clients})):
            if number % 200 == 0:
                family = [me, *me.children(recursive=True)]
                peak = max(peak, sum(p.memory_full_info().pss for p in family))
        net.states.commit(server, 0)
    finally:
        net.close()
    print(
        f"{clients} clients: one round in {time.perf_counter() - begun:.0f} s, peak {peak / 2**30:.2f} GB; limit 4 GB"
    )


def _down(method: FedAvg, server: Any) -> Any:
    from visard.methods.fedavg import Down

    return Down(server.theta, server.fixed, server.W, 0.01)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=["heavy", "light", "memory", "all"], nargs="?", default="all")
    options.add_argument("--clients", type=int)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--flower", action="store_true")
    options.add_argument("--ours-on-flower", action="store_true")
    options.add_argument("--pfl")
    chosen = options.parse_args()
    if chosen.what == "all":
        for what in ("heavy", "light", "memory"):
            subprocess.run([sys.executable, "-m", "benchmarks.engines", what], check=True)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if chosen.what == "memory":
            memory(chosen.clients or 10000, Path(scratch))
            return
        heavy = chosen.what == "heavy"
        clients = chosen.clients or (8 if heavy else 1000)
        steps = chosen.steps if heavy else 2
        network = "tiny" if heavy else "perceptron"
        print(f"{clients} clients x {steps} steps of {network}")
        arguments = {"folder": scratch, "clients": clients, "steps": steps, "network": network}
        names = ["local", "pool", *(["ours on Flower"] if chosen.ours_on_flower else [])]
        peers = {}
        if chosen.flower:
            peers["Flower"] = [sys.executable, "-m", "benchmarks.flower_light"]
        if chosen.pfl:
            peers["pfl"] = [chosen.pfl, str(Path(__file__).with_name("pfl_light.py"))]
        compare(names, arguments, chosen.rounds, Path(scratch), peers)


if __name__ == "__main__":
    main()
