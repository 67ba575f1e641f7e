"""Help for people who mistype."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or the known names if nothing is close and they are few."""
    known = sorted(known)
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(known)})" if 0 < len(known) <= 20 else ""
