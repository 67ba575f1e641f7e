"""Numbers and names in words: percentages, counts, sizes, durations; hostile text made visible."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

# Controls, surrogates, the marks that reverse the direction of text, and what has no width: invisible, so they could
# mislead, or act on a terminal.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
NO_VALUE = "–"
NBSP = "\N{NO-BREAK SPACE}"


def visible(value: Any, limit: int | None = None) -> str:
    """Text in which every character shows; at most `limit` characters."""
    text = _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", str(value))
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def line(value: Any, limit: int | None = None) -> str:
    """`visible` in one line."""
    return visible(" ".join(str(value).splitlines()), limit).replace("\t", " ")


def escaped(text: str) -> str:
    """JSON in which every character shows: what does not stands as \\uxxxx, which readers of JSON undo."""
    return _INVISIBLE.sub(lambda found: json.dumps(found[0])[1:-1], text)


def percent(value: float | None, digits: int = 1) -> str:
    """0.943 -> 94.3 %."""
    return NO_VALUE if value is None else f"{100 * value:.{digits}f}{NBSP}%"


def share(value: float) -> str:
    """A small share in full, as rates of false accepts are written: 0.0001 -> 0.01 %."""
    return f"{100 * value:.10f}".rstrip("0").rstrip(".") + f"{NBSP}%"


def plain(value: float | None, digits: int = 4) -> str:
    """A number without a unit, to `digits` significant digits."""
    if value is None:
        return NO_VALUE
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """4000 -> 4,000."""
    return NO_VALUE if value is None else f"{round(value):,}"


def size(value: float | None) -> str:
    """Bytes in decimal units: 2450000 -> 2.45 MB."""
    if value is None:
        return NO_VALUE
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.3g}{NBSP}{unit}" if unit != "B" else f"{value:.0f}{NBSP}B"
        value /= 1000
    return f"{value:,.3g}{NBSP}TB"


def duration(seconds: float | None) -> str:
    """75 -> 1 min 15 s."""
    if seconds is None:
        return NO_VALUE
    if seconds < 0.1:
        return f"{1000 * seconds:.3g}{NBSP}ms"
    if seconds < 59.95:
        return f"{seconds:.3g}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,}{NBSP}h {minutes}{NBSP}min"
    return f"{minutes}{NBSP}min {rest}{NBSP}s"


def plural(n: float | None, word: str, words: str | None = None) -> str:
    """1 client, 20 clients."""
    return f"{count(n)} {word if n == 1 else words or word + 's'}"


def at_round(stage: Any, round: Any) -> str:
    """A place in a run, whose records count rounds from 0: federate round 1."""
    if stage in ("start", "final"):
        return f"{stage} test"
    return f"{stage} round {round + 1}" if isinstance(round, int) else f"{stage}"


def ranges(numbers: Iterable[int]) -> str:
    """rounds 1 to 4 and 7."""
    found: list[list[int]] = []
    for n in sorted(set(numbers)):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    several = len(found) > 1 or any(a != b for a, b in found)
    return f"round{'s' if several else ''} {listing([f'{a:,}' if a == b else f'{a:,} to {b:,}' for a, b in found])}"


def listing(items: list[str]) -> str:
    """a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "nothing"
