"""Tables and progress: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from visard.text import line, visible


class _Console(Console):
    """Prints text from any source: no control characters but rich's own reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(visible(part.text), part.style)


console = _Console(markup=False)  # words of parties, paths and names may hold square brackets
LINES_EVERY = 10.0  # seconds between progress lines where there is no terminal


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1) -> None:
    """Print a table; the first `text` columns are left-aligned."""
    t = Table(show_edge=False, pad_edge=False)  # four columns narrower
    for i, column in enumerate(columns):
        t.add_column(column, justify="left" if i < text else "right", overflow="fold")
    for row in rows:
        t.add_row(*(line(cell) for cell in row))
    console.print(Text(line(title), "bold"), soft_wrap=True)  # a path in it stays whole, whatever the table's width
    console.print(t)


def say(text: str) -> None:
    """Print a line as it is, without wrapping or colours."""
    console.print(line(text), highlight=False, soft_wrap=True)


def mark(word: str, text: str, colour: str = "yellow") -> None:
    """Print a line that begins with a coloured word."""
    console.print(Text.assemble((word, colour), " ", line(text)), soft_wrap=True)


def list_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Print the first of the files that could not be used, each with the reason."""
    for file, reason in skipped[:10]:
        mark("skipped", f"{file}: {reason}")
    if len(skipped) > 10:
        mark("skipped", f"{len(skipped) - 10} more")


class Bar:
    """One progress bar, or a line at intervals."""

    def __init__(self, text: str, total: int) -> None:
        self.text, self.total, self._last = text, total, time.monotonic()
        self.printed: int | None = None  # what was done at the last line
        self._bar = self._task = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False), console=console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(text, total=total, note="")

    def update(self, done: int, note: str = "", now: bool = False) -> None:
        """Show that `done` of the total are done; `now`: also where lines are few."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif now or done >= self.total or time.monotonic() - self._last > LINES_EVERY:
            self._last = time.monotonic()
            say(f"{self.text}: {done}/{self.total} {note}".rstrip())
            self.printed = done

    def progress(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done, where the total was not known before."""
        self.total = total
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=total)
        self.update(done)

    def close(self) -> None:
        """Stop updating the bar."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def bar(text: str, total: int) -> Iterator[Bar]:
    """A progress bar for a block."""
    shown = Bar(text, total)
    try:
        yield shown
    finally:
        shown.close()


class RunWatcher:
    """Shows a run as it goes; see `engines.watchers.Watcher`."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._note = ""  # the last test, until a line has shown it
        self._begun = False  # whether a round is done
        self._resumed = False  # whether rounds were done before

    def begun(self, folder: Path) -> None:
        return

    def resumed(self, rounds: int) -> None:
        self._resumed = True

    def rendering(self, done: int, total: int) -> None:
        self.show("drawing synthetic faces", done, total)

    def activations(self, done: int, total: int) -> None:
        self.show("pictures through the frozen part", done, total)

    def round(self, stage: str, step: int, steps: int, metrics: dict[str, float]) -> None:
        first, self._begun = not self._begun, True
        loss = f"loss {metrics['loss']:.3f}" if "loss" in metrics else ""
        self.show("rounds", step, steps, f"{stage}  {loss}  {self._note}".strip(), now=first)
        if self._bar is not None and self._bar.printed == step:
            self._note = ""

    def evaluation(self, metrics: dict[str, Any]) -> None:
        tests = {k: v["accuracy"] for k, v in metrics.get("generic", {}).items() if v.get("accuracy") is not None}
        self._note = "  ".join(f"{name} accuracy {value:.3f}" for name, value in tests.items())
        if not self._begun and not self._resumed and self._note:
            say(f"given weights, before the first round: {self._note}")
            self._note = ""

    def problem(self, text: str) -> None:
        mark("warning", text)

    def ended(self, finished: bool) -> None:
        return

    def show(self, text: str, done: int, total: int, note: str = "", now: bool = False) -> None:
        """Move the bar of what is going on."""
        if self._bar is None or self._bar.text != text:
            self._clear()
            self._bar = Bar(text, total)
        self._bar.update(done, note, now)

    def close(self) -> None:
        """The run has ended."""
        self._clear()

    def _clear(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def share(value: float | None) -> str:
    """A share with four digits, or a dash."""
    return "-" if value is None else f"{value:.4f}"
