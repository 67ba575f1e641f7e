"""Server optimisers: the equations of Reddi et al. 2021 as slow loops, and what they do to a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.golden.test_aggregation_golden import Numbering
from tests.toys import ToyDown, toy_engine, toy_world

from visard.aggregation.optimisers import Adagrad, Adam, Optimiser, Sgd, Yogi
from visard.aggregation.robust import Median
from visard.aggregation.rules import Mean
from visard.config import load, parse
from visard.core import State, Weights
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import decode, encode
from visard.errors import UsageError, VisardError

Second = Callable[[float, float], float]


def slow_adaptive(x: float, deltas: list[float], lr: float, beta1: float, tau: float, second: Second) -> list[float]:
    """Algorithm 2 for one number."""
    m, v, found = 0.0, tau * tau, []
    for delta in deltas:
        m = beta1 * m + (1 - beta1) * delta
        v = second(v, delta)
        x = x + lr * m / (math.sqrt(v) + tau)
        found.append(x)
    return found


def slow_momentum(x: float, deltas: list[float], lr: float, beta: float) -> list[float]:
    m, found = 0.0, []
    for delta in deltas:
        m = beta * m + delta
        x = x + lr * m
        found.append(x)
    return found


def walked(optimiser: Optimiser, x: float, deltas: list[float]) -> list[float]:
    """As a run does it: the state goes through bytes between two rounds."""
    theta, state, found = {"w": torch.tensor([x], dtype=torch.float64)}, {}, []
    for delta in deltas:
        theta = optimiser.apply(theta, {"w": theta["w"] + delta}, state)
        state = decode(encode(state), dict)
        found.append(float(theta["w"]))
    return found


DELTAS = [0.3, -0.02, 0.0, 0.5, -0.9, 0.001, 0.001]


def test_fedadam() -> None:
    slow = slow_adaptive(1.0, DELTAS, 0.05, 0.8, 1e-2, lambda v, d: 0.95 * v + 0.05 * d * d)
    assert walked(Adam(lr=0.05, beta1=0.8, beta2=0.95, tau=1e-2), 1.0, DELTAS) == pytest.approx(slow, rel=1e-12)


def test_fedyogi() -> None:
    def second(v: float, d: float) -> float:
        return v - 0.05 * d * d * (1 if v > d * d else -1 if v < d * d else 0)

    slow = slow_adaptive(1.0, DELTAS, 0.05, 0.8, 1e-2, second)
    found = walked(Yogi(lr=0.05, beta1=0.8, beta2=0.95, tau=1e-2), 1.0, DELTAS)
    assert found == pytest.approx(slow, rel=1e-12)
    assert found != pytest.approx(walked(Adam(lr=0.05, beta1=0.8, beta2=0.95, tau=1e-2), 1.0, DELTAS), rel=1e-6)


def test_fedadagrad() -> None:
    slow = slow_adaptive(1.0, DELTAS, 0.05, 0.0, 1e-3, lambda v, d: v + d * d)
    assert walked(Adagrad(lr=0.05), 1.0, DELTAS) == pytest.approx(slow, rel=1e-12)


def test_the_first_step_of_fedadam_in_numbers() -> None:
    """No correction of the bias: m = 0.1 d, v = 0.99 tau^2 + 0.01 d^2 = 0.01000099 for d = 1 and tau = 0.01."""
    assert walked(Adam(lr=1.0, tau=0.01), 0.0, [1.0]) == pytest.approx([0.1 / (math.sqrt(0.010099) + 0.01)])


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.9), (0.5, 0.0), (0.3, 0.5)])
def test_fedavgm(lr: float, momentum: float) -> None:
    slow = slow_momentum(1.0, DELTAS, lr, momentum)
    assert walked(Sgd(lr=lr, momentum=momentum), 1.0, DELTAS) == pytest.approx(slow, rel=1e-12)


def test_statistics_and_counters_take_the_result_of_the_rule() -> None:
    sent = {"w": torch.zeros(2), "n.running_var": torch.ones(2), "other": torch.ones(1), "count": torch.tensor(3)}
    result = {k: v + 1 for k, v in sent.items()}
    state: State = {}
    found = Sgd(lr=0.5, momentum=0.0).apply(sent, result, state, {"other"})
    assert found["w"].tolist() == [0.5, 0.5]
    assert all(torch.equal(found[k], result[k]) for k in ("n.running_var", "other", "count"))
    assert list(state["m"]) == ["w"]
    assert list(found) == list(sent)


def round_of(net: object, theta: Weights) -> Weights:
    down = ToyDown(torch.zeros(4), theta)
    messages = dict.fromkeys(net.clients, down)  # type: ignore[attr-defined]
    means, _ = net.reduce(Numbering().number, messages, mean="theta", by=None)  # type: ignore[attr-defined]
    found: Weights = means["theta"]
    return found


@pytest.mark.parametrize("rule", [Mean, Median])
def test_it_follows_any_rule_and_goes_on_after_a_resume(tmp_path: Path, rule: type[Mean] | type[Median]) -> None:
    """Clients add 0, 1 and 2: mean and median are 1, so that momentum 0.5 goes 1, 1.5, 1.75."""
    world = toy_world(tmp_path, aggregation=rule(optimiser=Sgd(momentum=0.5)))
    net, theta, found = toy_engine(tmp_path, world), {"a": torch.zeros(2, 2)}, []
    for _ in range(3):
        theta = round_of(net, theta)
        net.states.commit(theta, 0, net.remembered)
        net = toy_engine(tmp_path, world)
        assert net.states.resume()
        net.remembered = net.states.memory()
        found.append(float(theta["a"][0, 0]))
    assert found == [1.0, 2.5, 4.25]
    assert len(list((tmp_path / "checkpoint").glob("memory-*.bin"))) == 1


def test_what_it_remembers_is_checked_when_a_run_goes_on(tmp_path: Path) -> None:
    states = Checkpoint(tmp_path, "hash")
    states.commit({}, 0, {"optimiser": {"m": torch.ones(3)}})
    file = tmp_path / "memory-000001.bin"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = Checkpoint(tmp_path, "hash")
    assert again.resume()
    with pytest.raises(VisardError, match="memory-000001.bin is damaged"):
        again.memory()
    manifest = (tmp_path / "manifest.json").read_text()
    digest = again.committed.memory_digest
    (tmp_path / "manifest.json").write_text(manifest.replace(digest, "0" * 64))
    with pytest.raises(VisardError, match="was changed or replaced"):
        Checkpoint(tmp_path, "hash").resume()
    (tmp_path / "manifest.json").write_text(manifest.replace("memory-000001.bin", "../memory.bin"))
    with pytest.raises(VisardError, match="is not a checkpoint"):
        Checkpoint(tmp_path, "hash").resume()


def test_without_one_checkpoints_are_as_before(tmp_path: Path) -> None:
    Checkpoint(tmp_path, "hash").commit({}, 0, {})
    assert "memory" not in (tmp_path / "manifest.json").read_text()


def test_what_it_cannot_work_on_is_one_line(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path, aggregation=Mean(optimiser=Sgd())))
    apart = {c: ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}) for c in net.clients}
    with pytest.raises(VisardError, match="number of toy sends the clients different weights"):
        net.reduce(Numbering().number, apart, mean="theta", by=None)
    down = ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)})
    with pytest.raises(VisardError, match="add of toy does not average the weights theta"):
        net.reduce(Numbering().add, dict.fromkeys(net.clients, down), mean="w", by=None)


def test_settings_name_it_alone_or_with_its_settings() -> None:
    plain = load("fedavg")
    assert plain.aggregation.optimiser is None
    named = load("fedavg", ["aggregation.optimiser=adam"])
    assert named.aggregation == Mean(optimiser=Adam())
    table = load(
        "fedavg", ["aggregation.rule=median", "aggregation.optimiser.name=sgd", "aggregation.optimiser.lr=0.5"]
    )
    assert table.aggregation == Median(optimiser=Sgd(lr=0.5))
    for settings in (named, table):
        assert parse(settings.to_dict()) == settings
    assert len({s.fingerprint() for s in (plain, named, table)}) == 3
    assert "optimiser" not in load("fedavg", ["aggregation.bound=2.0"]).to_dict()["aggregation"]
    assert replace(Mean(), optimiser=Adam()).between_parties().optimiser == Adam()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("adm", "unknown server optimiser 'adm' .did you mean 'adam'"),
        ('{name="adam", rate=1.0}', r"unknown setting aggregation\.optimiser\.rate"),
        ('{name="adam", lr=0.0}', r"aggregation\.optimiser\.lr = 0\.0"),
        ("{lr=0.1}", r"aggregation\.optimiser\] needs a name"),
        ("3", r"aggregation\.optimiser\] needs a name"),
    ],
)
def test_what_is_wrong_with_the_settings_is_one_line(value: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        load("fedavg", [f"aggregation.optimiser={value}"])
    assert "\n" not in str(error.value)
