"""What a bench found: metrics looked up in the run folders, by row, seed and column, and what they come to."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from visard.data.faces import FaceSet, FaceView
from visard.data.sources.catalog import find_set
from visard.errors import UsageError, VisardError, did_you_mean
from visard.files import number, read_json, safe_name, write_json
from visard.inference.model import evaluate, load_model, open_data
from visard.report.run_folder import Run, read_run
from visard.runs.run import machine
from visard.studies.execute import Outcome
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
    """A row's metric in a column."""

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
    problems: list[str] = field(default_factory=list)  # metrics that no run has

    @property
    def failed(self) -> list[RunOf]:
        return [run for run in self.runs if run.state != "finished"]

    def by_row(self) -> dict[str, list[RunOf]]:
        """The runs by row."""
        return {name: [run for run in self.runs if run.row == name] for name in dict.fromkeys(r.row for r in self.runs)}

    def to_dict(self) -> dict[str, Any]:
        """For `results.json`."""
        return asdict(self)


def on_set(data: str, protocol: str, metric: str) -> Callable[[Path], float | None]:
    """A metric of a run's model on a test set of the user; `NotHere` without that set."""

    def value(folder: Path) -> float | None:
        kept = folder / f"on-{safe_name(data)}.json"
        if not kept.exists():
            with users_set(data) as view:
                tested = evaluate(load_model(folder / "model.safetensors"), view, protocols=(protocol,))
            write_json(kept, tested.to_dict())
        return look_up(read_json(kept), metric)

    return value


@contextmanager
def users_set(data: str) -> Iterator[FaceView]:
    """The user's test set of this name; `NotHere` where it is missing, or without what the test needs."""
    try:
        path = find_set(data)
    except UsageError:
        raise NotHere(f"no face set {data} (visard data import)") from None
    try:
        yield open_data(FaceSet.open(path))
    except UsageError as error:
        raise NotHere(f"face set {data}: {error}") from None


def collect(
    plan: Plan, outcomes: Sequence[Outcome], *, bench: str, scale: str, seeds: Sequence[int], command: str, out: Path
) -> Results:
    """Read the metrics of all finished runs; the folders of the runs are relative to `out`.

    Rows that were not asked for (`--only`) are left out.
    """
    reader = _Reader(outcomes, seeds)
    tables = [table for table in (_table(t, reader) for t in plan.tables) if table.cells]
    figures = []
    for fig in plan.figures:
        where = f"figure {fig.title!r}"
        series = {
            label: [(x, row, reader.cell(row, fig.column, where)) for x, row in points if row in reader.folders]
            for label, points in fig.series.items()
        }
        paper = {label: list(points) for label, points in fig.paper.items()}
        figures.append(FigureOf(fig.title, fig.x, _about(fig.column), series, paper))
        reader.note_if_missing([row for points in fig.series.values() for _, row in points], fig.column)
    curves = [CurvesOf(c.title, c.metric, reader.curves(c.rows, c.metric, c.title)) for c in plan.curves]
    return Results(
        bench=bench,
        title=plan.title,
        scale=scale,
        seeds=list(seeds),
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        versions={"visard": version("visard"), "python": platform.python_version(), "numpy": np.__version__},
        machine=machine(outcomes[0].job.settings()),
        runs=[_record(outcome, out) for outcome in outcomes],
        tables=tables,
        figures=figures,
        curves=curves,
        notes=[*plan.notes, *reader.left_out()],
        problems=list(reader.problems),
    )


def _record(outcome: Outcome, out: Path) -> RunOf:
    job = outcome.job
    ends = run_at(job.folder).of("run_finished") if outcome.finished else []
    folder, seconds = os.path.relpath(job.folder, out), number(ends[-1].get("seconds")) if ends else None
    return RunOf(job.row.name, job.seed, outcome.state, outcome.reason, folder, job.portable_command(), seconds)


def _about(column: Column) -> dict[str, Any]:
    path = column.metric if isinstance(column.metric, str) else f"function {column.metric.__name__}"
    return {"title": column.title, "figure": path, "percent": column.percent}


def _table(table: Table, reader: _Reader) -> TableOf:
    where = f"table {table.title!r}"
    reader.means.update(table.means)
    rows = [row for row in table.rows if reader.has(row)]
    columns = [c for c in table.columns if not reader.not_here(rows, c, where)]
    cells = {
        row: {c.title: reader.cell(row, c, where, table.paper.get(row, {}).get(c.title)) for c in columns}
        for row in rows
        if columns
    }
    compared = []
    for a, b in table.compare:
        if not (reader.has(a) and reader.has(b)):
            continue
        for c in columns:
            x, y = reader.cell(a, c, where).values, reader.cell(b, c, where).values
            compared.append(Compared(a, b, c.title, differences(x, y, reader.seeds), paired(x, y)))
    for c in columns:
        reader.note_if_missing([row for row in table.rows if row not in table.means], c)
    return TableOf(table.title, [_about(c) for c in columns], cells, compared)


class _Reader:
    """Reads metrics once, and remembers which paths led nowhere."""

    def __init__(self, outcomes: Sequence[Outcome], seeds: Sequence[int]) -> None:
        self.seeds, self.problems = list(seeds), dict[str, None]()  # each problem once
        self.folders: dict[str, dict[int, Path]] = {}
        self.failures: dict[str, str] = {}
        for o in outcomes:
            of_row = self.folders.setdefault(o.job.row.name, {})
            if o.finished:
                of_row[o.job.seed] = o.job.folder
            else:
                self.failures[o.job.row.name] = o.reason
        self.means: dict[str, tuple[str, ...]] = {}
        self._known: dict[tuple[str, int], Cell] = {}
        self._missing: dict[tuple[str, int], tuple[str, NoMetric]] = {}
        self._left_out: dict[str, dict[str, None]] = {}  # why -> titles of columns, each once

    def has(self, row: str) -> bool:
        """Whether a row was asked for; of a mean all its rows."""
        return set(self.means.get(row, (row,))) <= self.folders.keys()

    def cell(self, row: str, column: Column, where: str, paper: float | None = None) -> Cell:
        """The metric of a row's runs; None for a run that does not have it."""
        if row in self.means:
            return self._mean([self.cell(r, column, where).values for r in self.means[row]])
        key = row, id(column)
        if key not in self._known:
            values: Values = {}
            for seed, folder in self.folders.get(row, {}).items():
                try:
                    values[seed] = metric_of(column, folder)
                except NoMetric as error:
                    values[seed] = None
                    self._missing[key] = where, error
            failed = self.failures.get(row, "") if not values else ""
            lost = len(self.seeds) - len(values) if values else 0
            self._known[key] = Cell(values, spread(list(values.values())), failed=failed, lost=lost)
        return replace(self._known[key], paper=paper)

    def _mean(self, rows: Sequence[Values]) -> Cell:
        """Over rows, of the seeds with which all of them have a value."""
        values: Values = {}
        for seed in self.seeds:
            known = [v for v in (of.get(seed) for of in rows) if v is not None]
            if len(known) == len(rows):
                values[seed] = sum(known) / len(known)
        return Cell(values, spread(list(values.values())), lost=len(self.seeds) - len(values) if values else 0)

    def not_here(self, rows: Sequence[str], column: Column, where: str) -> bool:
        """Whether no row has this column because the user lacks a test set."""
        known = [v for row in rows for v in self.cell(row, column, where).values.values() if v is not None]
        why = [self._missing[key][1] for row in rows if (key := (row, id(column))) in self._missing]
        if known or not why or not isinstance(why[0], NotHere):
            return False
        self._left_out.setdefault(str(why[0]), {})[column.title] = None
        return True

    def left_out(self) -> list[str]:
        """A line for each test set that the user lacks."""
        return [f"Left out, {why}: {', '.join(titles)}." for why, titles in self._left_out.items()]

    def note_if_missing(self, rows: Sequence[str], column: Column) -> None:
        """A path that leads nowhere in every row is a mistake; in some it says that the row has no such metric."""
        keys = [(row, id(column)) for row in dict.fromkeys(rows)]
        if keys and all(key in self._missing for key in keys):
            where, error = self._missing[keys[0]]
            self.problems[f"{where}: {error}"] = None

    def curves(self, rows: Sequence[str], metric: str, title: str) -> dict[str, dict[int, list[tuple[int, float]]]]:
        found: dict[str, dict[int, list[tuple[int, float]]]] = {}
        missing: list[NoMetric] = []
        for row in rows:
            for seed, folder in self.folders.get(row, {}).items():
                try:
                    found.setdefault(row, {})[seed] = curve_of(metric, folder)
                except NoMetric as error:
                    missing.append(error)
        if missing and not any(found.values()):
            self.problems[f"curves {title!r}: {missing[0]}"] = None
        return {row: series for row, series in found.items() if any(series.values())}


class NoMetric(VisardError):
    """A path that leads nowhere; the text says where it ends and what is near."""


class NotHere(NoMetric):
    """A test set that the user does not have, or without what its test needs: its columns are left out."""


def look_up(tree: Any, path: str) -> float | None:
    """The number at a dotted path; None where the file says null.

    - A key of an object may itself hold dots: the longest key that fits is taken ("clients.summary.tar@far=0.1.mean").
    - An item of a list of objects is named by the value of its first field: the list `tar` of `{"far": 0.1, "tar":
      0.62, ...}` has "tar.0.1". That alone is the field called like the list; "tar.0.1.threshold" is another field.
    - An item of a list of numbers is named by its place: "fold_accuracy.0".
    - "a.b | c.d": the first of several paths that leads somewhere.
    """
    missing: NoMetric | None = None
    for one in map(str.strip, path.split("|")):
        try:
            return _number(_walk(tree, one, one, ""), one)
        except NoMetric as error:
            missing = missing or error
    assert missing is not None
    raise missing


def _walk(node: Any, rest: str, path: str, name: str) -> Any:
    if not rest:
        return node
    found: dict[str, Any] = {}
    if isinstance(node, dict):
        found = {str(k): v for k, v in node.items()}
    elif isinstance(node, list) and node and all(isinstance(item, dict) and item for item in node):
        for item in node:
            label = next(iter(item.values()))
            found[f"{label:g}" if isinstance(label, float) else str(label)] = item
    elif isinstance(node, list):
        found = {str(i): item for i, item in enumerate(node)}
    written, key = _first_key(rest, found, isinstance(node, list))
    if not written:
        at = path[: len(path) - len(rest)].rstrip(".") or "the file"
        head = rest.split(".")[0] if isinstance(node, dict) else rest
        near = did_you_mean(head, found) if found else " (nothing is there)"
        raise NoMetric(f"no metric {path}: {at} has no {head!r}{near}")
    inner, left = found[key], rest[len(written) + 1 :]
    if not left and isinstance(node, list) and isinstance(inner, dict):
        left = name
        if name not in inner:
            raise NoMetric(f"no metric {path}: say which field{did_you_mean(name, inner)}")
    return _walk(inner, left, path, key if isinstance(node, dict) else name)


def _first_key(rest: str, found: dict[str, Any], in_list: bool) -> tuple[str, str]:
    """The longest beginning of `rest` that is a key, as written and as it is: a list's 0.001 may be written 1e-3."""
    head = rest
    while head and head not in found:
        if in_list:
            with suppress(ValueError):
                if (key := f"{float(head):g}") in found:
                    return head, key
        head = head.rpartition(".")[0]
    return head, head


def _number(value: Any, path: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, dict | list):
        keys = list(value)[:8] if isinstance(value, dict) else []
        inside = f" (inside: {', '.join(map(str, keys))})" if keys else ""
        raise NoMetric(f"no metric {path}: it is a {'section' if isinstance(value, dict) else 'list'}{inside}")
    if isinstance(value, bool):
        return float(value)
    if (found := number(value)) is None:
        raise NoMetric(f"no metric {path}: {value!r} is not a number")
    return found


@lru_cache(maxsize=16)
def _run(folder: Path, stamp: int) -> Run:
    return read_run(folder)


def run_at(folder: Path) -> Run:
    """The run in a folder, read once for all columns of a row."""
    path = folder / "metrics.json"
    return _run(folder, path.stat().st_mtime_ns if path.exists() else 0)


def metric_of(column: Column, folder: Path) -> float | None:
    """The metric of a column in a run folder; `NoMetric` if the path leads nowhere there."""
    if isinstance(column.metric, str):
        return look_up(run_at(folder).metrics, column.metric)
    try:
        value = column.metric(folder)
    except VisardError:
        raise
    except Exception as error:  # a bench's own function: its failure is a line, not the end of the bench
        raise NoMetric(f"column {column.title!r}: {type(error).__name__}: {error}") from error
    return None if value is None else number(float(value))


def curve_of(metric: str, folder: Path) -> list[tuple[int, float]]:
    """(round, metric) of every evaluation of a run, the final metrics as the last; `NoMetric` if none has it.

    "training.x" is the metric x of the rounds themselves.
    """
    run = run_at(folder)
    places: list[tuple[int, Any]] = [(e.step + 1, e.content) for e in run.measured]
    if metric.startswith("training."):
        places = [(r.step + 1, {"training": r.figures}) for r in run.rounds]
    points, missing = [], None
    for x, tree in places:
        try:
            if (y := look_up(tree, metric)) is not None:
                points.append((x, y))
        except NoMetric as error:
            missing = missing or error
    if missing and not points:
        raise missing
    return points


@dataclass(frozen=True)
class Spread:
    """Some values in two numbers."""

    n: int
    mean: float | None  # None: no value
    std: float | None  # ddof = 1; None: fewer than two values


@dataclass(frozen=True)
class Difference:
    """a - b, paired by seed."""

    n: int
    mean: float | None
    low: float | None  # of the 95 % interval; None: fewer than two pairs
    high: float | None


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and standard deviation (ddof = 1) of the values that are there."""
    known = [v for v in values if v is not None]
    mean = math.fsum(known) / len(known) if known else None
    if mean is None or len(known) < 2:
        return Spread(len(known), mean, None)
    return Spread(len(known), mean, math.sqrt(math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1)))


def differences(a: Mapping[int, float | None], b: Mapping[int, float | None], seeds: Iterable[int]) -> Values:
    """a - b of each seed; None where one of them has no value."""
    both = {seed: (a.get(seed), b.get(seed)) for seed in seeds}
    return {seed: None if x is None or y is None else x - y for seed, (x, y) in both.items()}


def paired(a: Mapping[int, float | None], b: Mapping[int, float | None]) -> Difference:
    """Mean of a - b over the seeds that both have, with the 95 % t interval mean ± t(n - 1) std / sqrt(n)."""
    s = spread(list(differences(a, b, a).values()))
    if s.mean is None or s.std is None:
        return Difference(s.n, s.mean, None, None)
    from scipy.special import stdtrit  # quantiles of Student's t

    half = float(stdtrit(s.n - 1, 0.975)) * s.std / math.sqrt(s.n)
    return Difference(s.n, s.mean, s.mean - half, s.mean + half)
