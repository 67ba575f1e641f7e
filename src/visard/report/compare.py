"""The page of several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from visard.report import overlays
from visard.report.charts import COLOURS, Chart
from visard.report.events import mapping, number
from visard.report.figures import describe, order
from visard.report.leaving import Leaving, add_up, bytes_of, judge
from visard.report.parts import Section, figure, flag, grid, table
from visard.report.results import Card, client_cards, client_summary, headline, verifications
from visard.report.runs import Run
from visard.report.words import NO_VALUE, count, duration, esc, listing, plural, size

MOST_SETTINGS = 300


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run, no two alike."""
    found: list[str] = []
    for run in runs:
        name, n = run.name, 2
        while name in found:
            name, n = f"{run.name} ({n})", n + 1
        found.append(name)
    return found


def summary(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Which runs, and whether they used the same data."""
    said = [n if n == run.method else f"{n} ({run.method})" for n, run in zip(names, runs, strict=True)]
    prints = {mapping(run.started.get("data")).get("fingerprint") for run in runs}
    if None in prints:
        same = ""
    elif len(prints) == 1:
        same = " All on the same data."
    else:
        same = " They used different data: compare their figures with care."
    return f"{listing(said)}.{same} Differences are to the first run."


def sections(runs: Sequence[Run], names: Sequence[str]) -> list[Section]:
    """All sections of the comparison."""
    ledgers = [add_up(run) for run in runs]
    parts = [
        _figures(runs, names, ledgers),
        _charts("curves", "Round by round", "Rounds", overlays.curves(runs, names)),
        _charts("recognition", "Recognition of unseen people", "Recognition", overlays.recognition(runs, names)),
        _clients(runs, names),
        _leaving(runs, names, ledgers),
        _settings(runs, names),
    ]
    return [part for part in parts if part is not None]


def _charts(id: str, title: str, short: str, charts: Sequence[Chart], after: str = "") -> Section | None:
    body = grid([figure(c) for c in charts]) + after
    return Section(id, title, body, tuple(charts), short) if body else None


def _heads(names: Sequence[str]) -> list[str]:
    """The names of the runs with their colours."""
    colours = [COLOURS[i % len(COLOURS)][1:] for i in range(len(names))]
    dots = [f'<span class="swatch" style="background:var(--{c})"></span>' for c in colours]
    return [dot + esc(name, 40) for dot, name in zip(dots, names, strict=True)]


def _figures(runs: Sequence[Run], names: Sequence[str], ledgers: Sequence[Leaving | None]) -> Section:
    """Headline figures as rows, runs as columns."""
    by_label: dict[str, list[Card | None]] = {}
    alone = not all(map(verifications, runs))  # then only the means over clients can be compared
    for i, (run, leaving) in enumerate(zip(runs, ledgers, strict=True)):
        for card in headline(run, leaving, every_rate=True) + (client_cards(run) if alone else []):
            by_label.setdefault(card.figure.label, [None] * len(runs))[i] = card
    rows = [[esc(label), *_cells(found)] for label, found in by_label.items()]
    rows.append(["Method", *(esc(run.method, 40) for run in runs)])
    rows.append(["State", *(esc(run.status[1], 80) for run in runs)])
    rows.append(["Rounds", *(count(len(run.rounds)) for run in runs)])
    rows.append(["Wall time", *(duration(run.seconds) for run in runs)])
    body = table(["Figure", *_heads(names)], rows, "Headline figures", quiet=True)
    body += '<p class="note">Green: the best of the row.</p>'
    return Section("figures", "Headline figures", body, short="Figures")


def _cells(found: Sequence[Card | None]) -> list[str]:
    """The cells of a row: value, difference to the first run, flag; the best one marked."""
    values = [c.value for c in found if c is not None and c.value is not None]
    known = next(c for c in found if c is not None)
    pick: Callable[..., float] | None = {True: max, False: min, None: None}[known.figure.higher_is_better]
    best = pick(values) if pick and len(set(values)) > 1 else None
    first = found[0].value if found[0] else None
    cells = []
    for i, card in enumerate(found):
        if card is None or card.value is None:
            cells.append(NO_VALUE)
            continue
        text = f'<span class="best">{esc(card.text)}</span>' if card.value == best else esc(card.text)
        if i and first is not None:
            text += f"<small>{_difference(card.value, first, card.figure.is_share)}</small>"
        cells.append(text + flag(card.flag))
    return cells


def _difference(value: float, first: float, is_share: bool) -> str:
    if value == first:
        return "the same"
    if is_share:
        return f"{100 * (value - first):+.2f} points".replace("-", "−")
    return f"{100 * (value / first - 1):+.0f} %".replace("-", "−") if first else "from nothing"


def _clients(runs: Sequence[Run], names: Sequence[str]) -> Section | None:
    """The distribution over clients as a picture and as a table."""
    spreads = [client_summary(run) for run in runs]
    keys = sorted(dict.fromkeys(n for s in spreads for n in s), key=order)
    rows = [[esc(describe(k).label), *(_spread(describe(k).text, s.get(k, {})) for s in spreads)] for k in keys]
    after = table(["Figure", *_heads(names)], rows, "Mean and spread over clients") if rows else ""
    return _charts("clients", "How the clients fare", "Clients", overlays.clients(runs, names), after)


def _spread(text: Callable[[float | None], str], s: dict[str, Any]) -> str:
    mean, std, worst = (number(s.get(key)) for key in ("mean", "std", "worst"))
    if mean is None:
        return NO_VALUE
    who = f" ({esc(s['worst_client'], 30)})" if s.get("worst_client") is not None else ""
    return f"{text(mean)} ± {text(std)}<small>worst {text(worst)}{who}</small>"


def _leaving(runs: Sequence[Run], names: Sequence[str], ledgers: Sequence[Leaving | None]) -> Section:
    """What each run let out: the verdict and the bytes by kind."""
    heads = _heads(names)
    rows = []
    for i, (run, ledger) in enumerate(zip(runs, ledgers, strict=True)):
        verdict = judge(ledger, run.status[0] == "finished")
        mark = f'<span class="mark {verdict.level}">{esc(verdict.title)}</span>'
        rows.append([heads[i], f"{mark}<small>{esc(verdict.text)}</small>"])
    body = table(["Run", "Verdict"], rows, "What the ledgers allow to say", 2)
    kinds = list(dict.fromkeys(k for ledger in ledgers if ledger for k in ledger.kinds))
    if not kinds:
        return Section("leaving", "What left each client", body, short="What left")
    amounts = [[bytes_of(ledger, kind) for ledger in ledgers] for kind in kinds]
    chart = overlays.leaving(names, kinds, amounts)
    rows = [[esc(k.replace("_", " "), 40), *map(size, row)] for k, row in zip(kinds, amounts, strict=True)]
    rows.append(["In rounds: per client and round", *(size(led.per_visit) if led else NO_VALUE for led in ledgers)])
    body += grid([figure(chart)]) + table(["Kind", *heads], rows, "Bytes that left all clients")
    return Section("leaving", "What left each client", body, (chart,), "What left")


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
