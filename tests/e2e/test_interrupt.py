"""Ctrl-C ends a run after its round, with a line that says how to go on; going on gives the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.e2e.smoke import SMOKE
from tests.e2e.test_methods import assert_same_results

import visard
from visard.cli import main
from visard.config import load
from visard.engines.watchers import Watcher

SETTINGS = [*SMOKE, "method.rounds=4"]


class Impatient(Watcher):
    """Presses Ctrl-C in the second round."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def round(self, stage: str, step: int, steps: int, figures: dict[str, Any]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def problem(self, text: str) -> None:
        self.said.append(text)


def test_interrupt_and_resume(here: Path) -> None:
    watcher = Impatient()
    with pytest.raises(visard.VisardError, match="continue with: visard run --resume --out stopped"):
        visard.run("fedavg", overrides=SETTINGS, out="stopped", watcher=watcher)
    assert "Ctrl-C again" in watcher.said[0]
    visard.resume("stopped")
    visard.run("fedavg", overrides=SETTINGS, out="whole")
    assert_same_results(Path("whole"), Path("stopped"))


def test_two_processes_on_one_folder_are_refused(here: Path) -> None:
    import fcntl

    visard.run("fedavg", overrides=SETTINGS, out="run")
    with Path("run/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(visard.VisardError, match="another visard"):
            visard.resume("run")


def test_resume_of_a_finished_run_changes_nothing(here: Path) -> None:
    visard.run("fedavg", overrides=SETTINGS, out="run")
    before = {p: Path("run", p).read_bytes() for p in ("model.safetensors", "metrics.json", "ledger.json")}
    visard.resume("run")
    assert all(Path("run", p).read_bytes() == content for p, content in before.items())


CONSTANT = [*SMOKE, "method.training.schedule=constant", "evaluation.every=0"]


def test_a_run_gets_more_rounds(here: Path) -> None:
    visard.run("fedavg", overrides=[*CONSTANT, "method.rounds=5"], out="whole")
    visard.run("fedavg", overrides=[*CONSTANT, "method.rounds=2"], out="longer")
    visard.resume("longer", overrides=["method.rounds=5"])
    assert_same_results(Path("whole"), Path("longer"))
    assert load("longer/config.toml").to_dict()["method"]["rounds"] == 5, "it is how the run is resumed from now on"
    visard.resume("longer")


def test_more_rounds_are_refused_where_rounds_know_how_many_there_are(here: Path) -> None:
    visard.run("fedavg", overrides=[*SMOKE, "method.rounds=2"], out="cosine")
    with pytest.raises(visard.VisardError, match="fedavg cannot be given more rounds: its learning rate follows a cos"):
        visard.resume("cosine", overrides=["method.rounds=3"])
    visard.run("fedavg", overrides=[*CONSTANT, "method.rounds=2"], out="constant")
    config = Path("constant/config.toml").read_text()
    for change, says in (("method.rounds=1", "more, not fewer"), ("seed=3", "other settings")):
        with pytest.raises(visard.VisardError, match=says):
            visard.resume("constant", overrides=[change])
        assert Path("constant/config.toml").read_text() == config


def test_sigterm_ends_a_run_with_a_line_that_says_how_to_go_on(here: Path) -> None:
    class Manager(Impatient):
        def round(self, stage: str, step: int, steps: int, figures: dict[str, Any]) -> None:
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    watcher = Manager()
    with pytest.raises(visard.VisardError, match="continue with: visard run --resume --out stopped"):
        visard.run("fedavg", overrides=SETTINGS, out="stopped", watcher=watcher)
    assert not watcher.said, "it does not wait for the round to end"
    visard.resume("stopped")
    visard.run("fedavg", overrides=SETTINGS, out="whole")
    assert_same_results(Path("whole"), Path("stopped"))


def test_sigterm_cleans_a_partial_import(here: Path) -> None:
    """A container that is stopped leaves no half-written set behind."""
    command = "from visard.cli import main; main()"
    many = [sys.executable, "-c", command, "data", "make", "--identities", "4000", "--images", "20", "--out", "faces"]
    with subprocess.Popen(many, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while not list(here.glob("faces.partial-*")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert "Traceback" not in said
    assert not list(here.iterdir())


def test_ctrl_c_before_there_is_anything_to_keep_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    made = typer.Typer()
    made.command()(interrupted)
    monkeypatch.setattr("visard.cli.commands", lambda: typer.main.get_command(made))
    monkeypatch.setattr(sys, "argv", ["visard"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    assert capsys.readouterr().err == "visard: stopped (Ctrl-C)\n"
