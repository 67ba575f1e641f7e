"""The display of a run in a notebook: its settings, its tests, and curves over its rounds, without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visard.evaluation.metrics import Metric, brief, describe
from visard.report.html import esc
from visard.text import NO_VALUE

WIDTH, HEIGHT, EDGE = 300, 110, 6
MOST = 400  # points of a curve
COLOUR = "#3388cc"  # to be seen on light and dark pages
CELL = 'style="text-align:right;padding:2px 10px"'


Curve = list[tuple[float, float]]  # (step, value)


def show(
    name: str, said: str, folder: Path, tests: Mapping[str, Mapping[str, Any]], curves: Mapping[tuple[str, str], Curve]
) -> str:
    """HTML of a run: heading, final tests, and curves by metric and stage or test."""
    parts = [f"<p><b>{esc(name, 80)}</b> {esc(said, 300)}<br><code>{esc(folder)}</code></p>", _tests(tests)]
    drawn = [_curve(describe(key), where, points) for (key, where), points in curves.items() if len(points) > 1]
    parts.append(f'<div style="display:flex;flex-wrap:wrap;gap:16px">{"".join(drawn)}</div>' if drawn else "")
    return f'<div class="visard-run">{"".join(parts)}</div>'


def _tests(tests: Mapping[str, Mapping[str, Any]]) -> str:
    shown = {name: brief(dict(test)) for name, test in tests.items()}
    keys = list(dict.fromkeys(key for found in shown.values() for key in found))
    if not keys:
        return ""
    head = "".join(f"<th {CELL}>{esc(describe(key).label)}</th>" for key in keys)
    rows = ""
    for name, found in shown.items():
        texts = [NO_VALUE if (v := found.get(key)) is None else describe(key).text(v) for key in keys]
        rows += f"<tr><th>{esc(name, 60)}</th>{''.join(f'<td {CELL}>{esc(text)}</td>' for text in texts)}</tr>"
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _curve(metric: Metric, where: str, points: Sequence[tuple[float, float]]) -> str:
    """A small drawing, with the first and last value in words."""
    title = f"{metric.label}, {where}"
    points = points[:: max(1, len(points) // MOST)]
    xs, ys = zip(*points, strict=True)
    low, wide, bottom, tall = min(xs), max(xs) - min(xs) or 1.0, min(ys), max(ys) - min(ys) or 1.0
    right, up = (WIDTH - 2 * EDGE) / wide, (HEIGHT - 2 * EDGE) / tall
    places = " ".join(f"{EDGE + (x - low) * right:.1f},{HEIGHT - EDGE - (y - bottom) * up:.1f}" for x, y in points)
    ends = f"{metric.text(ys[0])} → {metric.text(ys[-1])}, rounds {low:g} to {max(xs):g}"
    last = places.rpartition(" ")[2].split(",")
    return (
        f'<figure style="margin:0"><figcaption>{esc(title, 60)}: {ends}</figcaption>'
        f'<svg role="img" aria-label="{esc(title, 60)}: {ends}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}"><path d="M{EDGE} {HEIGHT - 1}H{WIDTH - EDGE}" stroke="currentColor" '
        f'opacity="0.3"/><polyline points="{places}" fill="none" stroke="{COLOUR}" stroke-width="2"/>'
        f'<circle cx="{last[0]}" cy="{last[1]}" r="3.5" fill="{COLOUR}"/></svg></figure>'
    )
