"""Curves of a run for TensorBoard.

visard run fedavg --set 'engine.watchers=["tensorboard"]' --out runs/mine
tensorboard --logdir runs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visard.engines.watchers import Watcher
from visard.errors import UsageError
from visard.runs.trackers.scalars import of_evaluation


class TensorBoard(Watcher):
    """Writes into the folder `tensorboard` of the run; a resumed run continues there."""

    files = ("tensorboard/*",)

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("engine.watchers = tensorboard: pip install 'visard[tensorboard]'") from None
        self._make, self._folder, self._step = SummaryWriter, folder / "tensorboard", 0
        self._writer: Any = None

    def round(self, stage: str, step: int, steps: int, metrics: dict[str, float]) -> None:
        self._step = step
        self._write({f"{stage}/{name}": value for name, value in metrics.items()})

    def evaluation(self, metrics: dict[str, Any]) -> None:
        self._write(of_evaluation(metrics))

    def problem(self, text: str) -> None:
        self._open().add_text("problems", text, self._step)

    def ended(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:  # discard what a killed attempt wrote of this and later rounds
            self._writer = self._make(str(self._folder), purge_step=self._step)
        return self._writer

    def _write(self, values: dict[str, float]) -> None:
        writer = self._open()
        for name, value in values.items():
            writer.add_scalar(name, value, self._step)
        writer.flush()
