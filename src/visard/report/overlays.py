"""The charts of several runs in one picture: a colour for each run, the same in every chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from visard.report import scores
from visard.report.charts import COLOURS, DASHES, Chart, Json, line, offer, round_axis
from visard.report.curves import last_round
from visard.report.figures import describe, order
from visard.report.results import client_figures, measured, verifications
from visard.report.runs import Run
from visard.report.words import esc, size

Points = list[tuple[float, float]]


def curves(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """Each training figure and each evaluation figure by round, the runs overlaid."""
    logged = dict.fromkeys(n for run in runs for r in run.rounds for n in r.figures)
    trained = sorted(logged, key=lambda n: (n != "loss", "loss" not in n))
    pairs = dict.fromkeys((s, n) for run in runs for e in measured(run) for s, f in e.generic.items() for n in f)
    shared = Counter(s for run in runs for s in {s for e in measured(run) for s in e.generic})
    tested = sorted(pairs, key=lambda pair: (-shared[pair[0]], pair[0], order(pair[1])))
    found = [
        [_by_round("training", "Training", runs, names, n, partial(_trained, name=n)) for n in trained],
        [
            _by_round("evaluation", "Evaluation", runs, names, n, partial(_tested, test_set=s, name=n), f" ({s})")
            for s, n in tested
        ],
    ]
    return [chart for charts in found for chart in offer([c for c in charts if c], "Figure")]


def _by_round(
    id: str,
    title: str,
    runs: Sequence[Run],
    names: Sequence[str],
    key: str,
    of: Callable[[Run], Points],
    on: str = "",
) -> tuple[str, Chart] | None:
    """One figure of all runs by round; None if no run has it."""
    figure = describe(key)
    data = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        points = of(run)
        if points:
            dash = {"dash": DASHES[(i // len(COLOURS)) % len(DASHES)]}
            hover = "%{y:.2%}" if figure.is_share else "%{y:.4g}"
            x, y = [p[0] for p in points], [p[1] for p in points]
            data.append(line(x, y, name, COLOURS[i % len(COLOURS)], line=dash, hovertemplate=hover))
    if not data:
        return None
    layout: Json = {
        "xaxis": round_axis(max(map(last_round, runs))),
        "hovermode": "x unified",
        "showlegend": True,
    }
    layout["yaxis"] = {"tickformat": ".1~%"} if figure.is_share else {}
    label = figure.label + on
    return label, Chart(id, title, f"{label} by round, {len(data)} runs overlaid.", data, layout)


def _trained(run: Run, name: str) -> Points:
    return [(r.step + 1, v) for r in run.rounds if (v := r.figures.get(name)) is not None]


def _tested(run: Run, test_set: str, name: str) -> Points:
    found = ((e.step + 1, e.generic.get(test_set, {}).get(name)) for e in measured(run))
    return [(x, y) for x, y in found if y is not None]


def recognition(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """ROC and DET of the runs, for each test set that any of them has."""
    found = [dict(verifications(run)) for run in runs]
    sets = dict.fromkeys(s for f in found for s in f)
    charts: list[Chart] = []
    for det in (False, True):
        drawn = []
        for test_set in sets:
            there = [i for i, f in enumerate(found) if test_set in f]
            curves_ = [(names[i], found[i][test_set]) for i in there]
            drawn += [(test_set, chart) for chart in scores.roc(curves_, det, colours=there)]
        charts += offer(drawn, "Test set")
    return charts


def clients(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """The distribution over clients: a box for each run and every client as a point."""
    figures = [client_figures(run) for run in runs]
    found = []
    for key in sorted(dict.fromkeys(n for f in figures for n in f), key=order):
        figure = describe(key)
        data: list[Json] = []
        for i, (values, name) in enumerate(zip(figures, names, strict=True)):
            known = [(c, v) for c, v in values.get(key, {}).items() if v is not None]
            if known:
                data.append(_box(known, name, COLOURS[i % len(COLOURS)], figure.is_share))
        if data:
            y_axis = {"tickformat": ".1~%"} if figure.is_share else {}
            layout: Json = {"showlegend": False, "hovermode": "closest", "yaxis": y_axis}
            alt = f"{figure.label} of each client, one box for each of {len(data)} runs."
            note = "A point is a client; the box holds the middle half, dashed is the mean."
            chart = Chart("per-client", "Clients of each run", alt, data, layout, note, 380)
            found.append((figure.label, chart))
    return offer(found, "Figure")


def _box(known: Sequence[tuple[str, float]], name: str, colour: str, is_share: bool) -> Json:
    return {
        "type": "box",
        "name": esc(name, 28),
        "y": [v for _, v in known],
        "text": [esc(c, 28) for c, _ in known],
        "boxpoints": "all" if len(known) <= 500 else "outliers",
        "jitter": 0.5,
        "pointpos": 0,
        "boxmean": True,
        "marker": {"color": colour, "size": 5, "opacity": 0.75},
        "line": {"color": colour, "width": 1.5},
        "fillcolor": f"{colour}/12",
        "hovertemplate": "%{text}: " + ("%{y:.2%}" if is_share else "%{y:.4g}") + "<extra></extra>",
    }


def leaving(names: Sequence[str], kinds: Sequence[str], amounts: Sequence[Sequence[float | None]]) -> Chart:
    """Bytes that left all clients, a bar for each run, stacked by kind. `amounts`: kind by run."""
    at = list(range(len(names)))
    data: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": at,
            "x": [a or 0 for a in amount],
            "name": esc(kind.replace("_", " "), 40),
            "marker": {"color": COLOURS[i % len(COLOURS)]},
            "hovertemplate": "%{x:.4~s}B",
        }
        for i, (kind, amount) in enumerate(zip(kinds, amounts, strict=True))
    ]
    ticks: Json = {"tickvals": at, "ticktext": [esc(n, 28) for n in names], "showgrid": False}
    layout: Json = {
        "barmode": "stack",
        "hovermode": "closest",
        "showlegend": True,
        "bargap": 0.35,
        "yaxis": {**ticks, "range": [len(names) - 0.4, -0.6]},
        "xaxis": {"tickformat": "~s", "ticksuffix": "B", "showgrid": True},
    }
    alt = "; ".join(f"{n}: {size(sum(a[i] or 0 for a in amounts))}" for i, n in enumerate(names))
    return Chart("leaving", "Bytes that left all clients, by kind", alt, data, layout, "", 130 + 46 * len(names))
