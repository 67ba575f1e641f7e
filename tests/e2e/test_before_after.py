"""Runs from given weights test them as round 0; tables and report begin with before and after."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.smoke import smoke
from tests.e2e.test_methods import assert_same_results
from tests.fuzz.formats import command

import visard
from visard.cli import main
from visard.engines import loop
from visard.errors import Interrupted
from visard.report.page import build_report
from visard.report.run_folder import Run, read_run
from visard.runs import run as runs


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> visard.Run:
    more = ["method.rounds=6", "evaluation.every=0"]
    return visard.run("pretrain", out=tmp_path_factory.mktemp("before") / "run", overrides=[*smoke("pretrain"), *more])


def go(start: Run, out: Path | str, *more: str, method: str = "fedavg", **how: Any) -> Run:
    given = [*smoke(method), "partition.public_identities=6", f"model.weights={start.folder / 'model.safetensors'}"]
    return visard.run(method, out=out, overrides=[*given, *more], **how)


@pytest.fixture(scope="module")
def after(start: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return go(start, tmp_path_factory.mktemp("after") / "run")


def test_given_weights_are_round_0(start: Run, after: Run) -> None:
    first = after.evaluations[0]
    assert [e.step for e in after.measured] == [-1, 0, 1]
    same_people = start.metrics["generic"]["test"]["verification"]
    assert first.generic["test"]["auc"] == pytest.approx(same_people["auc"])
    found = after.metrics["change"]["generic"]["test"]
    assert found["auc"]["before"] == pytest.approx(same_people["auc"])
    assert found["auc"]["after"] == after.metrics["generic"]["test"]["verification"]["auc"]
    assert found["accuracy"]["low"] <= found["accuracy"]["difference"] + 0.2
    for name in ("eer", "auc", "rank1"):  # paired: the same people are drawn for both
        assert found[name]["low"] <= found[name]["difference"] <= found[name]["high"]
    assert after.metrics["change"]["clients"]["rank1"]["clients"] == 3
    assert "change" not in start.metrics
    assert start.evaluations == []


def test_the_report_begins_with_it_and_curves_with_round_0(after: Run, start: Run) -> None:
    page = (after.folder / "report.html").read_text()
    assert page.index("Before and after</h2>") < page.index("What it took</h2>")
    took = page.partition("What it took</h2>")[2].partition("<h2")[0]
    assert "Time per round" in took
    assert "<h3>Verification accuracy" not in took, "what is compared is said once, above"
    assert "Headline metrics</h2>" not in page
    assert "→" in page
    assert "test, before" in page
    alone = (start.folder / "report.html").read_text()
    assert "Before and after</h2>" not in alone
    assert "<h3>Verification accuracy" in alone.partition("Headline metrics</h2>")[2].partition("<h2")[0]


def test_nothing_of_the_model_changes(start: Run, after: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loop.run_rounds
    monkeypatch.setattr(runs, "run_rounds", lambda *given: plain(*given[:-1]))
    untested = go(start, "run")
    assert "change" not in untested.metrics
    model = Path("model.safetensors")
    assert (untested.folder / model).read_bytes() == (after.folder / model).read_bytes()
    assert untested.metrics["generic"] == after.metrics["generic"]


def test_the_pool_finds_the_same(start: Run, after: Run, here: Path) -> None:
    assert_same_results(after.folder, go(start, "run", "engine.kind=pool", "engine.workers=2").folder)


class Stopping(loop.Watcher):
    """Ends a run as Ctrl-C does: when round 0 was tested, or after the first round."""

    def __init__(self, when: str) -> None:
        self.when = when

    def evaluation(self, figures: dict[str, Any]) -> None:
        if self.when == "round 0":
            raise Interrupted("stopped here")

    def round(self, stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
        if self.when == "round 1":
            raise Interrupted("stopped here")


@pytest.mark.parametrize("when", ["round 0", "round 1"])
def test_resuming_keeps_it(start: Run, after: Run, here: Path, when: str) -> None:
    with pytest.raises(Interrupted):
        go(start, "run", watcher=Stopping(when))
    again = visard.resume("run")
    assert_same_results(after.folder, again.folder)
    assert next(e.step for e in again.evaluations) == -1


def test_such_a_run_can_be_replaced(start: Run, after: Run, here: Path) -> None:
    shutil.copytree(after.folder, "run")
    again = go(start, "run", overwrite=True)
    assert_same_results(after.folder, again.folder)


def test_a_run_of_an_older_visard_goes_on_without(start: Run, here: Path) -> None:
    run = go(start, "run", "method.training.schedule=constant")
    (run.folder / "checkpoint" / "before.json").unlink()
    assert "change" not in visard.resume("run", overrides=["method.rounds=3"]).metrics


def test_the_table_shows_it(
    start: Run, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    given = [*smoke("fedavg"), "partition.public_identities=6", f"model.weights={start.folder / 'model.safetensors'}"]
    monkeypatch.setattr(
        sys, "argv", ["visard", "run", "fedavg", "--out", "r", *(p for s in given for p in ("--set", s))]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = capsys.readouterr().out
    assert "given weights, before the first round: test accuracy" in said
    assert "Before and after" in said
    assert "Generic model" not in said, "each figure is said once"


def test_no_winner_is_coloured_across_different_data(after: Run, start: Run, here: Path) -> None:
    twin = Path("twin")
    shutil.copytree(after.folder, twin)
    metrics = json.loads((twin / "metrics.json").read_text())
    metrics["generic"]["test"]["verification"]["eer"] /= 2
    (twin / "metrics.json").write_text(json.dumps(metrics))
    page = build_report([after.folder, twin], "same.html").read_text()
    assert 'class="best"' in page
    assert "tested on the same people" in page
    events = (twin / "events.jsonl").read_text()
    tested = read_run(twin).tested_on
    assert tested is not None
    (twin / "events.jsonl").write_text(events.replace(tested, "0" * 16))
    page = build_report([after.folder, twin], "other.html").read_text()
    assert 'class="best"' not in page
    assert "no run is marked as the best" in page


def test_what_was_tested_on_is_known_of_older_runs_too(after: Run, here: Path) -> None:
    old = Path("old")
    shutil.copytree(after.folder, old)
    events = (old / "events.jsonl").read_text()
    said = json.loads(events.splitlines()[0])["data"]["tested"]
    (old / "events.jsonl").write_text(events.replace(f'"tested":"{said}"', '"x":"y"'))
    assert read_run(old).tested_on == said
    (old / "partition.json").unlink()
    assert read_run(old).tested_on is None


def test_columns_are_named_after_folders(after: Run, here: Path) -> None:
    from visard.report.compare import labels

    for name in ("a/run", "b/run", "c"):
        shutil.copytree(after.folder, name)
    named = partial(lambda *names: labels([read_run(n) for n in names]))
    assert named("a/run", "c") == ["run", "c"]
    assert named("a/run", "b/run") == ["a/run", "b/run"]
    assert len(set(named("c", "c"))) == 2
    assert np.unique(named("a/run", "b/run", "c")).size == 3


def test_any_model_on_the_held_out_people_of_a_run(
    start: Run, after: Run, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["visard", "eval", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        found = capsys.readouterr()
        assert (stop.value.code or 0) == code, found.err
        return found.out + found.err

    own = json.loads(said("--run", str(after.folder), "--json"))["test"]["verification"]
    found = after.metrics["generic"]["test"]["verification"]
    for name in ("auc", "eer", "accuracy"):
        assert own[name] == pytest.approx(found[name]), name
    assert own["intervals"]["accuracy"] == pytest.approx(found["intervals"]["accuracy"] | {"unit": "identity"})
    given = str(start.folder / "model.safetensors")
    before = json.loads(said(given, "--run", str(after.folder), "--json"))["test"]["verification"]
    assert before["auc"] == pytest.approx(after.metrics["before"]["generic"]["test"]["verification"]["auc"])
    assert "model of the run" in said(given, "--run", str(after.folder))
    command("models", "add", given, "--name", "kept")
    capsys.readouterr()
    assert json.loads(said("kept", "--run", str(after.folder), "--json"))["test"]["verification"] == before
    command("models", "remove", "kept")
    assert "give a model and --data" in said(given, code=2)
    assert "holds no run" in said("--run", str(here), code=2)
