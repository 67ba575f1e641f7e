"""Does the encrypted method adapt as well as centralised training? Balanced accuracy and weighted F1 at the target.

    python -m benchmarks.encrypted_mmd_accuracy office --data DATA --out FILE.json [--lengths 4,64]
    python -m benchmarks.encrypted_mmd_accuracy widar --data DATA --out FILE.json [--seeds 0,1,2]

Rows: `none` = the pre-trained network as it is; `central` = the same training with plain features in one place and
the exact RBF kernel; `encrypted` = the method, with the fitted quadratic kernel; `taylor` = with the paper's Taylor
polynomial of degree 2. Keys have 512 bits here: decryption is exact, so results do not depend on the key. Finished rows
in FILE.json are kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.adaptation_data import extractor, office, widar
from visard.core import Client
from visard.data.augment import Augment
from visard.engines.checkpoint import Checkpoint
from visard.engines.local import LocalNetwork
from visard.engines.world import World
from visard.methods.encrypted_mmd import EncryptedMMD
from visard.numerics import Numerics
from visard.ops import mmd
from visard.ops.alignment import Learner
from visard.ops.compare import Compare
from visard.ops.predictor import new_head, quality
from visard.ops.training import HeadSettings, Training
from visard.privacy.ledger import Ledger

OFFICE = ["amazon>webcam", "dslr>webcam", "webcam>dslr", "caltech>amazon", "amazon+caltech+dslr>webcam"]
WIDAR = ["10+11+12>3", "10+11+12>7", "3+7+8>10"]  # users of room 1 to room 3 and back


def parties(task: str, folder: Path, pair: str, seed: int) -> dict[str, Any]:
    """Sources, and the target last; the target's labels serve its test alone."""
    left, right = pair.split(">")
    roles = [(name, "source") for name in left.split("+")] + [(right, "target")]
    if task == "office":
        return {f"{role}-{name}": office(folder, name, role, seed) for name, role in roles}
    return {f"{role}-{name}": widar(folder, int(name), role, seed) for name, role in roles}


def method(task: str, chosen: argparse.Namespace, kernel: str) -> EncryptedMMD:
    training = Training(
        lr=0.02 if task == "office" else 0.05, momentum=0.9, weight_decay=5e-4, batch_size=64, clip=5.0,
        schedule="constant", amount=chosen.epochs, augment=Augment(flip=False),
    )  # fmt: skip
    compare = Compare(unit=False, radius=chosen.radius, kernel=kernel)  # type: ignore[arg-type]
    return EncryptedMMD(
        rounds=chosen.rounds, exchanges=chosen.exchanges, weight=chosen.weight, compare=compare, training=training,
        head=HeadSettings("softmax"), classes="shared", pretrain_rounds=chosen.pretrain, key_bits=512,
        insecure_keys=True,
    )  # fmt: skip


def run(
    task: str, chosen: argparse.Namespace, pair: str, L: int, seed: int, kernels: Sequence[str]
) -> dict[str, dict[str, float]]:
    """All rows of one pair: pre-training is shared."""
    data, results = parties(task, chosen.data, pair, seed), {}
    world = World(
        seed=seed, clients=data, training=tuple(data), benchmarks={}, classes=10, embedding=L, build=extractor(task, L),
        numerics=Numerics(channels_last=False),
    )  # fmt: skip
    how = method(task, chosen, "fitted")
    small = [d for d in data.values() if len(d.train) < how.training.batch_size]
    if small:
        how = replace(how, training=replace(how.training, batch_size=min(len(d.train) for d in small)))
    with tempfile.TemporaryDirectory() as folder:
        net = network(world, Path(folder))
        server = how.start(world.setup())
        for r in range(how.pretrain_rounds):
            net.begin("pretrain", r)
            server = how.pretrain(server, net)
    target = list(data)[-1]
    results["none"] = figures(world, target, server.theta, [server.head])
    results["central"] = central(how, world, server)
    for kernel in kernels:
        with tempfile.TemporaryDirectory() as folder:
            net, s, begun = network(world, Path(folder)), server, time.process_time()
            this = replace(how, compare=replace(how.compare, kernel=kernel))
            for r in range(how.rounds):
                net.begin("align", r)
                s = this.round(s, net)
            name = "encrypted" if kernel == "fitted" else kernel
            found = {k: net.traffic.figures[k] for k in ("balanced_accuracy", "weighted_f1")}
            results[name] = found | {"cpu_seconds": time.process_time() - begun}
    return results


def network(world: World, folder: Path) -> LocalNetwork:
    states = Checkpoint(folder / "checkpoint", "accuracy")
    return LocalNetwork(world, states, Ledger(states.ledger))


def client(world: World, name: str, state: dict[str, Any], seed: int) -> Client:
    """A party whose network is its own: centralised training holds several at once."""
    model = world.build()
    rng = torch.Generator().manual_seed(seed)
    return Client(name, world.clients[name], state, rng, lambda: model, world.embedding, world.numerics)


def figures(world: World, target: str, theta: Any, heads: list[Any]) -> dict[str, float]:
    party = client(world, target, {"theta": theta}, 0)
    model = party.network()
    model.load_state_dict(theta)
    built = [new_head(HeadSettings("softmax"), party.data.n_classes, world.embedding, W) for W in heads]
    return quality(party, model, built)


def central(how: EncryptedMMD, world: World, server: Any) -> dict[str, float]:
    """Eqs. 2, 18 with the exact kernel exp(-alpha d), all features in one place; every extractor its own weights."""
    names = list(world.clients)
    sources, target = names[:-1], names[-1]
    learners = {}
    for i, name in enumerate(names):
        state = {"theta": copy.deepcopy(server.theta), "head": copy.deepcopy(server.head)}
        party = client(world, name, state, 1000 * world.seed + i)
        learners[name] = Learner(party, how.training, how.compare, how.head, name != target, how.training.lr)
    for step in range(how.rounds * how.exchanges):
        batches = {c: learner.draw(1)[0] for c, learner in learners.items()}
        if step % how.exchanges == 0:
            seen = [learners[c].look(learners[c].draw(4)).flatten(0, 1) for c in sources]
            alpha = float(np.mean([mmd.median_alpha(v) for v in seen]))
        raw = {c: learner.forward(batches[c]) for c, learner in learners.items()}
        v = {c: how.compare.inside(x) for c, x in raw.items()}

        def kernel(d: torch.Tensor, alpha: float = alpha) -> torch.Tensor:
            return torch.exp(-alpha * d)

        # a source's own loss has no 1 / S, as in the method
        loss = how.weight * mmd.within(v[target], kernel)
        for c in sources:
            loss = (
                loss
                + learners[c].head.loss(raw[c], learners[c].labels(batches[c]))
                + how.weight * mmd.within(v[c], kernel)
            )
            loss = loss + how.weight * mmd.between(v[c], v[target].detach(), kernel)
            loss = loss + how.weight * mmd.between(v[c].detach(), v[target], kernel) / len(sources)
        for learner in learners.values():
            learner.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for learner in learners.values():
            learner.optimiser.clip(how.training.clip)
            learner.optimiser.step()
    heads = [learners[c].head for c in sources]
    return quality(learners[target].client, learners[target].model, heads)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["office", "widar"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", default="")
    parser.add_argument("--lengths", default="4,64")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kernels", default="fitted")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--exchanges", type=int, default=20)
    parser.add_argument("--pretrain", type=int, default=15, help="rounds of pre-training")
    parser.add_argument("--epochs", type=int, default=1, help="of a source in one of these rounds")
    parser.add_argument("--weight", type=float, default=1.0)
    parser.add_argument("--radius", type=float, default=20.0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    done = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    pairs = chosen.pairs.split(",") if chosen.pairs else (OFFICE if chosen.task == "office" else WIDAR)
    kernels = [k for k in chosen.kernels.split(",") if k]
    for seed in map(int, chosen.seeds.split(",")):
        for pair in pairs:
            for L in map(int, chosen.lengths.split(",")):
                name = f"{pair} L={L} seed={seed}"
                if name not in done:
                    done[name] = run(chosen.task, chosen, pair, L, seed, kernels)
                    chosen.out.write_text(json.dumps(done, indent=1) + "\n")
                    line = {
                        k: f"{100 * v['balanced_accuracy']:.1f}/{100 * v['weighted_f1']:.1f}"
                        for k, v in done[name].items()
                    }
                    print(name, line, flush=True)


if __name__ == "__main__":
    main()
