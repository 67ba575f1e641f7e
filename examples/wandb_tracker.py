"""Weights & Biases: every metric that a run logs, as a run there.

pip install wandb
visard run --plugin examples/wandb_tracker.py fedavg --set 'engine.watchers=["wandb"]'

It goes where wandb's own variables say (WANDB_MODE=offline keeps it on this machine, under wandb/ in the run folder;
`wandb sync` sends it later). A run that is resumed goes on with the same run there. What is sent are the settings and
the metrics of the run, no pictures and no weights.
"""

import json
import secrets
import tomllib
from pathlib import Path
from typing import Any

from visard.engines.watchers import Watcher
from visard.plugins import register
from visard.runs.trackers.scalars import of_evaluation


@register("watchers", "wandb")
class WandbTracker(Watcher):
    """Steps are rounds over all stages; tests carry the step of the round before them."""

    files = ("wandb.json", "wandb/**")

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.run = folder, 0, None

    def begun(self, folder: Path) -> None:
        import wandb

        known = folder / "wandb.json"
        id = json.loads(known.read_text())["run"] if known.is_file() else secrets.token_hex(4)
        settings = tomllib.loads((folder / "config.toml").read_text())
        self.run = wandb.init(
            project="visard", id=id, name=folder.name, dir=folder, config=settings, resume="allow", reinit="create_new"
        )
        known.write_text(json.dumps({"run": id}))

    def round(self, stage: str, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.step = step
        self._log({f"{stage}/{name}": value for name, value in metrics.items()})

    def evaluation(self, metrics: dict[str, Any]) -> None:
        self._log(of_evaluation(metrics))

    def ended(self, finished: bool) -> None:
        if self.run is not None:
            self.run.finish(exit_code=0 if finished else 1)

    def _log(self, values: dict[str, float]) -> None:
        assert self.run is not None
        self.run.log(values, step=self.step)
