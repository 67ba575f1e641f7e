"""What a curious server sees of a client in each method, from the types of what leaves.

`make pages` writes the tables into docs/privacy.md; a test keeps the two the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from visard.core import Disclosure, Method, declared_kinds
from visard.methods.scoring import steps_of

BEGIN, END = (
    "<!-- from the types of the methods, by `make pages` -->",
    "<!-- end -->",
)
HOSTILE = "<!-- from the method's class, by `make pages` -->"


def fields_of(method: type[Method[Any]]) -> dict[Disclosure, list[str]]:
    """Kind -> `Reply.field` of everything that a client of this method may send; those that can stay empty end in ?"""
    found: dict[Disclosure, list[str]] = {}
    for reply in dict.fromkeys(step.types[1] for step in steps_of(method).values()):
        hints = get_type_hints(reply)
        for field, kind in declared_kinds(reply).items():
            mark = "?" if type(None) in get_args(hints[field]) else ""
            found.setdefault(kind, []).append(f"{reply.__name__}.{field}{mark}")
            if kind is Disclosure.weights:
                found.setdefault(Disclosure.statistic, []).append(f"{reply.__name__}.{field}[running statistics]")
    return {kind: found[kind] for kind in Disclosure if kind in found}


def lines(methods: Mapping[str, type[Method[Any]]]) -> Iterable[str]:
    """The generated part of the page."""
    yield "| method | centralised before the run | what leaves a client, by kind |"
    yield "|---|---|---|"
    for name, method in methods.items():
        pooled = ", ".join(f"**{k.value}**" for k in Disclosure if k in method.centralises) or "nothing"
        kinds = [f"{k.value}: {', '.join(f'`{f}`' for f in fields)}" for k, fields in fields_of(method).items()]
        yield f"| [`{name}`](methods/{name}.md#what-leaves-a-client) | {pooled} | {'; '.join(kinds)} |"
    yield ""
    yield "| method | what a hostile server can do today, and which setting of a party's policy prevents it |"
    yield "|---|---|"
    for name, method in methods.items():
        yield f"| `{name}` | {method.hostile} |"
    used = set().union(*(m.discloses | m.centralises for m in methods.values()))
    yield ""
    yield "| kind | what it is | what it reveals | methods |"
    yield "|---|---|---|---|"
    for kind in (k for k in Disclosure if k in used):
        by = ", ".join(f"`{name}`" for name, m in methods.items() if kind in m.discloses | m.centralises)
        yield f"| {kind.value} | {kind.what} | {kind.reveals} | {by} |"


def page(text: str, methods: Mapping[str, type[Method[Any]]]) -> str:
    """A page with its generated part made anew."""
    block = "\n".join([BEGIN, "", *lines(methods), "", END])
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, count=1, flags=re.DOTALL)


def card(text: str, method: type[Method[Any]]) -> str:
    """The card of a method with what a hostile server can do, at the end of what leaves a client."""
    text = re.sub(f"{re.escape(HOSTILE)}.*?{re.escape(END)}\n+", "", text, flags=re.DOTALL)
    block = f"{HOSTILE}\n**A hostile server.** {method.hostile}\n{END}\n\n"
    before, heading, after = text.partition("## Settings\n")
    return before + block + heading + after


if __name__ == "__main__":
    from visard.methods import METHODS

    path = Path(sys.argv[1])
    path.write_text(page(path.read_text(), METHODS))
    for name, method in METHODS.items():
        there = path.parent / "methods" / f"{name}.md"
        there.write_text(card(there.read_text(), method))
