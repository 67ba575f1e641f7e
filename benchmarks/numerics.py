"""Precision, memory format and compilation: pictures a second of one training step of a network, as ratios.

All variants run in one process, alternately, on the same batch; the first is plain fp32.

    python benchmarks/numerics.py [--model tiny] [--size 64] [--threads 1] [--compile]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from visard import models
from visard.learning.heads import build_head
from visard.numerics import Numerics, fast_bf16


def trainer(name: str, size: int, batch: int, numerics: Numerics) -> Callable[[], float]:
    """A function that takes one step and returns its CPU seconds."""
    torch.manual_seed(0)
    model = numerics.prepare(models.build(name, size=size))
    if numerics.compile:
        model.compile()
    head = build_head("cosface", 200, models.default_embedding(name), scale=20, margin=0.1)
    parameters = [*model.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)
    x = numerics.place(torch.randn(batch, 3, size, size))
    y = torch.randint(0, 200, (batch,))

    def step() -> float:
        begun = time.process_time()
        with numerics.autocast():
            features = model(x)
        loss = head.loss(features.float(), y)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        return time.process_time() - begun

    return step


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny")
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--repeats", type=int, default=8)
    options.add_argument("--compile", action="store_true")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    variants = {
        "fp32": Numerics(channels_last=False),
        "fp32 channels-last": Numerics(),
        "bf16": Numerics(precision="bf16", channels_last=False),
        "bf16 channels-last": Numerics(precision="bf16"),
    }
    if chosen.compile:
        variants["fp32 channels-last compiled"] = Numerics(compile=True)
    steps = {name: trainer(chosen.model, chosen.size, chosen.batch, n) for name, n in variants.items()}
    for step in steps.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(chosen.repeats):
        for name, step in steps.items():
            taken[name].append(step())
    base = statistics.median(taken["fp32"])
    print(f"{chosen.model}, {chosen.size} x {chosen.size}, batch {chosen.batch}, {chosen.threads} thread(s)")
    print(f"bfloat16 instructions: {'yes' if fast_bf16() else 'no'}")
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        print(f"  {name:28s} {chosen.batch / middle:7.0f} pictures per CPU second, {base / middle:5.2f} times fp32")


if __name__ == "__main__":
    main()
