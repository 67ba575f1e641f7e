"""Tests do not wait for the disk: what a process has written stays readable when it is killed, with or without fsync.

Only a machine that loses its power would notice. A small run calls fsync thirty times, and on a usual disk it waits for
these as long as it computes. Tests of what is synced, and when, put their own function in this place.
"""

from __future__ import annotations

import os


def do_not_wait() -> None:
    """In this process, from now on."""
    os.fsync = os.fdatasync = _sync


def _sync(file: int) -> None:
    os.fstat(file)  # an error where the file is not open, as before
