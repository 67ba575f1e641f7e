"""Watchers: all of them hear every event, and none of them ends a run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from visard.engines.watchers import Watcher, Watchers
from visard.errors import Interrupted


class Heard(Watcher):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def round(self, stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
        self.events.append((stage, step, steps, figures))

    def problem(self, text: str) -> None:
        self.events.append(text)


class Broken(Watcher):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def round(self, stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
        raise self.error


def test_all_hear_everything_and_a_failure_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    first, last = Heard(), Heard()
    watchers = Watchers([first, Broken(ValueError("no disk\nleft")), last])
    with caplog.at_level(logging.WARNING, "visard"):
        for step in (1, 2):
            watchers.round("train", step, 2, {"loss": 0.5})
        watchers.problem("late")
        watchers.evaluation({})
        watchers.rendering(1, 2)
    assert first.events == last.events == [*(("train", step, 2, {"loss": 0.5}) for step in (1, 2)), "late"]
    assert caplog.messages == ["a watcher failed, the run goes on: Broken: ValueError: no disk"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stop")])
def test_the_users_interrupt_passes(error: BaseException) -> None:
    with pytest.raises(type(error)):
        Watchers(Broken(error)).round("train", 1, 2, {})


def test_one_many_or_none() -> None:
    one = Heard()
    for given in (one, [one], (one,), iter([one])):
        Watchers(given).problem("x")
    Watchers().problem("x")
    Watchers(None).problem("x")
    assert one.events == ["x"] * 4
