"""Builds `report.html`: one file that opens offline, for one run or for several side by side."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.resources import files
from pathlib import Path

from visard.data.sensors import READERS
from visard.errors import UsageError, VisardError
from visard.files import write_atomically
from visard.report import charts as curves
from visard.report import charts as scores
from visard.report import compare
from visard.report.charts import Chart
from visard.report.disclosure import POOL, Leaving, add_up, judge
from visard.report.html import (
    Samples,
    Section,
    cards,
    encryption,
    figure,
    flag,
    flow,
    fold,
    grid,
    kept_samples,
    notice,
    sample_figures,
    table,
)
from visard.report.metrics import (
    COUNTERS,
    Card,
    Rate,
    client_figures,
    client_summary,
    describe,
    doubt,
    headline,
    identifications,
    order,
    rank,
    rate_label,
    tpir_at,
    verifications,
)
from visard.report.run_folder import Run, mapping, number, read_run, whole
from visard.report.text import NO_VALUE, count, duration, esc, listing, percent, plain, plural, script_json, size

# ----------
# The tables of the page of one run.

MOST_ROWS = 200


def rounds_table(run: Run) -> str:
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


def party_table(run: Run) -> str:
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


def recognition_table(run: Run) -> str:
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


def spread_table(run: Run, who: str = "clients") -> str:
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


def clients_table(run: Run, who: str = "clients") -> str:
    """Every client with every figure."""
    figures = client_figures(run, who)
    everyone = sorted({c for v in figures.values() for c in v})
    if not everyone:
        return ""
    rows = [[esc(c, 40), *(describe(n).text(v.get(c)) for n, v in figures.items())] for c in everyone]
    return table(["Client", *(esc(describe(n).label) for n in figures)], rows, "Every client")


def ledger_table(leaving: Leaving) -> str:
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


def replies_table(run: Run) -> str:
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


# ----------
# The page of one run: its sections, top to bottom.

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


def run_facts(run: Run) -> list[tuple[str, str]]:
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


def run_sections(run: Run, leaving: Leaving | None, samples: Samples | None = None) -> list[Section]:
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
    after = fold("Rounds as a table", rounds_table(run)) if run.rounds else ""
    after += fold("What each party did", rows) if (rows := party_table(run)) else ""
    return with_charts("curves", "Round by round", "Rounds", charts, after=after)


def _recognition(run: Run) -> Section | None:
    found = verifications(run)
    charts = scores.roc(found) + scores.histograms(found) + scores.roc(found, det=True)
    title = "Recognition of unseen people"
    return with_charts("recognition", title, "Recognition", charts, after=recognition_table(run))


def _clients(run: Run, who: str, title: str, short: str) -> Section | None:
    listed = fold("Every client as a table", rows) if (rows := clients_table(run, who)) else ""
    charts = scores.per_client(client_figures(run, who), client_summary(run, who))
    charts = [replace(chart, id=f"{who}-{chart.id}") for chart in charts] if who != "clients" else charts
    return with_charts(who, title, short, charts, before=spread_table(run, who), after=listed)


def _leaving(run: Run, leaving: Leaving | None) -> Section:
    verdict = judge(leaving, run.status[0] == "finished")
    body, charts = notice(verdict.level, verdict.title, f"<p>{esc(verdict.text)}</p>"), []
    if leaving is not None and leaving.lines:
        replies = sum(r.replied or 0 for r in run.rounds)
        down = sum(r.bytes_down or 0 for r in run.rounds) / replies if replies else None
        charts = curves.leaving_by_round(run, leaving.by_round, leaving.kinds)
        body += flow(leaving, run.clients, down, verdict) + grid([figure(c) for c in charts]) + ledger_table(leaving)
    return Section("leaving", "What left each client", body, tuple(charts), "What left")


def _cost(run: Run) -> Section | None:
    return with_charts("cost", "Time and traffic", "Cost", curves.cost(run))


def _replies(run: Run) -> Section | None:
    """Refused and missing replies, if there are any."""
    rows = replies_table(run)
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


def build_report(runs: Sequence[Path | str], out: Path | str | None = None, samples: Samples | None = None) -> Path:
    """Write the page of one run, or of several runs side by side; returns where it is.

    Without `out`: `report.html` in the folder of the one run, `comparison.html` here for several. `samples`
    are pictures (N, H, W, 3), or one such array for each client; only a run on synthetic faces may show any.
    By default the `samples.npy` that such a run leaves in its folder.
    """
    if isinstance(runs, str | Path):
        runs = [runs]
    if not runs:
        raise UsageError("a report needs at least one run folder")
    read = [read_run(folder) for folder in runs]
    if samples is not None and (len(read) > 1 or not read[0].synthetic):
        raise UsageError("sample pictures may be shown only in the report of one run on synthetic faces")
    if samples is None and len(read) == 1 and read[0].synthetic:
        samples = kept_samples(read[0].folder)
    page = one_page(read[0], samples) if len(read) == 1 else comparison_page(read)
    target = (
        Path(out) if out is not None else read[0].folder / "report.html" if len(read) == 1 else Path("comparison.html")
    )
    if target.is_dir():
        raise UsageError(f"{target}: is a folder; name the file to write")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VisardError(f"cannot write {target}: {error.strerror or error}") from None
    write_atomically(target, page)
    return target


def one_page(run: Run, samples: Samples | None = None) -> str:
    """The page of one run."""
    state, words = run.status
    leaving = add_up(run)
    facts = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v, 60)}</dd></div>" for k, v in run_facts(run))
    return page_of(
        title=f"{run.name}: visard run report",
        kicker=f'Run report <span class="pill {state}">{esc(words, 200)}</span> {privacy(run, leaving)}',
        heading=run.name,
        lead=summary(run),
        facts=f'<dl class="facts">{facts}</dl>' if facts else "",
        sections=run_sections(run, leaving, samples),
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


def page_of(title: str, kicker: str, heading: str, lead: str, facts: str, sections: Sequence[Section]) -> str:
    """Put everything into the template. `kicker` and `facts` are HTML, the other texts are not."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    # No plotly.js release has had these, but inside a script element they would end it or change how it ends.
    library = get_plotlyjs().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    script = _file("page.js")
    charts = [chart.payload() for section in sections for chart in section.charts]
    parts = {
        "policy": _policy(library, script),
        "version": esc(version()),
        "title": esc(title, 120),
        "style": _file("style.css"),
        "navigation": "".join(f'<li><a href="#{s.id}">{esc(s.short or s.title)}</a></li>' for s in sections),
        "kicker": kicker,
        "heading": esc(heading, 120),
        "lead": esc(lead, 2000),
        "facts": facts,
        "sections": "".join(s.html() for s in sections),
        "made": datetime.now(UTC).strftime("%Y-%m-%d"),
        "plotly": esc(get_plotlyjs_version()),
        "charts": script_json(charts),
        "library": library,
        "script": script,
    }
    # One pass, so that nothing in the parts is taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def _policy(*scripts: str) -> str:
    """Content security policy: only the page's own scripts run, and nothing is fetched from anywhere."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    rules = [
        "default-src 'none'",
        f"script-src {allowed}",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
    ]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def version() -> str:
    """The version of visard that made the page."""
    try:
        return installed("visard")
    except PackageNotFoundError:
        return "(not installed)"
