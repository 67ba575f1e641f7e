"""What a bench writes: values by row, seed and column, Markdown, and the page, also in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bench_sample import AUC, EVIL, sample
from chromium import Browser, find
from test_report_browser import FAINT, UNDRAWN

from visard.errors import UsageError
from visard.files import write_json
from visard.studies.execute import Job, Outcome
from visard.studies.latex import escaped, latex
from visard.studies.page import differences, markdown, page, seeds_line, table_grid
from visard.studies.plan import Column, Curves, Plan, Row, Table, check
from visard.studies.results import Results, collect


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return sample(folder)


@pytest.fixture(scope="module")
def html(results: Results) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("visard.report.html.plotly", lambda: "/* plotly.js */")
        return page(results)


def of(folder: Path, row: str, seed: int) -> float:
    metrics = json.loads((folder / "runs" / row / f"seed-{seed}" / "metrics.json").read_text())
    auc: float = metrics["generic"]["unseen"]["verification"]["auc"]
    return auc


def test_every_value_is_that_of_its_run(results: Results, folder: Path) -> None:
    cell = results.tables[0].cells["better"]["AUC"]
    assert cell.values == {seed: of(folder, "better", seed) for seed in (0, 1, 2)}
    assert cell.summary.mean == pytest.approx(sum(cell.values.values()) / 3)  # type: ignore[arg-type]
    assert cell.paper == 95.0
    difference = results.tables[0].compared[0]
    assert difference.values == {s: of(folder, "better", s) - of(folder, "plain", s) for s in (0, 1, 2)}
    assert difference.summary.n == 3
    assert results.tables[0].compared[-1].summary.mean is None, "nothing is made up for a row that failed"
    assert results.problems == []
    assert [run.folder for run in results.runs][:2] == ["runs/plain/seed-0", "runs/better/seed-0"]


def test_results_json_has_it_all(results: Results, tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", results.to_dict())
    read = json.loads((tmp_path / "results.json").read_text())
    cell = read["tables"][0]["cells"]["plain"]["AUC"]
    assert cell["values"]["1"] == results.tables[0].cells["plain"]["AUC"].values[1]
    assert {"visard", "python", "numpy"} == set(read["versions"])
    assert read["machine"]["torch"]
    assert read["command"] == "visard bench sample"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", read["date"])
    assert len(read["runs"]) == 12
    assert read["runs"][0]["command"].startswith("visard run fedavg --set seed=0")
    assert read["curves"][0]["series"]["plain"]["0"][-1][0] == 10


def test_cells_show_mean_spread_paper_and_failure(results: Results) -> None:
    head, rows = table_grid(results.tables[0])
    assert head == ["row", "AUC (%)", "paper", "TAR @ FAR 0.01 (%)", "paper", "sent, MB"]
    by_name = {row[0]: row for row in rows}
    assert re.fullmatch(r"\d\d\.\d\d ± \d\.\d\d", by_name["plain"][1])
    assert by_name["plain"][2] == "91.2"
    assert by_name["plain"][4] == "–"
    assert by_name["broken"][1:] == ["failed", "–", "failed", "–", "failed"]
    assert by_name["plain"][5] == "2 ± 0"
    lines = {(row[0], row[1]): row for row in differences(results.tables[0])[1]}
    assert re.fullmatch(r"\+\d+\.\d\d points", lines["better − plain", "AUC"][2])
    assert lines["broken − plain", "AUC"][2:] == ["–", "–", "0"]


def test_one_seed_has_no_spread_and_says_so(tmp_path: Path) -> None:
    results = sample(tmp_path, seeds=(4,))
    assert seeds_line(results) == "One seed (4): no standard deviation and no interval."
    assert "±" not in table_grid(results.tables[0])[1][0][1]
    assert differences(results.tables[0])[1][0][3] == "one seed: no interval"


def test_a_seed_that_failed_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    results = sample(tmp_path, lost=(("plain", 1),))
    row = table_grid(results.tables[0])[1][0]
    assert row[1].endswith(" (2 of 3 seeds)")
    assert results.tables[0].compared[0].summary.n == 2
    assert results.tables[0].cells["better"]["AUC"].lost == 0


def test_rows_that_were_not_asked_for_are_left_out(folder: Path, results: Results) -> None:
    rows = (Row("plain", "fedavg"), Row("absent", "fedavg"))
    table = Table("T", ("plain", "absent"), (AUC,), compare=(("plain", "absent"),))
    other = Table("only absent", ("absent",), (AUC,))
    outcomes = [Outcome(Job(rows[0], 0, folder / "runs"), "finished")]
    found = collect(
        Plan("t", rows, (table, other)), outcomes, bench="b", scale="smoke", seeds=[0], command="c", out=folder
    )  # fmt: skip
    assert [t.title for t in found.tables] == ["T"]
    assert list(found.tables[0].cells) == ["plain"]
    assert found.tables[0].compared == []
    assert found.problems == []


def test_a_mean_over_rows_is_one_for_each_seed(folder: Path, results: Results) -> None:
    """Only of seeds with which all its rows have a value; left out where one of its rows was not asked for."""
    rows = tuple(Row(name, "fedavg") for name in ("plain", "better", "absent"))
    table = Table(
        "T", ("both", "plain", "more"), (AUC,), compare=(("both", "plain"),),
        means={"both": ("plain", "better"), "more": ("plain", "absent")},
    )  # fmt: skip
    plan = Plan("t", rows, (table,))
    check(plan)
    outcomes = [Outcome(Job(r, seed, folder / "runs"), "finished") for r in rows[:2] for seed in (0, 1, 2)]
    outcomes[-1] = Outcome(outcomes[-1].job, "failed", "lost")  # better, seed 2
    found = collect(plan, outcomes, bench="b", scale="smoke", seeds=[0, 1, 2], command="c", out=folder).tables[0]
    mean = {seed: (of(folder, "plain", seed) + of(folder, "better", seed)) / 2 for seed in (0, 1)}
    assert list(found.cells) == ["both", "plain"]
    assert found.cells["both"]["AUC"].values == pytest.approx(mean)
    assert found.cells["both"]["AUC"].lost == 1
    (difference,) = found.compared
    expected = {seed: mean[seed] - of(folder, "plain", seed) for seed in (0, 1)}
    assert difference.values[2] is None
    assert {s: difference.values[s] for s in (0, 1)} == pytest.approx(expected)
    with pytest.raises(UsageError, match="a mean of table 'T'"):
        check(Plan("t", rows[:2], (table,)))


def test_markdown_tables_are_whole(results: Results) -> None:
    text = markdown(results)
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(blocks) == 4
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block
    assert "visard bench sample" in text
    assert "## Failed runs" in text
    assert "| 100 |" in text
    assert "/tmp" not in text


def test_latex_tables_are_whole(results: Results) -> None:
    text = latex(results)
    found = re.findall(r"\\begin\{tabular\}\{(l+r+)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL)
    assert len(found) == len(results.tables) + sum(bool(t.compared) for t in results.tables)
    for columns, body in found:
        rows = [line for line in body.splitlines() if line.endswith("\\\\")]
        assert all(len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1 for row in rows)
    for name, cells in results.tables[0].cells.items():
        shown = table_grid(results.tables[0])[1][list(results.tables[0].cells).index(name)]
        assert " & ".join(map(escaped, shown)) in text, cells
    assert escaped("a_b 5 % {x}\\ ± #1 & $2 ~ ^ – −3") == (
        r"a\_b 5 \% \{x\}\textbackslash{} $\pm$ \#1 \& \$2 \textasciitilde{} \textasciicircum{} -- $-$3"
    )
    assert all(line.startswith("% ") for line in text.split("\n\n")[0].splitlines())


def test_a_path_that_no_run_has_is_a_problem_and_one_that_some_have_is_a_dash(folder: Path, results: Results) -> None:
    outcomes = [Outcome(Job(Row(n, "fedavg"), 0, folder / "runs"), "finished") for n in ("plain", "better")]
    rows = tuple(o.job.row for o in outcomes)
    typo, own = Column("typo", "generic.unsene.auc"), Column("own", lambda f: 1.0 if "plain" in str(f) else None)
    table = Table("T", ("plain", "better"), (typo, own, AUC))
    plan = Plan("t", rows, (table,), curves=(Curves("C", ("plain",), "clients.rnk1.mean"),))
    found = collect(plan, outcomes, bench="b", scale="smoke", seeds=[0], command="c", out=folder)
    assert len(found.problems) == 2
    assert "table 'T': no metric generic.unsene.auc: generic has no 'unsene' (did you mean 'unseen'?)" in found.problems
    assert "did you mean 'rank1'" in found.problems[1]
    assert [row[1:3] for row in table_grid(found.tables[0])[1]] == [["–", "100.00"], ["–", "–"]]


def test_nothing_on_the_page_is_taken_for_html(html: str) -> None:
    assert EVIL not in html
    assert "best <b>" not in html
    assert 'href="runs/best%20%3Cb%3E/seed-2/report.html"' in html
    assert html.count('class="mark alarm"') == 3 + 3
    assert "9 of 12 runs finished" in html


# --- in a browser ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.browser
@pytest.mark.skipif(find() is None, reason="no Chromium on this machine: the page is not tried in a browser")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_page_in_a_browser(browser: Browser, results: Results, folder: Path, width: int, dark: bool) -> None:
    (folder / "report.html").write_text(page(replace(results, notes=["a note"])))
    browser.errors.clear()
    browser.requests.clear()
    browser.open(folder / "report.html", width=width, dark=dark)
    assert browser.errors == []
    assert sum(url.startswith("file:") for url in browser.requests) == 1
    assert browser.evaluate(UNDRAWN) == []
    assert browser.evaluate("document.querySelectorAll('.chart').length") == 3
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(FAINT) == []
