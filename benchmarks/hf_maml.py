"""One HF-MAML step against the bare cost of its four gradient evaluations, and against torch.func.

All variants run in one process, alternately, on the same three batches. Bare: forward, loss and `autograd.grad` on
D, D', D'' and D'' again, the parameters never moving. torch.func: the same update without touching the network's own
parameters, by `functional_call` on dicts of moved weights. Exact: h by differentiating the gradient on D'' instead of
two probes.

    python benchmarks/hf_maml.py [--model tiny] [--size 64] [--batch 64] [--repeats 12]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from visard import models
from visard.learning.heads import build_head
from visard.learning.objective import still_statistics
from visard.methods.hf_maml import Order, meta_step
from visard.numerics import Numerics

Batch = tuple[Tensor, Tensor]
ALPHA, BETA, DELTA = 0.01, 1e-4, 1e-3


def variants(name: str, size: int, batch: int, classes: int) -> dict[str, Callable[[], None]]:
    """Functions that do one step each, on one network."""
    torch.manual_seed(0)
    numerics = Numerics()
    model = numerics.prepare(models.build(name, size=size)).train()
    head = build_head("arcface", classes, models.default_embedding(name), scale=8.0, margin=0.5)
    p = [*model.parameters(), *head.parameters()]
    names = [n for n, _ in model.named_parameters()]
    made = [(numerics.place(torch.randn(batch, 3, size, size)), torch.randint(classes, (batch,))) for _ in range(3)]
    D, D1, D2 = made

    def loss(b: Batch) -> Tensor:
        return head.loss(model(b[0]), b[1])

    def bare() -> None:
        for b in (D, D1, D2, D2):
            torch.autograd.grad(loss(b), p)

    def step(order: Order = "hessian-free") -> None:
        meta_step(
            p, loss, (D, D1, D2), alpha=ALPHA, beta=BETA, delta=DELTA, order=order,
            quietly=lambda: still_statistics(model),
        )  # fmt: skip

    def functional() -> None:
        def gradient(at: list[Tensor], b: Batch) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in at]
            features = functional_call(model, dict(zip(names, leaves, strict=False)), (b[0],))
            value = functional_call(head, {"weight": leaves[-1]}, (features, b[1]))
            return torch.autograd.grad(value, leaves)

        def moved(by: float, along: tuple[Tensor, ...]) -> list[Tensor]:
            return [x + by * d for x, d in zip(p, along, strict=True)]

        first = gradient(list(p), D)
        with still_statistics(model):
            g = gradient(moved(-ALPHA, first), D1)
            above, below = gradient(moved(DELTA, g), D2), gradient(moved(-DELTA, g), D2)
        with torch.no_grad():
            for x, a, b, c in zip(p, g, above, below, strict=True):
                x.sub_(BETA * (a - ALPHA * (b - c) / (2 * DELTA)))

    return {
        "four gradients alone": bare,
        "hf-maml step, in place": step,
        "hf-maml step, torch.func": functional,
        "hf-maml step, exact": lambda: step("exact"),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny")
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--classes", type=int, default=75)
    options.add_argument("--repeats", type=int, default=12)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    steps = variants(chosen.model, chosen.size, chosen.batch, chosen.classes)
    for step in steps.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(chosen.repeats):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            taken[name].append(time.process_time() - begun)
    print(f"{chosen.model}, {chosen.size} x {chosen.size}, batch {chosen.batch}, one thread, CPU seconds")
    base = taken["four gradients alone"]
    for name, seconds in taken.items():
        ratios = [s / b for s, b in zip(seconds, base, strict=True)]
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"  {name:26s} {statistics.median(seconds):7.3f} s  {middle:5.3f} times bare ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
