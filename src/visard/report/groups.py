"""The section of a report on errors by group: each group at one threshold for all, and each two groups."""

from __future__ import annotations

from typing import Any

from visard.files import json_list, mapping, number, whole
from visard.report.html import Section, esc, fold, notice, table
from visard.report.run_folder import Run
from visard.text import NO_VALUE, count, percent, share

HEAD = ("Group", "People", "Pictures", "Genuine pairs", "FNMR", "Impostor pairs", "FMR", "Not enrolled")
NOTE = (
    "FNMR: share of genuine pairs that are refused. FMR: share of impostor pairs, both of the group, that are accepted."
    " Small print: 95 % intervals over people; ▲ and ▼ are above and below everyone beyond chance. Not enrolled:"
    " pictures in which no face of sufficient quality was found."
)


def groups_section(run: Run) -> Section | None:
    """Errors by group of the generic model on the people of the test sets; None if the run has none."""
    body = "".join(_tables(mapping(record)) for record in mapping(run.metrics.get("groups")).values())
    return Section("groups", "Errors by group", body, short="Groups") if body else None


def _tables(record: dict[str, Any]) -> str:
    by, target = esc(record.get("by", ""), 40), number(record.get("fmr_target"))
    groups, between, said = (json_list(record.get(key)) for key in ("groups", "between", "warnings"))
    rows = [_row(mapping(group)) for group in (record.get("everyone"), *groups)] if groups else []
    across = [
        [f"{esc(two.get('first'), 40)} with {esc(two.get('second'), 40)}", _trials(two, "fmr"), _rate(two, "fmr")]
        for two in map(mapping, between)
        if whole(mapping(two.get("fmr")).get("trials"))
    ]
    threshold = number(record.get("threshold"))
    at = "" if threshold is None or target is None else f": threshold {threshold:.4f}, FMR {share(target)}"
    text = table(HEAD, rows, f"By {by} at one threshold for all{at}") if rows else ""
    text += f'<p class="note">{NOTE}</p>' if rows else ""
    head = ("Groups", "Impostor pairs", "FMR")
    text += fold("Impostors of two groups", table(head, across, f"Impostors of two groups, by {by}") if across else "")
    items = "".join(f"<li>{esc(line, 300)}</li>" for line in said[:20])
    return text + (notice("caution", f"Errors by {record.get('by', '')}", f"<ul>{items}</ul>") if items else "")


def _row(group: dict[str, Any]) -> list[str]:
    counts = [count(whole(group.get(key))) for key in ("people", "pictures")]
    rates = [cell for key in ("fnmr", "fmr") for cell in (_trials(group, key), _rate(group, key))]
    return [esc(group.get("name", ""), 40), *counts, *rates, lost(group)]


def lost(group: dict[str, Any]) -> str:
    """Pictures of a group that could not be enrolled, of all that came."""
    failure = mapping(mapping(group.get("enrolment")).get("failure"))
    return f"{count(whole(failure.get('errors')))} of {count(whole(failure.get('trials')))}" if failure else "not known"


def _trials(of: dict[str, Any], key: str) -> str:
    return count(whole(mapping(of.get(key)).get("trials")))


def _rate(of: dict[str, Any], key: str) -> str:
    from visard.evaluation.groups import apart  # which loads torch

    rate = mapping(of.get(key))
    value, spread = number(rate.get("rate")), mapping(rate.get("interval"))
    if value is None:
        return NO_VALUE
    low, high = number(spread.get("low")), number(spread.get("high"))
    digits = 1 if value >= 0.1 else 2 if value >= 0.01 else 3
    small = "" if low is None or high is None else f"<small>{100 * low:.{digits}f} – {percent(high, digits)}</small>"
    return percent(value, digits) + {"above": " ▲", "below": " ▼"}.get(apart(rate), "") + small
