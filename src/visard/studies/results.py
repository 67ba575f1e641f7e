"""What a bench found, as plain values: every single one by row, seed and column, and what they come to."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from visard.runs.run import machine
from visard.studies.execute import Outcome
from visard.studies.lookup import Difference, NoFigure, Spread, curve_of, figure_of, paired, seconds_of, spread
from visard.studies.plan import Column, Plan, Table

Values = dict[int, float | None]  # by seed


@dataclass(frozen=True)
class RunOf:
    """A run of the bench."""

    row: str
    seed: int
    state: str  # finished, failed
    reason: str
    folder: str
    command: str
    seconds: float | None


@dataclass(frozen=True)
class Cell:
    """A row's figure in a column."""

    values: Values
    summary: Spread
    paper: float | None = None  # as printed: in per cent where the column is
    failed: str = ""  # why no seed has a run
    lost: int = 0  # seeds whose run failed, where others did not


@dataclass(frozen=True)
class Compared:
    """Row a minus row b in a column, paired by seed."""

    a: str
    b: str
    column: str
    values: Values
    summary: Difference


@dataclass(frozen=True)
class TableOf:
    """A table with its values. Cells: row -> column title."""

    title: str
    columns: list[dict[str, Any]]  # title, figure, percent
    cells: dict[str, dict[str, Cell]]
    compared: list[Compared]


@dataclass(frozen=True)
class FigureOf:
    """A figure with its values. Series: label -> (x, row, cell)."""

    title: str
    x: str
    column: dict[str, Any]
    series: dict[str, list[tuple[float, str, Cell]]]
    paper: dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class CurvesOf:
    """Curves with their values. Series: row -> seed -> (round, value)."""

    title: str
    figure: str
    series: dict[str, dict[int, list[tuple[int, float]]]]


@dataclass(frozen=True)
class Results:
    """A whole bench with its values."""

    bench: str
    title: str
    scale: str
    seeds: list[int]
    command: str
    date: str
    versions: dict[str, str]
    machine: dict[str, Any]
    runs: list[RunOf]
    tables: list[TableOf]
    figures: list[FigureOf]
    curves: list[CurvesOf]
    notes: list[str]
    problems: list[str] = field(default_factory=list)  # figures that no run has

    @property
    def failed(self) -> list[RunOf]:
        return [run for run in self.runs if run.state != "finished"]

    def to_dict(self) -> dict[str, Any]:
        """For `results.json`."""
        return asdict(self)


def collect(
    plan: Plan, outcomes: Sequence[Outcome], *, bench: str, scale: str, seeds: Sequence[int], command: str, out: Path
) -> Results:
    """Read the figures of all finished runs; the folders of the runs are told relative to `out`.

    Rows that were not asked for (`--only`) are left out.
    """
    reader = _Reader(outcomes, seeds)
    tables = [table for table in (_table(t, reader) for t in plan.tables) if table.cells]
    figures = []
    for fig in plan.figures:
        series = {
            label: [
                (x, row, reader.cell(row, fig.column, f"figure {fig.title!r}"))
                for x, row in points
                if row in reader.folders
            ]
            for label, points in fig.series.items()
        }
        paper = {label: list(points) for label, points in fig.paper.items()}
        figures.append(FigureOf(fig.title, fig.x, _about(fig.column), series, paper))
        reader.none_has_it([row for points in fig.series.values() for _, row in points], fig.column)
    curves = [CurvesOf(c.title, c.figure, reader.curves(c.rows, c.figure, c.title)) for c in plan.curves]
    settings = outcomes[0].job.settings()
    return Results(
        bench=bench,
        title=plan.title,
        scale=scale,
        seeds=list(seeds),
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        versions={"visard": version("visard"), "python": platform.python_version(), "numpy": np.__version__},
        machine=machine(settings),
        runs=[_run(outcome, out) for outcome in outcomes],
        tables=tables,
        figures=figures,
        curves=curves,
        notes=list(plan.notes),
        problems=reader.problems,
    )


def _run(outcome: Outcome, out: Path) -> RunOf:
    job, done = outcome.job, outcome.state == "finished"
    seconds = seconds_of(job.folder) if done else None
    folder = os.path.relpath(job.folder, out)
    return RunOf(job.row.name, job.seed, outcome.state, outcome.reason, folder, job.portable_command(), seconds)


def _about(column: Column) -> dict[str, Any]:
    path = column.figure if isinstance(column.figure, str) else f"function {column.figure.__name__}"
    return {"title": column.title, "figure": path, "percent": column.percent}


def _table(table: Table, reader: _Reader) -> TableOf:
    where = f"table {table.title!r}"
    cells = {
        row: {c.title: reader.cell(row, c, where, table.paper.get(row, {}).get(c.title)) for c in table.columns}
        for row in table.rows
        if row in reader.folders
    }
    compared = []
    for a, b in table.compare:
        if not {a, b} <= reader.folders.keys():
            continue
        for c in table.columns:
            x, y = reader.cell(a, c, where).values, reader.cell(b, c, where).values
            each = {s: _minus(x.get(s), y.get(s)) for s in reader.seeds}
            compared.append(Compared(a, b, c.title, each, paired(x, y)))
    for c in table.columns:
        reader.none_has_it(table.rows, c)
    return TableOf(table.title, [_about(c) for c in table.columns], cells, compared)


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


class _Reader:
    """Reads figures once, and remembers which paths led nowhere."""

    def __init__(self, outcomes: Sequence[Outcome], seeds: Sequence[int]) -> None:
        self.seeds, self.problems = list(seeds), list[str]()
        self.folders: dict[str, dict[int, Path]] = {}
        self.failures: dict[str, str] = {}
        for o in outcomes:
            of_row = self.folders.setdefault(o.job.row.name, {})
            if o.state == "finished":
                of_row[o.job.seed] = o.job.folder
            else:
                self.failures[o.job.row.name] = o.reason
        self._known: dict[tuple[str, int], Cell] = {}
        self._missing: dict[tuple[str, int], tuple[str, NoFigure]] = {}

    def cell(self, row: str, column: Column, where: str, paper: float | None = None) -> Cell:
        """The figure of a row's runs; None for a run that does not have it."""
        key = row, id(column)
        if key not in self._known:
            values: Values = {}
            for seed, folder in self.folders.get(row, {}).items():
                try:
                    values[seed] = figure_of(column, folder)
                except NoFigure as error:
                    values[seed] = None
                    self._missing[key] = where, error
            failed = self.failures.get(row, "") if not values else ""
            lost = len(self.seeds) - len(values) if values else 0
            self._known[key] = Cell(values, spread(list(values.values())), failed=failed, lost=lost)
        return replace(self._known[key], paper=paper)

    def none_has_it(self, rows: Sequence[str], column: Column) -> None:
        """A path that leads nowhere in every row is a mistake; in some it says that the row has no such figure."""
        keys = [(row, id(column)) for row in dict.fromkeys(rows)]
        if keys and all(key in self._missing for key in keys):
            where, error = self._missing[keys[0]]
            self._problem(f"{where}: {error}")

    def curves(self, rows: Sequence[str], figure: str, title: str) -> dict[str, dict[int, list[tuple[int, float]]]]:
        found: dict[str, dict[int, list[tuple[int, float]]]] = {}
        missing: list[NoFigure] = []
        for row in rows:
            for seed, folder in self.folders.get(row, {}).items():
                try:
                    found.setdefault(row, {})[seed] = curve_of(figure, folder)
                except NoFigure as error:
                    missing.append(error)
        if missing and not any(found.values()):
            self._problem(f"curves {title!r}: {missing[0]}")
        return {row: series for row, series in found.items() if any(series.values())}

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def by_row(results: Results) -> Mapping[str, list[RunOf]]:
    """The runs by row."""
    rows: dict[str, list[RunOf]] = {}
    for run in results.runs:
        rows.setdefault(run.row, []).append(run)
    return rows
