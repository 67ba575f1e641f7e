"""Aggregation rules under attack: the last layer of a public recogniser, 20 clients, 4 of them hostile.

TAR at FAR 0.01 on people whom no client has, at the start, without an attack, and under each attack and rule; a rule
counts under an attack if it keeps at least 70 % of what the clean run of the mean gains, for every seed. And what each
rule costs beside the mean.

    python -m benchmarks.poisoning FACE_SET MODEL WORK [--seeds 1 2 3]     168 runs of five seconds on one core
    python -m benchmarks.poisoning --cost                                  the cost alone, without data

FACE_SET: `visard data import folder SHARED/population --detector ... --size 112`. MODEL: any file that a run can start
from, such as mobilefacenet.pt. WORK keeps activations and finished figures: the same command goes on. Runs are runs of
FedAvg on the local engine, with its checks; hostile clients know what the others send, and replace what they send:

    flip      their own update with the other sign
    boost     the same, 100 times as long
    labels    honest training on mixed-up labels
    1e30      1e30 in every place
    alike     all four the same: against the others' mean, just inside a bound of 3 times the median norm
    little    all four the same: the others' mean less one standard deviation in each place (Baruch et al. 2019)
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from visard.aggregation.limits import norms
from visard.aggregation.reduction import Reduction
from visard.aggregation.robust import Bulyan, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from visard.aggregation.rules import Mean, Rule
from visard.config import Settings, parse
from visard.core import BoundStep, Disclosure, Weights
from visard.data.faces import ClientData, FaceSet, FaceView
from visard.data.partition import partition
from visard.disclosure import is_statistic
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork
from visard.engines.loop import run_rounds
from visard.engines.request import Reply, Request
from visard.engines.watchers import Watchers
from visard.engines.world import World, make_world
from visard.evaluation.scores import stream_roc
from visard.files import write_json
from visard.learning.features import embed
from visard.learning.weights import load_weights
from visard.report.run_folder import EventLog

CLIENTS, HOSTILE, FAR = 20, 4, 0.01
KEEPS = 0.7  # of the clean gain
RULES: dict[str, Rule] = {
    "mean": Mean(),
    "mean, bound 1": Mean(bound=1.0),
    "median": Median(),
    "trimmed-mean": TrimmedMean(),
    "geometric-median": GeometricMedian(),
    "krum": Krum(),
    "multi-krum": MultiKrum(),
    "bulyan": Bulyan(),
}
ATTACKS = ("none", "flip", "boost", "labels", "1e30", "alike", "little")
# chosen on seed 0, which is not in the table
SETTINGS: dict[str, Any] = {
    "method": {
        "name": "fedavg",
        "rounds": 10,
        "weighting": "uniform",
        "head_start": "means",
        "head": {"kind": "cosface", "scale": 30, "margin": 0.3},
        "training": {"unit": "iterations", "amount": 10, "batch_size": 32, "lr": 0.1, "augment": {"flip": False}},
    },
    "partition": {
        "kind": "dirichlet", "clients": CLIENTS, "alpha": 1.0, "test_identities": 20, "split": [1.0, 0.0, 0.0],
        "min_images": 4,
    },
    "evaluation": {"every": 0, "clients": False},
}  # fmt: skip


# ---- runs ------------------------------------------------------------------------------------------------------------
def settings_of(faces: FaceSet, model: Path, train: str, seed: int) -> Settings:
    return parse(
        {
            **SETTINGS,
            "seed": seed,
            "data": {"source": str(faces.path)},
            "model": {"weights": str(model), "train": train},
        }
    )


def world_of(settings: Settings, faces: FaceSet, work: Path) -> World:
    federation = partition(faces, settings.partition, settings.seed).federation(faces)
    world = make_world(settings, faces, federation, memory=work / "activations")
    if world.activations is not None:
        world.activations.prepare()
    return world


class Attacked(LocalNetwork):
    """Clients of which the first four are hostile."""

    attack = "none"

    def replies(self, step: BoundStep[Any, Any], requests: Sequence[Request]) -> Iterator[Reply]:
        found = list(super().replies(step, requests))
        hostile = [reply for reply in found if reply.client in self.clients[:HOSTILE]]
        others = [reply.value.theta for reply in found if reply not in hostile]
        sent = requests[0].message.theta
        for reply in found:
            if reply in hostile and self.attack not in ("none", "labels"):
                theta = crafted(self.attack, sent, reply.value.theta, others)
                reply = replace(reply, value=replace(reply.value, theta=theta))
            yield reply


def mixed_up(data: ClientData, seed: int) -> ClientData:
    """The same pictures with each other's labels."""
    view: FaceView = copy.copy(data.train)
    order = np.random.default_rng(seed).permutation(len(view))
    object.__setattr__(view, "labels", view.labels[order])  # a view that is made anew refuses labels that do not fit
    return replace(data, train=view)


def tar(world: World, theta: Weights) -> float:
    """On all pairs of the people whom no client has."""
    network = world.network()
    load_weights(network, theta)
    (view,) = world.benchmarks.values()
    (point,) = stream_roc(embed(network, view), view.identity, far=(FAR,)).tar
    return float(point.tar)


def run(world: World, settings: Settings, rule: Rule, attack: str) -> float:
    """TAR after all rounds."""
    clients = dict(world.clients)
    if attack == "labels":
        clients |= {c: mixed_up(clients[c], k) for k, c in enumerate(world.training[:HOSTILE])}
    here = replace(world, aggregation=rule, clients=clients, _network=None)
    with tempfile.TemporaryDirectory() as name:
        states = Checkpoint(Path(name) / "checkpoint", "bench")
        ledger = Ledger(states.ledger)
        net = Attacked(here, states, ledger)
        net.attack = attack
        events = EventLog(Path(name) / "events.jsonl")
        last = run_rounds(settings.method, net, states, ledger, events, lambda *_: {}, 0, Watchers(None))
        return tar(here, last.theta)


def crafted(attack: str, sent: Weights, own: Weights, others: Sequence[Weights]) -> Weights:
    """What a hostile client sends, which knows what honest ones do."""
    made = {}
    lengths = [norms(theta, sent)[""] for theta in others]
    trained = [k for k, v in sent.items() if v.is_floating_point() and not is_statistic(k, ())]
    mean = {k: torch.stack([theta[k] - sent[k] for theta in others]).mean(0) for k in trained}
    length = float(torch.cat([u.flatten() for u in mean.values()]).double().norm())
    for key in trained:
        match attack:
            case "flip":
                update = sent[key] - own[key]
            case "boost":
                update = 100 * (sent[key] - own[key])
            case "1e30":
                update = torch.full_like(sent[key], 1e30)
            case "alike":
                update = -mean[key] * (2.99 * statistics.median_low(lengths) / length)
            case "little":
                update = mean[key] - torch.stack([theta[key] - sent[key] for theta in others]).std(0)
            case _:
                raise ValueError(attack)
        made[key] = sent[key] + update
    return own | made


def poisoned(given: argparse.Namespace) -> None:
    """All runs that WORK has no figure of, and the table."""
    faces = FaceSet.open(given.faces)
    given.work.mkdir(parents=True, exist_ok=True)
    kept = given.work / "poisoning.json"
    found: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in given.seeds:
        settings = settings_of(faces, given.model, given.train, seed)
        jobs = [("start", "none"), *((rule, attack) for rule in given.rules for attack in given.attacks)]
        left = [job for job in jobs if f"{seed} {job[0]} {job[1]}" not in found]
        world = world_of(settings, faces, given.work) if left else None
        for rule, attack in left:
            assert world is not None
            value = tar(world, world.new_weights()) if rule == "start" else run(world, settings, RULES[rule], attack)
            found[f"{seed} {rule} {attack}"] = value
            write_json(kept, found)
            print(f"seed {seed}, {rule}, {attack}: {100 * value:.1f}", flush=True)
    table(found, given.seeds, given.rules, given.attacks)


def table(found: dict[str, float], seeds: Sequence[int], rules: Sequence[str], attacks: Sequence[str]) -> None:
    begun = [found[f"{s} start none"] for s in seeds]
    clean = [found[f"{s} mean none"] for s in seeds]
    print("start:", *(f"{100 * t:.1f}" for t in begun))
    print(f"| rule | {' | '.join(attacks)} |\n|---|{'---|' * len(attacks)}")
    for name in rules:
        cells = []
        for attack in attacks:
            values = [found[f"{s} {name} {attack}"] for s in seeds]
            counts = all(t - b >= KEEPS * (c - b) for t, b, c in zip(values, begun, clean, strict=True))
            cells.append(" ".join(f"{100 * t:.1f}" for t in values) + (" *" if counts else ""))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


# ---- cost ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Down:
    theta: Weights


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    n: Annotated[int, Disclosure.count]


def cost(replies: int = CLIENTS, numbers: int = 575_000, times: int = 7) -> None:
    """Seconds of each rule over those of the mean, taken in turn, medians."""
    rng = torch.Generator().manual_seed(0)
    sizes = [numbers // 10] * 10
    ups = [Up({f"w{i}": torch.randn(n, generator=rng) for i, n in enumerate(sizes)}, 1) for _ in range(replies)]
    down = Down({k: torch.zeros_like(v) for k, v in ups[0].theta.items()})
    seconds: dict[str, list[float]] = {name: [] for name in RULES}

    def once(rule: Rule) -> float:
        begun = time.perf_counter()
        with closing(Reduction(rule, ("theta",), "n", down)) as reduction:
            for number, up in enumerate(ups):
                reduction.take(f"client-{number:02d}", down, up)
            reduction.result()
        return time.perf_counter() - begun

    for _ in range(times):
        for name, rule in RULES.items():
            seconds[name].append(once(rule))
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds["mean"], strict=True)]
        print(f"{name}: {statistics.median(ratios):.2f} times the mean ({statistics.median(found) * 1e3:.0f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faces", nargs="?", type=Path)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("work", nargs="?", type=Path)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--train", default="last:1", help="what trains (model.train)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.cost:
        cost()
    elif given.work is None:
        parser.error("give a face set, a model and a folder to work in, or --cost")
    else:
        poisoned(given)


if __name__ == "__main__":
    main()
