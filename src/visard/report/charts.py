"""Charts as plotly.js figures: plain dicts that page.js draws and colours, and the parts they are made of.

Colours are names such as "@blue" or "@blue/20" (an opacity in per cent); page.js looks them up in the style
sheet, so that charts follow the theme. Text from run folders is escaped: plotly.js knows some HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import unescape
from statistics import quantiles
from typing import Any

from visard.report.metrics import COUNTERS, Figure, Verification, describe, measured, order
from visard.report.run_folder import Round, Run, mapping, number
from visard.report.text import count, esc, percent, share, size, visible

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


# ----------
# The charts that go by round: loss, evaluation, time, bytes.


def training(run: Run) -> list[Chart]:
    """The loss with its spread over clients, then every other figure that the method logged and that changes."""
    names = list(dict.fromkeys(n for r in run.rounds for n in r.figures))
    names.sort(key=lambda n: (n != "loss", "loss" not in n))
    charts = []
    for i, name in enumerate(names):
        figure = describe(name)
        rows = [(r.step + 1, r.figures[name], r) for r in run.rounds if r.figures.get(name) is not None]
        if not rows:
            continue
        x, y = [r[0] for r in rows], [r[1] for r in rows]
        if name != "loss" and len(y) > 1 and len(set(y)) == 1:  # a flat line says less than the table below it
            continue
        data: list[Json] = []
        spread = [sorted(v for c in r.clients.values() if (v := c.get(name)) is not None) for *_, r in rows]
        if name not in COUNTERS and any(len(s) >= 3 for s in spread):
            cut = [quantiles(s, n=10) if len(s) >= 3 else None for s in spread]
            low, high = [c[0] if c else None for c in cut], [c[-1] if c else None for c in cut]
            data += band(x, low, high, "Middle 80 % of clients", "@blue")
        data.append(line(x, y, figure.label, "@blue", hovertemplate="%{y:.4g}"))
        alt = f"{figure.label} by round: from {y[0]:.3g} in round {x[0]} to {y[-1]:.3g} in round {x[-1]}."
        layout = _layout(run, figure.is_share) | {"showlegend": len(data) > 1}
        charts.append(Chart(f"training-{i}", figure.label, alt, data, layout, figure.meaning if not i else ""))
    return charts


def evaluation(run: Run) -> list[Chart]:
    """The figures of the generic model by round: those to raise by test set, those to lower overlaid."""
    sets = list(dict.fromkeys([*mapping(run.metrics.get("generic")), *(s for e in measured(run) for s in e.generic)]))
    names = sorted(dict.fromkeys(n for e in measured(run) for f in e.generic.values() for n in f), key=order)
    figures = [f for f in map(describe, names) if f.is_share]
    by_set = []
    for test_set in sets:
        raised = [f for f in figures if f.higher_is_better]
        data = [t for i, f in enumerate(raised) if (t := _evaluated(run, test_set, f, f.label, i))]
        if data:
            ends = ", ".join(f"{unescape(d['name'])} {percent(d['y'][-1])}" for d in data)
            alt = f"Figures on {test_set} by round; at the end {ends}."
            note = f"On unseen identities ({test_set}). Tap a name in the legend to hide its curve."
            by_set.append((test_set, Chart("evaluation", "Evaluation", alt, data, _layout(run, True), note)))
    charts = offer(by_set, "Test set")
    for figure in (f for f in figures if not f.higher_is_better):
        data = [t for i, s in enumerate(sets) if (t := _evaluated(run, s, figure, s, i))]
        if data:
            alt = f"{figure.label} by round; at the end {percent(data[0]['y'][-1], 2)}."
            layout = _layout(run, True) | {"showlegend": len(data) > 1}
            charts.append(Chart(f"evaluation-{len(charts)}", figure.label, alt, data, layout, "Lower is better."))
    return charts


def _evaluated(run: Run, test_set: str, figure: Figure, name: str, i: int) -> Json | None:
    """One figure on one test set as a curve, None if it was never measured."""
    found = [(e.step + 1, e.generic.get(test_set, {}).get(figure.key)) for e in measured(run)]
    known = [(x, y) for x, y in found if y is not None]
    if not known:
        return None
    return line(
        [k[0] for k in known],
        [k[1] for k in known],
        name,
        COLOURS[i % len(COLOURS)],
        hovertemplate="%{y:.2%}",
    )


def _layout(run: Run, share: bool) -> Json:
    y_axis = {"tickformat": ".1~%"} if share else {}
    base: Json = {
        "xaxis": round_axis(last_round(run)),
        "yaxis": y_axis,
        "hovermode": "x unified",
        "showlegend": True,
    }
    return base | marks(run)


def last_round(run: Run) -> int:
    return max([r.step + 1 for r in run.rounds[-1:]] + [e.step + 1 for e in run.evaluations[-1:]], default=1)


def client_evaluation(run: Run) -> list[Chart]:
    """Mean, spread and worst client by round, for each figure."""
    names = sorted(dict.fromkeys(n for e in measured(run) for n in e.clients), key=order)
    charts = []
    for name in names:
        figure = describe(name)
        rows = [
            (e.step + 1, s) for e in measured(run) if (s := e.clients.get(name)) and number(s.get("mean")) is not None
        ]
        if len(rows) < 2:
            continue
        x = [r[0] for r in rows]
        part = {key: [number(s.get(key)) for _, s in rows] for key in ("mean", "worst", "best")}
        hover = "%{y:.2%}" if figure.is_share else "%{y:.4g}"
        data = band(x, part["worst"], part["best"], "Worst to best client", "@blue")
        data.append(line(x, part["mean"], "Mean over clients", "@blue", hovertemplate=hover))
        data.append(line(x, part["worst"], "Worst client", "@orange", line={"dash": "dot"}, hovertemplate=hover))
        alt = f"{figure.label} over clients by round; the mean ends at {figure.text(part['mean'][-1])}."
        chart = Chart("clients-by-round", "Clients over the rounds", alt, data, _layout(run, figure.is_share))
        charts.append((figure.label, chart))
    return offer(charts, "Figure")


def cost(run: Run) -> list[Chart]:
    """Time and bytes by round, as bars; long runs in groups of rounds."""
    groups = grouped(run)
    if not groups:
        return []
    evals = {e.step: e.seconds for e in run.evaluations}
    x = [g[0].step + 1 for g in groups]
    seconds = [_mean([r.seconds for r in g]) for g in groups]
    tests = [_mean([evals.get(r.step, 0.0) for r in g]) for g in groups]
    each = "" if len(groups) == len(run.rounds) else f" Each bar is the mean of {len(groups[0])} rounds."
    stacked: Json = {
        "barmode": "stack",
        "bargap": 0.25,
        "hovermode": "x unified",
        "xaxis": round_axis(last_round(run)),
        "showlegend": True,
    }
    data = [bars(x, seconds, "Round", "@blue", "%{y:.3~g} s")]
    if any(tests):
        data.append(bars(x, tests, "Evaluation", "@gold", "%{y:.3~g} s"))
    total = sum(r.seconds or 0 for r in run.rounds)
    charts = [
        Chart(
            "seconds",
            "Seconds per round",
            f"Seconds per round; {total:.0f} in all.",
            data,
            stacked | {"yaxis": {"title": {"text": "Seconds"}}} | marks(run),
            f"Evaluation apart.{each}" if any(tests) else each.strip(),
        )
    ]
    up = [_mean([r.bytes_up for r in g]) for g in groups]
    down = [_mean([r.bytes_down for r in g]) for g in groups]
    if any(up) or any(down):
        data = [
            bars(x, up, "Clients to server", "@blue", "%{y:.4~s}B"),
            bars(x, down, "Server to clients", "@sky", "%{y:.4~s}B"),
        ]
        sums = [size(sum(getattr(r, f"bytes_{way}") or 0 for r in run.rounds)) for way in ("up", "down")]
        alt = f"Bytes per round over all clients; {sums[0]} went up and {sums[1]} down in all."
        layout = stacked | {"yaxis": {"title": {"text": "Bytes"}, "tickformat": "~s", "ticksuffix": "B"}} | marks(run)
        charts.append(Chart("bytes", "Bytes per round, all clients", alt, data, layout, each.strip()))
    return charts


def grouped(run: Run) -> list[list[Round]]:
    """The rounds in equal groups, as few as needed for at most `MOST_BARS` bars."""
    each = max(1, -(-len(run.rounds) // MOST_BARS))
    return [run.rounds[i : i + each] for i in range(0, len(run.rounds), each)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def leaving_by_round(run: Run, by_round: dict[tuple[str, int], dict[str, int]], kinds: Sequence[str]) -> list[Chart]:
    """Bytes that left all clients in each round, stacked by kind."""
    if not by_round:
        return []
    steps = {(r.stage, r.round): r.step for r in run.rounds}
    order = {place: steps.get(place, i) for i, place in enumerate(by_round)}
    places = sorted(by_round, key=lambda p: order[p])
    each = max(1, -(-len(places) // MOST_BARS))
    groups = [places[i : i + each] for i in range(0, len(places), each)]
    x = [order[g[0]] + 1 for g in groups]
    data = [
        bars(
            x,
            [sum(by_round[p].get(kind, 0) for p in g) / len(g) for g in groups],
            kind.replace("_", " "),
            COLOURS[i % len(COLOURS)],
            "%{y:.4~s}B",
        )
        for i, kind in enumerate(kinds)
    ]
    y_axis = {"title": {"text": "Bytes"}, "tickformat": "~s", "ticksuffix": "B"}
    layout: Json = {"barmode": "stack", "bargap": 0.25, "hovermode": "x unified", "showlegend": True}
    layout |= {"xaxis": round_axis(last_round(run)), "yaxis": y_axis} | marks(run)
    alt = f"Bytes that left the clients by round and kind: {', '.join(kinds)}."
    return [
        Chart(
            "leaving",
            "What left, by round and kind",
            alt,
            data,
            layout,
            "All clients together, with the evaluations between rounds.",
        )
    ]


# ----------
# The charts of the final result: ROC and DET, score histograms, bars for each client.


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
