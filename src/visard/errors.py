"""Errors that end as one clear line for the user, never as a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from visard.text import line


class VisardError(Exception):
    """Something failed while working: one line that says what and where. Exit code 1."""

    exit_code = 1


class UsageError(VisardError):
    """Wrong use: an unknown setting, a missing file, an impossible combination. Exit code 2."""

    exit_code = 2


class PublicError(VisardError):
    """A failure at a party whose message may be sent to the server: it names no file, no folder and no person.

    Of other errors only the type leaves the party; the message is in its own log.
    """


class Interrupted(VisardError):
    """The user pressed Ctrl-C; finished work is safe on disk. Exit code 1."""


def one_line(error: BaseException) -> str:
    """An error in one line of visible characters; the type is added unless the error is one of visard's."""
    if isinstance(error, VisardError):
        return line(error) or type(error).__name__
    lines = str(error).splitlines()
    return line(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, 500)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or the known names if nothing is close and they are few."""
    known = sorted(known)
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(known)})" if 0 < len(known) <= 20 else ""
