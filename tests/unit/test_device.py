"""The device of a process: names, what moves, what comes back, and that devices do not mix."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import pretended
from tests.toys import Toy, ToyDown, ToyUp, first_step, toy_world

from visard import numerics
from visard.aggregation.rules import Mean
from visard.cli import main
from visard.clustering import finch
from visard.config import load
from visard.core import Client, client_step, nothing
from visard.data.augment import to_float
from visard.engines import pool
from visard.engines.codec import own
from visard.engines.pool import PoolNetwork
from visard.errors import UsageError
from visard.evaluation.identification import identify
from visard.evaluation.scores import Limits
from visard.evaluation.verification import verify_all
from visard.inference.search import Exact
from visard.learning.heads import HEADS, build_head
from visard.learning.train import Sgd
from visard.learning.weights import load_weights, weights_in, weights_of
from visard.methods.fedfr_joint_client import closest
from visard.numerics import CPU, Numerics, computing_on, moved, on_device, resident, resolve, spread
from visard.processes import Recipe


@pytest.fixture
def there() -> Iterator[torch.device]:
    with computing_on(pretended.DEVICE) as device:
        yield device


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_devices_do_not_mix(there: torch.device) -> None:
    x = rand(3, 4).to(there)
    with pytest.raises(pretended.Mixed, match="tensors on cpu and on pretended"):
        x @ rand(4, 3)
    assert (x * torch.tensor(2.0)).device == there, "a single number may come from the CPU, as on a GPU"
    assert torch.equal((x @ x.T).cpu(), rand(3, 4) @ rand(3, 4).T)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu", "device 'gpu': must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"),
        ("cuda:x", "must be auto, cpu, cuda"),
        ("cuda", "device cuda: torch .* finds none here; take cpu or auto"),
        ("mps", "device mps: torch .* finds none here"),
        ("xpu:1", "device xpu:1: torch .* finds none here"),
    ],
)
def test_a_device_that_is_not_there_is_one_clear_line(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "count", lambda kind: 0)
    with pytest.raises(UsageError, match=said) as error:
        resolve(name)
    assert "\n" not in str(error.value)


def test_names_and_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "count", lambda kind: 3 if kind == "cuda" else 0)
    assert resolve("auto") == resolve("cuda") == torch.device("cuda", 0)
    assert resolve("cuda:2") == torch.device("cuda", 2)
    with pytest.raises(UsageError, match="device cuda:3: there are 3, cuda:0 to cuda:2"):
        resolve("cuda:3")
    assert spread("auto") == spread("cuda") == ["cuda:0", "cuda:1", "cuda:2"]
    assert spread("cuda:1") == ["cuda:1"]
    assert spread("cpu") == ["cpu"]
    monkeypatch.setattr(numerics, "count", lambda kind: 0)
    assert resolve("auto") == CPU, "mps and xpu are taken by name alone"


def test_a_run_that_asks_for_a_missing_device_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(numerics, "count", lambda kind: 0)
    asked = ["run", "fedavg", "--set", "numerics.device=cuda", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["visard", *asked])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("visard: device cuda: torch ")
    assert not (tmp_path / "run").exists()


def test_settings_name_devices_and_runs_may_go_on_elsewhere() -> None:
    with pytest.raises(UsageError, match="numerics.device"):
        load("fedavg", ["numerics.device=gpu"])
    plain, moved_on = load("fedavg"), load("fedavg", ["numerics.device=cuda:1"])
    assert moved_on.numerics.device == "cuda:1"
    assert plain.fingerprint() == moved_on.fingerprint()
    assert plain.fingerprint() != load("fedavg", ["numerics.deterministic=true"]).fingerprint()


def test_what_moves_and_what_comes_back(there: torch.device) -> None:
    x = rand(2, 3)
    assert moved(x).device == there
    assert moved(moved(x)) is not x
    assert torch.equal(own({"a": moved(x)})["a"], x)
    network = on_device(torch.nn.Linear(3, 2))
    assert {p.device for p in network.parameters()} == {there}
    for weights in (weights_of(network), weights_in(network)):
        assert {value.device for value in weights.values()} == {CPU}
        load_weights(network, weights)
    assert to_float(np.zeros((1, 4, 4, 3), np.uint8)).device == there


def test_a_table_that_does_not_fit_stays(there: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    table = rand(10, 4)  # 160 bytes
    monkeypatch.setattr(numerics, "_free", lambda: 320.0)
    assert resident(table).device == there
    monkeypatch.setattr(numerics, "_free", lambda: 319.0)
    assert resident(table) is table


def test_on_the_cpu_nothing_is_copied() -> None:
    x, network = rand(2, 3), torch.nn.Linear(3, 2)
    before = [p.data_ptr() for p in network.parameters()]
    assert moved(x) is x
    assert resident(x) is x
    assert on_device(network) is network
    assert [p.data_ptr() for p in network.parameters()] == before


@pytest.mark.parametrize("kind", HEADS)
def test_heads_give_the_numbers_of_the_cpu(kind: str, there: torch.device) -> None:
    f, y, mask = rand(6, 8), torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([True, True, True, False])
    found = []
    for move in (False, True):
        torch.manual_seed(0)
        head = build_head(kind, 4, 8)
        features = (moved(f) if move else f.clone()).requires_grad_()
        loss = (on_device(head) if move else head).loss(
            features, moved(y) if move else y, moved(mask) if move else mask
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert features.grad is not None
        assert head.weight.grad is not None
        found.append([loss.detach().cpu(), features.grad.cpu(), head.weight.grad.cpu()])
    for here, other in zip(*found, strict=True):
        assert here.allclose(other, rtol=1e-6, atol=1e-7)


def test_mining_gives_the_numbers_of_the_cpu(there: torch.device) -> None:
    pictures, others = rand(50, 8), rand(30, 8, seed=1)
    with computing_on("cpu"):
        expected = closest(pictures, others, 16, 8)
    pretended.done.clear()
    assert torch.equal(closest(pictures, others, 16, 8), expected)
    assert "aten.mm.out" in pretended.done


def test_clipping_is_the_same_without_looking(there: torch.device) -> None:
    found = []
    for move in (False, True):
        parameters = [moved(rand(3, seed=i)) if move else rand(3, seed=i) for i in range(2)]
        for p in parameters:
            p.grad = 10 * p
        optimiser = Sgd(parameters, 0.1, 0.9, 0.0)
        optimiser.clip(1.0)
        optimiser.step()
        found.append(torch.stack([p.cpu() for p in parameters]))
    assert found[0].allclose(found[1], rtol=1e-6)


def test_autocast_and_seeds_are_of_the_device(there: torch.device) -> None:
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with Numerics.model_validate({"precision": name}).autocast():
            assert torch.is_autocast_enabled(there.type)
            assert torch.get_autocast_dtype(there.type) == kind
            assert not torch.is_autocast_enabled("cpu")
    pretended.seeds.clear()
    numerics.seed_device(7)
    assert pretended.seeds == [7]


def test_a_device_repeats_itself_where_asked_and_the_cpu_is_left_alone() -> None:
    with computing_on(pretended.DEVICE, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with computing_on("cpu", deterministic=True):
        assert not torch.are_deterministic_algorithms_enabled()


def unit(n: int, seed: int) -> np.ndarray:
    x = rand(n, 16, seed=seed).numpy()
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


@pytest.mark.parametrize("free", [math.inf, 0.0], ids=["resident", "in parts"])
@pytest.mark.parametrize("metric", ["chord", "euclidean"])
def test_clusters_are_those_of_the_cpu(
    metric: finch.Metric, free: float, there: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "_free", lambda: free)
    monkeypatch.setattr(finch, "LARGE", 64)
    x = np.repeat(unit(40, 0), 5, axis=0) + 0.05 * unit(200, 1)
    with computing_on("cpu"):
        row, distance = finch.nearest(x, metric)
        labels = finch.cfinch(x, finch.choose_d(x, metric), metric)[-1].labels
    pretended.done.clear()
    found = finch.nearest(x, metric)
    assert "aten.mm.out" in pretended.done
    assert np.array_equal(found[0], row)
    assert np.allclose(found[1], distance)
    pretended.done.clear()
    assert np.array_equal(finch.cfinch(x, finch.choose_d(x, metric), metric)[-1].labels, labels)
    assert "aten.amax.default" in pretended.done, "separation"


def test_neighbours_in_lists_are_those_of_the_cpu(there: torch.device) -> None:
    x = np.repeat(unit(60, 2), 4, axis=0) + 0.05 * unit(240, 3)
    with computing_on("cpu"):
        expected = finch.nearest(x, "chord", "faiss")[0]
    pretended.done.clear()
    assert np.array_equal(finch.nearest(x, "chord", "faiss")[0], expected)
    assert "aten.addmm.default" in pretended.done


@pytest.mark.parametrize("free", [math.inf, 0.0], ids=["resident", "in parts"])
def test_comparisons_are_those_of_the_cpu(free: float, there: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_free", lambda: free)
    x, who = np.repeat(unit(30, 4), 5, axis=0) + 0.3 * unit(150, 5), np.repeat(np.arange(30), 5)
    work: list[Callable[[], Any]] = [
        lambda: verify_all(x, who, limits=Limits(tile=64)).to_dict(),
        lambda: identify(x[::2], who[::2], x[1::2], who[1::2]).to_dict(),
        lambda: [part.tolist() for part in Exact(unit(90, 6)).search(unit(7, 7), 3)],
        lambda: [part.tolist() for part in Exact(unit(90, 6)).search(unit(1, 7), 3)],
    ]
    for do in work:
        with computing_on("cpu"):
            expected = do()
        pretended.done.clear()
        assert close(do(), expected)
        assert {"aten.mm.default", "aten.mm.out"} & pretended.done, "on the device"


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == pytest.approx(other, abs=1e-6)) if isinstance(one, float) else bool(one == other)


def test_workers_are_spread_over_the_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two workers on each of three devices, and a new one takes the place of one that is lost."""
    made: list[str] = []

    class Silent:
        def __init__(self, recipe: Recipe, states: object, areas: list[Path], device: str) -> None:
            made.append(device)
            self.device, self.areas = device, areas
            self.channel, self.end = socket.socketpair()

        def kill(self) -> None:
            self.channel.close()
            self.end.close()

    monkeypatch.setattr(pool, "Worker", Silent)
    world = SimpleNamespace(training=range(10), held_out=(), seed=0, aggregation=Mean(), timeout=1.0)
    states = SimpleNamespace(folder=tmp_path)
    engine = PoolNetwork(world, states, None, Recipe("a:b", {}), 6, ["cuda:0", "cuda:1", "cuda:2"])  # type: ignore[arg-type]
    assert sorted(made) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:2", "cuda:2"]
    lost = engine.workers[1]
    engine._stop_worker(lost)
    engine._start_worker()
    assert made[-1] == lost.device
    engine.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_like_fp32(precision: str) -> None:
    """A few steps on the CPU, whose autocast is the same code: the loss falls as it does in fp32."""
    found = {}
    for how in ("fp32", precision):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        head = build_head("softmax", 4, 8)
        chosen = Numerics.model_validate({"precision": how})
        optimiser, scaler = Sgd([*model.parameters(), *head.parameters()], 0.5, 0.0, 0.0), chosen.scaler()
        x, y = rand(64, 8), torch.arange(64) % 4
        for _ in range(20):
            with chosen.autocast():
                features = model(x)
            loss = head.loss(features.float(), y)
            optimiser.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimiser)  # type: ignore[arg-type]
            scaler.step(optimiser)  # type: ignore[arg-type]
            scaler.update()
        assert features.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[how]
        found[how] = float(loss.detach())
    assert found["fp32"] < 1.2
    assert found[precision] == pytest.approx(found["fp32"], abs=0.02)


class There(Toy):
    """A method whose clients reply with what they have on the device."""

    @client_step(trains=nothing)
    def add(self, client: Client, msg: ToyDown) -> ToyUp:
        client.state["kept"] = moved(torch.ones(3))
        return ToyUp(moved(msg.w + 1), {k: moved(v) for k, v in msg.theta.items()}, 1, 0.5)


def test_what_leaves_a_step_is_on_the_cpu(there: torch.device, tmp_path: Path) -> None:
    """Before postprocessors and a party's checks look at it."""
    seen: list[Any] = []

    def look(client: Client, message: ToyDown, value: ToyUp) -> ToyUp:
        seen.extend([value.w, *value.theta.values(), client.state["kept"]])
        return value

    world = toy_world(tmp_path, outgoing=(look,))
    assert moved(torch.ones(1)).device == there
    reply, state = first_step(world, There().add, "client-000", ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}))
    assert len(seen) == 3
    assert {x.device.type for x in (*seen, reply.w, *reply.theta.values(), state["kept"])} == {"cpu"}
    assert reply.w.tolist() == [1.0] * 4
