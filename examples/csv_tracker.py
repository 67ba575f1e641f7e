"""A tracker of one's own: every metric that a run logs, as a line of progress.csv in the run folder.

visard run --plugin examples/csv_tracker.py fedavg --set 'engine.watchers=["csv"]'
"""

import csv
from pathlib import Path
from typing import Any

from visard.engines.watchers import Watcher
from visard.plugins import register


@register("watchers", "csv")
class CsvTracker(Watcher):
    """Lines of step, stage, metric and value: those of rounds, then those of the test after it."""

    files = ("progress.csv",)

    def __init__(self, folder: Path) -> None:
        self.path, self.step, self.stage = folder / "progress.csv", 0, ""
        if not self.path.exists():  # a run that is resumed goes on with its file
            self._write(("step", "stage", "metric", "value"))

    def round(self, stage: str, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.step, self.stage = step, stage
        self._write(*((step, stage, name, value) for name, value in metrics.items()))

    def evaluation(self, metrics: dict[str, Any]) -> None:
        for name, values in metrics["generic"].items():
            self._write(*((self.step, self.stage, f"{name}/{metric}", value) for metric, value in values.items()))

    def _write(self, *rows: tuple[Any, ...]) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows(rows)
