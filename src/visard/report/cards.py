"""The headline of a run: its most important metrics, what left a client and the time of a round, each on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from visard.evaluation.metrics import Metric, Value, describe, order, values
from visard.files import mapping, number, whole
from visard.report.disclosure import Leaving
from visard.report.html import esc, flag, tip
from visard.report.run_folder import Run
from visard.text import duration, percent, plural, size

BYTES = Metric(
    "Left a client, per round",
    "Mean size of all that one client sent to the server in one round in which it replied, from the ledger.",
    higher_is_better=False,
)
SECONDS = Metric(
    "Time per round",
    "Median wall time of a round on the machine named above: training and averaging, without evaluation.",
)
LONG = 10  # values with more characters are printed smaller, to stay on one line
POOLED = Metric(
    "Pooled before training",
    "Private data that was moved to one place before the first round.",
    higher_is_better=False,
)


@dataclass(frozen=True)
class Card:
    """A headline metric."""

    metric: Metric
    value: float | None
    text: str
    detail: str = ""
    flag: str = ""

    def html(self, i: int) -> str:
        head = f"<h3>{esc(self.metric.label)}</h3>" + tip(f"tip-{i}", self.metric.label, self.metric.meaning)
        detail = f'<p class="detail">{esc(self.detail, 120)}</p>' if self.detail else ""
        kind = "value long" if len(self.text) > LONG else "value"
        return f'<li class="card">{head}<p class="{kind}">{esc(self.text)}</p>{detail}{flag(self.flag)}</li>'


def headline_cards(run: Run, leaving: Leaving | None, every_rate: bool = False) -> list[Card]:
    """The metrics at the top of the page; `every_rate`: not only the most telling false accept rates."""
    cards = _final_cards(run, every_rate) or _evaluation_cards(run) or client_cards(run) or _class_cards(run)
    cards += _traffic_cards(run, leaving)
    seconds = [r.seconds for r in run.rounds if r.seconds is not None]
    if seconds:
        middle = median(seconds)
        cards.append(Card(SECONDS, middle, duration(middle), f"{duration(run.seconds)} in all"))
    return cards


def _traffic_cards(run: Run, leaving: Leaving | None) -> list[Card]:
    """What left a client in a round; for a method that pools, what was pooled instead."""
    if leaving is None:
        sent = [r.bytes_up / r.replied for r in run.rounds if r.bytes_up is not None and r.replied]
        return [Card(BYTES, mean(sent), size(mean(sent)), "from the event log")] if sent else []
    cards = []
    if leaving.pooled:
        total = leaving.pool.total
        cards.append(Card(POOLED, total, size(total), ", ".join(leaving.pooled), "not federated"))
    if leaving.per_visit is not None:
        detail = f"{size(leaving.rounds.total)} from all clients in all rounds"
        cards.append(Card(BYTES, leaving.per_visit, size(leaving.per_visit), detail))
    elif run.rounds and not leaving.pooled:  # a method that pools has no merit in sending nothing afterwards
        cards.append(Card(BYTES, 0, size(0), "nothing left a client in the rounds"))
    return cards


def _final_cards(run: Run, every_rate: bool) -> list[Card]:
    """The registered metrics of the first final test of the generic model that have a card."""
    paired = [name for name, test in run.tests.items() if mapping(test.get("verification"))]
    if not paired:
        return []
    found = [v for v in values(run.tests[paired[0]]) if v.metric.card is not None and v.value is not None]
    rates = [v for v in found if v.at is not None and v.metric.test == "verification"]
    left_out = [] if every_rate else [v for v in rates if v not in _telling(rates)]
    gallery = whole(mapping(run.tests[paired[0]].get("identification")).get("gallery"))
    where = f"on {paired[0]}" if len(paired) > 1 else ""
    cards = []
    for v in found:
        if v in left_out:
            continue
        detail = where
        if v.low is not None:
            digits = 1 if v.metric.higher_is_better else 2  # errors are small
            detail = f"95 % interval {100 * v.low:.{digits}f} – {percent(v.high, digits)}"
        elif v.name.startswith("rank"):
            detail = f"gallery of {plural(gallery, 'identity', 'identities')}" if gallery else ""
        cards.append(Card(v.metric, v.value, v.metric.text(v.value, v.metric.card or 0), detail, v.doubt))
    return cards


def _telling(rates: Sequence[Value]) -> list[Value]:
    """Two rates for the headline: the strictest reliable one, and the next stricter one."""
    reliable = [v for v in rates if not v.doubt]
    if not reliable:
        return list(rates[:1])
    last = rates.index(reliable[-1])
    return list(rates[last : last + 2])


def _evaluation_cards(run: Run) -> list[Card]:
    """A run without final metrics: those of its last evaluation."""
    last = next((e for e in reversed(run.evaluations) if e.generic), None)
    if last is None:
        return []
    found = next(iter(last.generic.values()))
    known = [(describe(k), found[k]) for k in sorted(found, key=order)]
    doubt = f"not final: after round {last.step + 1}"
    return [Card(m, v, m.text(v), flag=doubt) for m, v in known if v is not None and m.meaning][:5]


def _class_cards(run: Run) -> list[Card]:
    """A run that predicts classes of samples: how well, after the last round."""
    last = run.rounds[-1].figures if run.rounds else {}
    known = [(describe(k), last.get(k)) for k in ("balanced_accuracy", "weighted_f1")]
    return [Card(m, v, m.text(v, 1)) for m, v in known if v is not None]


def client_cards(run: Run) -> list[Card]:
    """A method without a generic model: means over clients."""
    cards = []
    for name, s in sorted(run.client_summary().items(), key=lambda item: order(item[0]))[:4]:
        metric, value, worst = describe(name), number(s.get("mean")), number(s.get("worst"))
        if value is not None:
            metric = replace(metric, label=f"{metric.label}, mean over clients")
            detail = f"worst {metric.text(worst, 1)} ({s.get('worst_client', '?')})"
            cards.append(Card(metric, value, metric.text(value), detail))
    return cards
