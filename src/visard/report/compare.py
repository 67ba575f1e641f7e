"""The page of several runs side by side: a colour for each run, the same in every chart and table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from visard.evaluation.metrics import describe, order
from visard.files import mapping, number
from visard.report import charts
from visard.report.cards import Card, client_cards, headline_cards
from visard.report.charts import BYTES_AXIS, by_round, colour, dash, last_round, line, names_axis, offer, value_axis
from visard.report.disclosure import Leaving, add_up, judge
from visard.report.html import Chart, Json, Section, esc, flag, grid, table, with_charts
from visard.report.run_folder import Run
from visard.text import NO_VALUE, count, duration, listing, plural, size

MOST_SETTINGS = 300


def labels(runs: Sequence[Run]) -> list[str]:
    """A unique name for each run: that of its folder, with parent folders where needed."""
    folders = [run.folder.resolve().parts for run in runs]
    depth = 1
    while len({folder[-depth:] for folder in folders}) < len(set(folders)):
        depth += 1
    found: list[str] = []
    for folder in folders:
        name, n = "/".join(folder[-depth:]), 2
        while name in found:  # one folder twice
            name, n = f"{'/'.join(folder[-depth:])} ({n})", n + 1
        found.append(name)
    return found


def summary(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Which runs, and whether they used the same data."""
    said = [n if n == run.method else f"{n} ({run.method})" for n, run in zip(names, runs, strict=True)]
    found = [mapping(run.started.get("data")).get("fingerprint") for run in runs]
    prints = {one if isinstance(one, str) else None for one in found}
    if same_tests(runs):
        same = " All on the same data, tested on the same people. Differences are to the first run."
    elif None in prints:
        same = " What they were tested on is not known, so no run is marked as the best."
    elif len(prints) == 1:
        same = " They used the same data, but were tested on different people of it: no run is marked as the best."
    else:
        same = " They used different data: their metrics cannot be compared, and no run is marked as the best."
    return f"{listing(said)}.{same}"


def same_tests(runs: Sequence[Run]) -> bool:
    """Whether it is known that all runs were tested on the same people."""
    tested = {run.tested_on for run in runs}
    return len(tested) == 1 and None not in tested


def sections(runs: Sequence[Run], names: Sequence[str]) -> list[Section]:
    """All sections of the comparison."""
    ledgers = [add_up(run) for run in runs]
    parts = [
        _metrics(runs, names, ledgers),
        with_charts("curves", "Round by round", "Rounds", _curves(runs, names)),
        with_charts("recognition", "Recognition of unseen people", "Recognition", _recognition(runs, names)),
        _clients(runs, names),
        _leaving(runs, names, ledgers),
        _settings(runs, names),
    ]
    return [part for part in parts if part is not None]


def _heads(names: Sequence[str]) -> list[str]:
    """The names of the runs with their colours."""
    dots = [f'<span class="swatch" style="background:var(--{colour(i)[1:]})"></span>' for i in range(len(names))]
    return [dot + esc(name, 40) for dot, name in zip(dots, names, strict=True)]


def _metrics(runs: Sequence[Run], names: Sequence[str], ledgers: Sequence[Leaving | None]) -> Section:
    """Headline metrics as rows, runs as columns."""
    by_label: dict[str, list[Card | None]] = {}
    alone = not all(map(charts.pair_tests, runs))  # then only the means over clients can be compared
    for i, (run, leaving) in enumerate(zip(runs, ledgers, strict=True)):
        for card in headline_cards(run, leaving, every_rate=True) + (client_cards(run) if alone else []):
            by_label.setdefault(card.metric.label, [None] * len(runs))[i] = card
    same = same_tests(runs)
    rows = [[esc(label), *_cells(found, same)] for label, found in by_label.items()]
    rows.append(["Method", *(esc(run.method, 40) for run in runs)])
    states = [(run.status[1], "wrap" if len(run.status[1]) > 20 else "") for run in runs]
    rows.append(["State", *(f'<span class="{name}">{esc(text, 120)}</span>' for text, name in states)])
    rows.append(["Rounds", *(count(len(run.rounds)) for run in runs)])
    rows.append(["Wall time", *(duration(run.seconds) for run in runs)])
    body = table(["Metric", *_heads(names)], rows, "Headline metrics", quiet=True)
    body += (
        '<p class="note">Green: the best of the row. Small differences between single runs can be chance: '
        "visard bench compares methods over several seeds.</p>"
        if same
        else '<p class="note">Not tested on the same people of the same data: none is marked as the best.</p>'
    )
    return Section("figures", "Headline metrics", body, short="Metrics")


def _cells(found: Sequence[Card | None], same: bool) -> list[str]:
    """The cells of a row: value and flag; with the `same` tests also the difference to the first, the best marked."""
    shown = {c.value: c.text for c in found if c is not None and c.value is not None}
    known = next(c for c in found if c is not None)
    pick: Callable[..., float] | None = {True: max, False: min, None: None}[known.metric.higher_is_better]
    best = shown[pick(shown)] if same and pick and len(set(shown.values())) > 1 else None
    first = found[0].value if found[0] else None
    cells = []
    for i, card in enumerate(found):
        if card is None or card.value is None:
            cells.append(NO_VALUE)
            continue
        text = f'<span class="best">{esc(card.text)}</span>' if card.text == best else esc(card.text)
        if i and first is not None and same:
            text += f"<small>{_difference(card.value, first, card.metric.is_share)}</small>"
        cells.append(text + flag(card.flag))
    return cells


def _difference(value: float, first: float, is_share: bool) -> str:
    if value == first:
        return "the same"
    if is_share:
        return f"{100 * (value - first):+.2f} points".replace("-", "−")
    if not first:
        return "from nothing"
    change = round(100 * (value / first - 1))
    return f"{change:+d} %".replace("-", "−") if change else "the same"


def _curves(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """Each training metric and each evaluation metric by round, the runs overlaid."""
    pairs = dict.fromkeys((s, n) for run in runs for e in run.measured for s, f in e.generic.items() for n in f)
    shared = Counter(s for run in runs for s in {s for e in run.measured for s in e.generic})
    tested = sorted(pairs, key=lambda pair: (-shared[pair[0]], pair[0], order(pair[1])))
    trained = [_overlay("training", "Training", runs, names, n, partial(charts.trained, name=n), "")
               for n in charts.logged(runs)]  # fmt: skip
    evaluated = [
        _overlay("evaluation", "Evaluation", runs, names, n, partial(charts.tested, test_set=s, name=n), f" ({s})")
        for s, n in tested
    ]
    return offer([c for c in trained if c]) + offer([c for c in evaluated if c])


def _overlay(
    id: str,
    title: str,
    runs: Sequence[Run],
    names: Sequence[str],
    key: str,
    points_of: Callable[[Run], list[tuple[float, float]]],
    on: str,
) -> tuple[str, Chart] | None:
    """One metric of all runs by round; None if no run has it."""
    metric = describe(key)
    found = [(i, name, points_of(run)) for i, (run, name) in enumerate(zip(runs, names, strict=True))]
    data = [
        line(points, name, colour(i), metric.is_share, line={"dash": dash(i)}) for i, name, points in found if points
    ]
    first = min(map(charts.first_round, runs)) if id == "evaluation" else 1
    layout = by_round(max(map(last_round, runs)), metric.is_share, first)
    label = metric.label + on
    return (label, Chart(id, title, f"{label} by round, {len(data)} runs overlaid.", data, layout)) if data else None


def _recognition(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """ROC and DET of the runs, for each test set that any of them has."""
    found = [charts.pair_tests(run) for run in runs]
    drawn: list[Chart] = []
    for det in (False, True):
        of_set = []
        for test_set in dict.fromkeys(s for tests in found for s in tests):
            there = [i for i, tests in enumerate(found) if test_set in tests]
            curves = {names[i]: found[i][test_set] for i in there}
            of_set += [(test_set, chart) for chart in charts.roc(curves, there, det)]
        drawn += offer(of_set, "Test set")
    return drawn


def _clients(runs: Sequence[Run], names: Sequence[str]) -> Section | None:
    """The distribution over clients as a picture and as a table."""
    spreads = [run.client_summary() for run in runs]
    keys = sorted(dict.fromkeys(n for s in spreads for n in s), key=order)
    rows = [[esc(describe(k).label), *(_spread(describe(k).text, s.get(k, {})) for s in spreads)] for k in keys]
    after = table(["Metric", *_heads(names)], rows, "Mean and spread over clients") if rows else ""
    return with_charts("clients", "How the clients fare", "Clients", _boxes(runs, names), after=after)


def _spread(text: Callable[[float | None], str], s: dict[str, Any]) -> str:
    mean, std, worst = (number(s.get(key)) for key in ("mean", "std", "worst"))
    if mean is None:
        return NO_VALUE
    who = f" ({esc(s['worst_client'], 30)})" if s.get("worst_client") is not None else ""
    return f"{text(mean)} ± {text(std)}<small>worst {text(worst)}{who}</small>"


def _boxes(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """The distribution over clients: a box for each run and every client as a point."""
    found = [run.client_metrics() for run in runs]
    drawn = []
    for key in sorted(dict.fromkeys(n for f in found for n in f), key=order):
        metric = describe(key)
        data: list[Json] = []
        shown: list[str] = []
        for i, (values, name) in enumerate(zip(found, names, strict=True)):
            if known := {c: v for c, v in values.get(key, {}).items() if v is not None}:
                data += _box(known, len(shown), esc(name, 28), colour(i), metric.is_share)
                shown.append(esc(name, 28))
        if data:
            ticks = {"tickvals": list(range(len(shown))), "ticktext": shown}
            layout: Json = {
                "showlegend": False, "hovermode": "closest", "yaxis": value_axis(metric.is_share),
                "xaxis": ticks | {"range": [-0.6, len(shown) - 0.4]},
            }  # fmt: skip
            alt = f"{metric.label} of each client, one box for each of {len(shown)} runs."
            note = "A point is a client; the box holds the middle half. Line: median; diamond: mean."
            chart = Chart("per-client", "Clients of each run", alt, data, layout, note, 380)
            drawn.append((metric.label, chart))
    return offer(drawn)


def _box(known: dict[str, float], at: int, name: str, colour: str, is_share: bool) -> list[Json]:
    """The middle half as a bar, median and mean as marks, and the clients as points beside each other."""
    values = np.array(list(known.values()))
    low, median, high = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    value = charts.hover(is_share)
    middle = {
        "type": "bar", "x": [at], "base": [low], "y": [high - low], "width": [0.5],
        "marker": {"color": f"{colour}/12", "line": {"color": colour, "width": 1.5}}, "hoverinfo": "skip",
    }  # fmt: skip
    marks = {
        "type": "scatter", "mode": "markers", "x": [at, at], "y": [median, float(values.mean())],
        "text": ["median", "mean"],
        "marker": {"symbol": ["line-ew", "diamond-open"], "size": [26, 9], "color": colour,
                   "line": {"color": colour, "width": 2}},
        "hovertemplate": f"{name}, %{{text}}: {value}<extra></extra>",
    }  # fmt: skip
    spread = np.random.default_rng(0).uniform(-0.2, 0.2, len(values))
    points = {
        "type": "scatter", "mode": "markers", "name": name, "x": (at + spread).tolist(), "y": values.tolist(),
        "text": [esc(c, 28) for c in known],
        "marker": {"color": colour, "size": 5, "opacity": 0.75},
        "hovertemplate": f"%{{text}}: {value}<extra></extra>",
    }  # fmt: skip
    return [middle, points, marks]


def _leaving(runs: Sequence[Run], names: Sequence[str], ledgers: Sequence[Leaving | None]) -> Section:
    """What left in each run: the verdict and the bytes by kind."""
    heads = _heads(names)
    rows = []
    for head, run, ledger in zip(heads, runs, ledgers, strict=True):
        verdict = judge(ledger, run.status[0] == "finished")
        mark = f'<span class="mark {verdict.level}">{esc(verdict.title)}</span>'
        rows.append([head, f"{mark}<small>{esc(verdict.text)}</small>"])
    body = table(["Run", "Verdict"], rows, "What the ledgers allow to say", 2)
    kinds = list(dict.fromkeys(k for ledger in ledgers if ledger for k in ledger.kinds))
    if not kinds:
        return Section("leaving", "What left each client", body, short="What left")
    amounts = [[None if led is None else led.bytes.get(kind, 0) for led in ledgers] for kind in kinds]
    chart = _leaving_bars(names, kinds, amounts)
    rows = [[esc(k.replace("_", " "), 40), *map(size, row)] for k, row in zip(kinds, amounts, strict=True)]
    rows.append(["In rounds: per client and round", *(size(led.per_visit) if led else NO_VALUE for led in ledgers)])
    body += grid([chart]) + table(["Kind", *heads], rows, "Bytes that left all clients")
    return Section("leaving", "What left each client", body, (chart,), "What left")


def _leaving_bars(names: Sequence[str], kinds: Sequence[str], amounts: Sequence[Sequence[float | None]]) -> Chart:
    """Bytes that left all clients, a bar for each run, stacked by kind. `amounts`: kind by run."""
    data: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": list(range(len(names))),
            "x": [a or 0 for a in amount],
            "name": esc(kind.replace("_", " "), 40),
            "marker": {"color": colour(i)},
            "hovertemplate": "%{x:.4~s}B",
        }
        for i, (kind, amount) in enumerate(zip(kinds, amounts, strict=True))
    ]
    layout: Json = {"barmode": "stack", "hovermode": "closest", "showlegend": True, "bargap": 0.35}
    layout |= {"yaxis": names_axis(names), "xaxis": BYTES_AXIS | {"showgrid": True}}
    alt = "; ".join(f"{n}: {size(sum(a[i] or 0 for a in amounts))}" for i, n in enumerate(names))
    return Chart("leaving", "Bytes that left all clients, by kind", alt, data, layout, "", 130 + 46 * len(names))


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level: "data.size"."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _settings(runs: Sequence[Run], names: Sequence[str]) -> Section | None:
    """The settings in which the runs differ."""
    settings = [flat(run.config) for run in runs]
    keys = list(dict.fromkeys(k for s in settings for k in s))
    if not keys:
        return None
    differ = [k for k in keys if len({repr(s[k]) if k in s else "" for s in settings}) > 1]
    if not differ:
        return Section("settings", "Settings", "<p>All settings are the same.</p>")
    rows = [
        [f"<code>{esc(k, 60)}</code>", *(esc(s[k], 80) if k in s else NO_VALUE for s in settings)]
        for k in differ[:MOST_SETTINGS]
    ]
    same = plural(len(keys) - len(differ), "other setting is", "other settings are")
    body = table(["Setting", *_heads(names)], rows, "Settings that differ", len(runs) + 1, quiet=True)
    body += f'<p class="note">{same} the same in all runs.</p>'
    return Section("settings", "Settings that differ", body, short="Settings")
