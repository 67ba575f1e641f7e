"""The tables of a bench as text: cells for every medium, and Markdown for `results.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visard.bench.results import Cell, Compared, Results, TableOf, by_row
from visard.report.words import NO_VALUE, duration, plain

FAILED = "failed"


def figure(value: float | None, percent: bool) -> str:
    """62.14 for a share of 0.6214; other numbers to four digits."""
    if value is None:
        return NO_VALUE
    return f"{100 * value:.2f}" if percent else plain(value)


def printed(value: float | None) -> str:
    """A paper's figure as it is printed there."""
    return NO_VALUE if value is None else f"{value:g}"


def cell_text(cell: Cell, percent: bool) -> str:
    """Mean ± standard deviation; the mean alone with one seed; how many seeds, if the runs of some failed."""
    if cell.failed:
        return FAILED
    mean, std = cell.summary.mean, cell.summary.std
    text = figure(mean, percent) if mean is None or std is None else f"{figure(mean, percent)} ± {figure(std, percent)}"
    seeds = len(cell.values) + cell.lost
    return f"{text} ({len(cell.values)} of {seeds} seeds)" if cell.lost else text


def heading(column: dict[str, Any]) -> str:
    """The title with its unit."""
    return f"{column['title']} (%)" if column["percent"] else str(column["title"])


def grid(table: TableOf) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table, the paper's figures beside ours where there are any."""
    head, with_paper = ["row"], set()
    for column in table.columns:
        head.append(heading(column))
        if any(row[column["title"]].paper is not None for row in table.cells.values()):
            with_paper.add(column["title"])
            head.append("paper")
    rows = []
    for name, cells in table.cells.items():
        row = [name]
        for column in table.columns:
            cell = cells[column["title"]]
            row.append(cell_text(cell, column["percent"]))
            if column["title"] in with_paper:
                row.append(printed(cell.paper))
        rows.append(row)
    return head, rows


def signed(value: float | None, percent: bool) -> str:
    """+3.10 or −0.42."""
    if value is None:
        return NO_VALUE
    text = figure(abs(value), percent)
    return f"{'−' if value < 0 else '+'}{text}"


def interval(compared: Compared, percent: bool) -> str:
    """The 95 % interval, or why there is none."""
    s = compared.summary
    if s.low is None or s.high is None:
        return "one seed: no interval" if s.n == 1 else NO_VALUE
    return f"{signed(s.low, percent)} to {signed(s.high, percent)}"


def differences(table: TableOf) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the paired differences: a pair of rows and a figure in each line."""
    percent = {c["title"]: c["percent"] for c in table.columns}
    rows = [
        [
            f"{d.a} − {d.b}",
            d.column,
            signed(d.summary.mean, percent[d.column]) + (" points" if percent[d.column] and d.summary.n else ""),
            interval(d, percent[d.column]),
            str(d.summary.n),
        ]
        for d in table.compared
    ]
    return ["difference", "figure", "mean", "95 % interval", "seeds"], rows


def machine_line(results: Results) -> str:
    """Where and with what the figures were measured."""
    m = results.machine
    said = [results.date, str(m["cpu"]), f"{m['cores']} cores", f"torch {m['torch']}"]
    said += [f"visard {results.versions['visard']}", f"Python {results.versions['python']}"]
    return ", ".join(said)


def seeds_line(results: Results) -> str:
    """How many seeds the figures stand on."""
    seeds = ", ".join(map(str, results.seeds))
    if len(results.seeds) == 1:
        return f"One seed ({seeds}): no standard deviation and no interval."
    return f"Mean ± standard deviation over {len(results.seeds)} seeds ({seeds})."


def markdown(results: Results) -> str:
    """`results.md`."""
    parts = [f"# {results.title}", f"```sh\n{results.command}\n```", f"{machine_line(results)}. {seeds_line(results)}"]
    for table in results.tables:
        parts += [f"## {table.title}", _pipe(*grid(table))]
        if table.compared:
            parts += ["Differences, paired by seed, with 95 % t intervals:", _pipe(*differences(table), text=2)]
    for fig in results.figures:
        percent = fig.column["percent"]
        head = [fig.x, *fig.series, *(f"{label} (paper)" for label in fig.paper)]
        rows = []
        for x in sorted({x for points in fig.series.values() for x, *_ in points} | _xs(fig.paper)):
            ours = [{p[0]: p[2] for p in points}.get(x) for points in fig.series.values()]
            cells = [NO_VALUE if c is None else cell_text(c, percent) for c in ours]
            rows.append([f"{x:g}", *cells, *(printed(dict(points).get(x)) for points in fig.paper.values())])
        parts += [f"## {fig.title}", f"{heading(fig.column)} by {fig.x}:", _pipe(head, rows)]
    parts += ["\n".join(f"- {note}" for note in results.notes)] if results.notes else []
    if results.failed:
        parts += ["## Failed runs", "\n".join(f"- {r.row}, seed {r.seed}: {r.reason}" for r in results.failed)]
    if results.problems:
        parts += ["## Missing figures", "\n".join(f"- {text}" for text in results.problems)]
    parts += ["## Runs", _pipe(*runs(results), text=3)]
    return "\n\n".join(parts) + "\n"


def runs(results: Results) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the list of runs: how long each row took, and the command of its first seed."""
    rows = []
    for name, found in by_row(results).items():
        times = [r.seconds for r in found if r.seconds is not None]
        rows.append([name, f"`{found[0].command}`", duration(sum(times)) if times else NO_VALUE])
    return ["row", "command (first seed)", "time, all seeds"], rows


def _xs(paper: dict[str, list[tuple[float, float]]]) -> set[float]:
    return {x for points in paper.values() for x, _ in points}


def _pipe(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """A Markdown table; the first `text` columns are left-aligned."""
    lines = [head, ["---" if i < text else "---:" for i in range(len(head))], *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in row) + " |" for row in lines)
