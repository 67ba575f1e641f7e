"""The page of one run: its sections, top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from visard.data.sensor_files import READERS
from visard.report import curves, scores, tables
from visard.report.charts import Chart
from visard.report.events import mapping, number, whole
from visard.report.leaving import Leaving, judge
from visard.report.parts import Section, cards, figure, flow, fold, grid, notice
from visard.report.results import Card, client_figures, client_summary, headline, verifications
from visard.report.runs import Run
from visard.report.samples import Samples, sample_figures
from visard.report.words import count, duration, esc, listing, plural

READINGS = ("sensors", *READERS)  # kinds of sets that hold no pictures


def summary(run: Run) -> str:
    """One sentence: method, network, clients, data, rounds, time, machine."""
    model, parameters = mapping(run.config.get("model")).get("name"), number(run.started.get("parameters"))
    text = f"{run.method} trained a{f' {model}' if model else ''} network"
    text += f" ({count(parameters)} parameters)" if parameters else ""
    text += f" with {plural(run.clients, 'client')}" if run.clients else ""
    text += _data(run)
    stages = [name for name, *_ in run.stages]
    if run.rounds:
        text += f": {plural(len(run.rounds), 'round')}"
        text += f" in the stages {listing(stages)}" if len(stages) > 1 else ""
    text += f" in {duration(run.seconds)}" if run.seconds is not None else ""
    machine = mapping(run.started.get("machine"))
    cores = whole(machine.get("cores"))
    hardware = [str(machine[k]) for k in ("cpu", "system") if machine.get(k)]
    hardware += [plural(cores, "core")] if cores else []
    return text + (f" on one machine ({', '.join(hardware)})." if hardware else ".")


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


def privacy(run: Run, leaving: Leaving | None) -> str:
    """The verdict over the ledger as a link to it."""
    verdict = judge(leaving, run.status[0] == "finished")
    return f'<a class="pill {verdict.level}" href="#leaving">{esc(verdict.title)}</a>'


def facts(run: Run) -> list[tuple[str, str]]:
    """Small facts under the summary."""
    machine, data = mapping(run.started.get("machine")), mapping(run.started.get("data"))
    seed = run.started.get("seed", run.metrics.get("seed"))
    starts = run.of("run_started")
    when = str(starts[0].get("time", "")).replace("T", " ")[:16] if starts else ""
    found = [
        ("Started", f"{when} UTC" if when else ""),
        ("Resumed", plural(len(starts) - 1, "time") if len(starts) > 1 else ""),
        ("Seed", str(seed) if seed is not None else ""),
        ("visard", str(run.started.get("version") or "")),
        ("torch", str(machine.get("torch") or "")),
        ("Threads", str(machine.get("threads") or "")),
        ("Data fingerprint", str(data.get("fingerprint") or "")[:16]),
    ]
    return [(k, v) for k, v in found if v]


def sections(run: Run, leaving: Leaving | None, samples: Samples | None = None) -> list[Section]:
    """All sections of the page of one run."""
    heads = headline(run, leaving)
    parts = [
        _headline(run, heads),
        _curves(run),
        _recognition(run),
        _clients(run, "clients", "How the clients fare", "Clients"),
        _clients(run, "held_out", "Clients that took no part in training", "Held out"),
        _leaving(run, leaving),
        _cost(run),
        _replies(run),
        _samples(samples),
        _settings(run),
        _glossary(heads),
    ]
    return [part for part in parts if part is not None]


def with_charts(
    id: str, title: str, short: str, charts: Sequence[Chart], before: str = "", after: str = ""
) -> Section | None:
    """A section with its charts in a grid; None if it would be empty."""
    body = before + grid([figure(c) for c in charts]) + after
    return Section(id, title, body, tuple(charts), short) if body else None


def _headline(run: Run, heads: Sequence[Card]) -> Section:
    body = cards(heads) if heads else '<p class="empty">The run has no figures yet.</p>'
    warnings = Counter(str(e.get("text", "")) for e in run.of("warning"))
    if warnings:
        items = "".join(
            f"<li>{esc(text, 300)}{f' ({n} times)' if n > 1 else ''}</li>" for text, n in warnings.most_common(20)
        )
        body += notice("caution", "Warnings of the run", f"<ul>{items}</ul>")
    return Section("figures", "Headline figures", body, short="Figures")


def _curves(run: Run) -> Section | None:
    trained = curves.training(run)
    charts = trained[:1] + curves.evaluation(run) + curves.client_evaluation(run) + trained[1:9]
    after = fold("Rounds as a table", tables.rounds(run)) if run.rounds else ""
    after += fold("What each party did", rows) if (rows := tables.by_party(run)) else ""
    return with_charts("curves", "Round by round", "Rounds", charts, after=after)


def _recognition(run: Run) -> Section | None:
    found = verifications(run)
    charts = scores.roc(found) + scores.histograms(found) + scores.roc(found, det=True)
    title = "Recognition of unseen people"
    return with_charts("recognition", title, "Recognition", charts, after=tables.recognition(run))


def _clients(run: Run, who: str, title: str, short: str) -> Section | None:
    listed = fold("Every client as a table", rows) if (rows := tables.clients(run, who)) else ""
    charts = scores.per_client(client_figures(run, who), client_summary(run, who))
    charts = [replace(chart, id=f"{who}-{chart.id}") for chart in charts] if who != "clients" else charts
    return with_charts(who, title, short, charts, before=tables.spread(run, who), after=listed)


def _leaving(run: Run, leaving: Leaving | None) -> Section:
    verdict = judge(leaving, run.status[0] == "finished")
    body, charts = notice(verdict.level, verdict.title, f"<p>{esc(verdict.text)}</p>"), []
    if leaving is not None and leaving.lines:
        replies = sum(r.replied or 0 for r in run.rounds)
        down = sum(r.bytes_down or 0 for r in run.rounds) / replies if replies else None
        charts = curves.leaving_by_round(run, leaving.by_round, leaving.kinds)
        body += flow(leaving, run.clients, down, verdict) + grid([figure(c) for c in charts]) + tables.ledger(leaving)
    return Section("leaving", "What left each client", body, tuple(charts), "What left")


def _cost(run: Run) -> Section | None:
    return with_charts("cost", "Time and traffic", "Cost", curves.cost(run))


def _replies(run: Run) -> Section | None:
    """Refused and missing replies, if there are any."""
    rows = tables.replies(run)
    if not rows:
        return None
    asked = sum(r.asked or 0 for r in run.rounds)
    text = f"Of {plural(asked, 'request')} to clients, " if asked else ""
    text += f"{plural(len(run.of('refused')), 'reply was', 'replies were')} refused"
    text += f" and {count(len(run.of('missing')))} did not come."
    return Section("replies", "Refused and missing replies", f"<p>{text}</p>{rows}", short="Replies")


def _samples(samples: Samples | None) -> Section | None:
    if samples is None:
        return None
    body = '<p class="note">Drawn by a program: these people do not exist.</p>'
    return Section("samples", "Sample pictures", body + sample_figures(samples), short="Samples")


def _settings(run: Run) -> Section | None:
    if not run.config_text:
        return None
    note = '<p class="note">Complete: with this config.toml and the same data the run can be repeated.</p>'
    text = "\n".join(esc(row) for row in run.config_text.splitlines())
    return Section("settings", "Settings", note + fold("config.toml", f'<pre tabindex="0">{text}</pre>'))


def _glossary(heads: Sequence[Card]) -> Section | None:
    meanings = {card.figure.label: card.figure.meaning for card in heads if card.figure.meaning}
    if not meanings:
        return None
    items = "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in meanings.items())
    return Section("glossary", "What the figures mean", f"<dl>{items}</dl>", short="Meaning")
