"""Errors that end as one clear line for the user, never as a traceback."""


class VisardError(Exception):
    """Something failed while working: one line that says what and where. Exit code 1."""

    exit_code = 1


class UsageError(VisardError):
    """Wrong use: an unknown setting, a missing file, an impossible combination. Exit code 2."""

    exit_code = 2


class Told(VisardError):
    """What a party tells the server of a failure there: a line that names no file, no folder and no person.

    Of other errors only the type leaves the party; the line is in its own log.
    """


class Interrupted(VisardError):
    """Somebody pressed Ctrl-C; what was done is safe on disk. Exit code 1."""
