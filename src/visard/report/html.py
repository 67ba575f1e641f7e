"""The building blocks of the page: sections, tables, cards, charts, notices. Cells and bodies are HTML."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visard.errors import UsageError, VisardError
from visard.report.charts import Chart
from visard.report.disclosure import PRIVATE, Leaving, Verdict
from visard.report.metrics import Card
from visard.report.text import esc, plural, size

SIGNS = {"good": "✓", "caution": "!", "alarm": "!"}


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


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, text_columns: int = 1, quiet: bool = False
) -> str:
    """A table: `text_columns` columns of text, then figures; `quiet` shows the caption to screen readers only."""
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
    return f"<details><summary>{summary}</summary>{body}</details>"


def figure(chart: Chart) -> str:
    """The place of a chart; page.js draws into it."""
    pick = ""
    if chart.choices:
        names = [chart.label, *(name for name, _ in chart.choices)]
        options = "".join(f'<option value="{i}">{esc(n, 60)}</option>' for i, n in enumerate(names))
        select = f'<select data-chart="{chart.id}">{options}</select>'
        pick = f'<label class="pick">{esc(chart.choose)} {select}</label>'
    title = esc(chart.title, 80)
    save = f'aria-label="Save {title} as PNG" title="Save as PNG" data-save="{chart.id}"'
    tools = f'<div class="tools">{pick}<button type="button" class="save" {save}>PNG</button></div>'
    note = f'<p class="note">{esc(chart.note)}</p>' if chart.note else ""
    head = f'<figcaption><div class="head"><h3>{title}</h3>{tools}</div>{note}</figcaption>'
    place = f'id="chart-{chart.id}" role="img" aria-label="{esc(chart.alt, 400)}"'
    return f'<figure class="panel">{head}<div class="chart" {place} style="height:{chart.height}px"></div></figure>'


def grid(figures: Sequence[str], wide: bool = False) -> str:
    if not figures:
        return ""
    single = " one" if wide or len(figures) == 1 else ""
    return f'<div class="grid{single}">{"".join(figures)}</div>'


def tip(id: str, label: str, meaning: str) -> str:
    """A button that explains, by hovering, by focus and by a tap."""
    if not meaning:
        return ""
    about = f'aria-label="What is {esc(label)}?" aria-describedby="{id}"'
    box = f'<span role="tooltip" class="tip" id="{id}">{esc(meaning)}</span>'
    return f'<button type="button" class="ask" {about}>?</button>{box}'


def cards(items: Sequence[Card]) -> str:
    """The headline figures."""
    boxes = []
    for i, card in enumerate(items):
        head = f"<h3>{esc(card.figure.label)}</h3>" + tip(f"tip-{i}", card.figure.label, card.figure.meaning)
        detail = f'<p class="detail">{esc(card.detail, 120)}</p>' if card.detail else ""
        value = f'<p class="value">{esc(card.text)}</p>'
        boxes.append(f'<li class="card">{head}{value}{detail}{flag(card.flag)}</li>')
    return f'<ul class="cards">{"".join(boxes)}</ul>'


def notice(level: str, title: str, body: str) -> str:
    """A banner: good, caution or alarm."""
    role = ' role="alert"' if level == "alarm" else ""
    sign = f'<span class="sign" aria-hidden="true">{SIGNS[level]}</span>'
    return f'<div class="banner {level}"{role}>{sign}<div><strong>{esc(title)}</strong>{body}</div></div>'


def flag(text: str) -> str:
    """A doubt beside a figure; nothing if there is none."""
    return f'<span class="flag">{esc(text, 160)}</span>' if text else ""


LOCK = (
    '<svg viewBox="0 0 16 16" aria-hidden="true"><rect x="3" y="7" width="10" height="7" rx="1.5"/>'
    '<path d="M5 7V5a3 3 0 0 1 6 0v2" fill="none" stroke="currentColor" stroke-width="1.6"/></svg>'
)


def encryption(secret: bool) -> str:
    if secret:
        return f'<span class="chip secret">{LOCK}encrypted</span>'
    return '<span class="chip">readable by the server</span>'


def flow(leaving: Leaving, clients: int | None, down: float | None, verdict: Verdict) -> str:
    """Clients, server, and between them a lane for each kind: what it is, how much, encrypted or not."""
    moved = [
        (kind, occasion.each(kind), when, encryption(leaving.encrypted.get(kind, False)))
        for occasion, when in (
            (leaving.pool, "per client, once, before the first round"),
            (leaving.rounds, "per client and round"),
            (leaving.evaluation, "per client and evaluation"),
        )
        for kind in sorted(occasion.kinds, key=lambda k: -occasion.kinds[k])
        if occasion.kinds[kind]
    ]
    largest = max((n for _, n, *_ in moved), default=0) or 1
    lanes = []
    for kind, n, when, secret in moved:
        width = 2 + 8 * (n / largest) ** 0.4  # a small message stays visible beside the weights
        danger = " danger" if verdict.level == "alarm" and kind in (*PRIVATE, *leaving.pooled) else ""
        lanes.append(_lane(kind.replace("_", " "), f"{size(n)} {when}", width, danger, secret))
    if not lanes:
        lanes.append('<li class="lane none"><span class="what">nothing</span></li>')
    if down:
        lanes.append(_lane("back from the server", f"{size(down)} per client and round", 4, " back"))
    home = "stay here: pictures, features, labels" if verdict.level == "good" else "hold the pictures"
    who = plural(clients, "client") if clients else "Clients"
    readable = [leaving.name(k) for k in leaving.kinds if not leaving.encrypted.get(k)]
    sees = "can read: " + ", ".join(readable) if readable else "can read nothing"
    return (
        f'<div class="flow"><div class="party"><b>{who}</b><span>{home}</span></div>'
        f'<ul class="lanes" aria-label="What leaves a client">{"".join(lanes)}</ul>'
        f'<div class="party"><b>Server</b><span>{esc(sees)}</span></div></div>'
    )


def _lane(name: str, amount: str, width: float, style: str = "", more: str = "") -> str:
    what = f'<span class="what"><b>{esc(name, 40)}</b>{more}</span>'
    arrow = '<span class="arrow" aria-hidden="true"></span>'
    return f'<li class="lane{style}" style="--w:{width:.1f}px">{what}{arrow}<span class="amount">{amount}</span></li>'


# ----------
# Contact sheets of sample pictures, as PNG inside the page. Synthetic faces only.

Samples = NDArray[np.uint8] | Mapping[str, NDArray[np.uint8]]
COLUMNS, MOST, MOST_SHEETS, GAP = (
    8,
    32,
    12,
    2,
)  # pictures a row, a sheet; sheets a page; pixels between pictures


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


def kept_samples(folder: Path) -> NDArray[np.uint8] | None:
    """The sample pictures that a run on synthetic faces left in its folder."""
    path = folder / "samples.npy"
    if not path.exists():
        return None
    try:
        pictures: NDArray[np.uint8] = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise VisardError(f"{path}: cannot be read: {error}") from None
    return pictures


def data_uri(sheet: NDArray[np.uint8]) -> str:
    """The sheet as a PNG in a data URI."""
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def sample_figures(samples: Samples) -> str:
    """One figure for each client (or one for all)."""
    sheets = samples if isinstance(samples, Mapping) else {"": samples}
    more = len(sheets) - MOST_SHEETS
    figures = []
    for client, pictures in list(sheets.items())[:MOST_SHEETS]:
        sheet = contact_sheet(np.asarray(pictures[:MOST]))
        shown = min(len(pictures), MOST)
        of = f" of {esc(client, 60)}" if client else ""
        caption = f"<figcaption>{esc(client, 60)}</figcaption>" if client else ""
        size = f'width="{sheet.shape[1]}" height="{sheet.shape[0]}"'
        alt = f"{plural(shown, 'synthetic face')}{of}"
        image = f'<img src="{data_uri(sheet)}" {size} alt="{alt}">'
        figures.append(f'<figure class="sheet">{image}{caption}</figure>')
    rest = f'<p class="note">And {plural(more, "more client")}.</p>' if more > 0 else ""
    return f'<div class="sheets">{"".join(figures)}</div>{rest}'
