"""Trackers of numbers: what the watchers of a run become as named scalars."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from visard.engines.watchers import Watcher
from visard.files import mapping, number


class ScalarTracker(Watcher):
    """Writes every metric as a named number; a subclass says where. Tests carry the step of the round before them."""

    step = 0  # rounds over all stages

    @abstractmethod
    def write(self, values: dict[str, float]) -> None:
        """Write these numbers at `step`."""

    def resumed(self, rounds: int) -> None:
        self.step = rounds

    def round(self, stage: str, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.step = step
        self.write({f"{stage}/{name}": value for name, value in metrics.items()})

    def evaluation(self, metrics: dict[str, Any]) -> None:
        self.write(of_evaluation(metrics))


def of_evaluation(evaluation: dict[str, Any]) -> dict[str, float]:
    """The metrics of each test of the generic model, and the mean and the worst over the clients' own models."""
    found: dict[str, float] = {}
    for test, metrics in mapping(evaluation.get("generic")).items():
        for name, value in mapping(metrics).items():
            if (known := number(value)) is not None:
                found[f"{test}/{name}"] = known
    for name, summary in mapping(evaluation.get("clients")).items():
        for kind in ("mean", "worst"):
            if (known := number(mapping(summary).get(kind))) is not None:
                found[f"clients/{name}/{kind}"] = known
    return found
