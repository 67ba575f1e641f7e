"""The inner loop of training: pictures a second of `learning.train.train`, and where its time goes.

Two trees of the source are measured by turns, in processes of their own, so that a busy moment hits both; numbers are
medians, of CPU seconds and of seconds on the clock. `--workers 2` runs that many processes at once, as a pool does.

    python -m benchmarks.inner_loop [--model tiny --size 64] [--against OTHER_CHECKOUT] [--workers 1]
    python -m benchmarks.inner_loop --model mobilefacenet --size 112 --batch 32 --steps 6
    python -m benchmarks.inner_loop --embed         embedding instead of training
    python -m benchmarks.inner_loop --shares        loading, augmentation, forward, backward, optimiser
    python -m benchmarks.inner_loop --optimisers    ours beside torch's fused one
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visard import models
from visard.data.augment import augment, to_float
from visard.data.faces import FaceSet, FaceSetWriter, FaceView
from visard.learning.features import embed
from visard.learning.heads import Head, build_head
from visard.learning.train import Sgd, Training, train
from visard.numerics import Numerics

ROOT = Path(__file__).resolve().parents[1]
PEOPLE, PICTURES = 50, 512


def faces(size: int, folder: Path) -> FaceView:
    """Noise: what is in a picture does not matter here."""
    rng = np.random.default_rng(0)
    names = [f"p{i}" for i in range(PEOPLE)]
    with FaceSetWriter(
        folder / "noise", count=PICTURES, size=size, names=names, domains=["all"], attributes=[], info={}
    ) as writer:
        pictures = rng.integers(0, 256, (PICTURES, size, size, 3), np.uint8)
        none = np.zeros((PICTURES, 0), np.int8)
        writer.write(0, pictures, np.arange(PICTURES) % PEOPLE, np.zeros(PICTURES), none, [""] * PICTURES)
    return FaceSet.open(folder / "noise").all()


def network(options: argparse.Namespace) -> tuple[torch.nn.Module, Head]:
    torch.manual_seed(0)
    model = Numerics().prepare(models.build(options.model, size=options.size))
    return model, build_head("cosface", PEOPLE, models.default_embedding(options.model), scale=20, margin=0.1)


def rates(options: argparse.Namespace) -> dict[str, float]:
    """Pictures a second of one round of training, or of embedding: by CPU seconds, and by the clock."""
    with tempfile.TemporaryDirectory() as folder:
        view, (model, head) = faces(options.size, Path(folder)), network(options)
        how = Training(batch_size=options.batch, unit="iterations", amount=options.steps)

        def work() -> int:
            if options.embed:
                return len(embed(model, view))
            return train(model, head, view, how, torch.Generator().manual_seed(0), Numerics()).pictures

        work()
        cpu, clock = time.process_time(), time.perf_counter()
        done = work()
        cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    return {"cpu": done / cpu, "clock": done / clock}


def shares(options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of each part of a step, as shares of all."""
    spent = dict.fromkeys(("read", "to float", "augment", "forward", "head", "backward", "optimiser"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        view, (model, head) = faces(options.size, Path(folder)), network(options)
        rng = torch.Generator().manual_seed(0)
        optimiser = Sgd([*model.parameters(), *head.parameters()], 0.01, 0.9, 5e-4)
        how = Training()

        def timed(part: str, do: Callable[[], Any]) -> Any:
            begun = time.process_time()
            found = do()
            spent[part] += time.process_time() - begun
            return found

        for _ in range(options.steps):
            rows = torch.randperm(len(view), generator=rng)[: options.batch].numpy()
            raw = timed("read", lambda rows=rows: view.batch(rows))
            x = timed("to float", lambda raw=raw: to_float(raw, channels_last=True))
            x = timed("augment", lambda x=x: Numerics().place(augment(x, rng, how.augment)))
            features = timed("forward", lambda x=x: model(x))
            y = torch.from_numpy(view.labels)[torch.from_numpy(rows)]
            loss = timed("head", lambda f=features, y=y: head.loss(f, y))
            optimiser.zero_grad()
            timed("backward", loss.backward)
            timed("optimiser", lambda: (optimiser.clip(5.0), optimiser.step()))
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items()}


def optimisers(options: argparse.Namespace) -> dict[str, float]:
    """Microseconds of an update and of clipping: ours, and torch's fused SGD with its own clipping, by turns."""
    model, head = network(options)
    parameters = [*model.parameters(), *head.parameters()]
    ours = Sgd(parameters, 0.01, 0.9, 5e-4)
    theirs = torch.optim.SGD(parameters, 0.01, 0.9, weight_decay=5e-4, fused=True)
    grads = [torch.randn_like(p) * 1e-3 for p in parameters]

    def once(step: Callable[[], Any]) -> float:
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g.clone(memory_format=torch.preserve_format)
        begun = time.process_time()
        step()
        return 1e6 * (time.process_time() - begun)

    kinds: dict[str, Callable[[], Any]] = {
        "ours": lambda: (ours.clip(5.0), ours.step()),
        "torch's": lambda: (torch.nn.utils.clip_grad_norm_(parameters, 5.0, foreach=True), theirs.step()),
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.steps * 10):
        for name, step in kinds.items():
            taken[name].append(once(step))
    return {name: statistics.median(values) for name, values in taken.items()}


def children(options: argparse.Namespace, tree: Path) -> dict[str, float]:
    """`rates` in so many processes at once, on the source of `tree`, added up."""
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    given = [f"--{name}={getattr(options, name)}" for name in ("model", "size", "batch", "steps")]
    command = [sys.executable, str(Path(__file__)), "--child", *given, *(["--embed"] if options.embed else [])]
    begun = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(options.workers)
    ]
    found = [json.loads(child.communicate()[0]) for child in begun]
    return {name: sum(one[name] for one in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout")
    for flag in ("child", "shares", "optimisers", "embed"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(rates(options)))
        return
    print(f"{options.model}, {options.size} x {options.size}, batch {options.batch}, {options.workers} process(es)")
    if options.shares or options.optimisers:
        for name, value in (shares if options.shares else optimisers)(options).items():
            print(f"  {name:10s} {value:8.1%}" if options.shares else f"  {name:10s} {value:8.0f} microseconds")
        return
    trees = {"here": ROOT} | ({} if options.against is None else {"there": options.against.absolute()})
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(options.repeats):
        for name, tree in trees.items():
            seen[name].append(children(options, tree))
    for name, found in seen.items():
        cpu, clock = (statistics.median(one[kind] for one in found) for kind in ("cpu", "clock"))
        print(f"  {name:6s} {cpu:7.0f} pictures a CPU second, {clock:7.0f} a second")
    if options.against is not None:
        pairs = zip(seen["here"], seen["there"], strict=True)
        ratio = statistics.median(a["cpu"] / b["cpu"] for a, b in pairs)
        print(f"  here / there: {ratio:.3f} (median of pairs, CPU seconds)")


if __name__ == "__main__":
    main()
