"""What differential privacy costs: TAR against epsilon for units of one person that train the last layer of a network.

    python -m benchmarks.dp FOLDER_WITH_CELEBA MODEL WORK [--seeds 1 2 3]

1,000 and 4,000 units of one person of CelebA each, and 40 as a warning; epsilon none, 8, 4 and 2; three seeds. A unit
is a client with one person, or a person of a client with several (`aggregation.dp.unit`): the sums are the same. MODEL
is any file that a run can start from, such as mobilefacenet.pt. Its frozen part runs once, for three pictures of each
of 5,300 people (minutes on one core). WORK keeps that, and finished figures: the same command goes on.

The last layer begins at random, with batch norm's statistics of 500 public people: the network's own hardly gains from
more people of CelebA. A unit takes one gradient step on its three pictures: CosFace over its own person, whose class
vector is the mean of its features, and the 500 public people, whose class vectors all units have. Heads stay at home.
The bound is the median norm of what public people would send at the start, which costs no privacy. Bounds, noise and
accounts are those of a run (`aggregation.dp`), with units drawn one by one. TAR at FAR 0.001 on 800 other people.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from visard import models
from visard.aggregation.dp import Account, Privacy, PrivateReduction
from visard.core import Disclosure, Weights
from visard.crypto.discrete_gaussian import Stream
from visard.evaluation.scores import stream_roc
from visard.files import write_json
from visard.models.cut import Trunk, choose
from visard.models.files import start
from visard.models.inputs import Inputs
from visard.numerics import Numerics

PUBLIC, TESTED, PICTURES = 500, 800, 3  # people, and pictures of each
FAR = 1e-3


@dataclass(frozen=True)
class Plan:
    """How a run trains: chosen on seed 0 with 1,000 units, which is not in the table."""

    rounds: int = 15
    share: float = 0.25  # of the units in a round
    rate: float = 4.0  # of the server, on the mean update
    scale: float = 20.0
    margin: float = 0.2


PLANS = {4000: Plan(), 1000: Plan(), 40: Plan(share=1.0)}


class Recogniser:
    """A network in two parts: a frozen one, and the last layer, whose batch norm keeps its statistics."""

    def __init__(self, file: Path, size: int = 112) -> None:
        spec, weights = start(str(file), "", None, size)
        assert weights is not None
        build = functools.partial(models.build_spec, spec, size)
        trunk = Trunk.of(build, choose(build(), "last:1", (3, size, size)), weights)
        self.inputs = Inputs(size=size)  # the network turns [-1, 1] into what it expects
        self.frozen = Numerics().prepare(trunk.network()).eval()
        self.tail = trunk.tail()
        self.start: Weights = {}

    def begin(self, public: Tensor, seed: int) -> None:
        """A new last layer, whose batch norm keeps the statistics of public people (n, PICTURES, ...) from here on."""
        torch.manual_seed(seed)
        for module in self.tail.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm1d | nn.BatchNorm2d):
                module.reset_parameters()
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.momentum = None  # the mean over all that it sees
        with torch.no_grad():
            self.tail.train()(public.flatten(0, 1))
        self.tail.eval()
        self.start = {k: v.detach().clone() for k, v in self.tail.named_parameters()}

    def behind(self, pictures: np.ndarray) -> Tensor:
        """What the frozen part makes of pictures (n, size, size, 3)."""
        with torch.inference_mode():
            found: Tensor = self.frozen(self.inputs.tensor(pictures).contiguous(memory_format=torch.channels_last))
            return found.contiguous()

    def __call__(self, theta: Weights, x: Tensor) -> Tensor:
        """Features of length 1 of activations (n, ...)."""
        return F.normalize(torch.func.functional_call(self.tail, theta, (x,)), dim=1)


def activations(folder: Path, network: Recogniser, work: Path, people: int) -> Tensor:
    """(people, PICTURES, ...): what the frozen part makes of the first pictures of people who have enough.

    `work` keeps them, 100 people at a time.
    """
    pictures = defaultdict(list)
    for line in (folder / "identity_CelebA.txt").read_text().splitlines():
        name, who = line.split()
        pictures[int(who)].append(name)
    chosen = [files[:PICTURES] for _, files in sorted(pictures.items()) if len(files) >= PICTURES][:people]
    side, found = network.inputs.size, []
    with zipfile.ZipFile(folder / "img_align_celeba.zip") as archive:
        for begin in range(0, len(chosen), 100):
            stored = work / f"activations-{begin}.pt"
            if not stored.exists():
                files = [f for some in chosen[begin : begin + 100] for f in some]
                parts = []
                for at in range(0, len(files), 30):
                    opened = [Image.open(archive.open(f"img_align_celeba/{f}")) for f in files[at : at + 30]]
                    small = [p.convert("RGB").resize((side, side), Image.Resampling.BILINEAR) for p in opened]
                    parts.append(network.behind(np.stack([np.asarray(p) for p in small])))
                torch.save(torch.cat(parts), stored)
            found.append(torch.load(stored, weights_only=True))
    x = torch.cat(found)
    return x.view(len(chosen), PICTURES, *x.shape[1:])


@dataclass(frozen=True)
class Down:
    theta: Weights


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]


def class_vectors(network: Recogniser, theta: Weights, people: Tensor) -> Tensor:
    """(people, E): the directions of their mean features."""
    with torch.no_grad():
        seen = network(theta, people.flatten(0, 1))
    return F.normalize(seen.view(*people.shape[:2], -1).mean(1), dim=1)


def updates(network: Recogniser, theta: Weights, people: Tensor, others: Tensor, plan: Plan) -> Weights:
    """One gradient step of each of `people` (n, PICTURES, ...), from the same weights; `others` are class vectors."""

    def loss(theta: Weights, x: Tensor) -> Tensor:
        seen = network(theta, x)
        own = F.normalize(seen.detach().mean(0), dim=0)
        cosines = torch.cat([(seen @ own - plan.margin)[:, None], seen @ others.T], dim=1)
        return -torch.log_softmax(plan.scale * cosines, dim=1)[:, 0].mean()

    gradients: Weights = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(theta, people)
    return {k: -v.detach() for k, v in gradients.items()}


def usual_norm(network: Recogniser, public: Tensor, plan: Plan) -> float:
    """The median norm of what public people would send in the first round, against other public people."""
    first, rest = public[: len(public) // 2], public[len(public) // 2 :]
    found = updates(network, network.start, first, class_vectors(network, network.start, rest), plan)
    return float(torch.cat([v.flatten(1) for v in found.values()], dim=1).norm(dim=1).median())


def trained(
    network: Recogniser, people: Tensor, public: Tensor, plan: Plan, epsilon: float | None, seed: int
) -> tuple[Weights, dict[str, float]]:
    """The weights after all rounds, and what was spent; `epsilon` None: bounded updates, no noise."""
    how = Privacy(
        clip=usual_norm(network, public, plan), noise=0.0 if epsilon is None else None, epsilon=epsilon,
        sampling="poisson", unit="person",
    )  # fmt: skip
    account, theta = Account(how, {}, len(people), plan.rounds), dict(network.start)
    spent: dict[str, float] = {}
    for round in range(plan.rounds):
        cohort = np.flatnonzero(Stream(b"cohort %d %d" % (seed, round)).uniform(len(people)) < plan.share)
        others = class_vectors(network, theta, public)
        of, down = account.sum_of(len(people), plan.share), Down(theta)
        account.check(of, [str(number) for number in cohort])
        stream = functools.partial(Stream, b"noise %d %d" % (seed, round))
        reduction = PrivateReduction(("theta",), down, account, of, len(people), (), stream)
        for some in np.array_split(cohort, max(1, len(cohort) // 50)):
            found = updates(network, theta, people[some], others, plan)
            for place, number in enumerate(some):
                reduction.take(str(number), down, Up({k: theta[k] + v[place] for k, v in found.items()}))
        spent = account.take(of, [str(number) for number in cohort])
        moved = reduction.result()["theta"]
        theta = {k: v + plan.rate * (moved[k] - v) for k, v in theta.items()}
    return theta, spent


def tar(network: Recogniser, theta: Weights, people: Tensor) -> float:
    """On all pairs of pictures of people (n, PICTURES, ...)."""
    with torch.no_grad():
        seen = network(theta, people.flatten(0, 1))
    (point,) = stream_roc(seen.numpy(), np.repeat(np.arange(len(people)), PICTURES), far=(FAR,)).tar
    return float(point.tar)


def one(network: Recogniser, x: Tensor, units: int, epsilon: float | None, seed: int, plan: Plan) -> dict[str, float]:
    """TAR before and after, noise and epsilon of one run."""
    x = x[: TESTED + PUBLIC + units]
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]
    tested, public, people = x[:TESTED], x[TESTED : TESTED + PUBLIC], x[TESTED + PUBLIC :]
    network.begin(public, seed)
    theta, spent = trained(network, people, public, plan, epsilon, seed)
    before, after = (tar(network, weights, tested) for weights in (network.start, theta))
    return {"before": before, "after": after, "noise": spent["noise"], "delta": spent["delta"]}


def table(found: dict[str, dict[str, float]], units: list[int], epsilons: list[float], seeds: list[int]) -> None:
    print("| units | epsilon | noise | TAR at the start | TAR | change |\n|---|---|---|---|---|---|")
    for count in units:
        for epsilon in epsilons:
            runs = [found[f"{count} {epsilon:g} {seed}"] for seed in seeds]
            before, after = (" ".join(f"{100 * run[name]:.1f}" for run in runs) for name in ("before", "after"))
            change = statistics.mean(run["after"] - run["before"] for run in runs)
            limit = "none" if math.isinf(epsilon) else f"{epsilon:g}"
            noise = "0" if math.isinf(epsilon) else f"{runs[0]['noise']:.2f}"
            print(f"| {count} | {limit} | {noise} | {before} | {after} | {100 * change:+.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("celeba", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--units", type=int, nargs="+", default=[4000, 1000, 40])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[math.inf, 8, 4, 2], help="inf: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    network, kept = Recogniser(given.model), given.work / "dp.json"
    x = activations(given.celeba, network, given.work, TESTED + PUBLIC + max(given.units))
    found: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in given.seeds:
        for units in given.units:
            for epsilon in given.epsilon:
                name = f"{units} {epsilon:g} {seed}"
                if name not in found:
                    budget = None if math.isinf(epsilon) else epsilon
                    found[name] = one(network, x, units, budget, seed, PLANS[units])
                    write_json(kept, found)
                    print(f"{name}: {100 * found[name]['before']:.1f} to {100 * found[name]['after']:.1f}", flush=True)
    table(found, given.units, given.epsilon, given.seeds)


if __name__ == "__main__":
    main()
