"""Differential privacy below `Network.reduce`: budgets, cohorts, refusals, and the same bits on every engine."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import smoke
from tests.toys import Toy, ToyDown, toy_engine, toy_world

import visard
from visard.aggregation.dp import BudgetSpent, Privacy
from visard.aggregation.rules import Mean
from visard.config import load
from visard.core import sample_clients
from visard.crypto.discrete_gaussian import Stream, discrete_gaussian
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork
from visard.engines.loop import Watcher
from visard.errors import Interrupted, UsageError, VisardError

DOWN = ToyDown(torch.zeros(4), {"a": torch.full((2, 2), 3.0)})
FEDAVG = (*smoke("fedavg"), "model.name=tiny_nobn", "aggregation.dp.clip=0.5")


class Killer(Watcher):
    """Ends a run when its second round is done and not yet on disk."""

    def round(self, stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
        if step == 2:
            raise Interrupted("killed")


def private(folder: Path, clients: int = 4, seed: int = 0, rounds: int = 0, **dp: Any) -> LocalNetwork:
    world = toy_world(folder, clients, seed, aggregation=Mean(dp=Privacy(**dp)), rounds=rounds)
    return toy_engine(folder, world)


def reduced(net: LocalNetwork, toy: Toy | None = None, down: ToyDown = DOWN) -> tuple[dict[str, Any], Any]:
    return net.reduce((toy or Toy()).add, dict.fromkeys(net.clients, down), mean=("theta", "w"), by="n")


def test_one_client_moves_the_mean_by_no_more_than_the_bound(tmp_path: Path) -> None:
    means, ups = reduced(private(tmp_path, clip=0.5, noise=0.0))
    moved = torch.cat([(means["theta"]["a"] - 3.0).flatten(), means["w"]])
    assert float(moved.norm()) <= 0.5
    assert float(moved.norm()) > 0.4, "four updates of much the same direction"
    assert {up.n for up in ups.values()} == {1}
    assert all(math.isnan(up.loss) for up in ups.values())


def test_a_lost_client_leaves_the_divisor_as_it_is(tmp_path: Path) -> None:
    """Else the count of replies would show in the result."""
    all_four, _ = reduced(private(tmp_path, clip=1e3, noise=0.0))
    one_lost, ups = reduced(private(tmp_path, clip=1e3, noise=0.0), Toy(faults={"client-001": "raise"}))
    assert set(ups.missing) == {"client-001"}
    assert torch.allclose(all_four["theta"]["a"], torch.full((2, 2), 4.0), atol=1e-3)
    assert torch.allclose(one_lost["theta"]["a"], torch.full((2, 2), 3.75), atol=1e-3)


def test_the_run_ends_at_its_budget(tmp_path: Path) -> None:
    net = private(tmp_path, noise=2.0, epsilon=3.0, clip=0.5)
    seen: list[float] = []

    def round() -> None:
        net.begin("add", len(seen))
        reduced(net)
        seen.append(net.traffic.figures["epsilon"])

    with pytest.raises(BudgetSpent, match="one more round would make epsilon"):
        deque(iter(round, 0), maxlen=0)
    assert seen == sorted(seen)
    assert 2.0 < seen[-1] <= 3.0
    assert len(seen) < 20


def test_a_target_lasts_for_the_planned_rounds_and_no_longer(tmp_path: Path) -> None:
    net = private(tmp_path, epsilon=4.0, rounds=5)
    for r in range(5):
        net.begin("add", r)
        reduced(net)
    assert 3.9 < net.traffic.figures["epsilon"] <= 4.0
    net.begin("add", 5)
    with pytest.raises(BudgetSpent):
        reduced(net)


def test_an_account_goes_on_where_it_was(tmp_path: Path) -> None:
    """A checkpoint holds what was spent, the bound as it has adapted, and the noise that was chosen."""

    def rounds(net: LocalNetwork, some: range) -> list[Any]:
        found = []
        for r in some:
            net.begin("add", r)
            means, _ = reduced(net)
            found.append((means["w"], dict(net.traffic.figures)))
            net.states.commit({}, 0, net.remembered)
        return found

    how: dict[str, Any] = {"epsilon": 4.0, "rounds": 6, "quantile": 0.5, "clip": 0.1}
    whole = rounds(private(tmp_path / "a", **how), range(4))
    first = private(tmp_path / "b", **how)
    rounds(first, range(2))
    states = Checkpoint(tmp_path / "b" / "checkpoint", "toy")
    assert states.resume()
    again = LocalNetwork(first.world, states, Ledger(states.ledger))
    again.remembered = states.memory()
    rest = rounds(again, range(2, 4))
    for (w, figures), (w2, figures2) in zip(whole[2:], rest, strict=True):
        assert torch.equal(w, w2)
        assert figures == figures2
    assert len({figures["clip"] for _, figures in whole}) == 4


def test_noise_repeats_for_the_same_replies_and_for_no_others(tmp_path: Path) -> None:
    def noise_of(net: LocalNetwork, toy: Toy, w: float = 0.0) -> torch.Tensor:
        down = ToyDown(torch.full((4,), w), {"a": torch.full((2, 2), 3.0)})
        noisy, _ = reduced(net, toy, down)
        return torch.as_tensor(noisy["theta"]["a"] - 3.0)

    how: dict[str, Any] = {"noise": 1.0, "clip": 100.0}
    first, same = (noise_of(private(tmp_path, **how), Toy()) for _ in range(2))
    assert torch.equal(first, same)
    other = noise_of(private(tmp_path, **how), Toy(faults={"client-001": "raise"}))
    assert not torch.allclose(first, other, atol=1.0), "the difference of two sums has noise of its own"
    later = private(tmp_path, **how)
    later.begin("add", 1)
    assert not torch.allclose(first, noise_of(later, Toy()), atol=1.0)


def test_the_server_of_real_parties_has_a_secret_of_its_own(tmp_path: Path) -> None:
    """With all that parties and readers know, the seed among it, nobody else can take the noise off."""
    results = []
    for name in ("a", "b"):
        net = private(tmp_path, noise=1.0, clip=100.0)
        net.states = Checkpoint(tmp_path / name, "toy", remote=True)
        net.place = "0123456789abcdef"
        assert len(net.states.secret()) == 32
        assert (tmp_path / name / "secret.key").stat().st_mode & 0o077 == 0
        assert Checkpoint(tmp_path / name, "toy", remote=True).secret() == net.states.secret(), "after a restart too"
        stream = net._stream("1 noise", b"digest")
        results.append(discrete_gaussian(stream, 1e6, 100))
    public = private(tmp_path, noise=1.0)
    guess = discrete_gaussian(
        Stream(public.world.secret_of("\0server"), b"0123456789abcdef start 0 1 noise", b"digest"), 1e6, 100
    )
    for drawn in results:
        assert (drawn != guess).mean() > 0.9
    assert (results[0] != results[1]).mean() > 0.9, "the same seed, place and sum, another secret"


def test_clients_are_drawn_one_by_one_or_as_many_as_stated(tmp_path: Path) -> None:
    for sampling, sizes in (("poisson", {0, 1, 2, 3, 4, 5}), ("fixed", {2})):
        net = private(tmp_path, clients=5, noise=1.0, sampling=sampling)
        drawn = []
        for r in range(300):
            net.begin("add", r)
            drawn.append(sample_clients(net, 0.4))
        counts = [sum(c in some for some in drawn) for c in net.clients]
        assert all(abs(count - 120) < 45 for count in counts)
        assert {len(some) for some in drawn} <= sizes
        assert all(some and some == sorted(some) for some in drawn)
        assert len({len(some) for some in drawn}) == (1 if sampling == "fixed" else 5)
        both = sum(net.clients[0] in some and net.clients[1] in some for some in drawn)
        assert abs(both - (48 if sampling == "poisson" else 30)) < 25


def test_a_sampled_cohort_is_counted_and_a_chosen_one_is_not(tmp_path: Path) -> None:
    net = private(tmp_path, clients=5, noise=4.0, delta=1e-3)
    asked = dict.fromkeys(sample_clients(net, 0.4), DOWN)
    net.reduce(Toy().add, asked, mean=("theta", "w"), by=None)
    both = net.traffic.figures
    assert both["epsilon"] != both["epsilon if cohorts are known"]
    chosen = private(tmp_path, clients=5, noise=4.0, delta=1e-3)
    chosen.reduce(Toy().add, dict.fromkeys(chosen.clients[:2], DOWN), mean=("theta", "w"), by=None)
    assert chosen.traffic.figures["epsilon"] == both["epsilon if cohorts are known"]
    assert "epsilon if cohorts are known" not in chosen.traffic.figures


def test_empty_cohorts_are_refused_before_they_happen(tmp_path: Path) -> None:
    net = private(tmp_path, clients=5, noise=1.0, sampling="poisson")
    asked = dict.fromkeys(sample_clients(net, 0.4), DOWN)
    with pytest.raises(UsageError, match="a round without any client is too likely"):
        net.reduce(Toy().add, asked, mean=("theta", "w"), by=None)


def test_single_replies_are_refused(tmp_path: Path) -> None:
    net = private(tmp_path, noise=1.0)
    with pytest.raises(VisardError, match="add of toy is asked of each client by itself"):
        net.ask(Toy().add, dict.fromkeys(net.clients, DOWN))
    with pytest.raises(VisardError, match="add of toy is asked of each client by itself"):
        net.stream(Toy().add, dict.fromkeys(net.clients, DOWN))
    with pytest.raises(VisardError, match=r"ToyUp.w \(class_vectors\) leaves each client by itself"):
        net.reduce(Toy().add, dict.fromkeys(net.clients, DOWN), mean="theta", by=None)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("aggregation.dp.clip=-1", "aggregation.dp.clip = -1"),
        ("aggregation.dp.nois=1", "unknown setting aggregation.dp.nois .did you mean .noise"),
        ("aggregation.dp.clip=2", "give noise"),
        ("aggregation.dp=3", "must be a section"),
        ("aggregation.bound=3", "dp has a bound of its own"),
        ("aggregation.rule=median", "the noise of aggregation.dp is for the mean alone"),
        ("method.negatives=noisy", "method.negatives = noisy: clients show them one by one, so no noise"),
        ("method.negatives=class_vectors", "method.negatives = class_vectors: clients show them one by one, so no"),
    ],
)
def test_settings_that_make_no_sense_get_one_line(change: str, line: str) -> None:
    given = [] if "give noise" in line or "section" in line else ["aggregation.dp.noise=1"]
    with pytest.raises(UsageError, match=line):
        load("fedavg", [*given, change])


def test_negatives_that_no_client_shows_go_with_noise() -> None:
    assert load("fedavg", ["aggregation.dp.noise=1", "method.negatives=public"]).method.negatives == "public"  # type: ignore[attr-defined]
    assert load("fedavg", ["method.negatives=noisy"]).aggregation == Mean()


def test_a_delta_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with 4 clients at most 0.218"):
        reduced(private(tmp_path, noise=1.0, delta=0.3))


def test_settings_go_into_the_file_of_a_run_and_back() -> None:
    settings = load("fedavg", ["aggregation.dp.epsilon=8", "aggregation.dp.sampling=poisson"])
    written = settings.to_dict()["aggregation"]
    expected = {"clip": 1.0, "clip_rate": 0.2, "epsilon": 8.0, "sampling": "poisson", "colluders": 0.0}
    assert written["dp"] == expected | {"unit": "client"}
    assert visard.config.parse(settings.to_dict()).aggregation == settings.aggregation


def test_a_run_stops_at_its_budget_and_reports_what_it_spent(tmp_path: Path) -> None:
    budget = ("aggregation.dp.noise=2.0", "aggregation.dp.epsilon=3", "method.rounds=6", "evaluation.every=0")
    visard.run("fedavg", out=tmp_path / "run", overrides=[*FEDAVG, *budget, "aggregation.dp.delta=1e-3"])
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    spent = [e["figures"]["epsilon"] for e in events if e["event"] == "round"]
    assert 1 <= len(spent) < 6
    assert spent == sorted(spent)
    assert 1 < spent[-1] <= 3
    assert any("budget of differential privacy is spent" in e.get("text", "") for e in events)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["training"]["epsilon"] == pytest.approx(spent[-1])
    assert "loss" not in metrics["training"], "the losses of single clients are not covered"
    assert "epsilon" in (tmp_path / "run" / "report.html").read_text()


def test_batch_norm_is_refused_in_one_line(tmp_path: Path) -> None:
    noisy = (*smoke("fedavg"), "aggregation.dp.noise=1.0")
    with pytest.raises(VisardError, match="changes batch norm's running statistics, which aggregation.dp cannot bound"):
        visard.run("fedavg", out=tmp_path / "average", overrides=[*noisy, "model.name=tiny"])
    at_home = [*noisy, "model.name=tiny", "method.batch_norm=local", "method.rounds=1"]
    visard.run("fedavg", out=tmp_path / "local", overrides=at_home)


@pytest.mark.usefixtures("quick_children")
def test_every_engine_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    how = [*FEDAVG, "aggregation.dp.noise=0.5", "aggregation.dp.quantile=0.5", "evaluation.every=0"]
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
