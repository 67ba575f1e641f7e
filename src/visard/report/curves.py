"""The charts that go by round: loss, evaluation, time, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from html import unescape
from statistics import quantiles

from visard.report.charts import (
    COLOURS,
    MOST_BARS,
    Chart,
    Json,
    band,
    bars,
    line,
    marks,
    offer,
    round_axis,
)
from visard.report.events import Round, mapping, number
from visard.report.figures import COUNTERS, Figure, describe, order
from visard.report.results import measured
from visard.report.runs import Run
from visard.report.words import percent, size


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
