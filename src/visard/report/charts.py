"""Charts as plotly.js figures: plain dicts that page.js draws and colours, and the parts they are made of.

Colours are names such as "@blue" or "@blue/20" (an opacity in per cent); page.js looks them up in the style
sheet, so that charts follow the theme. Text from run folders is escaped: plotly.js knows some HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from visard.report.runs import Run
from visard.report.words import esc, share, visible

COLOURS = ("@blue", "@orange", "@green", "@pink", "@sky", "@brown", "@violet", "@gold")
DASHES = ("solid", "dash", "dot", "dashdot")
Json = dict[str, Any]
MOST_POINTS, MOST_BARS = 2000, 240


@dataclass(frozen=True)
class Chart:
    """A chart: what to draw, and the words beside it."""

    id: str
    title: str
    alt: str  # what a person sees in it, in a sentence; plain text
    data: list[Json]
    layout: Json = field(default_factory=dict)
    note: str = ""
    height: int = 340
    choices: tuple[tuple[str, Chart], ...] = ()  # other figures to choose from, (label, chart)
    choose: str = "Figure"
    label: str = ""  # the name of this one among the choices

    def payload(self) -> Json:
        """What page.js needs."""
        shown = (self, *(chart for _, chart in self.choices))
        figures = [
            {"data": c.data, "layout": c.layout, "alt": visible(c.alt, 400), "note": visible(c.note)} for c in shown
        ]
        return {"id": self.id, "height": self.height, "figures": figures}


def offer(charts: Sequence[tuple[str, Chart]], choose: str) -> list[Chart]:
    """One chart that shows any of several, the first to begin with; none if there is none."""
    if not charts:
        return []
    (label, first), *rest = charts
    height = max(c.height for _, c in charts)
    return [replace(first, choices=tuple(rest), choose=choose, height=height, label=label)]


def thin(
    x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS
) -> tuple[list[float], list[float | None]]:
    """At most `most` points of a curve; the lowest and highest of each stretch stay, so no spike is lost."""
    if len(x) <= most:
        return list(x), list(y)
    keep = {0, len(x) - 1}
    stretches = max(1, (most - 2) // 2)
    for i in range(stretches):
        part = range(i * len(x) // stretches, (i + 1) * len(x) // stretches)
        known = [j for j in part if y[j] is not None]
        if known:
            keep |= {min(known, key=lambda j: y[j]), max(known, key=lambda j: y[j])}  # type: ignore[arg-type,return-value]
    return [x[j] for j in sorted(keep)], [y[j] for j in sorted(keep)]


def line(x: Sequence[float], y: Sequence[float | None], name: str, colour: str, **more: Any) -> Json:
    """A curve."""
    xs, ys = thin(x, y)
    style = {"color": colour, "width": 2.25, **more.pop("line", {})}
    mode = "lines+markers" if len(xs) <= 40 else "lines"
    return {"type": "scatter", "mode": mode, "x": xs, "y": ys, "name": esc(name, 48), "line": style} | {
        "marker": {"size": 5, "color": colour},
        **more,
    }


def band(
    x: Sequence[float], low: Sequence[float | None], high: Sequence[float | None], name: str, colour: str
) -> list[Json]:
    """A shaded range around a curve."""
    rows = [(a, b, c) for a, b, c in zip(x, low, high, strict=True) if b is not None and c is not None]
    step = max(1, -(-len(rows) // (MOST_POINTS // 2)))
    rows = rows[::step]
    edge = {
        "type": "scatter",
        "mode": "lines",
        "x": [r[0] for r in rows],
        "line": {"width": 0},
        "hoverinfo": "skip",
    }
    group = f"band {name}"
    return [
        edge | {"y": [r[1] for r in rows], "showlegend": False, "legendgroup": group},
        edge
        | {"y": [r[2] for r in rows], "fill": "tonexty", "fillcolor": f"{colour}/16", "name": esc(name, 48)}
        | {"legendgroup": group, "line": {"width": 0, "color": f"{colour}/16"}},
    ]


def marks(run: Run) -> Json:
    """Lines and names where the stages of a run begin; nothing if there is only one."""
    if len(run.stages) < 2:
        return {}
    shapes, names = [], []
    for i, (name, first, _) in enumerate(run.stages):
        if i:
            at = {"x0": first + 0.5, "x1": first + 0.5, "y0": 0, "y1": 1, "yref": "paper"}
            shapes.append({"type": "line", **at, "line": {"color": "@axis", "width": 1, "dash": "dot"}})
        place = {"x": first + 0.6, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        names.append({**place, "text": esc(name, 20), "showarrow": False, "font": {"size": 11, "color": "@muted"}})
    return {"shapes": shapes, "annotations": names}


def round_axis(last: int) -> Json:
    """The axis of rounds 1 to `last`."""
    ticks: Json = {"dtick": 1} if last <= 8 else {"nticks": 9}
    return {"title": {"text": "Round"}, "range": [0.5, last + 0.5], "tickformat": ",d", **ticks}


def log_axis(low: float, high: float, title: str) -> Json:
    """A logarithmic axis of shares, ticks at powers of ten in per cent."""
    ticks = [10.0**p for p in range(-9, 1) if low / 2 <= 10.0**p <= high * 2]
    return {
        "type": "log",
        "title": {"text": title},
        "tickvals": ticks,
        "ticktext": [share(t) for t in ticks],
        "tickangle": 0,
    }


def bars(x: Sequence[float], y: Sequence[float | None], name: str, colour: str, hover: str) -> Json:
    return {"type": "bar", "x": list(x), "y": list(y), "name": esc(name, 48), "marker": {"color": colour}} | {
        "hovertemplate": hover
    }
