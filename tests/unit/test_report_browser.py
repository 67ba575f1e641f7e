"""The page in a real browser: charts drawn, nothing fetched, no error, narrow and wide, light and dark, on paper."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser, find
from fake_run import write_run
from test_report import hostile_run

from visard.report.page import build_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine: the page is not tried in a browser"),
]

UNDRAWN = """[...document.querySelectorAll(".chart")].filter(c => {
  const svg = c.querySelector("svg.main-svg"), box = svg && svg.getBoundingClientRect();
  return !svg || box.width < 200 || box.height < 100 || !c.querySelector(".cartesianlayer .trace path");
}).map(c => c.id)"""

# WCAG 2 contrast of visible text against the nearest opaque background; returns what is below 4.5.
FAINT = """(() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const e of document.querySelectorAll("main h1, main h2, main h3, main p, main dt, main dd, main th, main td," +
      " main small, main li, main span, main strong, main b, main a, main summary, main label, footer p, header a")) {
    if (!e.checkVisibility() || !e.textContent.trim() || e.closest(".chart")) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(ground(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${e.className || e.tagName}: ${e.textContent.slice(0, 30)} ${contrast.toFixed(2)}`);
  }
  return faint;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("pages")
    fed = write_run(base / "fed", sets=("unseen", "other"), stages=("pretrain", "federate"))
    many = write_run(base / "many", clients=120, encrypted=True, seed=1, name="many", rounds=10)
    central = write_run(base / "central", name="upper", method="central", pooled=True, seed=2, rounds=10)
    stopped = write_run(base / "stopped", name="half", stop_after=7)
    hostile = hostile_run(base / "hostile")
    changed = write_run(base / "changed", name="changed", rounds=6)
    metrics = json.loads((changed / "metrics.json").read_text())
    moved = {"before": 0.8132, "after": 0.8255, "difference": 0.0123, "low": -0.0123, "high": 0.0369}
    figures = dict.fromkeys(("accuracy", "tar@far=0.1", "tar@far=0.01", "rank10", "tpir@fpir=0.01"), moved)
    (changed / "metrics.json").write_text(json.dumps(metrics | {"change": {"generic": {"unseen": figures}}}))
    return {
        "fed": build_report([fed]),
        "changed": build_report([changed]),
        "stopped": build_report([stopped]),
        "hostile": build_report([hostile]),
        "comparison": build_report([fed, many, central, stopped, hostile], out=base / "comparison.html"),
    }


def show(browser: Browser, page: Path, width: int = 1280, dark: bool = False) -> None:
    """Open a page, unless it is open in this form, and check what must hold for every page in every form."""
    form = (page, width, dark)
    if getattr(browser, "form", None) != form:
        browser.errors.clear()
        browser.requests.clear()
        browser.open(page, width=width, dark=dark)
        setattr(browser, "form", form)  # noqa: B010
    assert browser.errors == []
    assert all(url.startswith(("file:///", "data:")) for url in browser.requests), browser.requests
    assert sum(url.startswith("file:") for url in browser.requests) == 1
    assert browser.evaluate(UNDRAWN) == []
    assert browser.evaluate("document.querySelectorAll('.chart').length") >= 3
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")


@pytest.mark.parametrize("name", ["stopped", "hostile", "comparison"])
def test_page_opens_without_error_or_request(browser: Browser, pages: dict[str, Path], name: str) -> None:
    show(browser, pages[name])
    assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert browser.evaluate(FAINT) == []


def test_comparison_in_a_narrow_dark_window(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["comparison"], width=390, dark=True)
    assert browser.evaluate(FAINT) == []


def test_before_and_after_is_whole_in_a_narrow_window(browser: Browser, pages: dict[str, Path]) -> None:
    """With intervals and what they say, without scrolling sideways."""
    for width in (480, 360):
        show(browser, pages["changed"], width=width)
        assert browser.evaluate("document.querySelectorAll('#change .mark').length") == 5
        assert browser.evaluate(
            "[...document.querySelectorAll('#change .scroll')].every(s => s.scrollWidth <= s.clientWidth)"
        )


def test_titles_and_labels_are_whole_in_a_narrow_window(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["fed"], width=360)
    wide = (
        "[...document.querySelectorAll('caption:not(.quiet)')].filter(c => c.checkVisibility() && c.offsetWidth > 360)"
    )
    assert browser.evaluate(f"{wide}.map(c => c.textContent)") == []
    touching = (
        "[...document.querySelectorAll('.xaxislayer-above')].filter(axis => {"
        " const at = [...axis.querySelectorAll('.xtick text')].filter(t => t.textContent.trim())"
        " .map(t => t.getBoundingClientRect()).sort((a, b) => a.left - b.left);"
        " return at.some((one, i) => i && one.left < at[i - 1].right); }).length"
    )
    assert browser.evaluate(touching) == 0


def test_explanations_open_by_tap_inside_a_narrow_window(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["fed"], width=390)
    count = browser.evaluate("document.querySelectorAll('.ask').length")
    assert count >= 6
    for i in range(count):
        browser.evaluate(f"document.querySelectorAll('.ask')[{i}].click()")
        shown = browser.evaluate(
            "[...document.querySelectorAll('.tip')].filter(t => t.checkVisibility())"
            ".map(t => t.getBoundingClientRect()).map(b => [b.left, b.right])"
        )
        assert len(shown) == 1
        assert shown[0][0] >= 0
        assert shown[0][1] <= 390
    browser.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.evaluate("[...document.querySelectorAll('.tip')].some(t => t.checkVisibility())") is False


def test_charts_follow_the_theme_and_the_toggle(browser: Browser, pages: dict[str, Path]) -> None:
    ground = "document.querySelector('#chart-roc .main-svg').style.background"
    panel = "getComputedStyle(document.querySelector('.panel')).backgroundColor"
    seen = []
    show(browser, pages["fed"], dark=True)
    for _ in range(2):
        assert browser.evaluate(ground) == browser.evaluate(panel)
        assert browser.evaluate(FAINT) == []
        seen.append(browser.evaluate(ground))
        browser.evaluate("document.getElementById('theme').click()")
    assert seen[0] != seen[1]
    assert browser.evaluate(ground) == seen[0]  # twice pressed: as before
    browser.evaluate("localStorage.removeItem('visard-theme')")
    assert browser.errors == []


def test_choice_redraws_the_chart_and_its_words(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["fed"], dark=True)
    label = "document.getElementById('chart-per-client').getAttribute('aria-label')"
    note = "document.getElementById('chart-per-client').closest('figure').querySelector('.note').textContent"
    said = []
    for choice in (2, 0):
        browser.evaluate(
            f"(s => {{ s.value = '{choice}'; s.dispatchEvent(new Event('change')); }})"
            "(document.querySelector('[data-chart=per-client]'))"
        )
        said.append(browser.evaluate(label))
        assert browser.evaluate(note) in said[-1]
        assert browser.evaluate(UNDRAWN) == []
    assert said[0] != said[1]


def test_paper_is_light_and_unfolded(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["fed"], dark=True)
    folded = "document.querySelectorAll('details:not([open])').length"
    assert browser.evaluate(folded) > 0
    browser.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
    assert browser.evaluate(folded) == 0
    assert browser.evaluate(UNDRAWN) == []
    widths = "[...document.querySelectorAll('.chart .main-svg')].map(s => Math.round(s.getBoundingClientRect().width))"
    assert set(browser.evaluate(widths)) == {640}
    browser.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate(folded) > 0
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert browser.errors == []
