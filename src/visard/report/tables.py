"""The tables of the page of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from visard.report.events import number, whole
from visard.report.figures import COUNTERS, describe, order, rank, tpir_at
from visard.report.leaving import POOL, Leaving
from visard.report.parts import encryption, flag, table
from visard.report.results import (
    Rate,
    client_figures,
    client_summary,
    doubt,
    identifications,
    rate_label,
    verifications,
)
from visard.report.runs import Run
from visard.report.words import NO_VALUE, count, duration, esc, percent, plain, size

MOST_ROWS = 200


def rounds(run: Run) -> str:
    """The rounds, at most `MOST_ROWS` of them, with every figure the method logged."""
    names = sorted(dict.fromkeys(n for r in run.rounds for n in r.figures), key=lambda n: (n != "loss", n))
    step = max(1, -(-len(run.rounds) // MOST_ROWS))
    rows = [
        [
            f"{r.step + 1}",
            esc(r.stage, 30),
            *(plain(r.figures.get(n)) for n in names),
            f"{count(r.replied)} of {count(r.asked)}",
            size(r.bytes_up),
            duration(r.seconds),
        ]
        for r in run.rounds[::step]
    ]
    head = ["Round", "Stage", *(esc(n, 30) for n in names), "Replied", "Bytes up", "Time"]
    return table(head, rows, f"Rounds, every {step}th" if step > 1 else "Rounds", 2)


def by_party(run: Run) -> str:
    """Operations on ciphertexts of each party, and its time, over all rounds: at most `MOST_ROWS` parties."""
    totals: dict[str, dict[str, float]] = {}
    for r in run.rounds:
        for client, figures in r.clients.items():
            mine = totals.setdefault(client, {})
            for name in (*COUNTERS, "seconds"):
                mine[name] = mine.get(name, 0.0) + (figures.get(name) or 0.0)
    names = [n for n in COUNTERS if any(mine[n] for mine in totals.values())]
    if not names:
        return ""
    rows = [
        [esc(c, 60), *(plain(mine[n]) for n in names), duration(mine["seconds"])]
        for c, mine in list(totals.items())[:MOST_ROWS]
    ]
    return table(["Party", *(esc(n, 30) for n in names), "Time of its steps"], rows, "All rounds, by party", 1)


def recognition(run: Run) -> str:
    """All final figures of the generic model: figures in rows, test sets in columns."""
    cells: dict[str, dict[str, str]] = {}

    def put(
        label: str,
        test_set: str,
        value: str,
        low: float | None = None,
        high: float | None = None,
        note: str = "",
    ) -> None:
        interval = (
            f"<small>{100 * low:.2f} – {percent(high, 2)}</small>" if low is not None and high is not None else ""
        )
        cells.setdefault(label, {})[test_set] = value + interval + flag(note)

    def put_rates(
        test_set: str, rates: Sequence[Rate], label: Callable[[Rate], str], note: Callable[[Rate], str]
    ) -> None:
        for r in rates:
            put(label(r), test_set, percent(r.value, 2), r.low, r.high, note(r))

    for name, v in verifications(run):
        put("Verification accuracy", name, percent(v.accuracy, 2), *(v.accuracy_range or ()))
        put_rates(name, v.tar, rate_label, lambda r, n=v.impostors: doubt(r, n))  # type: ignore[misc]
        put("Equal error rate", name, percent(v.eer, 2), *(v.eer_range or ()))
        put("Area under the ROC", name, percent(v.auc, 2))
        put("Genuine pairs", name, count(v.genuine))
        put("Impostor pairs", name, count(v.impostors))
    for name, i in identifications(run):
        for k, value in i.ranks.items():
            put(rank(k).label, name, percent(value, 2))
        put_rates(
            name,
            i.tpir,
            lambda r: tpir_at(r.far).label,
            lambda r: "" if r.reliable else "unreliable: few strangers",
        )
        put("Identities in the gallery", name, count(i.gallery))
        put("Probes of people in the gallery", name, count(i.mated))
        put("Probes of strangers", name, count(i.unmated))
    if not cells:
        return ""
    sets = list(dict.fromkeys(s for row in cells.values() for s in row))
    rows = [[esc(label), *(row.get(s, NO_VALUE) for s in sets)] for label, row in cells.items()]
    return table(["Figure", *(esc(s, 40) for s in sets)], rows, "All final figures, with 95 % intervals")


def spread(run: Run, who: str = "clients") -> str:
    """Mean, spread, worst and best over clients."""
    rows = []
    for name, s in sorted(client_summary(run, who).items(), key=lambda item: order(item[0])):
        f = describe(name)
        at = {key: f.text(number(s.get(key))) for key in ("mean", "std", "worst", "best", "gap")}
        for key in ("worst", "best"):
            if s.get(f"{key}_client") is not None:
                at[key] += f"<small>{esc(s[f'{key}_client'], 30)}</small>"
        rows.append([esc(f.label), *at.values(), plain(number(s.get("jain")), 3)])
    if not rows:
        return ""
    note = "Jain’s index is 1 when all clients do equally well, 1/n when one of n clients has it all."
    head = ["Figure", "Mean", "Std", "Worst", "Best", "Gap", "Jain’s index"]
    return table(head, rows, "Spread over clients") + f'<p class="note">{note}</p>'


def clients(run: Run, who: str = "clients") -> str:
    """Every client with every figure."""
    figures = client_figures(run, who)
    everyone = sorted({c for v in figures.values() for c in v})
    if not everyone:
        return ""
    rows = [[esc(c, 40), *(describe(n).text(v.get(c)) for n, v in figures.items())] for c in everyone]
    return table(["Client", *(esc(describe(n).label) for n in figures)], rows, "Every client")


def ledger(leaving: Leaving) -> str:
    """The ledger added up over rounds and clients."""
    rows = [
        [
            f"{esc(line.message, 40)}.{esc(line.field, 40)}",
            esc(line.kind.replace("_", " "), 40),
            encryption(line.encrypted),
            "before round 1" if line.stage == POOL else esc(line.stage, 30),
            count(len(line.clients)),
            count(line.times),
            size(line.bytes / line.times),
            size(line.bytes),
        ]
        for line in leaving.lines
    ]
    head = ["Field", "Kind", "Encrypted", "Stage", "Clients", "Times", "Each", "In all"]
    return table(head, rows, "The ledger, added up over rounds and clients", 4)


def replies(run: Run) -> str:
    """Refused and missing replies; empty if there are none."""
    rows = [
        [
            esc(e.get("client", NO_VALUE), 40),
            kind,
            esc(e.get("stage", ""), 30),
            f"{(whole(e.get('round')) or 0) + 1}",
            ".".join(esc(e[k], 40) for k in ("message", "field") if e.get(k)) or NO_VALUE,
            esc(e.get("reason", ""), 300),
        ]
        for kind in ("refused", "missing")
        for e in run.of(kind)
    ]
    if not rows:
        return ""
    more = (
        f'<p class="note">The first {MOST_ROWS} of {len(rows):,}; events.jsonl has all.</p>'
        if len(rows) > MOST_ROWS
        else ""
    )
    head = ["Client", "What", "Stage", "Round", "Field", "Reason"]
    return table(head, rows[:MOST_ROWS], "Refused and missing replies", 6, quiet=True) + more
