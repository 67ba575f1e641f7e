"""The light workload of `benchmarks.engines` on pfl (Apple's pfl-research), for its own environment: no visard in here.

1,000 clients of 8 pictures take 2 SGD steps (batch 4, momentum, weight decay, clipping, mirrored pictures) on a
perceptron of 100,000 parameters with a cosine head, then the server averages. Nothing is evaluated.

    python -m venv pfl-env && pfl-env/bin/pip install pfl==0.6.0 torch
    pfl-env/bin/python benchmarks/pfl_light.py [--clients 1000] [--rounds 5] [--turns]

Prints the seconds of every round; the first warms up. With --turns each round waits for a line on standard input, so
that another program can take turns with it (`python -m benchmarks.engines light --pfl pfl-env/bin/python`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

try:
    import pfl  # noqa: F401
except ImportError:
    raise SystemExit(print("pfl is not installed here: it needs an environment of its own (see above)")) from None

from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

SIZE, PICTURES = 32, 8


class Perceptron(nn.Module):
    """The same network and arithmetic as in `benchmarks.engines`; pfl averages the head with the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 32), nn.ReLU(), nn.Linear(32, 32))
        self.weight = nn.Parameter(torch.randn(2, 32) / 32**0.5)

    def loss(self, pictures: Tensor, labels: Tensor) -> Tensor:
        self.train()
        x = pictures.permute(0, 3, 1, 2).to(torch.float32).mul_(2 / 255).sub_(1)
        x = torch.where((torch.rand(len(x)) < 0.5).view(-1, 1, 1, 1), x.flip(3), x)
        cosine = normalize(self.body(x)) @ normalize(self.weight).t()
        margin = torch.zeros_like(cosine).scatter_(1, labels[:, None], 0.35)
        return cross_entropy(30 * (cosine - margin), labels)

    def metrics(self, pictures: Tensor, labels: Tensor) -> dict[str, Any]:
        return {}


class Clock(TrainingProcessCallback):
    """Takes the time of each round, and waits for its turn."""

    def __init__(self, turns: bool) -> None:
        self.turns, self.begun, self.seconds = turns, 0.0, list[float]()

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.seconds.append(time.perf_counter() - self.begun)
        print(f"{self.seconds[-1]:.6f}", flush=True)
        return self.wait(), Metrics()

    def wait(self) -> bool:
        """Whether to stop."""
        stop = self.turns and not sys.stdin.readline()
        self.begun = time.perf_counter()
        return stop


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--clients", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--turns", action="store_true")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 255, (chosen.clients, PICTURES, SIZE, SIZE, 3), np.uint8)
    labels = torch.arange(PICTURES) % 2

    def dataset(user: int) -> Dataset:
        return Dataset([torch.from_numpy(pictures[user]), labels], user_id=str(user))

    users = list(range(chosen.clients))
    data = FederatedDataset(dataset, get_user_sampler("minimize_reuse", users))
    network = Perceptron()
    model = PyTorchModel(
        network,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=5e-4, foreach=True),
        torch.optim.SGD(network.parameters(), lr=1.0),
    )
    clock = Clock(chosen.turns)
    FederatedAveraging().run(
        NNAlgorithmParams(chosen.rounds + 1, 10**9, chosen.clients, None),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.01, local_batch_size=PICTURES // 2, local_max_grad_norm=5.0
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    rest = clock.seconds[1:]
    print(f"pfl: {chosen.clients} clients, {statistics.median(rest):.3f} s a round (median of {len(rest)})", flush=True)


if __name__ == "__main__":
    main()
