"""Differential privacy for people: each person of a client is a virtual client, on every engine."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import smoke
from tests.engines.test_dp import Killer
from tests.engines.test_secure_aggregation import watched
from tests.golden.test_dp_golden import key_of, slow_noise, words
from tests.policies import ANYTHING
from tests.toys import Toy, ToyDown, ToyUp, toy_engine, toy_world

import visard
from visard.aggregation.accounting import Sum, epsilon_amplified, epsilon_plain
from visard.aggregation.dp import BudgetSpent, Privacy
from visard.aggregation.dp_shares import Shared
from visard.aggregation.people import SUMMED, Virtual, alone, check_apart, present
from visard.aggregation.rules import Mean
from visard.config import load
from visard.core import Client, ClientId, client_step, nothing, sample_clients
from visard.deployment.policy import Protect
from visard.engines.checkpoint import PackStates
from visard.engines.local import LocalNetwork
from visard.engines.request import Reply
from visard.engines.world import World, generator
from visard.errors import Interrupted, PublicError, UsageError

ROOT = Path(__file__).parents[2]
DOWN = ToyDown(torch.zeros(4), {"a": torch.full((2, 2), 3.0)})
FEDAVG = (
    *smoke("fedavg"), "model.name=tiny_nobn", "method.negatives=public", "method.head_start=means",
    "partition.public_identities=6", "aggregation.dp.unit=person", "aggregation.dp.clip=0.5",
)  # fmt: skip


@dataclass(frozen=True)
class Looks(Toy):
    """The update of a client is the mean colour of its pictures, and how often it was asked."""

    @client_step(trains=nothing)
    def add(self, client: Client, msg: ToyDown) -> ToyUp:
        train = client.data.train
        client.state["visits"] = client.state.get("visits", 0) + 1
        seen = train.batch(np.arange(len(train))).astype(float).mean((0, 1, 2)) / 500
        w = msg.w + torch.tensor([*seen, 0.1 * client.state["visits"]]).float() + torch.rand(4, generator=client.rng)
        return ToyUp(w, {"a": msg.theta["a"] - 0.1 * len(train)}, len(train), float(w.sum()))


def private(folder: Path, clients: int = 2, rounds: int = 0, seed: int = 0, **dp: Any) -> LocalNetwork:
    aggregation = Mean(dp=Privacy(unit="person", **dp))
    return toy_engine(folder, toy_world(folder, clients, seed, aggregation=aggregation, rounds=rounds))


def reduced(net: LocalNetwork, toy: Toy | None = None) -> tuple[dict[str, Any], Any]:
    return net.reduce((toy or Looks()).add, dict.fromkeys(net.clients, DOWN), mean=("theta", "w"), by="n")


def moved(means: dict[str, Any]) -> torch.Tensor:
    return torch.cat([(means["theta"]["a"] - 3.0).flatten(), means["w"]])


def slow_update(world: World, client: ClientId, label: int, round: int) -> list[float]:
    """What a person would send that is a client: four numbers of `theta`, four of `w`."""
    train = world.clients[client].train
    rows = [i for i in range(len(train)) if train.labels[i] == label]
    pictures = [train.batch([i])[0].astype(float) for i in rows]
    colour = [sum(p[:, :, c].mean() for p in pictures) / len(pictures) / 500 for c in range(3)]
    drawn = torch.rand(4, generator=generator(world.seed, "add", round, 1, client, "person", label))
    w = [np.float32(np.float32(x) + d) for x, d in zip([*colour, 0.1 * (round + 1)], drawn.numpy(), strict=True)]
    a = np.float32(3.0) - np.float32(0.1 * len(rows))
    return [float(a) - 3.0] * 4 + [float(x) for x in w]


@pytest.mark.parametrize("quantile", [None, 0.6])
def test_sums_over_people_are_those_of_a_slow_loop(tmp_path: Path, quantile: float | None) -> None:
    """Two rounds: each person's update from its own pictures and its own memory, bounded alone, and noise for one."""
    noise = 1.3
    net = private(tmp_path, clip=1.6, noise=noise, quantile=quantile)
    people = [(c, label) for c in net.clients for label in present(net.world.clients[c])]
    assert len(people) == 9 > len(net.clients)
    for round in range(2):
        net.begin("add", round)
        clip = float(net.remembered.get("dp", {}).get("clip", 1.6))
        means, ups = reduced(net)
        unit = 2.0 ** (math.floor(math.log2(clip)) - 24)
        total, within = [0] * 8, 0
        for client, label in people:
            update = slow_update(net.world, client, label, round)
            length = math.sqrt(math.fsum(x * x for x in update))
            within += length <= clip
            total = [t + math.trunc(x * min(1.0, clip / length) / unit) for t, x in zip(total, update, strict=True)]
        sigma = noise * clip
        if quantile is not None:
            sigma = clip / math.sqrt(1 / noise**2 - 1 / (2 * max(9 / 20, noise)) ** 2)
        digest = hashlib.sha256(np.array(total).tobytes() + f"{within} 9".encode()).digest()
        label_of = f" add {round} 1 noise".encode()
        stream = words(key_of(net.world.secret_of("\0server"), label_of, digest))
        slow = [(t + slow_noise(stream, sigma / unit)) * unit / 9 for t in total]
        assert moved(means).tolist() == pytest.approx(slow, rel=1e-5, abs=1e-6)
        assert 0 < within < 9, "some are shortened, some are not"
        assert all(up.n == 1 and math.isnan(up.loss) for up in ups.values())
        assert net.traffic.figures["clip"] == clip


def test_one_person_more_or_less_moves_the_sum_by_the_bound_at_most(tmp_path: Path) -> None:
    """Whatever the pictures of that person are, over two rounds with memory of the first."""

    def sums(net: LocalNetwork) -> list[torch.Tensor]:
        found = []
        for round in range(2):
            net.begin("add", round)
            found.append(9 * moved(reduced(net)[0]))
        return found

    every, without = (private(tmp_path / name, clip=0.5, noise=0.0) for name in ("a", "b"))
    (first, *_) = without.clients
    data = without.world.clients[first]
    gone = data.train.take(data.train.labels != 1)
    without.world.clients = without.world.clients | {first: replace(data, train=gone)}
    for a, b in zip(sums(every), sums(without), strict=True):
        assert 0.4 < float((a - b).norm()) <= 0.5 + 1e-5


def test_the_account_counts_people(tmp_path: Path) -> None:
    net = private(tmp_path, noise=2.0, clip=0.5)
    reduced(net)
    figures = net.traffic.figures
    assert figures["delta"] == pytest.approx(9**-1.1)
    assert figures["epsilon"] == epsilon_plain(1 / 4, 9**-1.1)
    target = private(tmp_path, epsilon=4.0, rounds=3)
    for r in range(3):
        target.begin("add", r)
        reduced(target)
    assert 3.9 < target.traffic.figures["epsilon"] <= 4.0
    target.begin("add", 3)
    with pytest.raises(BudgetSpent):
        reduced(target)
    with pytest.raises(UsageError, match=r"with 9 people at most 0\.0892"):
        reduced(private(tmp_path, noise=1.0, delta=0.1))


def test_clients_that_are_drawn_save_their_people_nothing(tmp_path: Path) -> None:
    """A person comes with all others of its client: only people that are drawn one by one are hidden by that."""
    net = private(tmp_path, clients=3, noise=2.0, clip=0.5)
    asked = dict.fromkeys(sample_clients(net, 0.34), DOWN)
    assert len(asked) == 1
    net.reduce(Looks().add, asked, mean=("theta", "w"), by=None)
    assert net.traffic.figures["epsilon"] == epsilon_plain(1 / 4, 9**-1.1)
    assert "epsilon if cohorts are known" not in net.traffic.figures


def test_people_are_drawn_one_by_one_at_home(tmp_path: Path) -> None:
    net = private(tmp_path, noise=4.0, clip=0.5, sampling="poisson")
    asked = sample_clients(net, 0.4)
    assert asked == list(net.clients), "each client draws its own"
    net.reduce(Looks().add, dict.fromkeys(asked, DOWN), mean=("theta", "w"), by=None)
    figures = net.traffic.figures
    assert figures["epsilon"] == epsilon_amplified(((Sum("poisson", 0, 0.4, 9, 4.0), 1),), 9**-1.1)
    assert figures["epsilon"] < figures["epsilon if cohorts are known"]
    counts, pairs = np.zeros(20), 0
    data = net.world.clients[net.clients[0]]
    people = present(data)
    for place in range(400):
        how = Virtual(("w",), 1.0, 0.4, f"add {place} 1")
        drawn = how.drawn(b"secret", data)
        assert drawn == how.drawn(b"secret", data), "a round that is repeated has the same"
        counts[drawn] += 1
        pairs += {people[0], people[1]} <= set(drawn)
    assert all(abs(counts[label] - 160) < 45 for label in people)
    assert abs(pairs - 64) < 30, "each by itself"
    draws = [[Virtual(("w",), 1.0, 0.4, f"add {p} 1").drawn(s, data) for p in range(20)] for s in (b"secret", b"other")]
    assert draws[0] != draws[1]


def test_a_client_whose_people_are_not_drawn_adds_nothing(tmp_path: Path) -> None:
    net = private(tmp_path, noise=0.0, clip=0.5, sampling="poisson")
    net._share = 1e-9
    means, ups = net.reduce(Looks().add, dict.fromkeys(net.clients, DOWN), mean=("theta", "w"), by=None)
    assert float(moved(means).abs().max()) == 0
    assert set(ups) == set(net.clients)
    for client in net.clients:
        state = PackStates(net.states.packs).read(net.request(client, "add", DOWN, 60.0))
        assert not state.get("people"), "and keeps nothing of what was tried"


class Lying(LocalNetwork):
    """The first client changes the sum that it sends."""

    change: Any = None

    def replies(self, step: Any, requests: Any) -> Any:
        for reply in super().replies(step, requests):
            if reply.client == self.clients[0]:
                vector = self.change(reply.value.theta[SUMMED].clone())
                reply = replace(reply, value=replace(reply.value, theta={SUMMED: vector}))
            yield reply


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda v: 100 * v, "is of 500 people, but the client has"),
        (lambda v: torch.cat([100 * v[:-2], v[-2:]]), "is longer than the bounded updates of"),
        (lambda v: v[:-1], "is not a sum over people of the length"),
        (lambda v: v.double(), "is not a sum over people of the length"),
        (lambda v: torch.cat([v[:-2], v[-2:] - 20]), "people, but the client has"),
    ],
)
def test_sums_that_no_people_can_have_are_refused(tmp_path: Path, change: Any, line: str) -> None:
    good = private(tmp_path, noise=0.0, clip=0.5)
    net = Lying(good.world, good.states, good.ledger)
    net.change = change
    _, ups = reduced(net)
    assert line in ups.missing[net.clients[0]]
    assert list(ups) == [net.clients[1]]


def test_a_client_sums_over_people_only_where_the_run_says_so(tmp_path: Path) -> None:
    good = private(tmp_path, noise=1.0, clip=0.5)
    net = LocalNetwork(good.world, good.states, good.ledger)
    replies: list[Reply] = []
    for unit in ("client", "person"):
        net.world.aggregation = Mean(dp=Privacy(unit=unit, noise=1.0))  # type: ignore[arg-type]
        request = replace(
            net.request(net.clients[0], "add", DOWN, 60.0), people=Virtual(("theta", "w"), 0.5, 1.0, "x").text()
        )
        replies += net.replies(Looks().add, [request])
    assert "the request is for a sum over people" in (replies[0].failure or "")
    assert replies[1].failure is None
    for text in ("{}", '{"fields": [], "clip": 1, "share": 1, "label": ""}', "[" * 5):
        with pytest.raises(PublicError, match="the request for a sum over people is"):
            Virtual.parse(text)


def test_a_secure_sum_over_people_has_their_updates_and_the_noise(tmp_path: Path) -> None:
    """Against the vectors of the clients as they were before any mask."""
    rule = Mean(secure=True, threshold=0.75, dp=Privacy(unit="person", clip=0.5, noise=0.25))
    net = watched(tmp_path, clients=3, aggregation=rule)
    means, _ = reduced(net)
    clear = private(tmp_path, clients=3, clip=0.5, noise=0.0)
    exact, _ = reduced(clear)
    most = max(net.world.people(c) for c in net.clients)
    how = Shared.of("start 0 1", 3, 0.75, 0.0, 0.5, 0.25, 9.0, False, most)
    assert how.sigma == pytest.approx(0.25 * 0.5 / math.sqrt(3))
    difference = 9 * (moved(means) - moved(exact))
    assert 0.01 < float(difference.norm()) < 4 * 0.25 * 0.5 * math.sqrt(8), "the noise of one person's bound"
    assert net.traffic.figures["epsilon"] == epsilon_plain(1 / 0.25**2, 9**-1.1)
    quiet = watched(tmp_path, clients=3, aggregation=replace(rule, dp=Privacy(unit="person", clip=0.5, noise=0.0)))
    assert torch.allclose(moved(reduced(quiet)[0]), moved(exact), atol=1e-6)
    many = Shared.of("start 0 1", 3, 0.75, 0.0, 0.5, 0.25, 9.0, False, 50)
    assert 3 * 50 * 0.5 / many.unit < 2**31, "sums of all of them have room"


def test_the_bound_adapts_to_the_updates_of_people(tmp_path: Path) -> None:
    """In the clear and behind masks; without noise by the share of all people within it."""
    how: dict[str, Any] = {"clip": 1.6, "noise": 0.0, "quantile": 0.6}
    rule = Mean(secure=True, dp=Privacy(unit="person", **how))
    clear, secure = private(tmp_path, clients=3, **how), watched(tmp_path, clients=3, aggregation=rule)
    for net in (clear, secure):
        net.begin("add", 0)
        reduced(net)
    lengths = [
        math.sqrt(math.fsum(x * x for x in slow_update(clear.world, c, label, 0)))
        for c in clear.clients
        for label in present(clear.world.clients[c])
    ]
    within = sum(length <= 1.6 for length in lengths) / 9
    assert 0 < within < 1
    for net in (clear, secure):
        assert net.remembered["dp"]["clip"] == pytest.approx(1.6 * math.exp(-0.2 * (within - 0.6)), rel=1e-6)


def test_people_who_are_at_two_clients_are_refused(tmp_path: Path) -> None:
    world = toy_world(tmp_path, 2)
    check_apart(world.clients)
    (first, _), (_, other) = world.clients.items()
    with pytest.raises(UsageError, match=r"unit = person: person-\d+ is at client-000 and at again"):
        check_apart({first: world.clients[first], "again": world.clients[first]})
    person = alone(other, present(other)[-1])
    assert person.n_classes == 1
    assert set(person.train.identity) == {other.train.classes[present(other)[-1]]}
    assert not len(person.test)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("method.negatives=none", "a head with one person alone learns nothing"),
        ("method.share_head=true", "is for heads that stay at home"),
        ("method.batch_norm=local", "would be each person's own"),
        ('outgoing=["compress"]', "clients send the sum over their people"),
        ("aggregation.dp.unit=picture", "aggregation.dp.unit = 'picture'"),
    ],
)
def test_settings_that_do_not_fit_get_one_line(change: str, line: str) -> None:
    given = ["aggregation.dp.noise=1", "aggregation.dp.unit=person", "method.negatives=public"]
    with pytest.raises(UsageError, match=line) as error:
        load("fedavg", [*given, change])
    assert "\n" not in str(error.value)


def test_runs_from_before_go_on() -> None:
    """The unit is no part of the fingerprint of a run whose unit is the client."""
    before = load("fedavg", ["aggregation.dp.noise=1"])
    assert "unit" in before.to_dict()["aggregation"]["dp"]
    tree = before.to_dict()
    del tree["aggregation"]["dp"]["unit"]
    assert visard.config.parse(tree).fingerprint() == before.fingerprint()
    person = load("fedavg", ["aggregation.dp.noise=1", "aggregation.dp.unit=person", "method.negatives=public"])
    client = load("fedavg", ["aggregation.dp.noise=1", "method.negatives=public"])
    assert person.fingerprint() != client.fingerprint()


def test_a_budget_of_a_party_is_for_all_that_it_has() -> None:
    policy = ANYTHING.model_copy(update={"protect": Protect(dp_epsilon=5.0)})
    settings = load("fedavg", ["aggregation.dp.noise=1", "method.negatives=public"])
    policy.check(settings.to_dict())
    person = load("fedavg", ["aggregation.dp.noise=1", "method.negatives=public", "aggregation.dp.unit=person"])
    with pytest.raises(PublicError, match="a budget for all that it has together"):
        policy.check(person.to_dict())


@pytest.mark.parametrize("secure", ["false", "true"])
@pytest.mark.usefixtures("quick_children")
def test_every_engine_and_a_resumed_run_give_the_same_bits(tmp_path: Path, secure: str) -> None:
    how = [*FEDAVG, "aggregation.dp.noise=0.5", "aggregation.dp.sampling=poisson", "method.participation=0.7"]
    how += [f"aggregation.secure={secure}", "aggregation.dp.quantile=0.5", "evaluation.every=0"]
    models = {}
    for kind in ("local", "pool"):
        visard.run("fedavg", out=tmp_path / kind, overrides=[*how, f"engine.kind={kind}", "engine.workers=2"])
        models[kind] = load_file(tmp_path / kind / "model.safetensors")
    with pytest.raises(Interrupted):
        visard.run("fedavg", out=tmp_path / "killed", overrides=how, watcher=Killer())
    visard.run(tmp_path / "killed" / "config.toml", out=tmp_path / "killed", resume=True)
    models["resumed"] = load_file(tmp_path / "killed" / "model.safetensors")
    for found in models.values():
        assert all(torch.equal(v, models["local"][k]) for k, v in found.items())
    ledger = json.loads((tmp_path / "local" / "ledger.json").read_text())
    kinds = {"masked", "public_key", "ciphertext", "share"} if secure == "true" else {"weights"}
    assert set(ledger["totals"]) - {"count", "metric", "class_vectors"} == kinds


@pytest.mark.flower
def test_flower_gives_the_bits_of_local(tmp_path: Path, ray: dict[str, str]) -> None:
    how = [*FEDAVG, "aggregation.dp.noise=0.5", "evaluation.every=0"]
    there = [*how, "engine.kind=flower", "engine.workers=2"]
    command = [sys.executable, "-m", "tests.engines.simulated", str(tmp_path / "flower"), "fedavg", *there]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | ray)
    assert done.returncode == 0, done.stderr
    visard.run("fedavg", out=tmp_path / "local", overrides=how)
    far, near = (load_file(folder / "model.safetensors") for folder in (tmp_path / "flower/fedavg", tmp_path / "local"))
    assert all(torch.equal(value, near[key]) for key, value in far.items())
