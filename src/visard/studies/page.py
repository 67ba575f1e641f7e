"""`report.html` of a bench: one page that opens offline, in the style of the run reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from visard.report.charts import COLOURS, Chart, Json, band, line, offer, round_axis
from visard.report.html import Section, figure, fold, grid, notice, table
from visard.report.metrics import describe
from visard.report.page import page_of
from visard.report.text import NO_VALUE, duration, esc, plain, plural
from visard.studies.lookup import Spread, spread
from visard.studies.results import Cell, Compared, CurvesOf, FigureOf, Results, RunOf, TableOf, by_row

# ----------
# The tables of a bench as text: cells for every medium, and Markdown for `results.md`.

FAILED = "failed"


def cell_figure(value: float | None, percent: bool) -> str:
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
    text = (
        cell_figure(mean, percent)
        if mean is None or std is None
        else f"{cell_figure(mean, percent)} ± {cell_figure(std, percent)}"
    )
    seeds = len(cell.values) + cell.lost
    return f"{text} ({len(cell.values)} of {seeds} seeds)" if cell.lost else text


def heading(column: dict[str, Any]) -> str:
    """The title with its unit."""
    return f"{column['title']} (%)" if column["percent"] else str(column["title"])


def table_grid(table: TableOf) -> tuple[list[str], list[list[str]]]:
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
    text = cell_figure(abs(value), percent)
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
    for one in results.tables:
        parts += [f"## {one.title}", _pipe(*table_grid(one))]
        if one.compared:
            parts += ["Differences, paired by seed, with 95 % t intervals:", _pipe(*differences(one), text=2)]
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


# ----------
# The charts of a bench: paired differences with intervals, figures over a setting, curves over rounds.

TICKS = ".1~%"


def difference_charts(table: TableOf, id: str) -> list[Chart]:
    """One chart with a figure to choose: a dot for the mean of each difference, its interval, and every seed."""
    found = []
    for column in table.columns:
        compared = [d for d in table.compared if d.column == column["title"] and d.summary.mean is not None]
        if compared:
            found.append((column["title"], _differences(compared, id, column["title"], column["percent"])))
    return offer(found, "Figure")


def _differences(compared: Sequence[Compared], id: str, title: str, percent: bool) -> Chart:
    scale = 100.0 if percent else 1.0
    unit = "points" if percent else ""
    dots: list[Json] = []
    seeds: Json = {"x": [], "y": [], "text": []}
    for y, d in enumerate(compared):
        mean, low, high = (None if v is None else scale * v for v in (d.summary.mean, d.summary.low, d.summary.high))
        colour = COLOURS[y % len(COLOURS)]
        dot: Json = {"type": "scatter", "mode": "markers", "x": [mean], "y": [y], "showlegend": False} | {
            "marker": {"color": colour, "size": 11},
            "hovertemplate": f"{signed(d.summary.mean, percent)} {unit} ({esc(interval(d, percent))})<extra></extra>",
        }
        if mean is not None and low is not None and high is not None:
            ends = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
            dot["error_x"] = {**ends, "color": colour, "thickness": 2, "width": 7}
        dots.append(dot)
        for seed, value in d.values.items():
            if value is not None and d.summary.n > 1:
                seeds["x"].append(scale * value)
                seeds["y"].append(y + 0.24)
                seeds["text"].append(f"seed {seed}")
    every: Json = {"type": "scatter", "mode": "markers", **seeds, "showlegend": False} | {
        "marker": {"color": "@muted/60", "size": 6},
        "hovertemplate": "%{text}: %{x:+.3~f}<extra></extra>",
    }
    names = [esc(f"{d.a} − {d.b}", 40) for d in compared]
    layout: Json = {
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": {"title": {"text": f"Difference{', percentage points' if percent else ''}"}, "showgrid": True}
        | {"tickformat": "~r", "zeroline": True, "zerolinecolor": "@axis", "zerolinewidth": 2, "rangemode": "tozero"},
        "yaxis": {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False}
        | {"range": [len(names) - 0.4, -0.6]},
    }
    alt = "; ".join(f"{d.a} minus {d.b}: {signed(d.summary.mean, percent)} {unit}" for d in compared)
    note = "Large dot: mean over seeds; line: 95 % interval; small dots: single seeds."
    if all(d.summary.n < 2 for d in compared):
        note = "One seed: there is no interval."
    return Chart(
        id, "Differences, paired by seed", f"{title}. {alt}.", [*dots, every], layout, note, 110 + 62 * len(names)
    )


def figure_chart(figure: FigureOf, id: str) -> Chart | None:
    """A column over a setting: mean and a band of one standard deviation; the paper's points dashed."""
    percent = figure.column["percent"]
    hover, data = ("%{y:.2%}" if percent else "%{y:.4g}"), list[Json]()
    labels = list(dict.fromkeys([*figure.series, *figure.paper]))
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
    for label, points in figure.series.items():
        known = {x: cell.summary for x, _, cell in points if cell.summary.mean is not None}
        data += _banded({x: known[x] for x in sorted(known)}, label, colours[label], hover)
    for label, printed in figure.paper.items():
        ys = [y / 100 if percent else y for _, y in sorted(printed)]
        style = {"dash": "dash", "width": 1.5}
        xs = [x for x, _ in sorted(printed)]
        data.append(line(xs, ys, f"{label}, paper", colours[label], line=style, hovertemplate=hover))
    if not data:
        return None
    axis: Json = {"title": {"text": esc(figure.x, 60)}}
    places = sorted({x for trace in data for x in trace["x"]})
    if places[0] > 0 and places[-1] >= 30 * places[0]:  # over more than a decade: logarithmic, a tick for each place
        axis |= {"type": "log", "tickvals": places, "ticktext": [f"{x:g}" for x in places]}
    layout: Json = {"hovermode": "x unified", "showlegend": True, "xaxis": axis}
    layout["yaxis"] = {"title": {"text": esc(heading(figure.column), 60)}, **({"tickformat": TICKS} if percent else {})}
    alt = f"{figure.column['title']} by {figure.x}, {len(labels)} series."
    note = "Band: one standard deviation over seeds." if any("fill" in trace for trace in data) else ""
    note += " Dashed: the paper’s figures, on its own data." if figure.paper else ""
    return Chart(id, figure.title, alt, data, layout, note.strip(), 380)


def curves_chart(curves: CurvesOf, id: str) -> Chart | None:
    """A figure over rounds: mean and a band of one standard deviation over seeds."""
    name = next((n for n in reversed(curves.figure.split(".")) if n not in ("mean", "worst", "best", "std")), "")
    percent = describe(name.rpartition("/")[2]).is_share or name.startswith(("tar@", "rank"))
    hover, data, last = ("%{y:.2%}" if percent else "%{y:.4g}"), list[Json](), 1
    for i, (row, seeds) in enumerate(curves.series.items()):
        by_round: dict[int, list[float]] = {}
        for points in seeds.values():
            for x, y in points:
                by_round.setdefault(x, []).append(y)
        known = {float(x): spread(ys) for x, ys in sorted(by_round.items())}
        data += _banded(known, row, COLOURS[i % len(COLOURS)], hover)
        last = max([last, *by_round])
    if not data:
        return None
    layout: Json = {"hovermode": "x unified", "showlegend": True, "xaxis": round_axis(last)}
    layout["yaxis"] = {"tickformat": TICKS} if percent else {}
    note = "Band: one standard deviation over seeds." if any("fill" in trace for trace in data) else ""
    return Chart(id, curves.title, f"{curves.title} by round, {len(curves.series)} rows.", data, layout, note, 380)


def _banded(points: Mapping[float, Spread], name: str, colour: str, hover: str) -> list[Json]:
    """A curve of means with its band; a single point keeps its interval as an error bar."""
    if not points:
        return []
    xs, all_of_it = list(points), list(points.values())
    traces: list[Json] = []
    group = f"row {name}"
    if len(xs) > 1 and any(s.std is not None for s in all_of_it):
        low = [None if s.mean is None or s.std is None else s.mean - s.std for s in all_of_it]
        high = [None if s.mean is None or s.std is None else s.mean + s.std for s in all_of_it]
        traces += [edge | {"showlegend": False, "legendgroup": group} for edge in band(xs, low, high, name, colour)]
    curve = line(xs, [s.mean for s in all_of_it], name, colour, hovertemplate=hover, legendgroup=group)
    if len(xs) == 1 and all_of_it[0].std is not None:
        curve["error_y"] = {"type": "data", "array": [all_of_it[0].std], "color": colour, "thickness": 2}
    if len(xs) == 1:
        curve["marker"] = {"size": 10, "color": colour}
    return [*traces, curve]


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
        facts=_facts(results),
        sections=_sections(results),
    )


def _facts(results: Results) -> str:
    said = {"Measured": machine_line(results), "Command": results.command}
    return (
        f'<dl class="facts">{"".join(f"<div><dt>{k}</dt><dd>{esc(v, 400)}</dd></div>" for k, v in said.items())}</dl>'
    )


def _sections(results: Results) -> list[Section]:
    parts = [_problems(results)] if results.failed or results.problems else []
    parts += [_table(t, i) for i, t in enumerate(results.tables)]
    figures = [figure_chart(f, f"figure-{i}") for i, f in enumerate(results.figures)]
    curves = [curves_chart(c, f"curves-{i}") for i, c in enumerate(results.curves)]
    parts += [_charts("figures", "Figures", [c for c in figures if c])] if any(figures) else []
    parts += [_charts("curves", "Round by round", [c for c in curves if c])] if any(curves) else []
    if results.notes:
        notes = "".join(f"<li>{esc(note, 2000)}</li>" for note in results.notes)
        parts.append(Section("notes", "Notes", f"<ul>{notes}</ul>"))
    return [*parts, _runs(results)]


def _problems(results: Results) -> Section:
    lines = [f"{r.row}, seed {r.seed}: {r.reason}" for r in results.failed] + results.problems
    body = f"<ul>{''.join(f'<li>{esc(text, 400)}</li>' for text in lines)}</ul>"
    what = "Some runs failed" if results.failed else "Some figures are in no run"
    return Section("failed", "What is missing", notice("alarm", what, body), short="Missing")


def _charts(id: str, title: str, charts: list[Chart]) -> Section:
    return Section(id, title, grid([figure(c) for c in charts]), tuple(charts))


def _table(results: TableOf, i: int) -> Section:
    papers = {
        c["title"] for c in results.columns if any(r[c["title"]].paper is not None for r in results.cells.values())
    }
    head = ["Row"]
    for c in results.columns:
        head += [esc(heading(c), 60), *(["Paper"] if c["title"] in papers else [])]
    rows = []
    for name, cells in results.cells.items():
        row = [esc(name, 80)]
        for c in results.columns:
            cell = cells[c["title"]]
            row += [_cell(cell, c["percent"]), *([_paper(cell)] if c["title"] in papers else [])]
        rows.append(row)
    title = esc(results.title, 120)
    body = table(head, rows, title, quiet=True)
    body += '<p class="note">Paper: the figures printed there, on its own data.</p>' if papers else ""
    charts = difference_charts(results, f"differences-{i}")
    body += grid([figure(c) for c in charts], wide=True)
    if results.compared:
        top, lines = differences(results)
        shown = [[esc(cell, 120) for cell in line] for line in lines]
        inner = table([t.capitalize() for t in top], shown, "Differences, paired by seed", 2, quiet=True)
        body += fold("All differences in numbers", inner)
    return Section(f"table-{i}", results.title, body, tuple(charts), short=_short(results.title))


def _cell(cell: Cell, percent: bool) -> str:
    text = esc(cell_text(cell, percent))
    return f'<span class="mark alarm" title="{esc(cell.failed, 300)}">{text}</span>' if cell.failed else text


def _paper(cell: Cell) -> str:
    return printed(cell.paper)


def _short(title: str) -> str:
    return title if len(title) <= 24 else title[:23].rstrip() + "…"


def _runs(results: Results) -> Section:
    rows = []
    for name, runs in by_row(results).items():
        times = [run.seconds for run in runs if run.seconds is not None]
        time = duration(sum(times) / len(times)) if times else NO_VALUE
        rows.append([esc(name, 80), " · ".join(_link(run) for run in runs), time])
    body = table(["Row", "Reports", "Time of a run, mean"], rows, "The runs", 2, quiet=True)
    lines = "\n".join(esc(run.command) for run in results.runs)
    return Section("runs", "The runs", body + fold("The command of every run", f"<pre>{lines}</pre>"), short="Runs")


def _link(run: RunOf) -> str:
    if run.state != "finished":
        return f'<span class="mark alarm" title="{esc(run.reason, 300)}">seed&nbsp;{run.seed}&nbsp;failed</span>'
    where = quote(f"{run.folder}/report.html")
    return f'<a href="{esc(where)}">seed&nbsp;{run.seed}</a>'
