"""Tables of errors by group, for `visard eval` and at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from visard.cli.console import mark, say, table
from visard.evaluation.groups import apart
from visard.files import mapping
from visard.text import NO_VALUE

COLUMNS = ("group", "people", "FNMR in %", "FMR in %", "not\nenrolled")
MARKS = {"above": " ▲", "below": " ▼"}


def show_groups(record: Mapping[str, Any]) -> None:
    """Print errors by group (`GroupErrors.to_dict()`): each group, each two groups, and what is doubtful."""
    groups = [mapping(group) for group in record.get("groups") or ()]
    if groups:
        rows = [_row(group) for group in (mapping(record.get("everyone")), *groups)]
        title = f"Errors by {record['by']}, one threshold for all: {record['threshold']:.4f}"
        table(f"{title} (FMR {record['fmr_target']:g})", COLUMNS, rows)
        across = [
            (f"{two['first']} with {two['second']}", two["fmr"]["trials"], _rate(two["fmr"]))
            for two in record["between"]
            if two["fmr"]["trials"]
        ]
        if across:
            table("Impostors of two groups", ("groups", "pairs", "FMR in %"), across)
        said = "in brackets 95 % intervals over people"
        if any(sign in cell for row in (*rows, *across) for sign in MARKS.values() for cell in map(str, row)):
            said += "; ▲ and ▼ are above and below everyone beyond chance"
        say(f"FNMR: genuine pairs that are refused; FMR: impostor pairs that are accepted; {said}")
    for text in record.get("warnings") or ():
        mark("caution", text)


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    enrolment = mapping(group.get("enrolment"))
    failed = mapping(enrolment.get("failure"))
    lost = f"{failed['errors']} of {failed['trials']}" if failed else "not known"
    return group["name"], str(group["people"]), _rate(group["fnmr"]), _rate(group["fmr"]), lost


def _rate(rate: dict[str, Any]) -> str:
    """A rate in per cent with its interval, and a mark where it is above or below that of all beyond chance."""
    if rate.get("rate") is None:
        return NO_VALUE
    spread = mapping(rate.get("interval"))
    between = f" ({100 * spread['low']:.3g}–{100 * spread['high']:.3g})" if spread else ""
    return f"{100 * rate['rate']:.3g}{between}" + MARKS.get(apart(rate), "")
