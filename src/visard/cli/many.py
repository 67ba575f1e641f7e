"""Progress of several runs: a bar for each that is going on, or lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from visard.bench.execute import Outcome
from visard.bench.jobs import Job
from visard.cli.console import LINES_EVERY, console


class Bars:
    """A bar for the whole, and one for each run; see `bench.execute.Show`."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._tasks: dict[Job, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._all = self._bars.add_task("runs", total=total, note="")

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def begun(self, job: Job) -> Watch:
        self._tasks[job] = self._bars.add_task(job.label, total=None, note="")
        return Watch(self, job)

    def update(self, job: Job, done: int, total: int, note: str) -> None:
        """Move the bar of a run."""
        self._bars.update(self._tasks[job], completed=done, total=total, note=note)

    def ended(self, outcome: Outcome) -> None:
        self.done += 1
        if (task := self._tasks.pop(outcome.job, None)) is not None:
            self._bars.remove_task(task)
        self._bars.update(self._all, completed=self.done)
        what = "kept" if outcome.reused else outcome.state
        self.say(f"{self.done}/{self.total} {outcome.job.label}: {what} {outcome.reason}".rstrip())

    def say(self, text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)


class Watch:
    """Watches one run of several; see `engines.loop.Watcher`."""

    def __init__(self, bars: Bars, job: Job) -> None:
        self._bars, self._job, self._last, self._note = bars, job, time.monotonic(), ""

    def rendering(self, done: int, total: int) -> None:
        self._show(done, total, "drawing synthetic faces")

    def round(self, stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
        loss = f"loss {figures['loss']:.3f}" if "loss" in figures else ""
        self._show(step, steps, f"{stage}  {loss}  {self._note}".strip())

    def evaluation(self, figures: dict[str, Any]) -> None:
        found = [
            f"{k} accuracy {v['accuracy']:.3f}" for k, v in figures.get("generic", {}).items() if v.get("accuracy")
        ]
        self._note = "  ".join(found)

    def problem(self, text: str) -> None:
        self._bars.say(f"warning: {self._job.label}: {text}")

    def _show(self, done: int, total: int, note: str) -> None:
        self._bars.update(self._job, done, total, note)
        if not console.is_terminal and time.monotonic() - self._last > LINES_EVERY:
            self._last = time.monotonic()
            self._bars.say(f"{self._job.label}: {done}/{total} {note}")
