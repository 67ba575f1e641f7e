"""A hostile server against a party with synthetic faces: what it gets without a policy, and what policies leave.

    python -m benchmarks.attacks [--people 12] [--images 10]

The server crafts weights of `tiny` with which the embedding is the picture, in 16 x 16 pixels of grey.

- **Templates**: `fedface` then sends the mean face of every person as a class vector.
- **Statistics**: with `fedavg` and a learning rate of 0 the running means of the last batch norm are the mean face of a
  party with one person.
- **Updates**: with `fedavg` the last layer's change at a party with two people is the difference of their faces. With
  secure aggregation over five parties the server has that party's masked reply, and the mean change of all five.

A correlation is that of the recovered picture with the person's mean face, over pixels. A person is recognised if, once
the mean face of the public was taken away from all, it is higher than with the mean face of any of 40 others and of the
people at the party.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visard import models
from visard.aggregation.rules import Mean
from visard.aggregation.secure import PHASES, OpenedShares, PublicKeys, SecureReduction, Shares
from visard.config import load
from visard.core import Weights
from visard.data.faces import FaceSet
from visard.data.sources.catalog import DataSettings, open_faces
from visard.deployment.guard import Guard
from visard.deployment.join import world_of_party
from visard.deployment.party import OwnStates, Party
from visard.deployment.policy import Between, Bounds, Policy, Protect, Start, digest_of
from visard.disclosure import MASKED
from visard.engines.codec import decode, encode
from visard.engines.request import Reply, Request, pack, unpack
from visard.methods import fedavg, fedface

SIZE, SIDE = 64, 16
HOUSE = "house"
RUN = "ab" * 16
FEDFACE = (
    "model.frozen_norm=true", "method.pretrain_rounds=0", "partition.public_identities=0", "method.training.lr=0.001",
)  # fmt: skip
EVERYTHING = Bounds(
    lr=Between(at_least=0, at_most=1e6), batch=1, pictures=1, parties=1, distance=1e6, requests=10**6, runs=10**4
)
BEFORE = Policy(
    methods=("fedavg", "fedface"), kinds=("weights", "class_vectors", "statistic", "metric", "count"), bounds=EVERYTHING
)


def build() -> Weights:
    """An honest network, as a run begins with one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = models.build("tiny", embedding=SIDE**2, size=SIZE)
    return {k: v.clone() for k, v in network.state_dict().items()}


def crafted(mean: Tensor, lift: float = 2.0, training: bool = False) -> Weights:
    """Weights of `tiny` with which a picture's embedding is its 16 x 16 grey pixels, less `mean` (256,).

    The first convolution averages cells of 4 x 4 pixels into channel 0; a lift keeps it above ReLU. Then two strided
    blocks lay the pixels of four places into channels, with their shortcuts closed, and the last layer reads them.
    With `training` batch norm centres every channel by its batch, so that each layer lifts anew.
    """
    theta = {k: torch.zeros_like(v) for k, v in build().items()}
    for name in theta:
        if name.endswith("running_var") or (name.endswith("weight") and "norm" in name):
            theta[name].fill_(1.0)
    theta["conv.weight"][0, :, 3:7, 3:7] = 1 / 48
    theta["norm.bias"][0] = lift
    theta["layer1.norm2.weight"].zero_()
    for layer, planes in (("layer2", 1), ("layer3", 4)):
        for plane in range(planes):
            for place, (i, j) in enumerate([(1, 1), (1, 2), (2, 1), (2, 2)]):
                theta[f"{layer}.conv1.weight"][4 * plane + place, plane, i, j] = 1.0
        for channel in range(4 * planes):
            theta[f"{layer}.conv2.weight"][channel, channel, 1, 1] = 1.0
            if training:
                theta[f"{layer}.norm1.bias"][channel] = theta[f"{layer}.norm2.bias"][channel] = lift
        theta[f"{layer}.shortcut.2.weight"].zero_()
    for pixel, entry in enumerate(entries()):
        theta["fc.weight"][pixel, entry] = 1.0
    theta["features.running_mean"].copy_(mean + lift)
    return theta


def channels() -> list[tuple[int, int]]:
    """The channels in layer2 and layer3 that carry each of the 256 pixels, row by row."""
    places = [(2 * (y % 2) + x % 2, 2 * (y // 2 % 2) + x // 2 % 2) for y in range(SIDE) for x in range(SIDE)]
    return [(inner, 4 * inner + outer) for inner, outer in places]


def entries() -> list[int]:
    """Where the last layer finds each of the 256 pixels."""
    cells = [4 * (y // 4) + x // 4 for y in range(SIDE) for x in range(SIDE)]
    return [channel * SIDE + cell for (_, channel), cell in zip(channels(), cells, strict=True)]


def undone(theta: Weights, lift: float, steps: int) -> np.ndarray:
    """The mean picture (256,) from the running means of the embedding, back through every batch norm.

    Running statistics after so many steps are a mix of their start (0 and 1) and of the batch's, which gives these.
    """
    old = 0.9**steps

    def back(value: float, name: str, channel: int) -> float:
        mean = float(theta[f"{name}.running_mean"][channel]) / (1 - old)
        variance = (float(theta[f"{name}.running_var"][channel]) - old) / (1 - old)
        return (value - lift) * math.sqrt(max(variance, 1e-12)) + mean

    found = np.zeros(SIDE**2)
    for pixel, (second, third) in enumerate(channels()):
        value = (float(theta["features.running_mean"][pixel]) - old * lift) / (1 - old)
        for name, channel in (("layer3.norm2", third), ("layer3.norm1", third), ("layer2.norm2", second),
                              ("layer2.norm1", second), ("norm", 0)):  # fmt: skip
            value = back(value, name, channel)
        found[pixel] = value
    return found


def grey(pixels: np.ndarray) -> np.ndarray:
    """(n, 64, 64, 3) bytes -> (n, 256) in [-1, 1], as the crafted network sees them."""
    small = (pixels.astype(np.float64) / 127.5 - 1).reshape(len(pixels), SIDE, 4, SIDE, 4, 3)
    found: np.ndarray = small.mean((2, 4, 5)).reshape(len(pixels), SIDE**2)
    return found


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Over pixels."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else 0.0


@dataclass
class Result:
    """What an attack gave of each person."""

    correlations: list[float]
    recognised: int
    refused: str = ""

    def words(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        low, high = min(self.correlations), max(self.correlations)
        return f"correlation {low:.3f} to {high:.3f}, {self.recognised} of {len(self.correlations)} recognised"


class Victim:
    """Some people; what the server knows of faces in general, and 40 people at other parties."""

    def __init__(self, folder: Path, people: int, images: int, others: int = 40) -> None:
        self.folder, self.count = folder, 0
        settings = DataSettings(identities=people + 2 * others, images_per_identity=images, size=SIZE, seed=5)
        self.all = open_faces(settings)
        flat, who = grey(np.asarray(self.all.pixels)), np.asarray(self.all.identity)
        self.means = np.stack([flat[who == i].mean(0) for i in range(people + others)])
        self.neighbours = range(people + others, people + 2 * others)
        self.pairs = [[k, k + 1] for k in range(0, people - 1, 2)]
        self.public = torch.from_numpy(self.means[people:].mean(0)).float()  # of people who are not at the party
        self.people = people

    def home(self, people: list[int]) -> Path:
        """A face set of these people alone."""
        self.count += 1
        path = self.folder / f"faces-{self.count}"
        rows = np.flatnonzero(np.isin(self.all.identity, people))
        copy_of(self.all, rows, path)
        return path

    def ask(
        self, faces: Path, method: str, changes: tuple[str, ...], policy: Policy, messages: list[Any], reply: type
    ) -> tuple[list[Any], Any]:
        """Replies to one request after the other, in rounds of one run, or why the last was refused; and the world."""
        party, run, make = self.party(faces, method, changes, policy)
        found: list[Any] = []
        for round, message in enumerate(messages):
            name = f"clients/{HOUSE}-{round + 1:06d}-1.bin"
            request = Request(RUN, run, HOUSE, "local", "federate", round, 1, new_state=name)
            header, payload = party.do(pack(request), encode(message))
            if failure := unpack(header, Reply).failure:
                return [*found, failure], None
            found.append(decode(payload, reply))
        return found, make(run, policy)[0].clients[HOUSE]

    def party(
        self, faces: Path, method: str, changes: tuple[str, ...], policy: Policy, client: str = HOUSE
    ) -> tuple[Party, dict[str, Any], Callable[..., Any]]:
        """A party with these pictures, the run as it hears of it, and what makes its world."""
        own = ["partition.kind=parties", "partition.clients=2", f"model.embedding={SIDE**2}", f"data.size={SIZE}"]
        settings = load(method, [*own, *changes]).to_dict()
        told = {k: v for k, v in settings.items() if k not in ("name", "engine", "data")}
        spec = {"model": "tiny", "embedding": SIDE**2, "size": SIZE}
        run = {"settings": told | {"data": {}}, "partition": "", "own": True, "spec": spec, "pictures": SIZE}
        self.count += 1
        home = self.folder / f"home-{self.count}"
        make = partial(world_of_party, data=str(faces), file=None, clients=[client])
        return Party(make, OwnStates(home / "states"), Guard(home, policy)), run, make

    def judged(self, recovered: dict[int, np.ndarray]) -> Result:
        """Compare the picture that was recovered of each person with all mean faces."""
        mean = self.public.numpy()
        scores = {p: [correlation(x - mean, face - mean) for face in self.means] for p, x in recovered.items()}
        plain = [correlation(x, self.means[p]) for p, x in recovered.items()]
        return Result(plain, sum(int(np.argmax(s)) == p for p, s in scores.items()))

    def told_apart(self, pair: list[int], change: Tensor) -> dict[int, np.ndarray]:
        """The main direction of a last layer's change: one of two people in it, the other against it.

        Which of the two is which is given away here, as one bit.
        """
        direction = np.linalg.svd(change[:, entries()].double().numpy())[2][0]
        first, second = (self.means[p] - self.public.numpy() for p in pair)
        sign = 1.0 if correlation(direction, first) > correlation(direction, second) else -1.0
        usual = float(np.linalg.norm(self.means[self.people :] - self.public.numpy(), axis=1).mean())
        return {p: self.public.numpy() + s * sign * usual * direction for p, s in zip(pair, (1.0, -1.0), strict=True)}


def copy_of(faces: FaceSet, rows: np.ndarray, path: Path) -> None:
    """Some pictures of a set as a set of their own."""
    from visard.data.faces import FaceSetWriter

    identity = np.asarray(faces.identity)[rows]
    kept, labels = np.unique(identity, return_inverse=True)
    names, n = [faces.names[i] for i in kept], len(rows)
    with FaceSetWriter(
        path, count=n, size=faces.size, names=names, domains=["x"], attributes=[],
        info={"kind": "synthetic", "name": "victim"},
    ) as out:  # fmt: skip
        files = [f"{names[i]}/{k}.png" for k, i in enumerate(labels)]
        pictures, none = np.asarray(faces.pixels)[rows], np.zeros((n, 0), np.int8)
        out.write(0, pictures, labels.astype(np.int32), np.zeros(n, np.int16), none, files)


def templates(victim: Victim, policy: Policy, lr: float = 0.0, first: Weights | None = None, rounds: int = 0) -> Result:
    """Class vectors of `fedface` as mean faces; with `first` the run begins there and walks towards crafted weights."""
    people, aim = list(range(victim.people)), crafted(torch.zeros(SIDE**2))
    path = [aim] if first is None else walk(first, aim, policy.bounds.distance, rounds)
    down = [fedface.Down(theta, None, lr) for theta in path]
    found, data = victim.ask(victim.home(people), "fedface", FEDFACE, policy, down, fedface.Up)
    if data is None:
        return Result([], 0, found[-1])
    usual = float(np.linalg.norm(victim.means[victim.people :], axis=1).mean())  # a class vector has length 1
    return victim.judged({p: usual * found[-1].w[p].double().numpy() for p in people})


def walk(start: Weights, aim: Weights, distance: float, rounds: int) -> list[Weights]:
    """From some weights towards others, each step as long as the party allows; statistics stay, as they must."""
    found = [start]
    for _ in range(rounds):
        now = found[-1]
        trained = [k for k in now if "running" not in k and now[k].is_floating_point()]
        gap = math.sqrt(sum(float((aim[k] - now[k]).square().sum()) for k in trained))
        length = math.sqrt(sum(float(now[k].square().sum()) for k in trained))
        share = min(1.0, 0.999 * distance * length / max(gap, 1e-12))
        found.append({k: now[k] + share * (aim[k] - now[k]) if k in trained else now[k] for k in now})
    return found


def statistics(victim: Victim, policy: Policy, lr: float = 0.0) -> Result:
    """Running means of `fedavg` as the mean face of a party with one person, one party for each."""
    recovered: dict[int, np.ndarray] = {}
    steps, lift = 30, 8.0
    theta = crafted(torch.zeros(SIDE**2), lift, training=True)
    for person in range(victim.people):
        how = ("batch_size=64", "unit=iterations", f"amount={steps}")
        changes = tuple(f"method.training.{setting}" for setting in how)
        message = [fedavg.Down(theta, {}, None, lr)]
        found, data = victim.ask(victim.home([person]), "fedavg", changes, policy, message, fedavg.Up)
        if data is None:
            return Result([], 0, found[-1])
        recovered[person] = undone(found[-1].theta, lift, steps)
    return victim.judged(recovered)


UPDATES = ("model.frozen_norm=true", "method.training.batch_size=16", "method.training.lr=0.1")


def updates(victim: Victim, policy: Policy) -> Result:
    """The last layer's change as the difference of two faces, from parties with two people each."""
    theta = crafted(victim.public)
    recovered: dict[int, np.ndarray] = {}
    for pair in victim.pairs:
        message = [fedavg.Down(theta, {}, None, 0.1)]
        found, data = victim.ask(victim.home(pair), "fedavg", UPDATES, policy, message, fedavg.Up)
        if data is None:
            return Result([], 0, found[-1])
        recovered |= victim.told_apart(pair, found[-1].theta["fc.weight"] - theta["fc.weight"])
    return victim.judged(recovered)


def masked_updates(victim: Victim, policy: Policy, of: str) -> Result:
    """The same with secure aggregation: from the `reply` of a party behind its masks, or the `sum` over five parties.

    The other four have ten people each, who are not in public.
    """
    theta = crafted(victim.public)
    message = fedavg.Down(theta, {}, None, 0.1)
    shape, before = theta["fc.weight"].shape, 1  # a 1 stands in front of a field
    for name, value in theta.items():
        if name == "fc.weight":
            break
        before += value.numel() if value.is_floating_point() else 0
    recovered: dict[int, np.ndarray] = {}
    for pair in victim.pairs:
        vector, mean = secure_sum(victim, pair, policy, message)
        if of == "reply":
            change = vector[before : before + shape.numel()].reshape(shape)
        else:
            change = mean["fc.weight"] - theta["fc.weight"]
        recovered |= victim.told_apart(pair, change)
    return victim.judged(recovered)


def secure_sum(victim: Victim, people: list[int], policy: Policy, message: fedavg.Down) -> tuple[Tensor, Weights]:
    """One round over five parties, the first with these people: its masked vector, and the mean."""
    groups = [people, *np.array_split(np.array(victim.neighbours), 4)]
    changes = (*UPDATES, "aggregation.secure=true")
    at = {
        f"{HOUSE}-{k}": victim.party(victim.home(list(group)), "fedavg", changes, policy, f"{HOUSE}-{k}")
        for k, group in enumerate(groups)
    }
    reduction = SecureReduction(("theta",), f"{RUN} federate 0 1 1", Mean(secure=True), dict.fromkeys(at, 1.0))

    def asked(step: str, ask: int, messages: Mapping[str, Any], reply: type) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, one in messages.items():
            party, run, _ = at[name]
            plan = reduction.plan(name) if step == "local" else ""
            state = f"clients/{name}-000001-{ask}.bin"
            request = Request(RUN, run, name, step, "federate", 0, ask, new_state=state, secure=plan)
            header, payload = party.do(pack(request), encode(one))
            if failure := unpack(header, Reply).failure:
                raise RuntimeError(failure)
            found[name] = decode(payload, reply)
        return found

    keys = asked("secure_keys", PHASES, reduction.invitations(at), PublicKeys)
    shares = asked("secure_shares", 2 * PHASES, reduction.circles(keys), Shares)
    reduction.begin(shares, message, fedavg.Up, frozenset(), at[f"{HOUSE}-0"][1])
    replies = asked("local", 1, dict.fromkeys(at, message), fedavg.Up)
    for name, reply in replies.items():
        reduction.take(name, message, reply)
    opened = asked("secure_open", 3 * PHASES, reduction.openings({}), OpenedShares)
    return replies[f"{HOUSE}-0"].theta[MASKED].double(), reduction.result(opened)[0]["theta"]


def attacks(victim: Victim) -> dict[str, dict[str, Callable[[], Result]]]:
    """Every attack under every policy."""
    start = build()
    open_kinds = ("weights", "metric", "count", "class_vectors")
    default, agreed = Policy(methods=("fedavg", "fedface")), Policy(methods=("fedface",), kinds=open_kinds)
    counted = Policy(methods=("fedavg",), kinds=("weights", "metric", "count", "statistic"))
    hidden = Policy(methods=("fedavg",), protect=Protect(secure_aggregation=True))
    pinned = Policy(
        methods=("fedface",), kinds=open_kinds, weights=Start(start=(digest_of(start),)), bounds=Bounds(distance=0.25)
    )
    return {
        "templates (fedface)": {
            "no policy": lambda: templates(victim, BEFORE),
            "default policy": lambda: templates(victim, default),
            "default, class_vectors allowed": lambda: templates(victim, agreed),
            "the same, learning rate within bounds": lambda: templates(victim, agreed, 0.001),
            "weights pinned": lambda: templates(victim, pinned, 0.001),
            "weights pinned, one step of 0.25 later": lambda: templates(victim, pinned, 0.001, start, 1),
            "weights pinned, ten steps of 0.25 later": lambda: templates(victim, pinned, 0.001, start, 10),
        },
        "statistics (fedavg)": {
            "no policy": lambda: statistics(victim, BEFORE),
            "default policy": lambda: statistics(victim, default),
            "default, statistic allowed": lambda: statistics(victim, counted),
            "the same, learning rate within bounds": lambda: statistics(victim, counted, 1e-6),
        },
        "updates (fedavg)": {
            "no policy": lambda: updates(victim, BEFORE),
            "default policy": lambda: updates(victim, default),
            "secure aggregation required, the masked reply": lambda: masked_updates(victim, hidden, "reply"),
            "secure aggregation required, the sum of five parties": lambda: masked_updates(victim, hidden, "sum"),
        },
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--people", type=int, default=12)
    options.add_argument("--images", type=int, default=10)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        victim = Victim(Path(folder), chosen.people, chosen.images)
        print("| attack | policy of the party | what the server gets |\n|---|---|---|")
        for attack, policies in attacks(victim).items():
            for policy, run in policies.items():
                print(f"| {attack} | {policy} | {run().words()} |", flush=True)


if __name__ == "__main__":
    main()
