"""`visard bench`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from visard import bench as benches
from visard.bench.execute import execute
from visard.bench.jobs import jobs_of
from visard.bench.render import differences, grid, markdown, seeds_line
from visard.bench.results import Results, collect
from visard.cli.console import console, mark, table
from visard.cli.many import Bars
from visard.errors import UsageError, VisardError
from visard.files import write_atomically, write_json


def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a bench; without one: the list")] = None,
    scale: Annotated[str, typer.Option(help="smoke (synthetic, minutes), small (CelebA) or paper")] = "smoke",
    seeds: Annotated[str, typer.Option(help="one run of each row for each: 0,1,2")] = "0,1,2",
    out: Annotated[Path | None, typer.Option(help="the folder of the bench (default: runs/bench/NAME-SCALE)")] = None,
    runs: Annotated[Path | None, typer.Option(help="where the runs are, shared by benches (default: OUT/runs)")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="this row and those that it needs")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="change a setting of all rows")] = None,
    jobs: Annotated[int, typer.Option(help="runs side by side, each in a process with one thread")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="do runs with other settings again")] = False,
    listing: Annotated[bool, typer.Option("--list", help="show the rows and their commands, run nothing")] = False,
) -> None:
    """Regenerate a paper's tables: runs what is missing, then writes results.json, results.md and report.html.

    Examples:

      visard bench baselines

      visard bench baselines --scale small --seeds 0,1,2 --jobs 2 --out runs/bench/celeba

      visard bench baselines --list
    """
    if name is None:
        table("Benches", ("name", "what"), benches.titles().items(), text=2)
        return
    plan = benches.find(name, scale)
    numbers = _seeds(seeds)
    folder = out or Path("runs") / "bench" / f"{name}-{scale}"
    todo = jobs_of(plan, numbers, runs or folder / "runs", sets or (), only or ())
    if listing:
        for job in todo:
            print(job.command())
        return
    with Bars(len(todo)) as bars:
        outcomes = execute(todo, side_by_side=jobs, overwrite=overwrite, show=bars)
    words = ["visard", "bench", name, "--scale", scale, "--seeds", seeds]
    words += [part for row in only or () for part in ("--only", row)] + [p for s in sets or () for p in ("--set", s)]
    results = collect(
        plan, outcomes, bench=name, scale=scale, seeds=numbers, command=shlex.join(words), out=folder
    )  # fmt: skip
    _write(results, folder)
    show(results)
    console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
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
    for t in results.tables:
        table(t.title, *grid(t))
        if t.compared:
            table("Differences, paired by seed", *differences(t), text=2)
    console.print(seeds_line(results), highlight=False)
    for note in results.notes:
        console.print(note, highlight=False)
    for run in results.failed:
        mark("failed", f"{run.row}, seed {run.seed}: {run.reason}", "red")
    for text in results.problems:
        mark("warning", text)


def _write(results: Results, folder: Path) -> None:
    from visard.bench.page import page

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from None
    write_json(folder / "results.json", results.to_dict())
    write_atomically(folder / "results.md", markdown(results))
    write_atomically(folder / "report.html", page(results))
