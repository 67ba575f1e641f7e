"""Overhead of the in-process engine over a bare PyTorch loop that does the same steps on the same data.

Both run in one process, alternately, one torch thread. The bare loop has no checks, ledger, checkpoint or events:
for each client it loads the global weights, takes the same SGD steps on the same batches, and averages.

    python -m benchmarks.engine_overhead [--clients 20] [--steps 20] [--repeats 5] [--size 64]
    python -m benchmarks.engine_overhead --steps 200 --repeats 2 --size 32     three minutes on a core
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from visard.config import parse
from visard.core import Weights
from visard.data.augment import augment, to_float
from visard.data.partition import partition
from visard.data.sources.catalog import open_faces
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork
from visard.engines.loop import run_rounds
from visard.engines.watchers import Watchers
from visard.engines.world import World, generator
from visard.learning.train import batches
from visard.methods.fedavg import FedAvg
from visard.report.run_folder import EventLog
from visard.runs.run import make_world


def bare_round(world: World, method: FedAvg, theta: Weights) -> Weights:
    """The same arithmetic, nothing else."""
    model, training = world.network(), method.training
    total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in theta.items() if v.is_floating_point()}
    counters = {k: v for k, v in theta.items() if not v.is_floating_point()}
    pictures = 0
    for client in world.training:
        view = world.clients[client].train
        model.load_state_dict(theta)
        head = method.head.build(world.clients[client].n_classes, world.embedding)
        parameters = [*model.parameters(), *head.parameters()]
        optimiser = torch.optim.SGD(
            parameters, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay, fused=True
        )
        rng = generator(0, client)
        labels = torch.from_numpy(view.labels)
        model.train()
        for rows in batches(len(view), training, rng):
            x = augment(to_float(view.batch(rows), True), rng, training.augment)
            loss = head.loss(model(x), labels[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, training.clip, foreach=True)
            optimiser.step()
        for key, value in model.state_dict().items():
            if key in total:
                total[key].add_(value, alpha=len(view))
            else:
                counters[key] = value.clone()
        pictures += len(view)
    return {k: (total[k] / pictures).float() if k in total else counters[k] for k in theta}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--clients", type=int, default=20)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--size", type=int, default=64)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    method = {
        "name": "fedavg",
        "rounds": 1,
        "training": {"unit": "iterations", "amount": chosen.steps, "batch_size": 32},
    }
    settings = parse(
        {
            "method": method,
            "data": {"identities": 10 * chosen.clients + 10, "images_per_identity": 10, "size": chosen.size},
            "partition": {"clients": chosen.clients, "test_identities": 10, "split": [1.0, 0.0, 0.0]},
        }
    )
    faces = open_faces(settings.data)
    world = make_world(settings, faces, partition(faces, settings.partition, 0).federation(faces))
    fedavg = settings.method
    assert isinstance(fedavg, FedAvg)
    theta = world.new_weights()
    short = replace(fedavg, training=replace(fedavg.training, amount=1))
    ratios, cpu_ratios = [], []
    for repeat in range(chosen.repeats + 1):
        fedavg = settings.method if repeat else short  # the first pair warms up
        begun, cpu = time.perf_counter(), time.process_time()
        bare_round(world, fedavg, theta)
        bare, bare_cpu = time.perf_counter() - begun, time.process_time() - cpu
        with tempfile.TemporaryDirectory() as folder:
            states = Checkpoint(Path(folder) / "checkpoint", "x")
            ledger = Ledger(states.ledger)
            network = LocalNetwork(world, states, ledger)
            events = EventLog(Path(folder) / "events.jsonl")
            begun, cpu = time.perf_counter(), time.process_time()
            run_rounds(fedavg, network, states, ledger, events, lambda s, n: {}, 0, Watchers())
            engine, engine_cpu = time.perf_counter() - begun, time.process_time() - cpu
        if repeat:
            ratios.append(engine / bare)
            cpu_ratios.append(engine_cpu / bare_cpu)
            print(f"bare loop {bare:.2f} s, engine {engine:.2f} s: {ratios[-1]:.3f} (CPU seconds {cpu_ratios[-1]:.3f})")
    print(
        f"{chosen.clients} clients x {chosen.steps} steps: engine / bare loop = {statistics.median(ratios):.3f} "
        f"(median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f}), in CPU seconds "
        f"{statistics.median(cpu_ratios):.3f}; limit 1.05"
    )


if __name__ == "__main__":
    main()
