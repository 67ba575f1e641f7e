"""The page of an adaptation: before and after on unseen people, thresholds, errors by group, what left, the cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visard.data.pictures import CUTS
from visard.evaluation.metrics import FEW, Metric
from visard.files import SHARED, json_list, mapping, number, whole, write_atomically
from visard.models.inputs import Inputs, words
from visard.report.cards import Card
from visard.report.disclosure import add_up, judge
from visard.report.groups import lost
from visard.report.html import Section, esc, facts, flag, notice, page_of, table
from visard.report.page import leaving_section, settings_section
from visard.report.run_folder import Run
from visard.text import NO_VALUE, count, duration, listing, percent, plural, share, size

ROLES = {"clients": "site", "source": "source", "public": "public people", "test": "people to test on"}
ESTIMATE = "estimate: groups of pictures stand for people"
ABOUT_ESTIMATES = (
    "No pictures with names were given to test on. Pictures that the network, as it came, put into one group count as "
    "one person, pictures of two groups of a site as two. Groups leave hard pictures out, so that rates of accepted "
    "pairs are too high, before and after. How much better the network is, only people with names can show: --test."
)
KEEP = "keep the recogniser as it came; more people at the sites, --source or fewer rounds may help"
FNMR = (
    "FNMR: share of pairs of one person that are refused. FMR: share of pairs of two people, both of the group, that "
    "are accepted. Failed to enrol: pictures in which no face of sufficient quality was found, of all that came."
)
TAR = (
    "True accept rate: the share of pairs of pictures of one person that are accepted, at the threshold at which {} of "
    "the pairs of two people are accepted too."
)


def write_page(path: Path, run: Run, record: dict[str, Any]) -> None:
    """Write the page."""
    leaving = add_up(run)
    verdict = judge(leaving, run.status[0] == "finished")
    pill = f'<a class="pill {verdict.level}" href="#leaving">{esc(verdict.title)}</a>'
    sections = [_change(record), _use(record), _groups(record), leaving_section(run, leaving), _cost(run, record),
                settings_section(run, "run/config.toml", note="")]  # fmt: skip
    page = page_of(
        title=f"{run.name}: adaptation",
        kicker=f"Adaptation of {esc(mapping(record.get('model')).get('file', ''), 60)} {pill}",
        heading=run.name,
        lead=_lead(run, record),
        facts=facts(_facts(run, record), 60),
        sections=[section for section in sections if section is not None],
    )
    write_atomically(path, page, SHARED)


def _sets(record: dict[str, Any], *roles: str) -> list[dict[str, Any]]:
    return [s for s in map(mapping, json_list(record.get("sets"))) if s.get("role") in roles]


def _lead(run: Run, record: dict[str, Any]) -> str:
    sites, source = _sets(record, "clients"), _sets(record, "source", "public")
    pictures = sum(whole(s.get("pictures")) or 0 for s in sites)
    unnamed = any(s.get("people") is None for s in sites)
    what = "unlabelled pictures" if unnamed or record.get("method") == "fedfr-da" else "pictures"
    text = f"{record.get('method')} adapted the network across {plural(run.clients or len(sites), 'client')}"
    if sites:
        text = f"{record.get('method')} adapted the network to {count(pictures)} {what} at {plural(len(sites), 'site')}"
    if source:
        text += (
            f", with {count(whole(source[0].get('people')))} labelled people of {source[0].get('name')} as the source"
        )
    parties = mapping(run.config.get("engine")).get("server")
    where = (
        "" if parties else " All of it happened on one machine, with the sites kept apart as a deployment keeps them."
    )
    went = "Weights and class vectors, which are face templates," if _templates(run) else "Weights"
    return f"{text}. {went} went between sites and server, no pictures.{where}"


def _templates(run: Run) -> bool:
    """Whether class vectors left the sites."""
    totals = mapping(mapping(mapping(run.ledger).get("totals")).get("class_vectors"))
    return bool(number(totals.get("bytes")))


def _facts(run: Run, record: dict[str, Any]) -> dict[str, str]:
    part = mapping(record.get("trained"))
    tail, frozen = whole(part.get("parameters")), whole(part.get("frozen"))
    trained = f"from {part.get('from')}: {percent(tail / (tail + frozen))} of the parameters" if tail and frozen else ""
    model = mapping(record.get("model"))
    found = {
        "Trained": trained,
        "Seed": str(run.started.get("seed", "")),
        "Model": str(model.get("fingerprint") or ""),
        "visard": str(run.started.get("version") or ""),
    }
    return {k: v for k, v in found.items() if v}


def _tests(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [mapping(test) for test in json_list(record.get("tests"))]


def _name(test: dict[str, Any]) -> str:
    if test.get("estimate"):
        return str(test.get("name"))
    return {"source": "people of the source", "sites": "people of the sites"}.get(
        str(test.get("name")), str(test.get("name"))
    )


def points(value: float | None) -> str:
    """A difference of shares in percentage points, with its sign."""
    return NO_VALUE if value is None else f"{100 * value:+.1f}"


def _difference(change: dict[str, Any]) -> float | None:
    before, after = number(change.get("before")), number(change.get("after"))
    return None if before is None or after is None else after - before


def _between(change: dict[str, Any]) -> str:
    low, high = number(change.get("low")), number(change.get("high"))
    return "" if low is None or high is None else f"{points(low)} to {points(high)}"


def _change(record: dict[str, Any]) -> Section:
    """A card for each rate of each test, and a summary in words."""
    cards = []
    for test in _tests(record):
        for change in map(mapping, json_list(test.get("changes"))):
            rate = number(change.get("far")) or 0.0
            metric = Metric(f"TAR at FAR {share(rate)}, {_name(test)}", TAR.format(share(rate)), is_share=True)
            text = f"{percent(number(change.get('before')))} → {percent(number(change.get('after')))}"
            spread = f" (95 %: {between})" if (between := _between(change)) else ""
            detail = f"{points(_difference(change))} points{spread}"
            cards.append(Card(metric, number(change.get("after")), text, detail, _doubt(test, change)))
    shown = "".join(card.html(i) for i, card in enumerate(cards))
    body = f'<ul class="cards">{shown}</ul>' + "".join(_verdict(test) for test in _tests(record))
    body += (
        '<p class="note">The intervals are those of the change: people are drawn with replacement, the same ones '
        "before and after, and the thresholds stay as they are.</p>"
    )
    if any(test.get("estimate") for test in _tests(record)):
        body += notice("caution", "What is an estimate", f"<p>{ABOUT_ESTIMATES}</p>")
    return Section("change", "Before and after", body, short="Before, after")


def _doubt(test: dict[str, Any], change: dict[str, Any]) -> str:
    if test.get("estimate"):
        return ESTIMATE
    few = (number(change.get("false_accepts")) or 0.0) < FEW
    return "unreliable: few false accepts" if few else ""


def _verdict(test: dict[str, Any]) -> str:
    """A sentence on the rates where it is worse, else on those where it is better, or that no difference shows."""
    spread = [
        (share(number(change.get("far")) or 0.0), low, high)
        for change in map(mapping, json_list(test.get("changes")))
        if (low := number(change.get("low"))) is not None and (high := number(change.get("high"))) is not None
    ]
    if not spread:
        return ""
    worse, better = [rate for rate, _, high in spread if high < 0], [rate for rate, low, _ in spread if low > 0]
    rates, pictures = listing(worse or better or [rate for rate, *_ in spread]), whole(test.get("pictures"))
    people = plural(whole(test.get("people")), "person", "people")
    where = (
        f"On {people} ({_name(test)}, {plural(pictures, 'picture')}) that it did not learn from, the adapted network is"
    )
    if test.get("estimate"):
        groups = plural(whole(test.get("people")), "group")
        where = f"Judged by {groups} of {plural(pictures, 'picture')}, which it did learn from, the adapted network is"
    if worse:
        advice = "" if test.get("name") == "source" else f" {KEEP.capitalize()}."
        text = f"{esc(where)} worse at FAR {rates}: the whole interval is below 0.{esc(advice)}"
        return notice("alarm", "Worse", f"<p>{text}</p>")
    if better:
        return notice("good", "Better", f"<p>{esc(where)} better at FAR {rates}: the whole interval is above 0.</p>")
    text = (
        f"{esc(where)} neither better nor worse at FAR {rates} beyond what other people of this kind could have given."
    )
    return notice("caution", "No difference shown", f"<p>{text}</p>")


def _thresholds(record: dict[str, Any]) -> str:
    """The threshold for each rate, of every test."""
    rows = [
        [
            esc(_name(test), 60) + (flag("estimate") if test.get("estimate") else ""),
            share(number(change.get("far")) or 0.0),
            _threshold(change, "before"),
            f"<strong>{_threshold(change, 'after')}</strong>",
            count(number(change.get("false_accepts"))),
        ]
        for test in _tests(record)
        for change in map(mapping, json_list(test.get("changes")))
    ]
    head = ("Tested on", "FAR", "Threshold before", "Threshold after", "False accepts allowed")
    return table(head, rows, "Thresholds for a false accept rate", 1) + (
        '<p class="note">A threshold is a cosine: two pictures with at least this one are accepted as one person. It '
        "moves with the network: the old one is wrong for the new network.</p>"
    )


def _threshold(change: dict[str, Any], when: str) -> str:
    value = number(change.get(f"threshold_{when}"))
    return NO_VALUE if value is None else f"{value:.4f}"


def _groups(record: dict[str, Any]) -> Section | None:
    """Errors by site or domain at one threshold for all, before and after."""
    body = "".join(_by_domain(test) for test in _tests(record))
    return Section("groups", "Errors by group", f'{body}<p class="note">{FNMR}</p>', short="Groups") if body else None


def _by_domain(test: dict[str, Any]) -> str:
    found = mapping(test.get("groups"))
    before, after = mapping(found.get("before")), mapping(found.get("after"))
    if not before or not after:
        return ""
    old = {str(mapping(g).get("name")): mapping(g) for g in json_list(before.get("groups"))}
    rows = []
    for group in (mapping(after.get("everyone")), *map(mapping, json_list(after.get("groups")))):
        name = str(group.get("name"))
        earlier = mapping(before.get("everyone")) if name == "everyone" else old.get(name, {})
        cells = [cell for key in ("fnmr", "fmr") for cell in (_rate(earlier, key), _rate(group, key))]
        rows.append([esc(name, 40), count(whole(group.get("people"))), *cells, lost(group)])
    head = ("Group", "People", "FNMR before", "FNMR after", "FMR before", "FMR after", "Failed to enrol")
    title = f"{esc(_name(test), 60)}, by {esc(after.get('by', ''), 40)}, at one threshold for all"
    said = "".join(f'<p class="note">{esc(line, 300)}</p>' for line in json_list(after.get("warnings"))[:5])
    return table(head, rows, f"{title} (FMR {share(number(after.get('fmr_target')) or 0.0)})") + said


def _rate(group: dict[str, Any], key: str) -> str:
    rate = mapping(group.get(key))
    spread = mapping(rate.get("interval"))
    low, high = number(spread.get("low")), number(spread.get("high"))
    small = "" if low is None or high is None else f"<small>{100 * low:.2f} – {percent(high, 2)}</small>"
    return percent(number(rate.get("rate")), 2) + small


def _cost(run: Run, record: dict[str, Any]) -> Section:
    seconds, cost = mapping(record.get("seconds")), mapping(record.get("cost"))
    rounds = sum(r.seconds or 0.0 for r in run.rounds)
    rows = [
        ["Finding and aligning faces", duration(number(seconds.get("import")))],
        ["Grouping and training" if run.method == "fedfr-da" else "Training", duration(rounds)],
        ["All, from the call to this page", duration(number(seconds.get("all")))],
        ["Left the clients", size(number(cost.get("bytes_up")))],
        ["Went to the clients", size(number(cost.get("bytes_down")))],
        ["Memory, at its largest", size(number(cost.get("peak_bytes")))],
        ["Cores of the machine", count(whole(cost.get("cores")))],
    ]
    body = table(("What", "How much"), [row for row in rows if row[1] != NO_VALUE], "What it cost")
    listed = []
    for one in map(mapping, json_list(record.get("sets"))):
        people = whole(one.get("people"))
        counts = [count(whole(one.get("pictures"))), "not known" if people is None else count(people)]
        role = ROLES.get(str(one.get("role")), "")
        listed.append([esc(one.get("name", ""), 60), esc(role), *counts, count(whole(one.get("skipped")))])
    body += table(("Set", "Role", "Faces", "People", "Pictures skipped"), listed, "Pictures", 2) if listed else ""
    groups = mapping(record.get("groups"))
    if groups:
        kept, clusters = number(groups.get("kept")), number(groups.get("clusters"))
        text = f"{count(kept)} pictures were put into {count(clusters)} groups, which stood for people in training; "
        text += "the others were left out."
        if (precision := number(groups.get("pairwise_precision"))) is not None:
            found = percent(number(groups.get("pairwise_recall")))
            text += f" By the names of the files, which training did not see, {percent(precision)} of the pairs in one "
            text += f"group are of one person, and {found} of the pairs of one person are in one group."
        body += f'<p class="note">{esc(text)}</p>'
    return Section("cost", "What it cost", body, short="Cost")


def _use(record: dict[str, Any]) -> Section:
    model = mapping(record.get("model"))
    taken, cut = Inputs.of_spec(model), str(model.get("align"))
    lines = [
        f"adapted.onnx takes what {model.get('file')} took: {taken.size} x {taken.size} {taken.order.upper()} pixels x "
        f"as {words(taken)}, faces {CUTS.get(cut, cut)}.",
        "Galleries and templates of the old network do not fit it: enrol again, with the threshold after.",
    ]
    items = "".join(f"<li>{esc(line, 400)}</li>" for line in lines)
    link = '<p><a href="run/report.html">The report of the run</a> has every round, every reply and all settings.</p>'
    return Section("use", "Use it", f"<ul>{items}</ul>{_thresholds(record)}{link}", short="Use")
