"""The charts of the final result: ROC and DET, score histograms, bars for each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visard.report.charts import COLOURS, DASHES, Chart, Json, line, log_axis, offer
from visard.report.figures import describe, order
from visard.report.results import Verification
from visard.report.words import count, esc, visible


def roc(
    sets: Sequence[tuple[str, Verification]], det: bool = False, colours: Sequence[int] | None = None
) -> list[Chart]:
    """ROC with a logarithmic axis, or DET (both axes logarithmic). Several curves are overlaid."""
    data: list[Json] = []
    lowest, fewest = 1.0, None
    for i, (name, v) in zip(colours or range(len(sets)), sets, strict=True):
        points = [(f, t) for f, t in v.roc if f > 0 and (not det or t < 1)]
        if not points:
            continue
        colour = COLOURS[i % len(COLOURS)]
        x, y = [p[0] for p in points], [1 - p[1] if det else p[1] for p in points]
        lowest = min(lowest, x[0])
        fewest = min(fewest or v.impostors or 0, v.impostors or 0) or fewest
        hover = "FAR %{x:.3~%}<br>" + ("FRR" if det else "TAR") + " %{y:.2%}"
        curve = line(x, y, name, colour, hovertemplate=f"{hover}<extra>{esc(name, 48)}</extra>", mode="lines")
        data.append(curve | {"line": {"color": colour, "width": 2.25, "dash": DASHES[(i // len(COLOURS)) % 4]}})
        stops = [t for t in v.tar if t.value is not None and (not det or t.value < 1)]
        if stops and not det:
            symbols = ["circle" if t.reliable else "circle-open" for t in stops]
            dots = {"size": 9, "color": colour, "symbol": symbols, "line": {"width": 2, "color": colour}}
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [t.far for t in stops],
                    "y": [t.value for t in stops],
                }
                | {
                    "marker": dots,
                    "showlegend": False,
                    "hovertemplate": f"{hover}<extra>{esc(name, 48)}</extra>",
                }
            )
    if not data:
        return []
    layout: Json = {
        "showlegend": len(sets) > 1,
        "hovermode": "closest",
        "xaxis": log_axis(lowest, 1, "False accept rate"),
    }
    note = "Higher and further left is better."
    if fewest:
        edge = 10 / fewest
        if edge > lowest:
            layout["shapes"] = [
                {
                    "type": "rect",
                    "x0": lowest,
                    "x1": edge,
                    "y0": 0,
                    "y1": 1,
                    "yref": "paper",
                    "layer": "below",
                }
                | {"fillcolor": "@gold/14", "line": {"width": 0}}
            ]
            note += f" Shaded: unreliable, fewer than 10 of {count(fewest)} impostor pairs accepted."
    if det:
        rates = [y for d in data for y in d["y"] if y > 0]
        layout["yaxis"] = log_axis(min(rates, default=1), max(rates, default=1), "False reject rate")
        note = "Both errors on logarithmic axes. Lower and further left is better."
        title, key = "DET curve", "det"
    else:
        layout["yaxis"] = {"tickformat": ".0%", "title": {"text": "True accept rate"}, "range": [0, 1.02]}
        title, key = "ROC curve", "roc"
    alt = f"{title} of {', '.join(n for n, _ in sets)}."
    return [Chart(key, title, alt, data, layout, note)]


def histogram(name: str, v: Verification) -> Chart | None:
    """Score densities of genuine and impostor pairs."""
    bins = len(v.genuine_scores)
    if not bins or bins != len(v.impostor_scores):
        return None
    data = []
    width = 2 / bins
    centres = [-1 + width * (i + 0.5) for i in range(bins)]
    for label, counts, colour in (
        ("Impostor pairs", v.impostor_scores, "@orange"),
        ("Genuine pairs", v.genuine_scores, "@blue"),
    ):
        total = sum(counts) or 1
        shares = [c / total for c in counts]
        data.append(
            {
                "type": "bar",
                "x": centres,
                "y": shares,
                "width": width,
                "name": label,
                "marker": {"color": f"{colour}/55"},
            }
            | {"hovertemplate": "score %{x:.2f}: %{y:.2%}<extra>" + label + "</extra>"}
        )
    full = [c for c, g, i in zip(centres, v.genuine_scores, v.impostor_scores, strict=True) if g or i]
    layout: Json = {"barmode": "overlay", "bargap": 0, "showlegend": True, "hovermode": "closest"}
    layout["xaxis"] = {
        "title": {"text": "Cosine score"},
        "range": [min(full) - 0.03, max(full) + 0.03] if full else None,
    }
    layout["yaxis"] = {"title": {"text": "Share of pairs"}, "tickformat": ".1~%"}
    if v.threshold is not None:
        at = {"x0": v.threshold, "x1": v.threshold, "y0": 0, "y1": 1, "yref": "paper"}
        layout["shapes"] = [{"type": "line", **at, "line": {"color": "@ink", "width": 1.25, "dash": "dash"}}]
    alt = f"Scores of genuine and impostor pairs on {name}."
    note = "The less the two overlap, the better." + (
        " Dashed: where both errors are equal." if v.threshold is not None else ""
    )
    return Chart("histogram", "Scores of pairs", alt, data, layout, note)


def histograms(sets: Sequence[tuple[str, Verification]]) -> list[Chart]:
    """One histogram, with a choice of the test set."""
    charts = [(name, chart) for name, v in sets if (chart := histogram(name, v))]
    return offer(charts, "Test set")


def client_bars(name: str, values: dict[str, float | None], worst: str | None, lower: bool) -> Chart | None:
    """Clients from the worst to the best, bars from zero, the mean as a line, the worst named."""
    figure = describe(name)
    known = [(c, v) for c, v in values.items() if v is not None]
    if not known:
        return None
    known.sort(key=lambda item: (item[1], item[0]), reverse=lower)
    worst = worst if worst in dict(known) else known[0][0]
    mean = sum(v for _, v in known) / len(known)
    few = len(known) <= 32
    at, height = list(range(len(known))), [v for _, v in known]
    names = [esc(c, 28) for c, _ in known]
    shown = [figure.text(v) for v in height]
    trace: Json = {
        "type": "bar",
        "marker": {"color": ["@orange" if c == worst else "@blue" for c, _ in known]},
        "customdata": [f"{n}: {s}" for n, s in zip(names, shown, strict=True)],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    value_axis: Json = {"rangemode": "tozero", **({"tickformat": ".1~%"} if figure.is_share else {})}
    mark: Json = {"type": "line", "line": {"color": "@ink", "width": 1.5, "dash": "dash"}}
    label = {
        "text": f"mean {figure.text(mean, 1)}",
        "showarrow": False,
        "font": {"size": 11, "color": "@ink"},
    }
    layout: Json = {"showlegend": False, "hovermode": "closest", "bargap": 0.3 if few else 0.1}
    if few:
        value_axis["range"] = [min(0.0, *height) * 1.04, max(0.0, *height) * 1.04]
        data = [trace | {"orientation": "h", "x": height, "y": at, "text": shown, "textposition": "inside"}]
        data[0] |= {"textfont": {"color": "@panel", "size": 11}, "insidetextanchor": "start", "textangle": 0}
        names_axis = {"tickvals": at, "ticktext": names, "range": [len(known) - 0.4, -0.6], "showgrid": False}
        layout |= {"xaxis": value_axis | {"showgrid": True}, "yaxis": names_axis}
        layout["shapes"] = [mark | {"x0": mean, "x1": mean, "y0": 0, "y1": 1, "yref": "paper"}]
        layout["annotations"] = [label | {"x": mean, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "right"}]
    else:
        data = [trace | {"x": at, "y": height}]
        layout |= {
            "yaxis": value_axis,
            "xaxis": {"showticklabels": False, "title": {"text": "Clients, worst first"}},
        }
        layout["shapes"] = [mark | {"y0": mean, "y1": mean, "x0": 0, "x1": 1, "xref": "paper"}]
        layout["annotations"] = [label | {"y": mean, "x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom"}]
    value = dict(known)[worst]
    note = f"Worst, in orange: {visible(worst, 40)} with {figure.text(value)}; the mean is {figure.text(mean)}."
    alt = f"{figure.label} of {len(known)} clients, worst first. {note}"
    return Chart("per-client", "Each client", alt, data, layout, note, max(200, 80 + 22 * len(known)) if few else 340)


def per_client(figures: dict[str, dict[str, float | None]], summary: dict[str, dict[str, Any]]) -> list[Chart]:
    """Bars for every figure, with a choice. `figures`: figure -> client -> value; `summary`: who is the worst."""
    charts = []
    for name in sorted(figures, key=order):
        said = summary.get(name, {})
        worst = str(said["worst_client"]) if said.get("worst_client") is not None else None
        lower = said.get("lower_is_better", describe(name).higher_is_better is False) is True
        chart = client_bars(name, figures[name], worst, lower)
        if chart is not None:
            charts.append((describe(name).label, chart))
    return offer(charts, "Figure")
