"""Aggregation rules under attack: the tail of a pre-trained network, 20 clients, 4 of them hostile.

TAR at FAR 0.01 on people whom no client has, at the start, without an attack, and under each attack and rule; a rule
counts under an attack if it keeps at least 70 % of what the clean run of the mean gains. And what each rule costs
beside the mean.

    python -m benchmarks.poisoning FOLDER_OF_PEOPLE MOBILEFACENET.PT       minutes on one core
    python -m benchmarks.poisoning --cost                                  the cost alone, without data

The network is that of ../shared/data/models, its frozen part runs once. Hostile clients know what the others send:

    flip      their own update with the other sign
    boost     the same, 100 times as long
    labels    honest training on mixed-up labels
    1e30      1e30 in every place
    alike     all four the same: against the others' mean, just inside a bound of 3 times the median norm
    little    all four the same: the others' mean less one standard deviation in each place (Baruch et al. 2019)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from visard.aggregation.limits import norms
from visard.aggregation.reduction import Reduction
from visard.aggregation.robust import GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from visard.aggregation.rules import Mean, Rule
from visard.core import BoundStep, Client, Disclosure, Weights
from visard.engines.refusal import refusal
from visard.learning.heads import build_head

CLIENTS, HOSTILE, PEOPLE = 20, 4, 40  # of the people the others are those to test on
AT_EACH, PICTURES, TESTED = 8, 20, 40  # people of a client, pictures of a person there, and of a person in the test
ROUNDS, STEPS, BATCH, LR = 10, 10, 32, 0.05
KEEPS = 0.7  # of the clean gain
RULES: dict[str, Rule] = {
    "mean": Mean(),
    "mean, bound 1": Mean(bound=1.0),
    "median": Median(),
    "trimmed-mean": TrimmedMean(),
    "geometric-median": GeometricMedian(),
    "krum": Krum(),
    "multi-krum": MultiKrum(),
}
ATTACKS = ("none", "flip", "boost", "labels", "1e30", "alike", "little")


@dataclass(frozen=True)
class Down:
    theta: Weights


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    n: Annotated[int, Disclosure.count]


class Training:
    """What `refusal` asks of a method."""

    name, discloses = "poisoning", frozenset({Disclosure.weights, Disclosure.statistic, Disclosure.count})

    def local(self, client: Client, msg: Down) -> Up:
        raise NotImplementedError


STEP: BoundStep[Down, Up] = BoundStep(Training(), "local", Training.local)


# ---- the network -----------------------------------------------------------------------------------------------------
def conv(i: int, o: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, o, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False), nn.BatchNorm2d(o), nn.ReLU6()
    )


class Block(nn.Module):
    def __init__(self, i: int, o: int, stride: int, times: int) -> None:
        super().__init__()
        inner, self.adds = i * times, stride == 1 and i == o
        self.conv = nn.Sequential(
            conv(i, inner, 1),
            conv(inner, inner, 3, stride, inner),
            nn.Conv2d(inner, o, 1, bias=False),
            nn.BatchNorm2d(o),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)  # type: ignore[no-any-return]


class Separable(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(i, i, 3, padding=1, groups=i, bias=False)
        self.pointwise = nn.Conv2d(i, o, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(i), nn.BatchNorm2d(o)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.depthwise(x)))
        return F.relu6(self.bn2(self.pointwise(x)))


class Global(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.bn = nn.Conv2d(width, width, 7, groups=width, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.depthwise(x))  # type: ignore[no-any-return]


class Network(nn.Module):
    """MobileFaceNet as in the file: what comes before `conv3` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.dw_conv = conv(3, 64, 3, 2), Separable(64, 64)
        plan = [(2, 64, 5, 2), (4, 128, 1, 2), (2, 128, 6, 1), (4, 128, 1, 2), (2, 128, 2, 1)]
        blocks, width = [], 64
        for times, out, count, stride in plan:
            for number in range(count):
                blocks.append(Block(width, out, stride if number == 0 else 1, times))
                width = out
        self.features = nn.Sequential(*blocks)
        self.conv2, self.gdconv = conv(128, 512, 1), Global(512)
        self.conv3, self.bn = nn.Conv2d(512, 128, 1), nn.BatchNorm2d(128)

    def trunk(self, pictures: Tensor) -> Tensor:
        return self.gdconv(self.conv2(self.features(self.dw_conv(self.conv1(pictures))))).flatten(1)  # type: ignore[no-any-return]


def tail_of(network: Network) -> nn.Module:
    """From 512 numbers to 128: the last layer with its batch norm, whose statistics stay."""
    layer = nn.Linear(512, 128)
    layer.weight.data, layer.bias.data = network.conv3.weight.data.flatten(1), network.conv3.bias.data  # type: ignore[union-attr]
    bn = nn.BatchNorm1d(128)
    bn.load_state_dict(network.bn.state_dict())
    return nn.Sequential(layer, bn).eval()


def features(folder: Path, network: Network) -> tuple[Tensor, Tensor]:
    """(n, 512) before the last layer, and whose pictures they are."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    found, who = [], []
    for number, person in enumerate(sorted(p for p in folder.iterdir() if p.is_dir())):
        files = sorted(person.glob("*.jpg"))
        pictures = [
            np.asarray(Image.open(f).convert("RGB").resize((112, 112), Image.Resampling.BILINEAR)) for f in files
        ]
        batch = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
        with torch.inference_mode():
            found.append(network.trunk((batch - mean) / std))
        who += [number] * len(files)
    return torch.cat(found), torch.tensor(who)


# ---- clients ---------------------------------------------------------------------------------------------------------
@dataclass
class Site:
    x: Tensor
    labels: Tensor  # 0 to AT_EACH - 1


def sites(x: Tensor, who: Tensor, seed: int) -> tuple[list[Site], Tensor, Tensor]:
    """Clients of some people each, every person at several of them with other pictures; and the test."""
    rng = torch.Generator().manual_seed(seed)
    people = torch.randperm(int(who.max()) + 1, generator=rng).tolist()
    pictures = {p: (who == p).nonzero().flatten() for p in people}
    pictures = {p: rows[torch.randperm(len(rows), generator=rng)] for p, rows in pictures.items()}
    clients: list[list[tuple[int, Tensor]]] = [[] for _ in range(CLIENTS)]
    copies = CLIENTS * AT_EACH // PEOPLE
    for place, person in enumerate(people[:PEOPLE]):
        for copy, rows in enumerate(torch.tensor_split(pictures[person], copies)):
            clients[(place + 7 * copy) % CLIENTS].append((person, rows[:PICTURES]))
    found = []
    for held in clients:
        rows = torch.cat([r for _, r in held])
        labels = torch.cat([torch.full((len(r),), number) for number, (_, r) in enumerate(held)])
        found.append(Site(x[rows], labels))
    tested = torch.cat([pictures[p][:TESTED] for p in people[PEOPLE:]])
    return found, x[tested], who[tested]


def train(tail: nn.Module, theta: Weights, site: Site, labels: Tensor, rng: torch.Generator) -> Weights:
    """Local steps from `theta`; the head starts at the means of the classes and stays at home."""
    tail.load_state_dict(theta)
    classes = int(site.labels.max()) + 1
    head = build_head("cosface", classes, 128, 30.0, 0.3)
    with torch.no_grad():
        seen = F.normalize(tail(site.x))
        means = torch.stack([seen[labels == c].sum(0) + 1e-6 for c in range(classes)])
        head.weight.copy_(F.normalize(means))
    optimiser = torch.optim.SGD([*tail.parameters(), *head.parameters()], lr=LR, momentum=0.9)
    for _ in range(STEPS):
        rows = torch.randint(len(site.x), (BATCH,), generator=rng)
        optimiser.zero_grad()
        loss = head.loss(tail(site.x[rows]), labels[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(tail.parameters(), 5.0)
        optimiser.step()
    return {k: v.detach().clone() for k, v in tail.state_dict().items()}


def tar(tail: nn.Module, theta: Weights, x: Tensor, who: Tensor, far: float = 0.01) -> float:
    """The share of pairs of one person above the threshold that the share `far` of pairs of two people is above."""
    tail.load_state_dict(theta)
    with torch.inference_mode():
        seen = F.normalize(tail(x))
    scores, same = seen @ seen.T, who[:, None] == who[None, :]
    upper = torch.ones_like(same).triu(1)
    impostors, genuine = scores[upper & ~same], scores[upper & same]
    threshold = impostors.sort(descending=True).values[int(far * len(impostors))]
    return float((genuine > threshold).double().mean())


# ---- attacks ---------------------------------------------------------------------------------------------------------
def crafted(attack: str, sent: Weights, own: Weights, others: Sequence[Weights]) -> Weights:
    """What a hostile client sends, which knows what honest ones do."""
    made = {}
    lengths = [norms(theta, sent)[""] for theta in others]
    trained = [k for k, v in sent.items() if v.is_floating_point() and "running" not in k]
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
                return own
        made[key] = sent[key] + update
    return own | made


def run(
    rule: Rule, attack: str, tail: nn.Module, start: Weights, data: tuple[list[Site], Tensor, Tensor], seed: int
) -> float:
    """TAR after all rounds."""
    clients, x, who = data
    theta = dict(start)
    for round in range(ROUNDS):
        rng = torch.Generator().manual_seed(1000 * seed + round)
        learnt = []
        for number, site in enumerate(clients):
            labels = site.labels
            if attack == "labels" and number < HOSTILE:
                labels = labels[torch.randperm(len(labels), generator=rng)]
            learnt.append(train(tail, theta, site, labels, rng))
        down = Down(theta)
        with closing(Reduction(rule, ("theta",), "n", down)) as reduction:
            for number, own in enumerate(learnt):
                sent = crafted(attack, theta, own, learnt[HOSTILE:]) if number < HOSTILE else own
                up = Up(sent, len(clients[number].x))
                if refusal(STEP, down, up, up.n, 128) is None:  # as every engine does
                    reduction.take(f"client-{number:02d}", down, up)
            theta = reduction.result()["theta"]
    return tar(tail, theta, x, who)


def poisoned(folder: Path, weights: Path, seeds: Sequence[int], rules: Sequence[str], attacks: Sequence[str]) -> None:
    network = Network()
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    x, who = features(folder, network.eval())
    found: dict[tuple[str, str], list[float]] = {}
    begun: list[float] = []
    for seed in seeds:
        data = sites(x, who, seed)
        tail = tail_of(network)
        start = {k: v.clone() for k, v in tail.state_dict().items()}
        begun.append(tar(tail, start, *data[1:]))
        for name in rules:
            for attack in attacks:
                found.setdefault((name, attack), []).append(run(RULES[name], attack, tail, start, data, seed))
    print("start:", *(f"{100 * t:.1f}" for t in begun))
    print(f"| rule | {' | '.join(attacks)} |\n|---|{'---|' * len(attacks)}")
    for name in rules:
        cells = []
        for attack in attacks:
            each = zip(found[name, attack], begun, found["mean", "none"], strict=True)
            counts = all(t - start >= KEEPS * (clean - start) for t, start, clean in each)
            values = " ".join(f"{100 * t:.1f}" for t in found[name, attack])
            cells.append(f"{values}{' *' if counts else ''}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


# ---- cost ------------------------------------------------------------------------------------------------------------
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
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("weights", nargs="?", type=Path)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.cost:
        cost()
    elif given.folder is None or given.weights is None:
        parser.error("give the folder of people and the network's file, or --cost")
    else:
        poisoned(given.folder, given.weights, given.seeds, given.rules, given.attacks)


if __name__ == "__main__":
    main()
