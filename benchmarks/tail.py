"""Training the last part of MobileFaceNet on stored activations, next to what it is compared with, alternately.

Pictures a second of a step (stored, frozen part live, all trained), bytes of a round, filling the store against the
bare forward pass on all cores, and a FedFR-DA run against a bare PyTorch loop over the same activations.

    python -m benchmarks.tail                      minutes on two cores
    python -m benchmarks.tail --source 1000 --target 480 --rounds 3 --amount 10      the run in small
    python -m benchmarks.tail --only adaptation --random      random activations: nothing has to be computed first

Ratios are also of CPU seconds, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from visard import models
from visard.config import Settings, parse
from visard.data.activations import CHUNK, MIRROR, PLAIN, Activations, remove, store_of, through
from visard.data.augment import Augment
from visard.data.faces import FaceSet, FaceSetWriter, FaceView
from visard.data.partition import partition
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork
from visard.engines.loop import run_rounds
from visard.engines.watchers import Watchers
from visard.engines.world import World, make_world
from visard.learning.features import input_batch
from visard.learning.heads import build_head
from visard.learning.train import Training, keep_statistics, train
from visard.models.cut import Trunk
from visard.models.files import save_model
from visard.numerics import Numerics
from visard.processes import cores
from visard.report.run_folder import EventLog

SIZE, EMBEDDING, LAYER = 112, 128, "blocks.13"


def noise(out: Path, source: int, target: int, each: int = 20) -> FaceSet:
    """Pictures of two domains; what is on them does not change how long anything takes."""
    rng, n = np.random.default_rng(0), source + target
    identity = np.arange(n) // each
    names = [f"p{i:05d}" for i in range(int(identity.max()) + 1)]
    writer = FaceSetWriter(
        out, count=n, size=SIZE, names=names, domains=["source", "target"], attributes=[], info={"kind": "noise"}
    )
    with writer:
        for start in range(0, n, 256):
            rows = np.arange(start, min(start + 256, n))
            base = np.random.default_rng(identity[rows[0]]).integers(0, 256, (1, SIZE, SIZE, 3))
            pictures = np.clip(base + rng.integers(-60, 60, (len(rows), SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
            marks = np.zeros((len(rows), 0), np.int8)
            writer.write(start, pictures, identity[rows], (rows >= source).astype(int), marks, [str(r) for r in rows])
    return FaceSet.open(out)


def network() -> nn.Module:
    torch.manual_seed(0)
    return models.build("mobilefacenet", embedding=EMBEDDING, size=SIZE)


def start() -> nn.Module:
    """The network with statistics of some pictures, so that its activations are of a usual size."""
    whole = network().train()
    for module in whole.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        whole(torch.randn(32, 3, SIZE, SIZE) / 2)
    return whole.eval()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def alternated(repeats: int, **works: Callable[[], Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each, and CPU seconds, done in turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            found[name].append(timed(work))
    wall, cpu = ({name: statistics.median(t[i] for t in times) for name, times in found.items()} for i in (0, 1))
    return wall, cpu


def speed(faces: FaceSet, root: Path, repeats: int) -> None:
    """Pictures a second on one core, batches of 64."""
    whole = start()
    trunk = Trunk.of(network, LAYER, whole.state_dict())
    front = Numerics().prepare(trunk.network())
    stored = Activations(faces, lambda: front, store_of(faces, trunk.digest, (128, 7, 7), "fp32", root))
    view = faces.all().take(np.arange(4 * CHUNK))
    stored.behind(view).batch(np.arange(4 * CHUNK), np.ones(4 * CHUNK, bool))  # computed before the clock runs
    stored.behind(view).batch(np.arange(4 * CHUNK))
    nets = {"all": whole, "tail": trunk.tail()}
    for net in nets.values():
        Numerics().prepare(net)
        keep_statistics(net)
    head = build_head("cosface", view.n_classes, EMBEDDING, 30.0, 0.3)

    def steps(net: nn.Module, data: FaceView, count: int) -> Callable[[], Any]:
        how = Training(lr=0.001, batch_size=64, unit="iterations", amount=count)
        return lambda: train(net, head, data, how, torch.Generator().manual_seed(0), Numerics())

    live = Activations(faces, lambda: front, None).behind(view)
    counts = {"stored": 16, "live": 2, "all": 1}
    _, cpu = alternated(
        repeats, stored=steps(nets["tail"], stored.behind(view), 16), live=steps(nets["tail"], live, 2),
        all=steps(whole, view, 1),
    )  # fmt: skip
    rates = {name: 64 * counts[name] / seconds for name, seconds in cpu.items()}
    print(f"pictures a second of CPU: stored {rates['stored']:.0f}, live {rates['live']:.0f}, all {rates['all']:.1f}")
    print(f"stored / all trained: {rates['stored'] / rates['all']:.0f} (at least 40)")
    sizes = {name: sum(v.nbytes for v in net.state_dict().values()) for name, net in nets.items()}
    print(
        f"bytes of a reply: {sizes['all']:,} all, {sizes['tail']:,} tail, {sizes['all'] / sizes['tail']:.1f} times less"
    )
    x, y = (input_batch(v, np.arange(64), Numerics(), torch.Generator().manual_seed(1), Augment()) for v in
            (stored.behind(view), live))  # fmt: skip
    print(f"stored against live, relative: {float((x - y).norm() / y.norm()):.1e} (at most 1e-6)")


def filling(faces: FaceSet, root: Path, pictures: int, repeats: int) -> None:
    """Filling against the forward pass alone, both on all cores."""
    trunk = Trunk.of(network, LAYER, start().state_dict())
    front, rows = Numerics().prepare(trunk.network()), np.arange(pictures // CHUNK * CHUNK)

    def fill() -> None:
        store = store_of(faces, "filling", (128, 7, 7), "fp32", root)
        store.fill(faces, {PLAIN: rows}, front)
        remove(store.folder)

    def bare() -> None:
        with ThreadPoolExecutor(cores(), initializer=lambda: torch.set_num_threads(1)) as pool:
            list(pool.map(lambda chunk: through(faces, chunk, front), np.split(rows, len(rows) // CHUNK)))

    bare()
    found, cpu = alternated(repeats, fill=fill, bare=bare)
    print(f"filling: {len(rows) / found['fill']:.0f} pictures a second on {cores()} cores")
    ratios = f"{found['fill'] / found['bare']:.3f}, CPU seconds {cpu['fill'] / cpu['bare']:.3f}"
    print(f"filling / bare forward pass: {ratios} (at most 1.1)")


def da_settings(faces: FaceSet, weights: Path, rounds: int, amount: int) -> Settings:
    training = {"unit": "iterations", "amount": amount, "lr": 0.001, "batch_size": 64}
    return parse(
        {
            "method": {
                "name": "fedfr-da", "rounds": rounds, "training": training, "source_head": "random", "measure": False,
                "head": {"kind": "cosface", "scale": 30, "margin": 0.3},
                "clustering": {"method": "kmeans", "clusters": 16},
            },
            "data": {"source": str(faces.path)},
            "partition": {"kind": "domains", "clients": 4, "source_domain": ["source"], "target_domain": ["target"],
                          "test_identities": 0, "split": [1.0, 0.0, 0.0]},
            "model": {"name": "mobilefacenet", "embedding": EMBEDDING, "weights": str(weights),
                      "train": f"from:{LAYER}"},
            "evaluation": {"every": 0, "clients": False},
        }
    )  # fmt: skip


def bare_loop(world: World, settings: Settings) -> None:
    """The same steps on the same activations: load, train, average."""
    training: Training = settings.method.training  # type: ignore[attr-defined]
    net, theta = world.network(), world.new_weights()
    heads: dict[str, Any] = {}
    for _ in range(settings.method.rounds):  # type: ignore[attr-defined]
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in theta.items() if v.is_floating_point()}
        for client in world.training:
            view = world.clients[client].train
            net.load_state_dict(theta)
            net.train()
            head = heads.setdefault(client, build_head("cosface", max(16, view.n_classes), EMBEDDING, 30.0, 0.3))
            parameters = [*net.parameters(), *head.parameters()]
            optimiser = torch.optim.SGD(parameters, lr=training.lr, momentum=0.9, weight_decay=5e-4, fused=True)
            labels, rng = torch.from_numpy(view.labels), torch.Generator().manual_seed(0)
            for _ in range(training.amount):
                rows = torch.randperm(len(view), generator=rng)[: training.batch_size].numpy()
                x = input_batch(view, rows, Numerics(), rng, Augment())
                loss = head.loss(net(x), labels[rows])
                optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, training.clip, foreach=True)
                optimiser.step()
            for k, v in net.state_dict().items():
                if k in total:
                    total[k] += v.double()
        theta = {k: (total[k] / len(world.training)).to(v.dtype) if k in total else v for k, v in theta.items()}


def engine_run(world: World, settings: Settings, folder: Path) -> None:
    states = Checkpoint(folder / "checkpoint", "bench")
    ledger = Ledger(states.ledger)
    net = LocalNetwork(replace(world, _network=None), states, ledger)
    run_rounds(
        settings.method, net, states, ledger, EventLog(folder / "events.jsonl"), lambda *_: {}, 0, Watchers(None)
    )


def fill_at_random(activations: Activations) -> None:
    """Numbers of the size of activations in the store: what they are does not change how long training takes."""
    store, rng = activations.store, np.random.default_rng(0)
    assert store is not None
    for kind in (PLAIN, MIRROR):
        store.missing(np.arange(store.count), kind)  # makes the files
        with (store.folder / f"{kind}.bin").open("r+b") as file:
            for _ in range(store.chunks - 1):
                file.write(rng.standard_normal((CHUNK, store.row_bytes // 4), np.float32).tobytes())
        store.mark(kind, range(store.chunks))


def adaptation(faces: FaceSet, folder: Path, rounds: int, amount: int, repeats: int, random: bool) -> None:
    """A FedFR-DA run over 5 clients against the bare loop, all activations computed before."""
    weights = folder / "start.safetensors"
    spec = {"model": "mobilefacenet", "embedding": str(EMBEDDING), "size": str(SIZE)}
    save_model(weights, start().state_dict(), spec)
    settings = da_settings(faces, weights, rounds, amount)
    federation = partition(faces, settings.partition, 0).federation(faces)
    world = make_world(settings, faces, federation, memory=folder / "activations")
    assert world.activations is not None
    if random:
        fill_at_random(world.activations)
    seconds, _ = timed(world.activations.prepare)
    print(f"activations of {len(faces)} pictures and their mirror images: {seconds:.0f} s")
    number = iter(range(1000))

    def run() -> None:
        out = folder / f"run-{next(number)}"
        out.mkdir()
        engine_run(world, settings, out)

    found, cpu = alternated(repeats, run=run, bare=lambda: bare_loop(world, settings))
    print(f"{rounds} rounds of {amount} steps: run {found['run']:.1f} s, bare loop {found['bare']:.1f} s")
    ratios = f"{found['run'] / found['bare']:.3f}, CPU seconds {cpu['run'] / cpu['bare']:.3f}"
    print(f"FedFR-DA / bare loop: {ratios} (at most 1.15)")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("source", 10_000), ("target", 2_400), ("rounds", 20), ("amount", 40), ("repeats", 3), ("filled", 768)
    ):  # fmt: skip
        arguments.add_argument(f"--{name}", type=int, default=default)
    arguments.add_argument("--only", choices=("speed", "filling", "adaptation"))
    arguments.add_argument("--random", action="store_true", help="random activations for the run")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        faces = noise(folder / "faces", given.source, given.target)
        if given.only in (None, "speed"):
            speed(faces, folder / "stores", given.repeats)
        if given.only in (None, "filling"):
            filling(faces, folder / "stores", min(given.filled, len(faces)), given.repeats)
        if given.only in (None, "adaptation"):
            adaptation(faces, folder, given.rounds, given.amount, given.repeats, given.random)


if __name__ == "__main__":
    main()
