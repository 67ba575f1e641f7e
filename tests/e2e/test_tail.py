"""`model.train`: clients train, send and keep the tail alone; what comes out is whole; engines agree bit for bit."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.e2e.smoke import smoke
from tests.e2e.test_methods import assert_same_results
from tests.engines.deployed import until

import visard
from visard.at_rest import Key
from visard.config import load, parse
from visard.engines.watchers import Watcher
from visard.errors import UsageError, VisardError
from visard.methods import METHODS
from visard.models.files import save_model
from visard.report.run_folder import Run

TAIL = ("layer3", "fc", "features")
CUT = "model.train=from:layer3"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of eight rounds, whose features tell people apart."""
    more = ["method.rounds=8", "evaluation.every=0"]
    run = visard.run("pretrain", out=tmp_path_factory.mktemp("start") / "run", overrides=[*smoke("pretrain"), *more])
    return run.folder / "model.safetensors"


def tail_run(out: Path | str, start: Path, *more: str, method: str = "fedavg") -> Run:
    return visard.run(method, out=out, overrides=[*smoke(method), f"model.weights={start}", CUT, *more])


def trained(start: Path, file: Path) -> set[str]:
    before, after = load_file(start), load_file(file)
    assert before.keys() <= after.keys(), "the model is whole"
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


MORE = {
    "fedfr-da": ["method.source_head=random"],
    "fedface": ["model.name=tiny"],
    "central-mmd": ["model.train=from:layers.5"],
}


def models_of(run: Run) -> list[Path]:
    found = [*run.folder.glob("model.safetensors"), *run.folder.glob("clients/*.safetensors")]
    assert found
    return found


def assert_labelled(run: Run, how: str, said: str) -> None:
    """Files, metrics and report say what was trained."""
    kind, _, value = how.partition(":")
    for file in models_of(run):
        with safe_open(file, "pt") as content:
            assert content.metadata()["trained"] == how
        assert visard.load_model(file)
    assert run.metrics["trained"][kind] == run.started["trained"][kind] == value
    assert said in (run.folder / "report.html").read_text()


@pytest.fixture(scope="module")
def sensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network for the readings of central-mmd."""
    file = tmp_path_factory.mktemp("sensors") / "start.safetensors"
    torch.manual_seed(0)
    network = visard.models.build("mlp", embedding=16, size=32)
    save_model(file, network.state_dict(), {"model": "mlp", "embedding": "16", "size": "32"})
    return file


@pytest.mark.parametrize("method", METHODS.built_in)
def test_every_method_trains_the_tail_alone(method: str, start: Path, sensors: Path, here: Path) -> None:
    first, tail = (sensors, {"layers"}) if method == "central-mmd" else (start, {*TAIL[:2]})
    run = tail_run("run", first, *MORE.get(method, []), method=method)
    files = models_of(run)
    assert tail in [trained(first, file) for file in files]
    assert all(trained(first, file) <= {*tail, *TAIL} for file in files)
    assert_labelled(run, "from:layers.5" if first is sensors else "from:layer3", "from layer")


@pytest.mark.parametrize("method", METHODS.built_in)
def test_every_method_trains_factors_alone(method: str, start: Path, sensors: Path, here: Path) -> None:
    first = sensors if method == "central-mmd" else start
    run = tail_run(
        "run",
        first,
        *MORE.get(method, []),
        "model.train=lora:2",
        "evaluation.every=0",
        method=method,
    )
    before, changed = load_file(first), set()
    for file in models_of(run):
        after = load_file(file)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert all(before[name].ndim > 1 for name in moved), "no bias, no batch norm"
        for name in moved:
            assert torch.linalg.matrix_rank((after[name] - before[name]).flatten(1), rtol=1e-4) <= 2, name
        assert before.keys() <= after.keys()
        assert not any("lora" in name for name in after), "the factors are merged"
        changed |= moved
    assert changed == {
        name for name, value in before.items() if value.ndim > 1 and 2 * (len(value) + value[0].numel()) < value.numel()
    }
    assert_labelled(run, "lora:2", "LoRA of rank 2")


def test_only_the_tail_leaves_and_is_checkpointed(start: Path, here: Path) -> None:
    whole = load_file(start)
    size = sum(v.nbytes for k, v in whole.items() if k.split(".")[0] in TAIL)
    run = tail_run("run", start, "method.rounds=1", "evaluation.every=0")
    rows = json.loads(Path("run/ledger.json").read_text())["rows"]
    for client in {row[2] for row in rows}:
        left = sum(row[6] for row in rows if row[2] == client and row[4].startswith("theta"))
        assert size <= left < size + 5000, "the numbers and the names of the tail"
    server = next(Path("run/checkpoint").glob("server-*.bin"))
    assert size < server.stat().st_size < size + 10_000 < sum(v.nbytes for v in whole.values())
    assert run.metrics["trained"]["parameters"] + run.metrics["trained"]["frozen"] == sum(
        v.numel() for k, v in whole.items() if not k.endswith(("running_mean", "running_var", "num_batches_tracked"))
    )


def close(one: Path, two: Path, bound: float) -> bool:
    a, b = load_file(one), load_file(two)
    return all(torch.allclose(a[k], b[k], rtol=bound, atol=bound) for k in a)


def tar(run: Run) -> list[float]:
    return [p["tar"] for p in run.metrics["generic"]["test"]["verification"]["tar"]]


@pytest.mark.parametrize("flip", ["false", "true"])
def test_cached_and_live_agree(start: Path, here: Path, flip: str) -> None:
    one = ["method.rounds=1", "evaluation.every=0", f"evaluation.flip={flip}"]
    runs = {c: tail_run(c, start, f"model.cache={c}", *one) for c in ("fp32", "off", "fp16")}
    assert close(Path("fp32/model.safetensors"), Path("off/model.safetensors"), 1e-5)
    assert close(Path("fp16/model.safetensors"), Path("off/model.safetensors"), 2e-3)
    assert not close(Path("fp32/model.safetensors"), start, 1e-3), "something was trained"
    for other in ("off", "fp16"):
        assert tar(runs["fp32"]) == pytest.approx(tar(runs[other]), abs=1e-3)


@pytest.mark.parametrize("cache", ["fp32", "off"])
def test_pool_and_local_give_the_same_bits(start: Path, here: Path, cache: str) -> None:
    for engine in ("local", "pool"):
        tail_run(engine, start, f"engine.kind={engine}", "engine.workers=2", f"model.cache={cache}")
    assert_same_results(Path("local"), Path("pool"))


@pytest.mark.parametrize("engine", ["local", "pool"])
def test_in_memory_nothing_is_left(start: Path, here: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tail_run("disk", start)
    monkeypatch.setenv("VISARD_CACHE", str(here / "cache"))
    before = {*Path("/dev/shm").iterdir()}
    tail_run("memory", start, "model.cache_in=memory", f"engine.kind={engine}", "engine.workers=2")
    found = {*Path("/dev/shm").iterdir()} - before  # of runs beside this one: gone when these end
    until(lambda: not any(folder.exists() for folder in found), f"{found} to be removed", seconds=60)
    assert not (here / "cache" / "activations").exists()
    assert_same_results(Path("disk"), Path("memory"))


class Impatient(Watcher):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def activations(self, done: int, total: int) -> None:
        self.seen.append((done, total))

    def round(self, stage: str, step: int, steps: int, figures: dict[str, Any]) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_stopped_run_goes_on_with_the_same_trunk_alone(
    start: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISARD_CACHE", str(here / "cache"))
    own = here / "start.safetensors"
    own.write_bytes(start.read_bytes())
    watcher = Impatient()
    settings = [*smoke("fedavg"), f"model.weights={own}", CUT]
    with pytest.raises(VisardError, match="continue with"):
        visard.run("fedavg", out="stopped", overrides=settings, watcher=watcher)
    assert watcher.seen
    assert watcher.seen[-1][0] == watcher.seen[-1][1], "the cache was filled, and a watcher heard of it"
    before = Path("stopped/events.jsonl").read_text()
    other = load_file(own)
    other["conv.weight"] += 1
    save_model(own, other, {"model": "tiny", "embedding": "16", "size": "32"})
    with pytest.raises(VisardError, match="other settings"):
        visard.resume("stopped")
    own.write_bytes(start.read_bytes())
    watcher.seen.clear()
    visard.resume("stopped", watcher)
    assert not watcher.seen, "nothing was computed again"
    visard.run("fedavg", out="whole", overrides=settings)
    assert before
    assert_same_results(Path("stopped"), Path("whole"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.train=tails"], "must be all, tail, last:K, from:LAYER"),
        (["model.train=last:0"], "must be all, tail"),
        (["model.train=from:layer9"], "no layer to begin with"),
        (["model.train=all", "model.fresh=true"], "model.fresh needs a part that trains"),
        (["model.train=lora:2", "model.fresh=true"], "model.fresh needs a part that trains"),
        (["method.training.augment.shift=2"], r"method.training.augment.shift = 2.*model.cache = off"),
        (["method.training.augment.erase=0.5"], "method.training.augment.erase"),
    ],
)
def test_what_does_not_go_together_is_one_line(start: Path, here: Path, changes: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        tail_run("run", start, *changes)
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()


def test_activations_on_disk_and_a_key_do_not_go_together(start: Path, here: Path) -> None:
    key = f"engine.encrypt_with={Key.make(here / 'my.key').path}"
    with pytest.raises(
        UsageError, match="fedavg: a key .--encrypt-with. does not protect activations on disk"
    ) as caught:
        tail_run("run", start, key)
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()
    tail_run("plain", start, "method.rounds=1")
    tail_run("memory", start, "method.rounds=1", key, "model.cache_in=memory")
    assert_same_results(Path("plain"), Path("memory"))


def test_untrained_networks_are_not_frozen(here: Path) -> None:
    with pytest.raises(UsageError, match="model.train = tail: what stays frozen must have been trained"):
        visard.run("fedavg", out="run", overrides=[*smoke("fedavg"), "model.train=tail"])
    tail = visard.run("fedavg", out="live", overrides=[*smoke("fedavg"), "method.rounds=1"])
    assert "trained" not in tail.metrics


def test_live_trunks_take_any_augmentation(start: Path, here: Path) -> None:
    run = tail_run("run", start, "model.cache=off", "method.training.augment.shift=2", "method.rounds=1")
    assert trained(start, run.folder / "model.safetensors") == {*TAIL[:2]}


def test_a_fresh_tail_begins_at_random_by_the_seed(start: Path, here: Path) -> None:
    """No rounds: what comes out is the given trunk with a tail that nobody has trained."""
    for name, seed in (("a", 1), ("again", 1), ("b", 2)):
        tail_run(name, start, "method.rounds=0", "model.fresh=true", f"seed={seed}", method="pretrain")
    given = load_file(start)
    a, again, b = (load_file(f"{name}/model.safetensors") for name in ("a", "again", "b"))
    assert all(torch.equal(a[name], again[name]) for name in given)
    assert {name.split(".")[0] for name in given if not torch.equal(a[name], given[name])} == {*TAIL}
    assert not torch.equal(a["fc.weight"], b["fc.weight"])
    assert torch.equal(a["features.running_var"], torch.ones_like(a["features.running_var"]))


def test_settings_without_a_cut_are_as_before() -> None:
    plain, cut = load("fedavg"), load("fedavg", ["model.train=tail", "model.weights=w.safetensors"])
    assert not {"train", "cache", "cache_in", "fresh"} & plain.to_dict()["model"].keys()
    assert "fresh" not in cut.to_dict()["model"]
    assert parse(tomllib.loads(cut.to_toml())).fingerprint() == cut.fingerprint() != plain.fingerprint()
    memory = load("fedavg", ["model.train=tail", "model.weights=w.safetensors", "model.cache_in=memory"])
    assert memory.fingerprint() == cut.fingerprint(), "where activations are changes nothing"


@pytest.mark.parametrize("how", ["lora:2", "from:layer3"])
def test_pool_and_resume_give_the_same_bits(start: Path, here: Path, how: str) -> None:
    settings = [*smoke("fedavg"), f"model.weights={start}", f"model.train={how}"]
    visard.run("fedavg", out="local", overrides=settings)
    visard.run("fedavg", out="pool", overrides=[*settings, "engine.kind=pool", "engine.workers=2"])
    with pytest.raises(VisardError, match="continue with"):
        visard.run("fedavg", out="stopped", overrides=settings, watcher=Impatient())
    visard.resume("stopped")
    for other in ("pool", "stopped"):
        assert_same_results(Path("local"), Path(other))


def test_factors_are_all_that_leaves_and_is_checkpointed(start: Path, here: Path) -> None:
    tail_run("run", start, "model.train=lora:2", "method.rounds=1", "evaluation.every=0")
    before = load_file(start)
    size = sum(
        4 * 2 * (len(v) + v[0].numel())
        for v in before.values()
        if v.ndim > 1 and 2 * (len(v) + v[0].numel()) < v.numel()
    )
    rows = json.loads(Path("run/ledger.json").read_text())["rows"]
    for client in {row[2] for row in rows}:
        left = sum(row[6] for row in rows if row[2] == client and row[4].startswith("theta"))
        assert size <= left < size + 5000
        assert "statistic" not in {row[5] for row in rows}
    server = next(Path("run/checkpoint").glob("server-*.bin"))
    assert size < server.stat().st_size < size + 10_000 < sum(v.nbytes for v in before.values()) / 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.train=lora:0"], "must be all, tail, last:K, from:LAYER .* or lora:R"),
        (["model.train=lora:999"], "model.train = lora:999: Tiny has no linear layer or convolution"),
        (
            ["model.train=lora:2", "model.frozen_norm=false"],
            "model.frozen_norm = false: batch norm does not train with lora:2",
        ),
        (
            ["model.train=lora:2", "method.batch_norm=local"],
            "method.batch_norm is about batch norm, which does not train",
        ),
    ],
)
def test_what_factors_do_not_go_with_is_one_line(start: Path, here: Path, changes: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        tail_run("run", start, *changes)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="model.train = lora:2: what stays frozen must have been trained"):
        visard.run("fedavg", out="run", overrides=[*smoke("fedavg"), "model.train=lora:2"])


def test_settings_of_factors_are_complete_without_a_cache() -> None:
    settings = load("fedavg", ["model.train=lora:2", "model.weights=w.safetensors", "engine.encrypt_with=k"])
    assert settings.to_dict()["model"].keys() & {"train", "cache", "cache_in", "frozen_norm"} == {
        "train",
        "frozen_norm",
    }
    assert parse(tomllib.loads(settings.to_toml())).fingerprint() == settings.fingerprint()
