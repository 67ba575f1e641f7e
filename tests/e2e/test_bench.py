"""`visard bench` end to end on tiny runs: reuse, dependencies, processes side by side, failures, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.e2e.smoke import SMOKE

from visard.cli import main
from visard.studies.execute import execute, jobs_of
from visard.studies.plan import Plan, Row

TINY = [*(s for s in SMOKE if not s.startswith("evaluation.every")), "evaluation.bootstrap=0"]


def visard(*arguments: str) -> int:
    """The exit code of a command."""
    sys.argv = ["visard", *arguments]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def sets(*changes: str) -> list[str]:
    return [part for change in (*TINY, *changes) for part in ("--set", change)]


@pytest.fixture(autouse=True)
def _argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])


def test_baselines_from_nothing_to_a_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = ["bench", "baselines", "--seeds", "0,1", "--out", "b", *sets()]
    assert visard(*bench) == 0
    said = capsys.readouterr().out
    assert "6/6 central, seed 1: finished" in said
    assert "People not seen in training" in said
    read = json.loads(Path("b/results.json").read_text())
    cells = read["tables"][0]["cells"]
    for row in ("local", "fedavg", "central"):
        for seed in ("0", "1"):
            metrics = json.loads(Path(f"b/runs/{row}/seed-{seed}/metrics.json").read_text())
            generic, clients = metrics["generic"], metrics["clients"]["summary"]
            auc = generic["test"]["verification"]["auc"] if generic else clients["test/auc"]["mean"]
            assert cells[row]["AUC"]["values"][seed] == auc
            assert metrics["seed"] == int(seed)
    assert "Differences, paired by seed" in Path("b/results.md").read_text()
    assert "runs/central/seed-1/report.html" in Path("b/report.html").read_text()
    stamp = Path("b/runs/fedavg/seed-0/metrics.json").stat().st_mtime_ns
    assert visard(*bench) == 0
    assert capsys.readouterr().out.count(": kept") == 6
    assert Path("b/runs/fedavg/seed-0/metrics.json").stat().st_mtime_ns == stamp
    shared = ["bench", "baselines", "--seeds", "0", "--out", "c", "--runs", "b/runs", "--only", "fedavg", *sets()]
    assert visard(*shared) == 0
    assert "1/1 fedavg, seed 0: kept" in capsys.readouterr().out
    assert 'href="../b/runs/fedavg/seed-0/report.html"' in Path("c/report.html").read_text()
    parts = json.loads(Path("c/results.json").read_text())["tables"][0]["cells"]
    assert list(parts) == ["local", "fedavg", "central"], "other rows that are there already, of the same seed"
    assert list(parts["central"]["AUC"]["values"]) == ["0"]
    config = Path("b/runs/local/seed-0/config.toml")
    config.write_text(config.read_text().replace("rounds = ", "rounds = 1"))
    assert visard(*shared) == 0
    parts = json.loads(Path("c/results.json").read_text())["tables"][0]["cells"]
    assert list(parts) == ["fedavg", "central"], "a run with other settings is not of this table"


def test_list_shows_commands_that_work(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert visard("bench", "baselines", "--seeds", "3", "--only", "fedavg", "--out", "b", "--list", *sets()) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert not Path("b").exists()
    assert visard(*line.split()[1:]) == 0
    capsys.readouterr()
    assert visard("bench", "baselines", "--seeds", "3", "--only", "fedavg", "--out", "b", *sets()) == 0
    assert "1/1 fedavg, seed 3: kept" in capsys.readouterr().out


def test_bad_use_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["baselinez"], "unknown bench 'baselinez' (did you mean 'baselines'?)"),
        (["baselines", "--scale", "huge"], "--scale huge"),
        (["baselines", "--seeds", "0,0"], "--seeds 0,0"),
        (["baselines", "--seeds", "one"], "--seeds one: must look like 0,1,2"),
        (["baselines", "--only", "fedavgg"], "no row 'fedavgg' in this bench (did you mean 'fedavg'?)"),
        (["baselines", "--set", "method.roundz=1"], "row local: preset local: unknown setting method.roundz"),
        (["baselines", "--jobs", "0"], "--jobs 0"),
    ):
        assert visard("bench", *arguments) == 2, arguments
        error = capsys.readouterr().err
        assert says in error
        assert len(error.strip().splitlines()) == 1
    assert list(here.iterdir()) == []


PLAN = Plan(
    "t",
    (
        Row("tuned", "fedavg", ("model.weights={base}/model.safetensors",)),
        Row("base", "fedavg"),
        Row("wrong", "fedavg", ("data.source=nowhere",)),
    ),
)


def test_processes_side_by_side_give_the_same_results_and_failures_are_told(here: Path) -> None:
    alone = execute(jobs_of(PLAN, [0], Path("alone"), TINY))
    beside = execute(jobs_of(PLAN, [0], Path("beside"), TINY), side_by_side=2)
    assert [o.state for o in alone] == [o.state for o in beside] == ["finished", "finished", "failed"]
    for outcomes in (alone, beside):
        assert outcomes[2].reason.startswith("no face set 'nowhere'")
        assert "\n" not in outcomes[2].reason
    for row in ("base", "tuned"):
        first, second = (Path(p, row, "seed-0", "model.safetensors").read_bytes() for p in ("alone", "beside"))
        assert first == second
    assert "model.weights" not in Path("beside/base/seed-0/config.toml").read_text()
    assert "beside/base/seed-0/model.safetensors" in Path("beside/tuned/seed-0/config.toml").read_text()


def test_ctrl_c_lets_the_processes_end_their_rounds(here: Path) -> None:
    words = ["bench", "baselines", "--only", "fedavg", "--seeds", "0", "--jobs", "2", "--out", "b"]
    command = [sys.executable, "-c", "from visard.cli import main; main()", *words, *sets("method.rounds=5000")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs start with it ignored
    )  # fmt: skip
    events = Path("b/runs/fedavg/seed-0/events.jsonl")
    end = time.monotonic() + 120
    with process:
        try:
            while not (events.exists() and '"event":"round"' in events.read_text()):
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 1
    assert said == "visard: interrupted; the same command goes on where this one stopped\n"
    assert '"reason":"interrupted"' in events.read_text().splitlines()[-1]
