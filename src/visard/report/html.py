"""Builds `report.html`: one file that opens offline, for one run or for several side by side."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.resources import files
from pathlib import Path

from visard.errors import UsageError, VisardError
from visard.files import write_atomically
from visard.report import compare, single
from visard.report.leaving import add_up
from visard.report.parts import Section
from visard.report.runs import Run, read_run
from visard.report.samples import Samples, kept_samples
from visard.report.words import esc, script_json


def build_report(runs: Sequence[Path | str], out: Path | str | None = None, samples: Samples | None = None) -> Path:
    """Write the page of one run, or of several runs side by side; returns where it is.

    Without `out`: `report.html` in the folder of the one run, `comparison.html` here for several. `samples`
    are pictures (N, H, W, 3), or one such array for each client; only a run on synthetic faces may show any.
    By default the `samples.npy` that such a run leaves in its folder.
    """
    if isinstance(runs, str | Path):
        runs = [runs]
    if not runs:
        raise UsageError("a report needs at least one run folder")
    read = [read_run(folder) for folder in runs]
    if samples is not None and (len(read) > 1 or not read[0].synthetic):
        raise UsageError("sample pictures may be shown only in the report of one run on synthetic faces")
    if samples is None and len(read) == 1 and read[0].synthetic:
        samples = kept_samples(read[0].folder)
    page = one_page(read[0], samples) if len(read) == 1 else comparison_page(read)
    target = (
        Path(out) if out is not None else read[0].folder / "report.html" if len(read) == 1 else Path("comparison.html")
    )
    if target.is_dir():
        raise UsageError(f"{target}: is a folder; name the file to write")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VisardError(f"cannot write {target}: {error.strerror or error}") from None
    write_atomically(target, page)
    return target


def one_page(run: Run, samples: Samples | None = None) -> str:
    """The page of one run."""
    state, words = run.status
    leaving = add_up(run)
    facts = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v, 60)}</dd></div>" for k, v in single.facts(run))
    return page_of(
        title=f"{run.name}: visard run report",
        kicker=f'Run report <span class="pill {state}">{esc(words, 200)}</span> {single.privacy(run, leaving)}',
        heading=run.name,
        lead=single.summary(run),
        facts=f'<dl class="facts">{facts}</dl>' if facts else "",
        sections=single.sections(run, leaving, samples),
    )


def comparison_page(runs: Sequence[Run]) -> str:
    """The page of several runs."""
    labels = compare.labels(runs)
    return page_of(
        title=f"{len(runs)} runs: visard comparison",
        kicker="Comparison",
        heading=f"{len(runs)} runs side by side",
        lead=compare.summary(runs, labels),
        facts="",
        sections=compare.sections(runs, labels),
    )


def page_of(title: str, kicker: str, heading: str, lead: str, facts: str, sections: Sequence[Section]) -> str:
    """Put everything into the template. `kicker` and `facts` are HTML, the other texts are not."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    # No plotly.js release has had these, but inside a script element they would end it or change how it ends.
    library = get_plotlyjs().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    script = _file("page.js")
    charts = [chart.payload() for section in sections for chart in section.charts]
    parts = {
        "policy": _policy(library, script),
        "version": esc(version()),
        "title": esc(title, 120),
        "style": _file("style.css"),
        "navigation": "".join(f'<li><a href="#{s.id}">{esc(s.short or s.title)}</a></li>' for s in sections),
        "kicker": kicker,
        "heading": esc(heading, 120),
        "lead": esc(lead, 2000),
        "facts": facts,
        "sections": "".join(s.html() for s in sections),
        "made": datetime.now(UTC).strftime("%Y-%m-%d"),
        "plotly": esc(get_plotlyjs_version()),
        "charts": script_json(charts),
        "library": library,
        "script": script,
    }
    # One pass, so that nothing in the parts is taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def _policy(*scripts: str) -> str:
    """Content security policy: only the page's own scripts run, and nothing is fetched from anywhere."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    rules = [
        "default-src 'none'",
        f"script-src {allowed}",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
    ]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


@cache
def _file(name: str) -> str:
    return files("visard.report").joinpath(name).read_text(encoding="utf-8")


def version() -> str:
    """The version of visard that made the page."""
    try:
        return installed("visard")
    except PackageNotFoundError:
        return "(not installed)"
