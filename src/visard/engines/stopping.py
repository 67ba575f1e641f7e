"""Ctrl-C: the first one lets the round end and be checkpointed, the second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether somebody asked for the run to end after this round."""

    wanted = False

    def check(self) -> None:
        """Stop here if that was asked for: the round is safe on disk."""
        if self.wanted:
            raise KeyboardInterrupt


@contextmanager
def stop_on_interrupt(say: Callable[[str], None]) -> Iterator[Stop]:
    """Catch Ctrl-C for the length of a run; outside the main thread signals are left alone."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop.wanted:
            raise KeyboardInterrupt
        stop.wanted = True
        say("interrupted: this round is finished and saved first (Ctrl-C again stops at once)")

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
