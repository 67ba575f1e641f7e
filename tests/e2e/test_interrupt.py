"""Ctrl-C ends a run after its round, with a line that says how to go on; going on gives the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.smoke import SMOKE
from tests.e2e.test_methods import assert_same_results

import visard
from visard.engines.loop import Watcher

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
