"""What a bench is: its runs, and the tables, figures and curves that it makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from visard.errors import UsageError, did_you_mean

Scale = Literal["smoke", "small", "paper", "real"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "paper")
REAL: Scale = "real"  # from a network that the user gives, of which the last part trains
# for runs from given weights: the papers let batch norm follow its batches, and the pages in docs/results were made so
TRAINED_NORM = "model.frozen_norm=false"
# the run folder of another row in an override; what has quotes in it is a table of TOML
PLACE = re.compile(r"\{([^{}\"]*)\}")
BAD_NAME = re.compile(r"[/\\{}\"\x00-\x1f]|^[.\s]|\s$")


@dataclass(frozen=True)
class Row:
    """One run for each seed."""

    name: str  # its folder and its label
    preset: str  # a preset's name
    set: tuple[
        str, ...
    ] = ()  # overrides "a.b=c"; "{other}" becomes the run folder of row `other`, same seed, run first

    def needs(self) -> tuple[str, ...]:
        """The rows whose run folders the overrides name."""
        return tuple(dict.fromkeys(name for text in self.set for name in PLACE.findall(text)))


@dataclass(frozen=True)
class Column:
    """A metric of a run; see `results.look_up` for what a path may be."""

    title: str  # "TAR @ FAR 0.1"
    metric: str | Callable[[Path], float | None]  # a dotted path into metrics.json, or a function of the run folder
    percent: bool = True  # a share between 0 and 1, shown in per cent


@dataclass(frozen=True)
class Table:
    """Rows by columns: mean and standard deviation over seeds."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    # row -> column title -> the paper's number as it is printed there (in per cent where the column is); other data
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    compare: tuple[tuple[str, str], ...] = ()  # (a, b): differences a - b, paired by seed
    # name -> rows: the mean over these rows for each seed, as a row of its own
    means: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A column of runs over some setting of theirs, as a figure."""

    title: str
    x: str  # what the axis says
    column: Column
    series: Mapping[str, tuple[tuple[float, str], ...]]  # label -> (x, row name)
    paper: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)  # label -> (x, y as printed)


@dataclass(frozen=True)
class Curves:
    """A metric over rounds, from the `evaluation` events and, as the last point, the final metrics."""

    title: str
    rows: tuple[str, ...]
    # a dotted path into the evaluation event: "generic.test.accuracy", "clients.rank1.mean"; or "training.x", of rounds
    metric: str


@dataclass(frozen=True)
class Plan:
    """A whole bench."""

    title: str
    rows: tuple[Row, ...]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    curves: tuple[Curves, ...] = ()
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise UsageError(f"no row {name!r} in this bench{did_you_mean(name, [r.name for r in self.rows])}")


def in_order(plan: Plan, only: Sequence[str] = ()) -> tuple[Row, ...]:
    """The rows, or those of `only` and what they need, each after the rows that it needs."""
    done: dict[str, Row] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise UsageError(f"rows that need each other: {' -> '.join((*path, name))}")
        if name in done:
            return
        row = plan.row(name)
        for other in row.needs():
            visit(other, (*path, name))
        done[name] = row

    for name in only or [row.name for row in plan.rows]:
        visit(name, ())
    return tuple(done.values())


def check(plan: Plan) -> None:
    """Refuse a plan that cannot work: names twice or unknown, unknown placeholders, paper's numbers out of place."""
    names = [row.name for row in plan.rows]
    for row in plan.rows:
        if names.count(row.name) > 1:
            raise UsageError(f"two rows are called {row.name!r}")
        if not row.name or BAD_NAME.search(row.name) or len(row.name) > 80:
            raise UsageError(f"row {row.name!r}: not a name for a folder")
        for other in row.needs():
            if other not in names:
                text = next(s for s in row.set if f"{{{other}}}" in s)
                raise UsageError(f"row {row.name}: {text}: there is no row {other!r}{did_you_mean(other, names)}")
    in_order(plan)
    for table in plan.tables:
        titles = [c.title for c in table.columns]
        shown = [*table.rows, *(name for pair in table.compare for name in pair)]
        _known([r for rows in table.means.values() for r in rows], names, f"a mean of table {table.title!r}")
        _known(shown, [*names, *table.means], f"table {table.title!r}")
        _known(table.paper, table.rows, f"the paper's numbers of table {table.title!r}")
        for row_name, cells in table.paper.items():
            _known(cells, titles, f"the paper's numbers of row {row_name!r}", "column")
        shares = {c.title for c in table.columns if c.percent}
        _as_printed([v for r in table.paper.values() for t, v in r.items() if t in shares], f"table {table.title!r}")
    for figure in plan.figures:
        _known([name for points in figure.series.values() for _, name in points], names, f"figure {figure.title!r}")
        if figure.column.percent:
            _as_printed([y for points in figure.paper.values() for _, y in points], f"figure {figure.title!r}")
    for curves in plan.curves:
        _known(curves.rows, names, f"curves {curves.title!r}")


def _known(used: Iterable[str], known: Sequence[str], where: str, what: str = "row") -> None:
    for name in used:
        if name not in known:
            raise UsageError(f"{where}: there is no {what} {name!r}{did_you_mean(name, known)}")


def _as_printed(values: Sequence[float], where: str) -> None:
    """Per cent are written 93.7, not 0.937: shown beside ours, a mistake would be a hundredfold."""
    if values and all(0 < abs(v) <= 1 for v in values):
        raise UsageError(f"{where}: the paper's numbers look like shares; write per cent, 93.7 and not 0.937")
