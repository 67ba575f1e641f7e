"""`report.html` of a bench: one page that opens offline, in the style of the run reports."""

from __future__ import annotations

from urllib.parse import quote

from visard.bench.charts import curves_chart, difference_charts, figure_chart
from visard.bench.render import cell_text, differences, heading, machine_line, printed, seeds_line
from visard.bench.results import Cell, Results, RunOf, TableOf, by_row
from visard.report.charts import Chart
from visard.report.html import page_of
from visard.report.parts import Section, figure, fold, grid, notice, table
from visard.report.words import NO_VALUE, duration, esc, plural


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
