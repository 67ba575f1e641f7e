"""The light workload of `benchmarks.engines` on Flower's own simulation: its grid, its records, two Ray actors.

1,000 nodes take 2 SGD steps on a perceptron of 100,000 parameters; an actor keeps one model and the pictures. All
messages of a round go out at once. No visard takes part but for switching telemetry off.

    python -m benchmarks.flower_light [--clients 1000] [--rounds 3] [--workers 2] [--turns]

Prints the seconds of every round; the first warms up. With --turns each round waits for a line on standard input.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from visard.deployment.flower import require

require()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy, normalize  # noqa: E402

SIZE, PICTURES = 32, 8


class Perceptron(nn.Module):
    """The same network and arithmetic as in `benchmarks.engines`; the head is averaged with the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 32), nn.ReLU(), nn.Linear(32, 32))
        self.weight = nn.Parameter(torch.randn(2, 32) / 32**0.5)

    def loss(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = pictures.permute(0, 3, 1, 2).to(torch.float32).mul_(2 / 255).sub_(1)
        x = torch.where((torch.rand(len(x)) < 0.5).view(-1, 1, 1, 1), x.flip(3), x)
        cosine = normalize(self.body(x)) @ normalize(self.weight).t()
        margin = torch.zeros_like(cosine).scatter_(1, labels[:, None], 0.35)
        return cross_entropy(30 * (cosine - margin), labels)


_kept: dict[str, Any] = {}  # of an actor


def train(message: Message, context: Context) -> Message:
    """A client's step."""
    clients = int(context.node_config["num-partitions"])
    if not _kept:
        torch.set_num_threads(1)
        shape = (clients, PICTURES, SIZE, SIZE, 3)
        _kept.update(model=Perceptron(), pictures=np.random.default_rng(0).integers(0, 255, shape, np.uint8))
    model: Perceptron = _kept["model"]
    pictures = torch.from_numpy(_kept["pictures"][int(context.node_config["partition-id"])])
    labels = torch.arange(PICTURES) % 2
    model.load_state_dict(message.content["theta"].to_torch_state_dict())  # type: ignore[union-attr]
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=True)
    for rows in torch.randperm(PICTURES).split(4):
        optimiser.zero_grad()
        model.loss(pictures[rows], labels[rows]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0, foreach=True)
        optimiser.step()
    content = {"theta": ArrayRecord(model.state_dict()), "n": MetricRecord({"num-examples": PICTURES})}
    return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--clients", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--turns", action="store_true")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    client, server, taken = ClientApp(), ServerApp(), list[float]()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # of the actors
    from benchmarks import flower_light  # by name, so that an actor keeps its model: __main__ is sent with each message

    client.train()(flower_light.train)

    @server.main()
    def rounds(grid: Grid, _: Context) -> None:
        theta = Perceptron().state_dict()
        while len(list(grid.get_node_ids())) < chosen.clients:
            time.sleep(0.1)
        nodes = list(grid.get_node_ids())
        for _round in range(chosen.rounds + 1):
            if chosen.turns and not sys.stdin.readline():
                return
            begun = time.perf_counter()
            content = RecordDict({"theta": ArrayRecord(theta)})
            total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in theta.items()}
            replies = list(grid.send_and_receive([Message(content, node, "train") for node in nodes]))
            assert len(replies) == chosen.clients
            for reply in replies:
                for key, value in reply.content["theta"].to_torch_state_dict().items():  # type: ignore[union-attr]
                    total[key].add_(value)
            theta = {k: (v / len(replies)).float() for k, v in total.items()}  # type: ignore[assignment]
            taken.append(time.perf_counter() - begun)
            print(f"{taken[-1]:.6f}", flush=True)

    run_simulation(
        server,
        client,
        chosen.clients,
        backend_config={
            "init_args": {"num_cpus": chosen.workers, "include_dashboard": False, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    rest = taken[1:]
    print(
        f"Flower: {chosen.clients} clients, {statistics.median(rest):.2f} s a round (median of {len(rest)})", flush=True
    )


if __name__ == "__main__":
    main()
