"""Before and after: the first section of the report of a run that started from given weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from visard.evaluation.metrics import Metric, describe, order, values
from visard.files import mapping, number, whole
from visard.report.cards import Card
from visard.report.html import Section, esc, fold, table
from visard.report.run_folder import Run
from visard.text import NO_VALUE

MOST_SETS = 4  # that have cards
GROUPS = {"clients": "Clients on their own held-out pictures, mean", "held_out": "Clients that took no part, mean"}


@dataclass(frozen=True)
class Change:
    """A metric before and after; without an interval where nothing was resampled."""

    metric: Metric
    before: float
    after: float
    low: float | None = None
    high: float | None = None
    clients: int | None = None  # over which it is a mean
    better: int | None = None  # of these

    @property
    def verdict(self) -> tuple[str, str]:
        """(good | alarm | caution, word): whether the interval leaves zero out."""
        if self.low is None or self.high is None or self.metric.higher_is_better is None:
            return "", ""
        up, down = self.low > 0, self.high < 0
        if not (up or down):
            return "caution", "not clear"
        return ("good", "better") if up is self.metric.higher_is_better else ("alarm", "worse")

    @property
    def difference(self) -> str:
        return points(self.after - self.before, self.metric)

    @property
    def interval(self) -> str:
        """The 95 % interval of the difference; a dash where there is none."""
        if self.low is None or self.high is None:
            return NO_VALUE
        scale, digits = (100, 2) if self.metric.is_share else (1, 4)
        return f"{scale * self.low:+.{digits}f} to {scale * self.high:+.{digits}f}".replace("-", "−")


def points(difference: float, metric: Metric) -> str:
    """A difference in points of per cent, or as it is."""
    text = f"{100 * difference:+.2f} points" if metric.is_share else f"{difference:+.4g}"
    return text.replace("-", "−")


def changes(found: Mapping[str, Any]) -> dict[str, Change]:
    """The changes in `metrics.json` of a test set or of clients, by metric, in reading order."""
    known: dict[str, Change] = {}
    for name in sorted(found, key=order):
        record = mapping(found[name])
        before, after = number(record.get("before")), number(record.get("after"))
        if before is not None and after is not None:
            low, high = number(record.get("low")), number(record.get("high"))
            counted = whole(record.get("clients")), whole(record.get("better"))
            known[name] = Change(describe(name), before, after, low, high, *counted)
    return known


def tests(run: Run) -> dict[str, dict[str, Change]]:
    """The changes on each test set, that of the sites' people first; nothing of a run without given weights."""
    generic, sites = mapping(mapping(run.metrics.get("change")).get("generic")), run.domains("target")
    listed = sorted(generic.items(), key=lambda test: test[0] not in sites)
    return {name: found for name, record in listed if (found := changes(mapping(record)))}


def section(run: Run) -> Section | None:
    """The section, or None for a run that was given no weights."""
    by_set, said = tests(run), mapping(run.metrics.get("change"))
    clients = {who: found for who in GROUPS if (found := changes(mapping(said.get(who))))}
    if not by_set and not clients:
        return None
    cards = [card for name in list(by_set)[:MOST_SETS] for card in _cards(run, name, by_set[name], len(by_set) > 1)]
    shown = "".join(card.html(i) for i, card in enumerate(cards, 1000))  # numbers of their own for the explanations
    body = f'<ul class="cards">{shown}</ul>' if cards else ""
    body += (
        '<p class="note">Before: the weights that the run was given, tested as round 0. After: its final model. The '
        "interval is of the change, from people drawn anew, the same draws for both models. Where it leaves out zero, "
        "the change is clear. Equal error rate and area have none where a test has more than a million pairs.</p>"
    )
    for name, found in by_set.items():
        caption = f"On {esc(name, 60)}, people that no client has"
        body += table(["Metric", "Before", "After", "Change", "95 % interval", ""], _rows(found), caption)
    for who, found in clients.items():
        head = ["Metric", "Before", "After", "Change", "Better for"]
        listed = [
            [
                esc(c.metric.label),
                c.metric.text(c.before),
                c.metric.text(c.after),
                c.difference,
                f"{c.better} of {c.clients}",
            ]
            for c in found.values()
        ]
        body += fold(GROUPS[who], table(head, listed, GROUPS[who]))
    return Section("change", "Before and after", body, short="Before, after")


def _rows(found: Mapping[str, Change]) -> list[list[str]]:
    rows = []
    for c in found.values():
        level, word = c.verdict
        mark = f'<span class="mark {level}">{word}</span>' if word else ""
        rows.append(
            [esc(c.metric.label), c.metric.text(c.before), c.metric.text(c.after), c.difference, c.interval, mark]
        )
    return rows


def _cards(run: Run, test_set: str, found: Mapping[str, Change], several: bool) -> list[Card]:
    """The strictest reliable TAR and the accuracy of a test set, before and after."""
    doubts = {v.name: v.doubt for v in values(run.tests.get(test_set, {}))}
    rates = [name for name in found if name.startswith("tar@")]
    reliable = [name for name in rates if not doubts.get(name)] or rates[:1]
    cards = []
    for name in [*reliable[-1:], *(["accuracy"] if "accuracy" in found else [])]:
        c, digits = found[name], 1
        label = f"{c.metric.label}, {test_set}" if several else c.metric.label
        text = f"{c.metric.text(c.before, digits)} → {c.metric.text(c.after, digits)}"
        detail = c.difference + ("" if c.low is None else f", 95 % interval {c.interval}")
        cards.append(Card(replace(c.metric, label=label), c.after, text, detail, doubts.get(name, "")))
    return cards
