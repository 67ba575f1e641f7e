"""What a bench shows: its tables as text and Markdown, and `report.html`, a page in the style of the run reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from visard.evaluation.metrics import describe
from visard.report.charts import band, by_round, colour, line, names_axis, offer, value_axis
from visard.report.html import Chart, Json, Section, esc, facts, fold, grid, notice, page_of, table, with_charts
from visard.studies.results import Cell, Compared, CurvesOf, FigureOf, Results, RunOf, Spread, TableOf, spread
from visard.text import NO_VALUE, duration, plain, plural

BAND = "Band: one standard deviation over seeds."


def number_text(value: float | None, percent: bool) -> str:
    """62.14 for a share of 0.6214; other numbers to four digits."""
    if value is None:
        return NO_VALUE
    return f"{100 * value:.2f}" if percent else plain(value)


def printed(value: float | None) -> str:
    """A paper's number as it is printed there."""
    return NO_VALUE if value is None else f"{value:g}"


def cell_text(cell: Cell, percent: bool) -> str:
    """Mean ± standard deviation; the mean alone with one seed; how many seeds, if the runs of some failed."""
    if cell.failed:
        return "failed"
    text = number_text(cell.summary.mean, percent)
    if cell.summary.std is not None:
        text += f" ± {number_text(cell.summary.std, percent)}"
    seeds = len(cell.values) + cell.lost
    return f"{text} ({len(cell.values)} of {seeds} seeds)" if cell.lost else text


def heading(column: dict[str, Any]) -> str:
    """The title with its unit."""
    return f"{column['title']} (%)" if column["percent"] else str(column["title"])


def table_grid(table: TableOf, show: Callable[[Cell, bool], str] = cell_text) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table, the paper's numbers beside ours where there are any."""
    head, rows = ["row"], [[name] for name in table.cells]
    for column in table.columns:
        cells = [row[column["title"]] for row in table.cells.values()]
        beside = any(cell.paper is not None for cell in cells)
        head += [heading(column), *(["paper"] if beside else [])]
        for row, cell in zip(rows, cells, strict=True):
            row += [show(cell, column["percent"]), *([printed(cell.paper)] if beside else [])]
    return head, rows


def signed(value: float | None, percent: bool) -> str:
    """+3.10 or −0.42."""
    if value is None:
        return NO_VALUE
    return f"{'−' if value < 0 else '+'}{number_text(abs(value), percent)}"


def interval(compared: Compared, percent: bool) -> str:
    """The 95 % interval, or why there is none."""
    s = compared.summary
    if s.low is None or s.high is None:
        return "one seed: no interval" if s.n == 1 else NO_VALUE
    return f"{signed(s.low, percent)} to {signed(s.high, percent)}"


def differences(table: TableOf) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the paired differences: a pair of rows and a metric in each line."""
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
    return ["difference", "metric", "mean", "95 % interval", "seeds"], rows


def machine_line(results: Results) -> str:
    """Where and with what the metrics were measured."""
    m = results.machine
    software = f"torch {m['torch']}, visard {results.versions['visard']}, Python {results.versions['python']}"
    return f"{results.date}, {m['cpu']}, {m['cores']} cores, {software}"


def seeds_line(results: Results) -> str:
    """How many seeds the metrics stand on."""
    seeds = ", ".join(map(str, results.seeds))
    if len(results.seeds) == 1:
        return f"One seed ({seeds}): no standard deviation and no interval."
    return f"Mean ± standard deviation over {len(results.seeds)} seeds ({seeds})."


def markdown(results: Results) -> str:
    """`results.md`."""
    parts = [f"# {results.title}", f"```sh\n{results.command}\n```", f"{machine_line(results)}. {seeds_line(results)}"]
    for one in results.tables:
        parts += [f"## {one.title}", _pipe(*table_grid(one))]
        if one.compared:
            parts += ["Differences, paired by seed, with 95 % t intervals:", _pipe(*differences(one), text=2)]
    for fig in results.figures:
        percent = fig.column["percent"]
        head = [fig.x, *fig.series, *(f"{label} (paper)" for label in fig.paper)]
        rows = []
        ours_at = {x for points in fig.series.values() for x, *_ in points}
        for x in sorted(ours_at | {x for points in fig.paper.values() for x, _ in points}):
            ours = [{p[0]: p[2] for p in points}.get(x) for points in fig.series.values()]
            cells = [NO_VALUE if c is None else cell_text(c, percent) for c in ours]
            rows.append([f"{x:g}", *cells, *(printed(dict(points).get(x)) for points in fig.paper.values())])
        parts += [f"## {fig.title}", f"{heading(fig.column)} by {fig.x}:", _pipe(head, rows)]
    parts += ["\n".join(f"- {note}" for note in results.notes)] if results.notes else []
    if results.failed:
        parts += ["## Failed runs", "\n".join(f"- {r.row}, seed {r.seed}: {r.reason}" for r in results.failed)]
    if results.problems:
        parts += ["## Missing metrics", "\n".join(f"- {text}" for text in results.problems)]
    parts += ["## Runs", _pipe(*runs(results), text=3)]
    return "\n\n".join(parts) + "\n"


def runs(results: Results) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the list of runs: how long each row took, and the command of its first seed."""
    rows = []
    for name, found in results.by_row().items():
        times = [r.seconds for r in found if r.seconds is not None]
        rows.append([name, f"`{found[0].command}`", duration(sum(times)) if times else NO_VALUE])
    return ["row", "command (first seed)", "time, all seeds"], rows


def _pipe(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """A Markdown table; the first `text` columns are left-aligned."""
    lines = [head, ["---" if i < text else "---:" for i in range(len(head))], *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in row) + " |" for row in lines)


def difference_charts(table: TableOf, id: str) -> list[Chart]:
    """One chart with a metric to choose: a dot for the mean of each difference, its interval, and every seed."""
    found = []
    for column in table.columns:
        compared = [d for d in table.compared if d.column == column["title"] and d.summary.mean is not None]
        if compared:
            found.append((column["title"], _differences(compared, id, column["title"], column["percent"])))
    return offer(found)


def _differences(compared: Sequence[Compared], id: str, title: str, percent: bool) -> Chart:
    scale, unit = (100.0, "points") if percent else (1.0, "")
    data: list[Json] = []
    seeds: list[tuple[float, float, str]] = []
    for y, d in enumerate(compared):
        mean, low, high = (None if v is None else scale * v for v in (d.summary.mean, d.summary.low, d.summary.high))
        text = f"{signed(d.summary.mean, percent)} {unit} ({esc(interval(d, percent))})<extra></extra>"
        dot = _dots([mean], [y], {"color": colour(y), "size": 11}, text)
        if mean is not None and low is not None and high is not None:
            ends = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
            dot["error_x"] = {**ends, "color": colour(y), "thickness": 2, "width": 7}
        data.append(dot)
        if d.summary.n > 1:
            seeds += [(scale * v, y + 0.24, f"seed {seed}") for seed, v in d.values.items() if v is not None]
    xs, ys, texts = ([s[i] for s in seeds] for i in range(3))
    every = _dots(xs, ys, {"color": "@muted/60", "size": 6}, "%{text}: %{x:+.3~f}<extra></extra>")
    axis: Json = {"title": {"text": f"Difference{', percentage points' if percent else ''}"}, "showgrid": True}
    axis |= {"tickformat": "~r", "zeroline": True, "zerolinecolor": "@axis", "zerolinewidth": 2, "rangemode": "tozero"}
    layout: Json = {"hovermode": "closest", "showlegend": False, "xaxis": axis}
    layout["yaxis"] = names_axis([f"{d.a} − {d.b}" for d in compared], 40)
    alt = "; ".join(f"{d.a} minus {d.b}: {signed(d.summary.mean, percent)} {unit}" for d in compared)
    note = "Large dot: mean over seeds; line: 95 % interval; small dots: single seeds."
    if all(d.summary.n < 2 for d in compared):
        note = "One seed: there is no interval."
    data.append(every | {"text": texts})
    return Chart(id, "Differences, paired by seed", f"{title}. {alt}.", data, layout, note, 110 + 62 * len(compared))


def _dots(x: Sequence[Any], y: Sequence[Any], marker: Json, hover: str) -> Json:
    trace: Json = {"type": "scatter", "mode": "markers", "x": x, "y": y, "showlegend": False}
    return trace | {"marker": marker, "hovertemplate": hover}


def figure_chart(figure: FigureOf, id: str) -> Chart | None:
    """A column over a setting: mean and a band of one standard deviation; the paper's points dashed."""
    percent, data = figure.column["percent"], list[Json]()
    labels = list(dict.fromkeys([*figure.series, *figure.paper]))
    colours = {label: colour(i) for i, label in enumerate(labels)}
    for label, points in figure.series.items():
        known = {x: cell.summary for x, _, cell in points if cell.summary.mean is not None}
        data += _banded({x: known[x] for x in sorted(known)}, label, colours[label], percent)
    for label, points_printed in figure.paper.items():
        theirs = [(x, y / 100 if percent else y) for x, y in sorted(points_printed)]
        data.append(line(theirs, f"{label}, paper", colours[label], percent, line={"dash": "dash", "width": 1.5}))
    if not data:
        return None
    axis: Json = {"title": {"text": esc(figure.x, 60)}}
    places = sorted({x for trace in data for x in trace["x"]})
    if places[0] > 0 and places[-1] >= 30 * places[0]:  # over more than a decade: logarithmic, a tick for each place
        axis |= {"type": "log", "tickvals": places, "ticktext": [f"{x:g}" for x in places]}
    layout: Json = {"hovermode": "x unified", "showlegend": True, "xaxis": axis}
    layout["yaxis"] = {"title": {"text": esc(heading(figure.column), 60)}, **value_axis(percent)}
    alt = f"{figure.column['title']} by {figure.x}, {len(labels)} series."
    note = BAND if any("fill" in trace for trace in data) else ""
    note += " Dashed: the paper’s numbers, on its own data." if figure.paper else ""
    return Chart(id, figure.title, alt, data, layout, note.strip(), 380)


def curves_chart(curves: CurvesOf, id: str) -> Chart | None:
    """A metric over rounds: mean and a band of one standard deviation over seeds."""
    name = next((n for n in reversed(curves.figure.split(".")) if n not in ("mean", "worst", "best", "std")), "")
    percent = describe(name.rpartition("/")[2]).is_share or name.startswith(("tar@", "rank"))
    data, last = list[Json](), 1
    for i, (row, seeds) in enumerate(curves.series.items()):
        values: dict[int, list[float]] = {}
        for points in seeds.values():
            for x, y in points:
                values.setdefault(x, []).append(y)
        data += _banded({float(x): spread(ys) for x, ys in sorted(values.items())}, row, colour(i), percent)
        last = max([last, *values])
    if not data:
        return None
    note = BAND if any("fill" in trace for trace in data) else ""
    alt = f"{curves.title} by round, {len(curves.series)} rows."
    return Chart(id, curves.title, alt, data, by_round(last, percent), note, 380)


def _banded(points: Mapping[float, Spread], name: str, colour: str, percent: bool) -> list[Json]:
    """A curve of means with its band; a single point keeps its interval as an error bar."""
    if not points:
        return []
    group = f"row {name}"
    curve = line([(x, s.mean) for x, s in points.items()], name, colour, percent, legendgroup=group)
    ends = [(x, s.mean - s.std, s.mean + s.std) for x, s in points.items() if s.mean is not None and s.std is not None]
    if len(points) > 1:
        edges = band(ends, name, colour) if ends else []
        return [*(edge | {"showlegend": False, "legendgroup": group} for edge in edges), curve]
    only = next(iter(points.values()))
    if only.std is not None:
        curve["error_y"] = {"type": "data", "array": [only.std], "color": colour, "thickness": 2}
    return [curve | {"marker": {"size": 10, "color": colour}}]


def page(results: Results) -> str:
    """The whole page, for the folder that the folders of the runs are relative to."""
    state = "alarm" if results.failed or results.problems else "good"
    done = len(results.runs) - len(results.failed)
    pill = f'<span class="pill {state}">{done} of {plural(len(results.runs), "run")} finished</span>'
    return page_of(
        title=f"{results.title}: visard bench",
        kicker=f"Bench {esc(results.bench)}, {esc(results.scale)} {pill}",
        heading=results.title,
        lead=seeds_line(results),
        facts=facts({"Measured": machine_line(results), "Command": results.command}, 400),
        sections=_sections(results),
    )


def _sections(results: Results) -> list[Section]:
    figures = [figure_chart(f, f"figure-{i}") for i, f in enumerate(results.figures)]
    curves = [curves_chart(c, f"curves-{i}") for i, c in enumerate(results.curves)]
    notes = "".join(f"<li>{esc(note, 2000)}</li>" for note in results.notes)
    parts = [
        _problems(results),
        *(_table(t, i) for i, t in enumerate(results.tables)),
        with_charts("figures", "Figures", "", [c for c in figures if c]),
        with_charts("curves", "Round by round", "", [c for c in curves if c]),
        Section("notes", "Notes", f"<ul>{notes}</ul>") if notes else None,
        _runs(results),
    ]
    return [part for part in parts if part is not None]


def _problems(results: Results) -> Section | None:
    lines = [f"{r.row}, seed {r.seed}: {r.reason}" for r in results.failed] + results.problems
    if not lines:
        return None
    body = f"<ul>{''.join(f'<li>{esc(text, 400)}</li>' for text in lines)}</ul>"
    what = "Some runs failed" if results.failed else "Some metrics are in no run"
    return Section("failed", "What is missing", notice("alarm", what, body), short="Missing")


def _table(results: TableOf, i: int) -> Section:
    head, rows = table_grid(results, _cell)
    shown = [esc(h, 60) if h not in ("row", "paper") else h.capitalize() for h in head]
    body = table(shown, [[esc(name, 80), *cells] for name, *cells in rows], esc(results.title, 120), quiet=True)
    body += '<p class="note">Paper: the numbers printed there, on its own data.</p>' if "paper" in head else ""
    charts = difference_charts(results, f"differences-{i}")
    body += grid(charts, wide=True)
    if results.compared:
        top, lines = differences(results)
        cells = [[esc(cell, 120) for cell in line] for line in lines]
        inner = table([t.capitalize() for t in top], cells, "Differences, paired by seed", 2, quiet=True)
        body += fold("All differences in numbers", inner)
    short = results.title if len(results.title) <= 24 else results.title[:23].rstrip() + "…"
    return Section(f"table-{i}", results.title, body, tuple(charts), short=short)


def _cell(cell: Cell, percent: bool) -> str:
    text = esc(cell_text(cell, percent))
    return f'<span class="mark alarm" title="{esc(cell.failed, 300)}">{text}</span>' if cell.failed else text


def _runs(results: Results) -> Section:
    rows = []
    for name, runs in results.by_row().items():
        times = [run.seconds for run in runs if run.seconds is not None]
        time = duration(sum(times) / len(times)) if times else NO_VALUE
        rows.append([esc(name, 80), " · ".join(_link(run) for run in runs), time])
    body = table(["Row", "Reports", "Time of a run, mean"], rows, "The runs", 2, quiet=True)
    lines = "\n".join(esc(run.command) for run in results.runs)
    return Section("runs", "The runs", body + fold("The command of every run", f"<pre>{lines}</pre>"), short="Runs")


def _link(run: RunOf) -> str:
    if run.state != "finished":
        return f'<span class="mark alarm" title="{esc(run.reason, 300)}">seed&nbsp;{run.seed}&nbsp;failed</span>'
    return f'<a href="{esc(quote(f"{run.folder}/report.html"))}">seed&nbsp;{run.seed}</a>'
