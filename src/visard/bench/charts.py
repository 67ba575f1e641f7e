"""The charts of a bench: paired differences with intervals, figures over a setting, curves over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from visard.bench.render import heading, interval, signed
from visard.bench.results import Compared, CurvesOf, FigureOf, TableOf
from visard.bench.statistics import Spread, spread
from visard.report.charts import COLOURS, Chart, Json, band, line, offer, round_axis
from visard.report.figures import describe
from visard.report.words import esc

TICKS = ".1~%"


def difference_charts(table: TableOf, id: str) -> list[Chart]:
    """One chart with a figure to choose: a dot for the mean of each difference, its interval, and every seed."""
    found = []
    for column in table.columns:
        compared = [d for d in table.compared if d.column == column["title"] and d.summary.mean is not None]
        if compared:
            found.append((column["title"], _differences(compared, id, column["title"], column["percent"])))
    return offer(found, "Figure")


def _differences(compared: Sequence[Compared], id: str, title: str, percent: bool) -> Chart:
    scale = 100.0 if percent else 1.0
    unit = "points" if percent else ""
    dots: list[Json] = []
    seeds: Json = {"x": [], "y": [], "text": []}
    for y, d in enumerate(compared):
        mean, low, high = (None if v is None else scale * v for v in (d.summary.mean, d.summary.low, d.summary.high))
        colour = COLOURS[y % len(COLOURS)]
        dot: Json = {"type": "scatter", "mode": "markers", "x": [mean], "y": [y], "showlegend": False} | {
            "marker": {"color": colour, "size": 11},
            "hovertemplate": f"{signed(d.summary.mean, percent)} {unit} ({esc(interval(d, percent))})<extra></extra>",
        }
        if mean is not None and low is not None and high is not None:
            ends = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
            dot["error_x"] = {**ends, "color": colour, "thickness": 2, "width": 7}
        dots.append(dot)
        for seed, value in d.values.items():
            if value is not None and d.summary.n > 1:
                seeds["x"].append(scale * value)
                seeds["y"].append(y + 0.24)
                seeds["text"].append(f"seed {seed}")
    every: Json = {"type": "scatter", "mode": "markers", **seeds, "showlegend": False} | {
        "marker": {"color": "@muted/60", "size": 6},
        "hovertemplate": "%{text}: %{x:+.3~f}<extra></extra>",
    }
    names = [esc(f"{d.a} − {d.b}", 40) for d in compared]
    layout: Json = {
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": {"title": {"text": f"Difference{', percentage points' if percent else ''}"}, "showgrid": True}
        | {"tickformat": "~r", "zeroline": True, "zerolinecolor": "@axis", "zerolinewidth": 2, "rangemode": "tozero"},
        "yaxis": {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False}
        | {"range": [len(names) - 0.4, -0.6]},
    }
    alt = "; ".join(f"{d.a} minus {d.b}: {signed(d.summary.mean, percent)} {unit}" for d in compared)
    note = "Large dot: mean over seeds; line: 95 % interval; small dots: single seeds."
    if all(d.summary.n < 2 for d in compared):
        note = "One seed: there is no interval."
    return Chart(
        id, "Differences, paired by seed", f"{title}. {alt}.", [*dots, every], layout, note, 110 + 62 * len(names)
    )


def figure_chart(figure: FigureOf, id: str) -> Chart | None:
    """A column over a setting: mean and a band of one standard deviation; the paper's points dashed."""
    percent = figure.column["percent"]
    hover, data = ("%{y:.2%}" if percent else "%{y:.4g}"), list[Json]()
    labels = list(dict.fromkeys([*figure.series, *figure.paper]))
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
    for label, points in figure.series.items():
        known = {x: cell.summary for x, _, cell in points if cell.summary.mean is not None}
        data += _banded({x: known[x] for x in sorted(known)}, label, colours[label], hover)
    for label, printed in figure.paper.items():
        ys = [y / 100 if percent else y for _, y in sorted(printed)]
        style = {"dash": "dash", "width": 1.5}
        xs = [x for x, _ in sorted(printed)]
        data.append(line(xs, ys, f"{label}, paper", colours[label], line=style, hovertemplate=hover))
    if not data:
        return None
    axis: Json = {"title": {"text": esc(figure.x, 60)}}
    places = sorted({x for trace in data for x in trace["x"]})
    if places[0] > 0 and places[-1] >= 30 * places[0]:  # over more than a decade: logarithmic, a tick for each place
        axis |= {"type": "log", "tickvals": places, "ticktext": [f"{x:g}" for x in places]}
    layout: Json = {"hovermode": "x unified", "showlegend": True, "xaxis": axis}
    layout["yaxis"] = {"title": {"text": esc(heading(figure.column), 60)}, **({"tickformat": TICKS} if percent else {})}
    alt = f"{figure.column['title']} by {figure.x}, {len(labels)} series."
    note = "Band: one standard deviation over seeds." if any("fill" in trace for trace in data) else ""
    note += " Dashed: the paper’s figures, on its own data." if figure.paper else ""
    return Chart(id, figure.title, alt, data, layout, note.strip(), 380)


def curves_chart(curves: CurvesOf, id: str) -> Chart | None:
    """A figure over rounds: mean and a band of one standard deviation over seeds."""
    name = next((n for n in reversed(curves.figure.split(".")) if n not in ("mean", "worst", "best", "std")), "")
    percent = describe(name.rpartition("/")[2]).is_share or name.startswith(("tar@", "rank"))
    hover, data, last = ("%{y:.2%}" if percent else "%{y:.4g}"), list[Json](), 1
    for i, (row, seeds) in enumerate(curves.series.items()):
        by_round: dict[int, list[float]] = {}
        for points in seeds.values():
            for x, y in points:
                by_round.setdefault(x, []).append(y)
        known = {float(x): spread(ys) for x, ys in sorted(by_round.items())}
        data += _banded(known, row, COLOURS[i % len(COLOURS)], hover)
        last = max([last, *by_round])
    if not data:
        return None
    layout: Json = {"hovermode": "x unified", "showlegend": True, "xaxis": round_axis(last)}
    layout["yaxis"] = {"tickformat": TICKS} if percent else {}
    note = "Band: one standard deviation over seeds." if any("fill" in trace for trace in data) else ""
    return Chart(id, curves.title, f"{curves.title} by round, {len(curves.series)} rows.", data, layout, note, 380)


def _banded(points: Mapping[float, Spread], name: str, colour: str, hover: str) -> list[Json]:
    """A curve of means with its band; a single point keeps its interval as an error bar."""
    if not points:
        return []
    xs, all_of_it = list(points), list(points.values())
    traces: list[Json] = []
    group = f"row {name}"
    if len(xs) > 1 and any(s.std is not None for s in all_of_it):
        low = [None if s.mean is None or s.std is None else s.mean - s.std for s in all_of_it]
        high = [None if s.mean is None or s.std is None else s.mean + s.std for s in all_of_it]
        traces += [edge | {"showlegend": False, "legendgroup": group} for edge in band(xs, low, high, name, colour)]
    curve = line(xs, [s.mean for s in all_of_it], name, colour, hovertemplate=hover, legendgroup=group)
    if len(xs) == 1 and all_of_it[0].std is not None:
        curve["error_y"] = {"type": "data", "array": [all_of_it[0].std], "color": colour, "thickness": 2}
    if len(xs) == 1:
        curve["marker"] = {"size": 10, "color": colour}
    return [*traces, curve]
