"""`visard bench`: a paper's tables, with a progress bar for each run that is going on."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from visard import plugins
from visard.cli import options
from visard.cli.console import LINES_EVERY, RunWatcher, console, mark, say, table
from visard.errors import UsageError, VisardError
from visard.files import SHARED, write_atomically, write_json

if TYPE_CHECKING:
    from visard.studies.execute import Job, Outcome
    from visard.studies.results import Results


class Bars:
    """A bar for the whole and one for each run, or lines where there is no terminal; see `studies.execute.Show`."""

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
        say(text)


class Watch(RunWatcher):
    """Watches one run of several, with a bar among theirs."""

    def __init__(self, bars: Bars, job: Job) -> None:
        super().__init__()
        self._bars, self._job, self._last = bars, job, time.monotonic()
        self._begun = True  # with many runs the metrics before the first round are not shown

    def problem(self, text: str) -> None:
        self._bars.say(f"warning: {self._job.label}: {text}")

    def show(self, text: str, done: int, total: int, note: str = "", now: bool = False) -> None:
        self._bars.update(self._job, done, total, note or text)
        if not console.is_terminal and time.monotonic() - self._last > LINES_EVERY:
            self._last = time.monotonic()
            self._bars.say(f"{self._job.label}: {done}/{total} {note or text}")


def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a bench; without one: the list")] = None,
    scale: Annotated[
        str,
        typer.Option(help="smoke (synthetic, minutes), small (CelebA), paper, or real (from --model, or of sensors)"),
    ] = "smoke",
    model: Annotated[
        Path | None, typer.Option(help="real: a network that recognises faces; its last part is trained")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="each row is run once for each seed (default: 0,1,2; real: 0,1,2,3,4)", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the folder of the bench (default: runs/bench/NAME-SCALE)")] = None,
    runs: Annotated[Path | None, typer.Option(help="where the runs are, shared by benches (default: OUT/runs)")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="this row and those that it needs")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="change a setting of all rows")] = None,
    jobs: Annotated[int, typer.Option(help="runs side by side, each in a process with one thread")] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="repeat finished runs whose settings have changed")
    ] = False,
    plugin: options.Plugin = None,
    listing: Annotated[
        bool, typer.Option("--list", help="list the rows and their commands without running them")
    ] = False,
) -> None:
    """Reproduce a paper's tables: make the missing runs, then write results.json, .md and .tex, and report.html.

    Examples:

      visard bench baselines

      visard bench baselines --scale small --seeds 0,1,2 --jobs 2 --out runs/bench/celeba

      visard bench fedfr-da --scale real --model recogniser.onnx --only "L FedFR-DA" --seeds 0

      visard bench baselines --list
    """
    from visard import studies as benches

    if name is None:
        table("Benches", ("name", "what"), benches.BENCHES.items(), text=2)
        return
    from visard.studies.execute import execute, jobs_of, made_before
    from visard.studies.results import collect

    if plugin:
        sets = [*(sets or ()), f"plugins={json.dumps(plugins.load(plugin))}"]
    plan = benches.find(name, scale, model)
    seeds = seeds or ("0,1,2,3,4" if scale == "real" else "0,1,2")
    numbers = _seeds(seeds)
    folder = out or Path("runs") / "bench" / f"{name}-{scale}"
    todo = jobs_of(plan, numbers, runs or folder / "runs", sets or (), only or ())
    if listing:
        for job in todo:
            print(job.command())
        return
    with Bars(len(todo)) as bars:
        outcomes = execute(todo, side_by_side=jobs, overwrite=overwrite, show=bars)
    outcomes += made_before(plan, todo)
    words = ["visard", "bench", name, "--scale", scale, "--seeds", seeds]
    words += ["--model", model.name] if model is not None else []
    words += [part for row in only or () for part in ("--only", row)] + [p for s in sets or () for p in ("--set", s)]
    results = collect(
        plan, outcomes, bench=name, scale=scale, seeds=numbers, command=shlex.join(words), out=folder
    )  # fmt: skip
    _write(results, folder)
    show(results)
    say(f"report: {folder / 'report.html'}")
    if results.failed:
        first = results.failed[0]
        more = f" (and {len(results.failed) - 1} more)" if len(results.failed) > 1 else ""
        raise VisardError(f"failed: {first.row}, seed {first.seed}: {first.reason}{more}")
    if results.problems:
        raise VisardError(results.problems[0])


def _seeds(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {text}: must look like 0,1,2") from None
    if len(set(found)) != len(found) or min(found) < 0:
        raise UsageError(f"--seeds {text}: must be different numbers, none negative")
    return found


def show(results: Results) -> None:
    """The tables at the end of a bench."""
    from visard.studies.page import differences, seeds_line, table_grid

    for t in results.tables:
        table(t.title, *table_grid(t))
        if t.compared:
            table("Differences, paired by seed", *differences(t), text=2)
    say(seeds_line(results))
    for note in results.notes:
        say(note)
    for run in results.failed:
        mark("failed", f"{run.row}, seed {run.seed}: {run.reason}", "red")
    for text in results.problems:
        mark("warning", text)


def _write(results: Results, folder: Path) -> None:
    from visard.studies.latex import latex
    from visard.studies.page import markdown, page

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from None
    write_json(folder / "results.json", results.to_dict(), SHARED)
    write_atomically(folder / "results.md", markdown(results), SHARED)
    write_atomically(folder / "results.tex", latex(results), SHARED)
    write_atomically(folder / "report.html", page(results), SHARED)
