"""The charts of one run, as plain dicts that page.js draws and colours, and the parts that all charts share.

Colours are names such as "@blue" or "@blue/20" (an opacity in per cent); page.js looks them up in the style
sheet, so that charts follow the theme. Text from run folders is escaped: plotly.js knows some HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from statistics import quantiles
from typing import Any, TypeVar

from visard.evaluation.metrics import FEW, Metric, describe, order, values
from visard.files import json_list, mapping, number, whole
from visard.report.html import Chart, Json, esc
from visard.report.run_folder import Run
from visard.text import count, percent, share, size, visible

COLOURS = ("@blue", "@orange", "@green", "@pink", "@sky", "@brown", "@violet", "@gold")
DASHES = ("solid", "dash", "dot", "dashdot")
MOST_POINTS, MOST_BARS = 2000, 240
COUNTERS = ("encryptions", "decryptions", "multiplications", "refreshes")  # of ciphertexts; a round's are sums
BYTES_AXIS: Json = {"tickformat": "~s", "ticksuffix": "B"}
Points = Sequence[tuple[float, float | None]]
T = TypeVar("T")


def colour(i: int) -> str:
    """The colour of the i-th curve."""
    return COLOURS[i % len(COLOURS)]


def dash(i: int) -> str:
    """The dash of the i-th curve: another one where the colours begin again."""
    return DASHES[i // len(COLOURS) % len(DASHES)]


def offer(charts: Sequence[tuple[str, Chart]], choose: str = "Metric") -> list[Chart]:
    """One chart that can show any of several, the first one initially; None if there is none."""
    if not charts:
        return []
    (label, first), *rest = charts
    height = max(c.height for _, c in charts)
    return [replace(first, choices=tuple(rest), choose=choose, height=height, label=label)]


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points of a curve; the lowest and highest of each stretch stay, so no spike is lost."""
    if len(points) <= most:
        return points
    keep = {0, len(points) - 1}
    stretches = max(1, (most - 2) // 2)
    for i in range(stretches):
        part = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
        known = [(y, j) for j in part if (y := points[j][1]) is not None]
        keep |= {min(known)[1], max(known, key=lambda k: k[0])[1]} if known else set()
    return [points[j] for j in sorted(keep)]


def line(points: Points, name: str, colour: str, is_share: bool = False, **more: Any) -> Json:
    """A curve."""
    kept = thin(points)
    style = {"color": colour, "width": 2.25, **more.pop("line", {})}
    trace: Json = {"type": "scatter", "mode": "lines+markers" if len(kept) <= 40 else "lines"}
    trace |= {"x": [x for x, _ in kept], "y": [y for _, y in kept], "name": esc(name, 48), "line": style}
    return trace | {"marker": {"size": 5, "color": colour}, "hovertemplate": hover(is_share), **more}


def band(rows: Sequence[tuple[float, float | None, float | None]], name: str, colour: str) -> list[Json]:
    """A shaded range around a curve, from (x, low, high)."""
    known = [row for row in rows if None not in row]
    known = known[:: max(1, -(-len(known) // (MOST_POINTS // 2)))]
    group = f"band {name}"
    edge: Json = {"type": "scatter", "mode": "lines", "x": [r[0] for r in known], "line": {"width": 0}}
    edge |= {"hoverinfo": "skip"}
    lower = edge | {"y": [r[1] for r in known], "showlegend": False, "legendgroup": group}
    upper = edge | {"y": [r[2] for r in known], "fill": "tonexty", "fillcolor": f"{colour}/16", "name": esc(name, 48)}
    return [lower, upper | {"legendgroup": group, "line": {"width": 0, "color": f"{colour}/16"}}]


def bars(x: Sequence[float], y: Sequence[float | None], name: str, colour: str, hover: str) -> Json:
    return {"type": "bar", "x": list(x), "y": list(y), "name": esc(name, 48), "marker": {"color": colour}} | {
        "hovertemplate": hover
    }


def hover(is_share: bool) -> str:
    """How a value is shown under the pointer."""
    return "%{y:.2%}" if is_share else "%{y:.4g}"


def value_axis(is_share: bool) -> Json:
    """The axis of a metric."""
    return {"tickformat": ".1~%"} if is_share else {}


def round_axis(last: int, first: int = 1) -> Json:
    """The axis of rounds `first` to `last`; round 0 is the start."""
    ticks: Json = {"dtick": 1} if last <= 8 else {"nticks": 9}
    return {"title": {"text": "Round"}, "range": [first - 0.5, last + 0.5], "tickformat": ",d", **ticks}


def by_round(last: int, is_share: bool, first: int = 1) -> Json:
    """The layout of curves over the rounds."""
    layout: Json = {"xaxis": round_axis(last, first), "yaxis": value_axis(is_share)}
    return layout | {"hovermode": "x unified", "showlegend": True}


def log_axis(low: float, high: float, title: str) -> Json:
    """A logarithmic axis of shares, ticks at powers of ten in per cent."""
    ticks = [10.0**p for p in range(-9, 1) if low / 2 <= 10.0**p <= high * 2]
    text = [share(t) for t in ticks]
    return {"type": "log", "title": {"text": title}, "tickvals": ticks, "ticktext": text, "tickangle": 0}


def names_axis(names: Sequence[str], limit: int = 28) -> Json:
    """A vertical axis with a name at each place, from the top."""
    ticks = {"tickvals": list(range(len(names))), "ticktext": [esc(n, limit) for n in names]}
    return {**ticks, "range": [len(names) - 0.4, -0.6], "showgrid": False}


def last_round(run: Run) -> int:
    return max([r.step + 1 for r in run.rounds[-1:]] + [e.step + 1 for e in run.evaluations[-1:]], default=1)


def first_round(run: Run) -> int:
    """0 where the weights that a run starts from were tested."""
    return min([e.step + 1 for e in run.evaluations[:1]] + [1])


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


def trained(run: Run, name: str) -> list[tuple[float, float]]:
    """(round, value) of a metric that the method logged."""
    return [(r.step + 1, v) for r in run.rounds if (v := r.figures.get(name)) is not None]


def tested(run: Run, test_set: str, name: str) -> list[tuple[float, float]]:
    """(round, value) of a metric of the generic model on a test set."""
    found = ((e.step + 1, e.generic.get(test_set, {}).get(name)) for e in run.measured)
    return [(x, y) for x, y in found if y is not None]


def training(run: Run) -> list[Chart]:
    """The loss with its spread over clients, then every other metric that the method logged and that changes."""
    charts = []
    for i, name in enumerate(logged([run])):
        metric, points = describe(name), trained(run, name)
        if not points or (name != "loss" and len(run.rounds) > 1 and len({y for _, y in points}) == 1):
            continue  # a flat line or a single point is no better than the table below it
        spread = [(r.step + 1, sorted(v for c in r.clients.values() if (v := c.get(name)) is not None))
                  for r in run.rounds if r.figures.get(name) is not None]  # fmt: skip
        data: list[Json] = []
        if name not in COUNTERS and any(len(s) >= 3 for _, s in spread):
            cut = [(x, quantiles(s, n=10)) for x, s in spread if len(s) >= 3]
            data += band([(x, c[0], c[-1]) for x, c in cut], "Middle 80 % of clients", "@blue")
        data.append(line(points, metric.label, "@blue"))
        (first, start), (last, end) = points[0], points[-1]
        alt = f"{metric.label} by round: from {start:.3g} in round {first} to {end:.3g} in round {last}."
        layout = by_round(last_round(run), metric.is_share) | marks(run) | {"showlegend": len(data) > 1}
        charts.append(Chart(f"training-{i}", metric.label, alt, data, layout, metric.meaning if not i else ""))
    return charts


def logged(runs: Sequence[Run]) -> list[str]:
    """The metrics that the methods logged, losses first."""
    names = dict.fromkeys(n for run in runs for r in run.rounds for n in r.figures)
    return sorted(names, key=lambda n: (n != "loss", "loss" not in n))


def evaluation(run: Run) -> list[Chart]:
    """The metrics of the generic model by round: those to raise by test set, those to lower overlaid."""
    sets = list(dict.fromkeys([*run.tests, *(s for e in run.measured for s in e.generic)]))
    names = sorted(dict.fromkeys(n for e in run.measured for f in e.generic.values() for n in f), key=order)
    metrics = [m for m in map(describe, names) if m.is_share]
    if not any(len(tested(run, s, m.key)) > 1 for s in sets for m in metrics):
        return []  # a test at the end alone is in the cards and the table
    layout = by_round(last_round(run), True, first_round(run)) | marks(run)
    by_set = []
    for test_set in sets:
        data = _curves(run, [(test_set, m, m.label) for m in metrics if m.higher_is_better])
        if data:
            ends = ", ".join(f"{unescape(d['name'])} {percent(d['y'][-1])}" for d in data)
            alt = f"Metrics on {test_set} by round; at the end {ends}."
            note = f"On unseen identities ({test_set}). Tap a name in the legend to hide its curve."
            by_set.append((test_set, Chart("evaluation", "Evaluation", alt, data, layout, note)))
    charts = offer(by_set, "Test set")
    for metric in (m for m in metrics if not m.higher_is_better):
        data = _curves(run, [(s, metric, s) for s in sets])
        if data:
            alt = f"{metric.label} by round; at the end {percent(data[0]['y'][-1], 2)}."
            shown = layout | {"showlegend": len(data) > 1}
            charts.append(Chart(f"evaluation-{len(charts)}", metric.label, alt, data, shown, "Lower is better."))
    return charts


def _curves(run: Run, wanted: Sequence[tuple[str, Metric, str]]) -> list[Json]:
    """A curve for each (test set, metric, name) that was measured."""
    found = [(i, name, tested(run, s, metric.key)) for i, (s, metric, name) in enumerate(wanted)]
    return [line(points, name, colour(i), True) for i, name, points in found if points]


def client_evaluation(run: Run) -> list[Chart]:
    """Mean, spread and worst client by round, for each metric."""
    charts = []
    for name in sorted(dict.fromkeys(n for e in run.measured for n in e.clients), key=order):
        metric = describe(name)
        seen = [(e.step + 1, s) for e in run.measured if number((s := e.clients.get(name, {})).get("mean")) is not None]
        if len(seen) < 2:
            continue
        mean, worst, best = ([(x, number(s.get(key))) for x, s in seen] for key in ("mean", "worst", "best"))
        ends = [(x, low, high) for (x, low), (_, high) in zip(worst, best, strict=True)]
        data = band(ends, "Worst to best client", "@blue")
        data.append(line(mean, "Mean over clients", "@blue", metric.is_share))
        data.append(line(worst, "Worst client", "@orange", metric.is_share, line={"dash": "dot"}))
        alt = f"{metric.label} over clients by round; the mean ends at {metric.text(mean[-1][1])}."
        layout = by_round(last_round(run), metric.is_share, first_round(run)) | marks(run)
        charts.append((metric.label, Chart("clients-by-round", "Clients over the rounds", alt, data, layout)))
    return offer(charts)


def _bars_by_round(run: Run, y_axis: Json) -> Json:
    layout: Json = {"barmode": "stack", "bargap": 0.25, "hovermode": "x unified", "showlegend": True}
    return layout | {"xaxis": round_axis(last_round(run)), "yaxis": y_axis} | marks(run)


def cost(run: Run) -> list[Chart]:
    """Time and bytes by round, as bars; long runs in groups of rounds."""
    if not run.rounds:
        return []
    groups = _grouped(run.rounds)
    evals = {e.step: e.seconds for e in run.evaluations}
    x = [g[0].step + 1 for g in groups]
    seconds = [_mean([r.seconds for r in g]) for g in groups]
    tests = [_mean([evals.get(r.step, 0.0) for r in g]) for g in groups]
    each = "" if len(groups) == len(run.rounds) else f" Each bar is the mean of {len(groups[0])} rounds."
    data = [bars(x, seconds, "Round", "@blue", "%{y:.3~g} s")]
    if any(tests):
        data.append(bars(x, tests, "Evaluation", "@gold", "%{y:.3~g} s"))
    alt = f"Seconds per round; {sum(r.seconds or 0 for r in run.rounds):.0f} in all."
    layout = _bars_by_round(run, {"title": {"text": "Seconds"}})
    note = f"Evaluation apart.{each}" if any(tests) else each.strip()
    charts = [Chart("seconds", "Seconds per round", alt, data, layout, note)]
    up, down = ([_mean([getattr(r, f"bytes_{way}") for r in g]) for g in groups] for way in ("up", "down"))
    if any(up) or any(down):
        data = [
            bars(x, up, "Clients to server", "@blue", "%{y:.4~s}B"),
            bars(x, down, "Server to clients", "@sky", "%{y:.4~s}B"),
        ]
        sums = [size(sum(getattr(r, f"bytes_{way}") or 0 for r in run.rounds)) for way in ("up", "down")]
        alt = f"Bytes per round over all clients; {sums[0]} went up and {sums[1]} down in all."
        layout = _bars_by_round(run, {"title": {"text": "Bytes"}, **BYTES_AXIS})
        charts.append(Chart("bytes", "Bytes per round, all clients", alt, data, layout, each.strip()))
    return charts


def _grouped(items: Sequence[T]) -> list[Sequence[T]]:
    """The items in equal groups, as few as needed for at most `MOST_BARS` bars."""
    each = max(1, -(-len(items) // MOST_BARS))
    return [items[i : i + each] for i in range(0, len(items), each)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def leaving_by_round(run: Run, moved: dict[tuple[str, int], dict[str, int]], kinds: Sequence[str]) -> list[Chart]:
    """Bytes that left all clients in each round, stacked by kind."""
    if not moved:
        return []
    steps = {(r.stage, r.round): r.step for r in run.rounds}
    step = {place: steps.get(place, i) for i, place in enumerate(moved)}
    groups = _grouped(sorted(moved, key=lambda p: step[p]))
    x = [step[g[0]] + 1 for g in groups]
    data = []
    for i, kind in enumerate(kinds):
        y = [sum(moved[p].get(kind, 0) for p in g) / len(g) for g in groups]
        data.append(bars(x, y, kind.replace("_", " "), colour(i), "%{y:.4~s}B"))
    layout = _bars_by_round(run, {"title": {"text": "Bytes"}, **BYTES_AXIS})
    alt = f"Bytes that left the clients by round and kind: {', '.join(kinds)}."
    note = "All clients together, with the evaluations between rounds."
    return [Chart("leaving", "What left, by round and kind", alt, data, layout, note)]


def _series(value: Any) -> list[float]:
    """A list of numbers; empty if one of them is none."""
    found = [number(v) for v in json_list(value)]
    return [v for v in found if v is not None] if None not in found else []


def pair_tests(run: Run) -> dict[str, Json]:
    """The final 1:1 tests of the generic model by test set, as metrics.json has them."""
    found = {name: mapping(test.get("verification")) for name, test in run.tests.items()}
    return {name: record for name, record in found.items() if record}


def roc_points(record: Json) -> list[tuple[float, float]]:
    """(FAR, TAR) of a 1:1 test, FAR rising."""
    far, tar = (_series(mapping(record.get("curve")).get(key)) for key in ("far", "tar"))
    return sorted(zip(far, tar, strict=True)) if len(far) == len(tar) else []


def with_before(run: Run, tests: Mapping[str, Json]) -> tuple[dict[str, Json], list[int]]:
    """The tests and those of the weights that the run was given, each in the colour of its test, dashed; the places."""
    earlier = mapping(mapping(run.metrics.get("before")).get("generic"))
    found, places = {}, []
    for i, (name, record) in enumerate(tests.items()):
        found[name] = record
        places.append(i)
        if before := mapping(mapping(earlier.get(name)).get("verification")):
            found[f"{name}, before"] = before
            places.append(i % len(COLOURS) + len(COLOURS))
    return found, places


def roc(tests: Mapping[str, Json], places: Sequence[int] | None = None, det: bool = False) -> list[Chart]:
    """ROC with a logarithmic axis, or DET (both axes logarithmic). Several curves are overlaid."""
    data: list[Json] = []
    lowest, fewest = 1.0, None
    for i, (name, record) in zip(places or range(len(tests)), tests.items(), strict=True):
        points = [(f, 1 - t if det else t) for f, t in roc_points(record) if f > 0 and (not det or t < 1)]
        if not points:
            continue
        impostors = whole(record.get("impostors"))
        lowest = min(lowest, points[0][0])
        fewest = min(fewest or impostors or 0, impostors or 0) or fewest
        shown = "FAR %{x:.3~%}<br>" + ("FRR" if det else "TAR") + f" %{{y:.2%}}<extra>{esc(name, 48)}</extra>"
        curve = line(points, name, colour(i), hovertemplate=shown, mode="lines", line={"dash": dash(i)})
        data.append(curve)
        stops = [v for v in values({"verification": record}) if v.at is not None and v.value is not None]
        if stops and not det:
            symbols = ["circle-open" if v.doubt else "circle" for v in stops]
            dots = {"size": 9, "color": colour(i), "symbol": symbols, "line": {"width": 2, "color": colour(i)}}
            trace = {"type": "scatter", "mode": "markers", "x": [v.at for v in stops], "y": [v.value for v in stops]}
            data.append(trace | {"marker": dots, "showlegend": False, "hovertemplate": shown})
    if not data:
        return []
    layout: Json = {"showlegend": len(tests) > 1, "hovermode": "closest"}
    layout["xaxis"] = log_axis(lowest, 1, "False accept rate")
    note = "Higher and further left is better."
    if fewest and FEW / fewest > lowest:
        place = {"x0": lowest, "x1": FEW / fewest, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
        layout["shapes"] = [{"type": "rect", **place, "fillcolor": "@gold/14", "line": {"width": 0}}]
        note += f" Shaded: unreliable, fewer than {FEW} of {count(fewest)} impostor pairs accepted."
    if det:
        rates = [y for d in data for y in d["y"] if y > 0]
        layout["yaxis"] = log_axis(min(rates, default=1), max(rates, default=1), "False reject rate")
        note = "Both errors on logarithmic axes. Lower and further left is better."
    else:
        layout["yaxis"] = {"tickformat": ".0%", "title": {"text": "True accept rate"}, "range": [0, 1.02]}
    title = "DET curve" if det else "ROC curve"
    return [Chart("det" if det else "roc", title, f"{title} of {', '.join(tests)}.", data, layout, note)]


def histograms(tests: Mapping[str, Json]) -> list[Chart]:
    """Score densities of genuine and impostor pairs, with a choice of the test set."""
    charts = [(name, chart) for name, record in tests.items() if (chart := _histogram(name, record))]
    return offer(charts, "Test set")


def _histogram(name: str, record: Json) -> Chart | None:
    counts = {kind: _series(mapping(record.get("histogram")).get(kind)) for kind in ("impostor", "genuine")}
    places = len(counts["genuine"])
    if not places or places != len(counts["impostor"]):
        return None
    width = 2 / places
    centres = [-1 + width * (i + 0.5) for i in range(places)]
    data: list[Json] = []
    for kind, paint in (("impostor", "@orange/55"), ("genuine", "@blue/55")):
        label, total = f"{kind.capitalize()} pairs", sum(counts[kind]) or 1
        text = "score %{x:.2f}: %{y:.2%}<extra>" + label + "</extra>"
        data.append(bars(centres, [c / total for c in counts[kind]], label, paint, text) | {"width": width})
    full = [c for c, *some in zip(centres, *counts.values(), strict=True) if any(some)]
    layout: Json = {"barmode": "overlay", "bargap": 0, "showlegend": True, "hovermode": "closest"}
    span = [min(full) - 0.03, max(full) + 0.03] if full else None
    layout["xaxis"] = {"title": {"text": "Cosine score"}, "range": span}
    layout["yaxis"] = {"title": {"text": "Share of pairs"}, **value_axis(True)}
    note = "The less the two overlap, the better."
    if (threshold := number(record.get("eer_threshold"))) is not None:
        at = {"x0": threshold, "x1": threshold, "y0": 0, "y1": 1, "yref": "paper"}
        layout["shapes"] = [{"type": "line", **at, "line": {"color": "@ink", "width": 1.25, "dash": "dash"}}]
        note += " Dashed: where both errors are equal."
    alt = f"Scores of genuine and impostor pairs on {name}."
    return Chart("histogram", "Scores of pairs", alt, data, layout, note)


def per_client(run: Run, who: str) -> list[Chart]:
    """Bars of every metric, with a choice, for the clients that trained or those that were `held_out`."""
    charts, found, summary = [], run.client_metrics(who), run.client_summary(who)
    for name in sorted(found, key=order):
        said, metric = summary.get(name, {}), describe(name)
        worst = str(said["worst_client"]) if said.get("worst_client") is not None else None
        lower = said.get("lower_is_better", metric.higher_is_better is False) is True
        if chart := _client_bars(metric, found[name], worst, lower):
            charts.append((metric.label, chart))
    return offer(charts)


def _client_bars(metric: Metric, values: dict[str, float | None], worst: str | None, lower: bool) -> Chart | None:
    """Clients from the worst to the best, bars from zero, the mean as a line, the worst named."""
    known = {c: v for c, v in values.items() if v is not None}
    if not known:
        return None
    known = dict(sorted(known.items(), key=lambda item: (item[1], item[0]), reverse=lower))
    worst = worst if worst in known else next(iter(known))
    mean = sum(known.values()) / len(known)
    few = len(known) <= 32
    at, height, shown = list(range(len(known))), list(known.values()), [metric.text(v) for v in known.values()]
    trace: Json = {
        "type": "bar",
        "marker": {"color": ["@orange" if c == worst else "@blue" for c in known]},
        "customdata": [f"{esc(c, 28)}: {text}" for c, text in zip(known, shown, strict=True)],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    axis: Json = {"rangemode": "tozero", **value_axis(metric.is_share)}
    mark: Json = {"type": "line", "line": {"color": "@ink", "width": 1.5, "dash": "dash"}}
    label: Json = {"text": f"mean {metric.text(mean, 1)}", "showarrow": False, "font": {"size": 11, "color": "@ink"}}
    layout: Json = {"showlegend": False, "hovermode": "closest", "bargap": 0.3 if few else 0.1}
    if few:
        axis |= {"range": [min(0.0, *height) * 1.04, max(0.0, *height) * 1.04], "showgrid": True}
        trace |= {"orientation": "h", "x": height, "y": at, "text": shown, "textposition": "inside"}
        trace |= {"textfont": {"color": "@panel", "size": 11}, "insidetextanchor": "start", "textangle": 0}
        layout |= {"xaxis": axis, "yaxis": names_axis(list(known))}
        mark |= {"x0": mean, "x1": mean, "y0": 0, "y1": 1, "yref": "paper"}
        label |= {"x": mean, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "right"}
    else:
        trace |= {"x": at, "y": height}
        layout |= {"yaxis": axis, "xaxis": {"showticklabels": False, "title": {"text": "Clients, worst first"}}}
        mark |= {"y0": mean, "y1": mean, "x0": 0, "x1": 1, "xref": "paper"}
        label |= {"y": mean, "x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom"}
    layout |= {"shapes": [mark], "annotations": [label]}
    note = f"Worst, in orange: {visible(worst, 40)} with {metric.text(known[worst])}; the mean is {metric.text(mean)}."
    alt = f"{metric.label} of {len(known)} clients, worst first. {note}"
    height_px = max(200, 80 + 22 * len(known)) if few else 340
    return Chart("per-client", "Each client", alt, [trace], layout, note, height_px)
