"""The building blocks of a page (safe text, sections, tables, charts, notices, sample pictures) and the page itself.

Cells and bodies are HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visard.data.storage import map_npy
from visard.errors import UsageError, VisardError
from visard.text import plural, visible

Json = dict[str, Any]
PLOTLY_VERSION = "4.1.1"  # of plotly-basic.min.js, the npm package plotly.js-basic-dist-min
SIGNS = {"good": "✓", "caution": "!", "alarm": "!"}


def esc(value: Any, limit: int | None = None) -> str:
    """Text for HTML, in content and in quoted attributes. Chart labels need it too: they know some HTML."""
    return html.escape(visible(value, limit), quote=True)


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: ASCII (so no U+2028) and without the characters of a tag.

    A number that JSON cannot say is null, a gap in a chart.
    """
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Chart:
    """A chart: what plotly.js draws, and the words beside it."""

    id: str
    title: str
    alt: str  # a description in one sentence; plain text
    data: list[Json]
    layout: Json = field(default_factory=dict)
    note: str = ""
    height: int = 340
    choices: tuple[tuple[str, Chart], ...] = ()  # others to choose from, (label, chart)
    choose: str = "Metric"
    label: str = ""  # the name of this one among the choices

    def payload(self) -> Json:
        """The data for page.js."""
        shown = (self, *(chart for _, chart in self.choices))
        metrics = [
            {"data": c.data, "layout": c.layout, "alt": visible(c.alt, 400), "note": visible(c.note)} for c in shown
        ]
        return {"id": self.id, "height": self.height, "figures": metrics}

    def html(self) -> str:
        """The place of the chart; page.js draws into it."""
        pick = ""
        if self.choices:
            names = [self.label, *(name for name, _ in self.choices)]
            options = "".join(f'<option value="{i}">{esc(n, 60)}</option>' for i, n in enumerate(names))
            select = f'<select data-chart="{self.id}">{options}</select>'
            pick = f'<label class="pick">{esc(self.choose)} {select}</label>'
        title = esc(self.title, 80)
        save = f'aria-label="Save {title} as PNG" title="Save as PNG" data-save="{self.id}"'
        tools = f'<div class="tools">{pick}<button type="button" class="save" {save}>PNG</button></div>'
        note = f'<p class="note">{esc(self.note)}</p>' if self.note else ""
        head = f'<figcaption><div class="head"><h3>{title}</h3>{tools}</div>{note}</figcaption>'
        place = f'id="chart-{self.id}" role="img" aria-label="{esc(self.alt, 400)}"'
        return f'<figure class="panel">{head}<div class="chart" {place} style="height:{self.height}px"></div></figure>'


@dataclass(frozen=True)
class Section:
    """A part of the page with its own entry in the navigation."""

    id: str
    title: str
    body: str
    charts: tuple[Chart, ...] = ()
    short: str = ""  # in the navigation

    def html(self) -> str:
        name = f"{self.id}-title"
        head = f'<h2 id="{name}">{esc(self.title)}</h2>'
        return f'<section id="{self.id}" aria-labelledby="{name}">{head}{self.body}</section>'


def with_charts(
    id: str, title: str, short: str, charts: Sequence[Chart], before: str = "", after: str = ""
) -> Section | None:
    """A section with its charts in a grid; None if it would be empty."""
    body = before + grid(charts) + after
    return Section(id, title, body, tuple(charts), short) if body else None


def grid(charts: Sequence[Chart], wide: bool = False) -> str:
    """Charts side by side."""
    if not charts:
        return ""
    single = " one" if wide or len(charts) == 1 else ""
    return f'<div class="grid{single}">{"".join(chart.html() for chart in charts)}</div>'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, text_columns: int = 1, quiet: bool = False
) -> str:
    """A table: `text_columns` columns of text, then numbers; `quiet` shows the caption to screen readers only."""
    kinds = [' class="n"' if i >= text_columns else "" for i in range(len(head))]
    top = "".join(f'<th scope="col"{k}>{h}</th>' for h, k in zip(head, kinds, strict=True))
    body = ""
    for first, *others in rows:
        cells = "".join(f"<td{k}>{cell}</td>" for cell, k in zip(others, kinds[1:], strict=True))
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>'
    name = f'<caption class="quiet">{caption}</caption>' if quiet else f"<caption>{caption}</caption>"
    inner = f"<table>{name}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">{inner}</div>'


def fold(summary: str, body: str) -> str:
    """A body that shows on request; nothing if it is empty."""
    return f"<details><summary>{summary}</summary>{body}</details>" if body else ""


def tip(id: str, label: str, meaning: str) -> str:
    """A button that explains, by hovering, by focus and by a tap."""
    if not meaning:
        return ""
    about = f'aria-label="What is {esc(label)}?" aria-describedby="{id}"'
    box = f'<span role="tooltip" class="tip" id="{id}">{esc(meaning)}</span>'
    return f'<button type="button" class="ask" {about}>?</button>{box}'


def facts(said: Mapping[str, str], limit: int) -> str:
    """Small facts under the summary of a page; nothing if there are none."""
    items = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v, limit)}</dd></div>" for k, v in said.items())
    return f'<dl class="facts">{items}</dl>' if items else ""


def notice(level: str, title: str, body: str) -> str:
    """A banner: good, caution or alarm."""
    role = ' role="alert"' if level == "alarm" else ""
    sign = f'<span class="sign" aria-hidden="true">{SIGNS[level]}</span>'
    return f'<div class="banner {level}"{role}>{sign}<div><strong>{esc(title)}</strong>{body}</div></div>'


def flag(text: str) -> str:
    """A doubt beside a metric; nothing if there is none."""
    return f'<span class="flag">{esc(text, 160)}</span>' if text else ""


COLUMNS, MOST, GAP = 8, 32, 2  # pictures a row, pictures a sheet, pixels between them
MOST_PIXELS = 1024  # of a side of a sample


def contact_sheet(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures (N, H, W, 3) side by side on one white sheet."""
    if pictures.ndim != 4 or pictures.shape[-1] != 3 or pictures.dtype != np.uint8 or not len(pictures):
        raise UsageError(
            f"sample pictures must be uint8 of shape (N, H, W, 3), not {pictures.dtype} of {pictures.shape}"
        )
    n, h, w, _ = pictures.shape
    columns = min(COLUMNS, n)
    rows = -(-n // columns)
    sheet = np.full((rows * (h + GAP) - GAP, columns * (w + GAP) - GAP, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = (i // columns) * (h + GAP), (i % columns) * (w + GAP)
        sheet[y : y + h, x : x + w] = picture
    return sheet


def sample_sheet(path: Path) -> str:
    """The sample pictures in a file (N, H, W, 3) as one PNG inside the page; nothing if there is no file."""
    if not path.exists():
        return ""
    pictures = map_npy(path)
    if pictures.ndim != 4 or pictures.dtype != np.uint8 or pictures.shape[3] != 3 or 0 in pictures.shape:
        raise VisardError(f"{path}: holds no sample pictures but {pictures.dtype} {pictures.shape}")
    if max(pictures.shape[1:3]) > MOST_PIXELS:
        raise VisardError(f"{path}: holds pictures of {pictures.shape[2]} x {pictures.shape[1]} pixels, too large")
    pictures = pictures[:MOST]
    sheet, buffer = contact_sheet(pictures), io.BytesIO()
    Image.fromarray(sheet).save(buffer, "JPEG", quality=85, optimize=True)  # a sixth of the same as PNG
    source = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    size = f'width="{sheet.shape[1]}" height="{sheet.shape[0]}"'
    image = f'<img src="{source}" {size} alt="{plural(len(pictures), "synthetic face")}">'
    return f'<div class="sheets"><figure class="sheet">{image}</figure></div>'


def page_of(title: str, kicker: str, heading: str, lead: str, facts: str, sections: Sequence[Section]) -> str:
    """Put everything into the template. `kicker` and `facts` are HTML, the other texts are not."""
    # Inside a script element these would end it or change how it ends.
    library = plotly().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    script = page_file("page.js")
    parts = {
        "policy": policy(library, script),
        "version": esc(version()),
        "title": esc(title, 120),
        "style": page_file("style.css"),
        "navigation": "".join(f'<li><a href="#{s.id}">{esc(s.short or s.title)}</a></li>' for s in sections),
        "kicker": kicker,
        "heading": esc(heading, 120),
        "lead": esc(lead, 2000),
        "facts": facts,
        "sections": "".join(s.html() for s in sections),
        "made": datetime.now(UTC).strftime("%Y-%m-%d"),
        "plotly": PLOTLY_VERSION,
        "charts": script_json([chart.payload() for section in sections for chart in section.charts]),
        "library": library,
        "script": script,
    }
    return filled("page.html", parts)


def plotly() -> str:
    """plotly.js with the charts that its authors call basic: a quarter of the whole."""
    return page_file("plotly-basic.min.js")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A template with its placeholders filled in one pass, so that the parts themselves may contain placeholders."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page_file(template))


def policy(*scripts: str) -> str:
    """Content security policy: only the page's own scripts run, and nothing is fetched from anywhere."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def page_file(name: str) -> str:
    """A template, script or style sheet of this folder."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def version() -> str:
    """The version of visard that made the page."""
    try:
        return installed("visard")
    except PackageNotFoundError:
        return "(not installed)"
