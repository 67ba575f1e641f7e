"""The display of a run in a notebook: its settings, its tests, and curves over its rounds, without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visard.evaluation.metrics import brief, describe
from visard.report.html import esc
from visard.text import NO_VALUE

WIDTH, HEIGHT, EDGE = 300, 110, 6
MOST = 400  # points of a curve
CELL = 'style="text-align:right;padding:2px 10px"'


Curve = list[tuple[float, float]]  # (step, value)


def show(
    name: str, said: str, folder: Path, tests: Mapping[str, Mapping[str, Any]], curves: Mapping[str, Curve]
) -> str:
    """HTML of a run: heading, final tests, and curves by title."""
    parts = [f"<p><b>{esc(name, 80)}</b> {esc(said, 300)}<br><code>{esc(folder)}</code></p>", _tests(tests)]
    drawn = [_curve(title, points) for title, points in curves.items() if len(points) > 1]
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


def _curve(title: str, points: Sequence[tuple[float, float]]) -> str:
    """A small drawing, with the first and last value in words."""
    points = points[:: max(1, len(points) // MOST)]
    xs, ys = zip(*points, strict=True)
    low, wide, bottom, tall = min(xs), max(xs) - min(xs) or 1.0, min(ys), max(ys) - min(ys) or 1.0
    right, up = (WIDTH - 2 * EDGE) / wide, (HEIGHT - 2 * EDGE) / tall
    places = " ".join(f"{EDGE + (x - low) * right:.1f},{HEIGHT - EDGE - (y - bottom) * up:.1f}" for x, y in points)
    ends = f"{ys[0]:.4g} → {ys[-1]:.4g}"
    return (
        f'<figure style="margin:0"><figcaption>{esc(title, 60)}: {ends}</figcaption>'
        f'<svg role="img" aria-label="{esc(title, 60)}: {ends}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}"><polyline points="{places}" fill="none" stroke="currentColor" '
        'stroke-width="1.5"/></svg></figure>'
    )
