"""Every registered method on its smoke preset: a complete run folder, honest declarations, the same bits everywhere."""

from __future__ import annotations

import gc
import json
import subprocess
from pathlib import Path

import pytest
import torch
from tests.e2e.smoke import smoke

import visard
from visard import processes
from visard.config import load
from visard.core import Disclosure, possible_kinds
from visard.engines.codec import size_of
from visard.methods import METHODS
from visard.methods.scoring import steps_of
from visard.presets import presets
from visard.report.run_folder import read_events

DOCS = Path(__file__).resolve().parents[2] / "docs" / "methods"


def finish(method: str, out: Path, *more: str) -> visard.Run:
    return visard.run(method, overrides=[*smoke(method), *more], out=out)


class Finished(dict[str, visard.Run]):
    """The smoke run of each method, made when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> visard.Run:
        self[name] = finish(name, self.folder / name)
        return self[name]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, visard.Run]:
    return Finished(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", METHODS)
def test_a_run_leaves_everything_behind(finished: dict[str, visard.Run], name: str) -> None:
    run, method = finished[name], METHODS[name]
    for file in ("config.toml", "events.jsonl", "metrics.json", "ledger.json", "report.html", "partition.json"):
        assert (run.folder / file).stat().st_size > 0, file
    has_generic = bool(run.metrics["generic"])
    assert (run.folder / "model.safetensors").exists() == has_generic
    assert has_generic or list((run.folder / "clients").glob("*.safetensors"))
    ledger = json.loads((run.folder / "ledger.json").read_text())
    allowed = {k.value for k in method.discloses | method.centralises}
    assert {row[5] for row in ledger["rows"]} <= allowed
    assert set(ledger["pooled"]) == {k.value for k in method.centralises}
    events = [e["event"] for e in read_events(run.folder / "events.jsonl")]
    assert events[0] == "run_started"
    assert events[-1] == "run_finished"
    assert events.count("round") == sum(s.rounds for s in load(run.folder / "config.toml").method.stages())
    assert not {"refused", "missing", "warning"} & set(events)


@pytest.mark.parametrize("name", METHODS)
def test_declarations_are_complete(name: str) -> None:
    method = METHODS[name]
    kinds = frozenset[Disclosure]().union(*(possible_kinds(step.types[1]) for step in steps_of(method).values()))
    assert kinds <= method.discloses
    assert method.title
    assert name in presets(), "a preset"
    assert presets()[name].splitlines()[0] == f"# visard run {name}"
    card = (DOCS / f"{name.replace('_', '-')}.md").read_text()
    for heading in (
        "What it does",
        "What leaves a client",
        "Settings",
        "Run it",
        "Expected results",
        "Where we differ",
    ):
        assert f"## {heading}" in card


@pytest.mark.parametrize("name", METHODS)
def test_config_toml_reproduces_the_run_on_the_pool(finished: dict[str, visard.Run], name: str, tmp_path: Path) -> None:
    first = finished[name]
    text = (first.folder / "config.toml").read_text().replace('kind = "local"', 'kind = "pool"\nworkers = 2')
    (tmp_path / "again.toml").write_text(text)
    again = visard.run(tmp_path / "again.toml", out=tmp_path / "again")
    assert_same_results(first.folder, again.folder)


def assert_same_results(a: Path, b: Path) -> None:
    """The same bits: models, figures, ledger."""
    models = sorted(p.relative_to(a) for p in a.rglob("*.safetensors"))
    assert models
    for file in [*models, Path("metrics.json"), Path("ledger.json"), Path("partition.json")]:
        assert (a / file).read_bytes() == (b / file).read_bytes(), file


@pytest.mark.parametrize("policy", ["parameters", "local"])
def test_batch_norm_that_stays_at_home(tmp_path: Path, policy: str) -> None:
    run = finish("fedavg", tmp_path / "run", f"method.batch_norm={policy}", "evaluation.client_benchmarks=true")
    assert run.metrics["generic"] == {}
    assert "statistic" not in run.ledger["totals"], "running statistics stay at home"
    assert len(list((run.folder / "clients").glob("*.safetensors"))) == 3
    assert "test/auc" in run.metrics["clients"]["summary"]


def test_a_shared_head_leaves_as_class_vectors(tmp_path: Path) -> None:
    run = finish("fedavg", tmp_path / "run", "method.share_head=true", "method.mu=0.01", "method.participation=0.6")
    ledger = json.loads((run.folder / "ledger.json").read_text())
    rows = [r for r in ledger["rows"] if r[4] == "W"]
    assert {r[5] for r in rows} == {"class_vectors"}
    assert {r[6] for r in rows} == {size_of(torch.zeros(24, 16))}
    assert len(rows) == 2 * 2, "two of three clients in each of two rounds"


def test_numerics_change_the_result_only_a_little(finished: dict[str, visard.Run], tmp_path: Path) -> None:
    plain = finished["fedavg"].metrics["generic"]["test"]["verification"]["auc"]
    for setting in ("numerics.precision=bf16", "numerics.channels_last=false"):
        run = finish("fedavg", tmp_path / setting, setting)
        assert run.metrics["generic"]["test"]["verification"]["auc"] == pytest.approx(plain, abs=0.15)


def test_every_preset_is_valid() -> None:
    for name, text in presets().items():
        assert text.splitlines()[0].startswith(f"# visard run {name}"), name
        assert load(name).method.name in METHODS


@pytest.mark.parametrize("kind", ["local", "pool"])
def test_runs_leave_no_file_open(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "subprocess", subprocess)  # workers as they really begin

    def count() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    finish("fedavg", tmp_path / "first", f"engine.kind={kind}", "method.rounds=1")
    before = count()
    for number in range(2):
        finish("fedavg", tmp_path / str(number), f"engine.kind={kind}", "method.rounds=1")
    assert count() <= before
