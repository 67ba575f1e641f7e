"""Builds `report.html`: one file that opens offline, for one run or for several side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from visard.data.sensors import READERS
from visard.errors import UsageError, VisardError
from visard.evaluation.metrics import describe, doubts, order, values
from visard.files import SHARED, mapping, number, whole, write_atomically
from visard.report import change, charts, compare, replay
from visard.report.cards import Card, headline_cards
from visard.report.disclosure import Leaving, add_up, flow, judge, ledger_table
from visard.report.groups import groups_section
from visard.report.html import Section, esc, facts, flag, fold, grid, notice, page_of, sample_sheet, table, with_charts
from visard.report.run_folder import Run, read_run, warnings_of
from visard.text import NO_VALUE, count, duration, listing, percent, plain, plural, size

MOST_ROWS = 200
REPEAT = '<p class="note">Complete: with this config.toml and the same data the run can be repeated.</p>'
READINGS = ("sensors", *READERS)  # kinds of sets that hold no pictures


def build_report(runs: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the page of one run, or of several runs side by side; returns where it is.

    Without `out`: `report.html` in the folder of the one run, `comparison.html` here for several.
    """
    if isinstance(runs, str | Path):
        runs = [runs]
    if not runs:
        raise UsageError("a report needs at least one run folder")
    read = [read_run(folder) for folder in runs]
    page = one_page(read[0]) if len(read) == 1 else comparison_page(read)
    target = (
        Path(out) if out is not None else read[0].folder / "report.html" if len(read) == 1 else Path("comparison.html")
    )
    if target.is_dir():
        raise UsageError(f"{target}: is a folder; name the file to write")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VisardError(f"cannot write {target}: {error.strerror or error}") from None
    write_atomically(target, page, SHARED)
    return target


def one_page(run: Run) -> str:
    """The page of one run."""
    state, words = run.status
    leaving = add_up(run)
    verdict = judge(leaving, state == "finished")
    privacy = f'<a class="pill {verdict.level}" href="#leaving">{esc(verdict.title)}</a>'
    return page_of(
        title=f"{run.name}: visard run report",
        kicker=f'Run report <span class="pill {state}">{esc(words, 200)}</span> {privacy}',
        heading=run.name,
        lead=summary(run),
        facts=facts(run_facts(run), 60),
        sections=run_sections(run, leaving),
    )


def comparison_page(runs: Sequence[Run]) -> str:
    """The page of several runs."""
    labels = compare.labels(runs)
    return page_of(
        title=f"{len(runs)} runs: visard comparison",
        kicker="Comparison",
        heading=f"{len(runs)} runs side by side",
        lead=compare.summary(runs, labels),
        facts="",
        sections=compare.sections(runs, labels),
    )


def summary(run: Run) -> str:
    """In words: method, network, clients, data, rounds, time, machine."""
    model, parameters = mapping(run.config.get("model")).get("name"), number(run.started.get("parameters"))
    text = f"{run.method} trained a{f' {model}' if model else ''} network"
    text += f" ({count(parameters)} parameters)" if parameters else ""
    own = mapping(run.config.get("partition")).get("kind") == "parties"  # then the data are the server's, to test on
    who = plural(run.clients, "party" if own else "client", "parties" if own else "clients")
    text += f" with {who}" if run.clients else ""
    data = _data(run)
    text += (", each on its own pictures" + (f", and tested it{data}" if data else "")) if own else data
    stages = [name for name, *_ in run.stages]
    if run.rounds:
        text += f": {plural(len(run.rounds), 'round')}"
        text += f" in the stages {listing(stages)}" if len(stages) > 1 else ""
    text += f" in {duration(run.seconds)}" if run.seconds is not None else ""
    machine = mapping(run.started.get("machine"))
    cores = whole(machine.get("cores"))
    hardware = [str(machine[k]) for k in ("cpu", "system") if machine.get(k)]
    hardware += [plural(cores, "core")] if cores else []
    elsewhere = own or mapping(run.config.get("engine")).get("server") is not None
    where = "; the server's machine:" if elsewhere else " on one machine"
    about = ", ".join(hardware)
    return text + ((f"{where} {about}." if elsewhere else f"{where} ({about}).") if hardware else ".") + _domains(run)


def _domains(run: Run) -> str:
    """Whose pictures the source and the sites have, where they are of two populations or the like."""
    source, target = (listing(run.domains(side)) for side in ("source", "target"))
    if "nothing" in (source, target) or mapping(run.config.get("partition")).get("kind") != "domains":
        return ""
    return f" The source has people of {source}; the sites have people of {target}."


def _data(run: Run) -> str:
    """The pictures of a run, in words."""
    data, classes = mapping(run.started.get("data")), whole(run.started.get("classes"))
    pictures, pixels = whole(data.get("pictures")), whole(data.get("size"))
    identities = whole(data.get("identities")) or classes
    if not pictures and not identities:
        return ""
    text = f" on {count(pictures)} " if pictures else " on "
    if data.get("kind") in READINGS:
        return text + f"samples of {plural(identities, 'class', 'classes')} ({data.get('name')})"
    text += "synthetic faces" if run.synthetic else "faces"
    text += f" of {plural(identities, 'identity', 'identities')}" if identities else ""
    text += f", {count(classes)} of them in training" if classes and identities and classes < identities else ""
    about = [str(data["name"])] if data.get("name") and data.get("name") != "synthetic" else []
    about += [f"{pixels} × {pixels} pixels"] if pixels else []
    return text + (f" ({', '.join(about)})" if about else "")


def trained_part(about: dict[str, Any]) -> str:
    """Which part of the network a run trained, in words; nothing where it was all of it."""
    part = mapping(about.get("trained"))
    tail, frozen = whole(part.get("parameters")), whole(part.get("frozen"))
    if not tail or frozen is None or not (part.get("from") or part.get("lora")):
        return ""
    if part.get("lora"):
        return f"LoRA of rank {part['lora']}: {count(tail)} parameters beside {count(frozen)} frozen ones"
    return f"from {part['from']}: {percent(tail / (tail + frozen))} of the parameters, the rest is frozen"


def run_facts(run: Run) -> dict[str, str]:
    """Small facts under the summary."""
    machine, data = mapping(run.started.get("machine")), mapping(run.started.get("data"))
    seed = run.started.get("seed", run.metrics.get("seed"))
    starts = run.of("run_started")
    when = str(starts[0].get("time", "")).replace("T", " ")[:16] if starts else ""
    found = {
        "Started": f"{when} UTC" if when else "",
        "Resumed": plural(len(starts) - 1, "time") if len(starts) > 1 else "",
        "Seed": str(seed) if seed is not None else "",
        "visard": str(run.started.get("version") or ""),
        "torch": str(machine.get("torch") or ""),
        "Threads": str(machine.get("threads") or ""),
        "Trained": trained_part(run.started),
        "Batch norm": "statistics frozen" if run.started.get("frozen_norm") is True else "",
        "Data fingerprint": str(data.get("fingerprint") or "")[:16],
    }
    return {k: v for k, v in found.items() if v}


def run_sections(run: Run, leaving: Leaving | None) -> list[Section]:
    """All sections of the page of one run."""
    heads = headline_cards(run, leaving)
    before_after = change.section(run)
    compared = {c.metric.label for found in change.tests(run).values() for c in found.values()}
    parts = [
        replay.section(run),
        before_after,
        _headline(run, [card for card in heads if card.metric.label not in compared], bool(compared)),
        _curves(run),
        _recognition(run),
        groups_section(run),
        _clients(run, "clients", "How the clients fare", "Clients"),
        _clients(run, "held_out", "Clients that took no part in training", "Held out"),
        leaving_section(run, leaving),
        with_charts("cost", "Time and traffic", "Cost", charts.cost(run)),
        _replies(run),
        _samples(run),
        settings_section(run),
        _glossary(heads),
    ]
    return [part for part in parts if part is not None]


def _headline(run: Run, heads: Sequence[Card], compared: bool) -> Section:
    """The cards; without the metrics of the comparison, for a run that was `compared` with its given weights."""
    cards = "".join(card.html(i) for i, card in enumerate(heads))
    body = f'<ul class="cards">{cards}</ul>' if heads else '<p class="empty">The run has no metrics yet.</p>'
    doubtful = [f"{name}: {text}" for name, test in run.tests.items() for text in doubts(test)]
    if doubtful:
        items = "".join(f"<li>{esc(text, 400)}</li>" for text in doubtful[:20])
        body += notice("caution", "Read these metrics with care", f"<ul>{items}</ul>")
    warnings = Counter([str(e.get("text", "")) for e in run.of("warning")] + warnings_of(run.events))
    if warnings:
        items = "".join(
            f"<li>{esc(text, 300)}{f' ({n} times)' if n > 1 else ''}</li>" for text, n in warnings.most_common(20)
        )
        body += notice("caution", "Warnings of the run", f"<ul>{items}</ul>")
    if compared:
        return Section("figures", "What it took", body, short="What it took")
    return Section("figures", "Headline metrics", body, short="Metrics")


def _curves(run: Run) -> Section | None:
    trained = charts.training(run)
    losses = max(1, sum(chart.title.startswith(describe("loss").label) for chart in trained))  # they come first
    drawn = trained[:losses] + charts.evaluation(run) + charts.client_evaluation(run) + trained[losses : 8 + losses]
    after = fold("Rounds as a table", rounds_table(run)) + fold("What each party did", party_table(run))
    return with_charts("curves", "Round by round", "Rounds", drawn, after=after)


def _recognition(run: Run) -> Section | None:
    tests = charts.pair_tests(run)
    overlaid = charts.with_before(run, tests)
    drawn = charts.roc(*overlaid) + charts.histograms(tests) + charts.roc(*overlaid, det=True)
    listed = recognition_table(run)
    if change.tests(run):  # the table of before and after has them
        listed = fold("All final metrics with separate intervals", listed)
    return with_charts("recognition", "Recognition of unseen people", "Recognition", drawn, after=listed)


def _clients(run: Run, who: str, title: str, short: str) -> Section | None:
    drawn = [replace(c, id=c.id if who == "clients" else f"{who}-{c.id}") for c in charts.per_client(run, who)]
    listed = fold("Every client as a table", clients_table(run, who))
    return with_charts(who, title, short, drawn, before=spread_table(run, who), after=listed)


def leaving_section(run: Run, leaving: Leaving | None) -> Section:
    """What left each client: the verdict, the flow, the ledger."""
    verdict = judge(leaving, run.status[0] == "finished")
    body, drawn = notice(verdict.level, verdict.title, f"<p>{esc(verdict.text)}</p>"), []
    if leaving is not None and leaving.lines:
        replies = sum(r.replied or 0 for r in run.rounds)
        down = sum(r.bytes_down or 0 for r in run.rounds) / replies if replies else None
        drawn = charts.leaving_by_round(run, leaving.by_round, leaving.kinds)
        body += flow(leaving, run.clients, down, verdict) + grid(drawn) + ledger_table(leaving)
    return Section("leaving", "What left each client", body, tuple(drawn), "What left")


def _replies(run: Run) -> Section | None:
    """Replies that were refused, did not come or are far from the others, if there are any."""
    rows = replies_table(run)
    if not rows:
        return None
    asked = sum(r.asked or 0 for r in run.rounds)
    text = f"Of {plural(asked, 'request')} to clients, " if asked else ""
    text += f"{plural(len(run.of('refused')), 'reply was', 'replies were')} refused"
    text += f" and {count(len(run.of('missing')))} did not come."
    if run.of("far"):
        text += f" {plural(len(run.of('far')), 'update was', 'updates were')} far from the others'."
    return Section("replies", "Refused, missing and far replies", f"<p>{text}</p>{rows}", short="Replies")


def _samples(run: Run) -> Section | None:
    """The `samples.npy` that a run on synthetic faces leaves in its folder; pictures of real faces are never shown."""
    sheet = sample_sheet(run.folder / "samples.npy") if run.synthetic else ""
    note = '<p class="note">Drawn by a program: these people do not exist.</p>'
    return Section("samples", "Sample pictures", note + sheet, short="Samples") if sheet else None


def settings_section(run: Run, file: str = "config.toml", note: str = REPEAT) -> Section | None:
    """The settings file of the run, folded; None if there is none."""
    if not run.config_text:
        return None
    text = "\n".join(esc(row) for row in run.config_text.splitlines())
    return Section("settings", "Settings", note + fold(file, f'<pre tabindex="0">{text}</pre>'))


def _glossary(heads: Sequence[Card]) -> Section | None:
    meanings = {card.metric.label: card.metric.meaning for card in heads if card.metric.meaning}
    if not meanings:
        return None
    items = "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in meanings.items())
    return Section("glossary", "What the metrics mean", f"<dl>{items}</dl>", short="Meaning")


def rounds_table(run: Run) -> str:
    """The rounds, at most `MOST_ROWS` of them, with every metric the method logged; empty if there are none."""
    if not run.rounds:
        return ""
    names = sorted(dict.fromkeys(n for r in run.rounds for n in r.figures), key=lambda n: (n != "loss", n))
    step = -(-len(run.rounds) // MOST_ROWS)
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


def party_table(run: Run) -> str:
    """Operations on ciphertexts of each party, and its time, over all rounds: at most `MOST_ROWS` parties."""
    totals: dict[str, dict[str, float]] = {}
    for r in run.rounds:
        for client, metrics in r.clients.items():
            mine = totals.setdefault(client, {})
            for name in (*charts.COUNTERS, "seconds"):
                mine[name] = mine.get(name, 0.0) + (metrics.get(name) or 0.0)
    names = [n for n in charts.COUNTERS if any(mine[n] for mine in totals.values())]
    if not names:
        return ""
    rows = [
        [esc(c, 60), *(plain(mine[n]) for n in names), duration(mine["seconds"])]
        for c, mine in list(totals.items())[:MOST_ROWS]
    ]
    return table(["Party", *(esc(n, 30) for n in names), "Time of its steps"], rows, "All rounds, by party", 1)


COUNTS = {  # of a test, by their names in metrics.json
    "verification": {"genuine": "Genuine pairs", "impostors": "Impostor pairs"},
    "identification": {
        "gallery": "Identities in the gallery",
        "mated": "Probes of people in the gallery",
        "unmated": "Probes of strangers",
    },
}


def recognition_table(run: Run) -> str:
    """All final metrics of the generic model: metrics in rows, test sets in columns."""
    cells: dict[str, dict[str, str]] = {}
    for kind, counts in COUNTS.items():
        for name, test in run.tests.items():
            record = mapping(test.get(kind))
            for v in values({kind: record}):
                interval = "" if v.low is None else f"<small>{100 * v.low:.2f} – {percent(v.high, 2)}</small>"
                cells.setdefault(v.metric.label, {})[name] = v.metric.text(v.value) + interval + flag(v.doubt)
            for key, label in counts.items() if record else ():
                cells.setdefault(label, {})[name] = count(whole(record.get(key)))
    if not cells:
        return ""
    sets = list(dict.fromkeys(s for row in cells.values() for s in row))
    rows = [[esc(label), *(row.get(s, NO_VALUE) for s in sets)] for label, row in cells.items()]
    return table(["Metric", *(esc(s, 40) for s in sets)], rows, "All final metrics, with 95 % intervals")


def spread_table(run: Run, who: str = "clients") -> str:
    """Mean, spread, worst and best over clients."""
    rows = []
    for name, s in sorted(run.client_summary(who).items(), key=lambda item: order(item[0])):
        metric = describe(name)
        at = {key: metric.text(number(s.get(key))) for key in ("mean", "std", "worst", "best", "gap")}
        for key in ("worst", "best"):
            if s.get(f"{key}_client") is not None:
                at[key] += f"<small>{esc(s[f'{key}_client'], 30)}</small>"
        rows.append([esc(metric.label), *at.values(), plain(number(s.get("jain")), 3)])
    if not rows:
        return ""
    note = "Jain’s index is 1 when all clients do equally well, 1/n when one of n clients has it all."
    head = ["Metric", "Mean", "Std", "Worst", "Best", "Gap", "Jain’s index"]
    return table(head, rows, "Spread over clients") + f'<p class="note">{note}</p>'


def clients_table(run: Run, who: str = "clients") -> str:
    """Every client with every metric; empty if there are none."""
    found = run.client_metrics(who)
    everyone = sorted({c for v in found.values() for c in v})
    if not everyone:
        return ""
    rows = [[esc(c, 40), *(describe(n).text(v.get(c)) for n, v in found.items())] for c in everyone]
    return table(["Client", *(esc(describe(n).label) for n in found)], rows, "Every client")


def replies_table(run: Run) -> str:
    """Refused, missing and far replies; empty if there are none."""
    rows = [
        [
            esc(e.get("client", NO_VALUE), 40),
            kind,
            esc(e.get("stage", ""), 30),
            f"{(whole(e.get('round')) or 0) + 1}",
            ".".join(esc(e[k], 40) for k in ("message", "field") if e.get(k)) or NO_VALUE,
            esc(e.get("reason", ""), 300),
        ]
        for kind in ("refused", "missing", "far")
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
    return table(head, rows[:MOST_ROWS], "Refused, missing and far replies", 6, quiet=True) + more
