"""Watchers follow a run: progress bars, notebooks, trackers, tests."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from visard.errors import Interrupted, one_line
from visard.text import line


class Watcher(Protocol):
    """Follows a run: the progress bar of the command line, a notebook, a tracker, a test.

    The methods of this class do nothing; a subclass overrides those it needs. The class attribute `files` names what it
    writes into the run folder, so that --overwrite may remove it.
    """

    def begun(self, folder: Path) -> None:
        """The run has its folder."""
        return

    def resumed(self, rounds: int) -> None:
        """The run goes on after this many rounds, over all stages."""
        return

    def rendering(self, done: int, total: int) -> None:
        """This many of the synthetic faces are drawn."""
        return

    def activations(self, done: int, total: int) -> None:
        """This many pictures have gone through the frozen part of the network."""
        return

    def round(self, stage: str, step: int, steps: int, metrics: dict[str, float]) -> None:
        """Round `step` of all `steps` is done; `metrics` are those that the method logged."""
        return

    def evaluation(self, metrics: dict[str, Any]) -> None:
        """Models were tested."""
        return

    def problem(self, text: str) -> None:
        """A line for the user: a client is missing, something is slow."""
        return

    def ended(self, finished: bool) -> None:
        """The run has finished, or has stopped before its end."""
        return


class Watchers:
    """Forwards every event to all watchers, in their order.

    An error of a watcher never ends the run, unless it is the user's interrupt: the others hear of it once.
    """

    def __init__(self, watchers: Watcher | Iterable[Watcher] | None = None) -> None:
        alone = watchers is not None and not isinstance(watchers, Iterable)
        self._all: list[Watcher] = [watchers] if alone else list(watchers or ())  # type: ignore[list-item,arg-type]
        self._failed: set[int] = set()

    def begun(self, folder: Path) -> None:
        self.notify("begun", folder)

    def resumed(self, rounds: int) -> None:
        self.notify("resumed", rounds)

    def rendering(self, done: int, total: int) -> None:
        self.notify("rendering", done, total)

    def activations(self, done: int, total: int) -> None:
        self.notify("activations", done, total)

    def round(self, stage: str, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.notify("round", stage, step, steps, metrics)

    def evaluation(self, metrics: dict[str, Any]) -> None:
        self.notify("evaluation", metrics)

    def problem(self, text: str) -> None:
        self.notify("problem", text)

    def ended(self, finished: bool) -> None:
        self.notify("ended", finished)

    def notify(self, event: str, *values: Any) -> None:
        """Forward one event."""
        for number, watcher in enumerate(self._all):
            try:
                if (hear := getattr(watcher, event, None)) is not None:  # a watcher written before there was this event
                    hear(*values)
            except Interrupted:
                raise
            except Exception as error:
                if number not in self._failed:
                    self._failed.add(number)
                    text = f"a watcher failed, the run goes on: {type(watcher).__name__}: {one_line(error)}"
                    logging.getLogger("visard").warning(line(text))
