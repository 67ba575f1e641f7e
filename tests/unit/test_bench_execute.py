"""Which runs of a bench are made, kept, resumed, refused and replaced; what a failure does to the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from visard.cli.bench import Bars
from visard.config import load
from visard.errors import Interrupted, UsageError, VisardError
from visard.studies.execute import Job, Outcome, execute, jobs_of
from visard.studies.plan import Plan, Row

PLAN = Plan("t", (Row("tuned", "fedavg", ("model.weights={base}/model.safetensors",)), Row("base", "fedavg")))


class Runs:
    """Stands in for `visard.runs.run.run`: writes what the bench looks at, and notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool, bool]] = []
        self.fails: dict[str, Exception | KeyboardInterrupt] = {}

    def __call__(
        self, preset: str, *, overrides: Sequence[str], out: Path, resume: bool, overwrite: bool, watcher: Any
    ) -> None:
        name = f"{out.parent.name}-{out.name}"
        self.calls.append((name, resume, overwrite))
        settings = load(preset, overrides)
        if overwrite:
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.toml").write_text(settings.to_toml())
        watcher.round("train", 1, 2, {"loss": 1.0})
        if name in self.fails:
            raise self.fails[name]
        (out / "metrics.json").write_text(json.dumps({"name": name, "lr": settings.method.training.lr}))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr("visard.runs.run.run", fake)
    return fake


def jobs(folder: Path, *sets: str, seeds: Sequence[int] = (0,), only: Sequence[str] = ()) -> list[Job]:
    return jobs_of(PLAN, seeds, folder, sets, only)


def states(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {f"{o.job.row.name}-{o.job.seed}": "kept" if o.reused else o.state for o in outcomes}


def test_settings_folders_and_commands(tmp_path: Path) -> None:
    base, tuned = jobs(Path("out/runs"), "method.rounds=3", "method.rounds=4", seeds=[7])
    assert base.folder == Path("out/runs/base/seed-7")
    assert base.command() == (
        "visard run fedavg --set method.rounds=4 --set seed=7 --set name=base-seed-7 --out out/runs/base/seed-7"
    )
    assert "--set model.weights=runs/base/seed-7/model.safetensors " in tuned.portable_command()
    settings = tuned.settings()
    assert (settings.seed, settings.name, settings.method.rounds) == (7, "tuned-seed-7", 4)  # type: ignore[attr-defined]
    assert settings.model.weights == str(Path("out/runs/base/seed-7/model.safetensors").absolute())


def test_a_second_time_everything_is_kept(tmp_path: Path, runs: Runs) -> None:
    assert set(states(execute(jobs(tmp_path, seeds=[0, 1]))).values()) == {"finished"}
    assert [name for name, *_ in runs.calls] == ["base-seed-0", "tuned-seed-0", "base-seed-1", "tuned-seed-1"]
    runs.calls.clear()
    assert set(states(execute(jobs(tmp_path, seeds=[0, 1]))).values()) == {"kept"}
    assert runs.calls == []


def test_only_a_row_and_what_it_needs(tmp_path: Path, runs: Runs) -> None:
    assert states(execute(jobs(tmp_path, only=["base"]))) == {"base-0": "finished"}
    assert states(execute(jobs(tmp_path, only=["tuned"]))) == {"base-0": "kept", "tuned-0": "finished"}


def test_a_moved_bench_is_kept(tmp_path: Path, runs: Runs) -> None:
    execute(jobs(tmp_path / "a"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert set(states(execute(jobs(tmp_path / "b"))).values()) == {"kept"}


def test_an_unfinished_run_is_resumed(tmp_path: Path, runs: Runs) -> None:
    execute(jobs(tmp_path))
    (tmp_path / "tuned" / "seed-0" / "metrics.json").unlink()
    runs.calls.clear()
    execute(jobs(tmp_path))
    assert runs.calls == [("tuned-seed-0", True, False)]


def test_other_settings_are_refused_before_anything_is_run_and_replaced_on_demand(tmp_path: Path, runs: Runs) -> None:
    execute(jobs(tmp_path))
    runs.calls.clear()
    with pytest.raises(
        UsageError, match=r"base/seed-0 was run with other settings \(method.rounds = 30 there, 9 here\)"
    ):
        execute(jobs(tmp_path, "method.rounds=9"))
    assert runs.calls == []
    execute(jobs(tmp_path, "method.rounds=9"), overwrite=True)
    assert runs.calls == [("base-seed-0", False, True), ("tuned-seed-0", False, True)]
    runs.calls.clear()
    execute(jobs(tmp_path, "method.rounds=9"), overwrite=True)
    assert runs.calls == [], "what is right is not done again"


def test_a_run_made_from_an_earlier_result_is_not_kept(tmp_path: Path, runs: Runs) -> None:
    execute(jobs(tmp_path))
    (tmp_path / "base" / "seed-0" / "metrics.json").write_text('{"name": "base", "lr": 5}')
    with pytest.raises(UsageError, match="tuned/seed-0 was made from an earlier run of base"):
        execute(jobs(tmp_path))
    runs.calls.clear()
    execute(jobs(tmp_path), overwrite=True)
    assert runs.calls == [("tuned-seed-0", False, True)]


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "base" / "seed-0").mkdir(parents=True)
    (tmp_path / "base" / "seed-0" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="is not a run"):
        execute(jobs(tmp_path), overwrite=True)
    assert (tmp_path / "base" / "seed-0" / "thesis.tex").exists()


def test_a_failure_does_not_end_the_rest(tmp_path: Path, runs: Runs) -> None:
    runs.fails = {"base-seed-0": VisardError("no good replies"), "base-seed-1": RuntimeError("shape\nmismatch")}
    outcomes = execute(jobs(tmp_path, seeds=[0, 1, 2]))
    assert states(outcomes) == {
        "base-0": "failed", "tuned-0": "failed", "base-1": "failed", "tuned-1": "failed",
        "base-2": "finished", "tuned-2": "finished",
    }  # fmt: skip
    assert [o.reason for o in outcomes[:4]] == [
        "no good replies",
        "needs base, which failed",
        "internal error: RuntimeError: shape",
        "needs base, which failed",
    ]  # fmt: skip


@pytest.mark.parametrize("stop", [Interrupted("interrupted"), KeyboardInterrupt()])
def test_ctrl_c_ends_the_bench(tmp_path: Path, runs: Runs, stop: Interrupted | KeyboardInterrupt) -> None:
    runs.fails = {"base-seed-0": stop}
    with pytest.raises(Interrupted, match="the same command goes on"):
        execute(jobs(tmp_path, seeds=[0, 1]))
    assert len(runs.calls) == 1
    runs.fails = {}
    execute(jobs(tmp_path))
    assert runs.calls[1] == ("base-seed-0", True, False)


def test_a_wrong_setting_names_its_row(tmp_path: Path, runs: Runs) -> None:
    with pytest.raises(UsageError, match="row base: preset fedavg: unknown setting method.roundz"):
        execute(jobs(tmp_path, "method.roundz=1"))
    with pytest.raises(UsageError, match="--jobs 0"):
        execute(jobs(tmp_path), side_by_side=0)


def test_lines_of_progress(tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.fails = {"tuned-seed-0": VisardError("broken [red]")}
    with Bars(2) as bars:
        execute(jobs(tmp_path), show=bars)
    assert capsys.readouterr().out.splitlines() == [
        "1/2 base, seed 0: finished",
        "2/2 tuned, seed 0: failed broken [red]",
    ]
