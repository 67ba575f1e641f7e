"""Curves of a run for TensorBoard.

visard run fedavg --set 'engine.watchers=["tensorboard"]' --out runs/mine
tensorboard --logdir runs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visard.errors import UsageError
from visard.runs.trackers.scalars import ScalarTracker


class TensorBoard(ScalarTracker):
    """Writes into the folder `tensorboard` of the run; a resumed run continues there."""

    files = ("tensorboard/*",)

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("engine.watchers = tensorboard: pip install 'visard[tensorboard]'") from None
        self._make, self._folder = SummaryWriter, folder / "tensorboard"
        self._writer: Any = None
        self._first = 0  # the step from which on nothing is kept of what a killed attempt wrote

    def resumed(self, rounds: int) -> None:
        super().resumed(rounds)
        self._first = rounds + 1

    def problem(self, text: str) -> None:
        self._open().add_text("problems", text, self.step)

    def ended(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=self._first)
        return self._writer

    def write(self, values: dict[str, float]) -> None:
        writer = self._open()
        for name, value in values.items():
            writer.add_scalar(name, value, self.step)
        writer.flush()
