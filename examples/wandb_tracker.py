"""Weights & Biases: every metric that a run logs, as a run there.

pip install wandb
visard run --plugin examples/wandb_tracker.py fedavg --set 'engine.watchers=["wandb"]'

It goes where wandb's own variables say (WANDB_MODE=offline keeps it on this machine, under wandb/ in the run folder;
`wandb sync` sends it later). A resumed run continues the same run there. Only the settings and the metrics of the run
are sent, no pictures and no weights.
"""

import json
import secrets
import tomllib
from pathlib import Path
from typing import Any

from visard.plugins import register
from visard.runs.trackers.scalars import ScalarTracker


@register("watchers", "wandb")
class WandbTracker(ScalarTracker):
    """One run of Weights & Biases for each run folder."""

    files = ("wandb.json", "wandb/**")

    def __init__(self, folder: Path) -> None:
        self.run: Any = None

    def begun(self, folder: Path) -> None:
        import wandb

        known = folder / "wandb.json"
        id = json.loads(known.read_text())["run"] if known.is_file() else secrets.token_hex(4)
        settings = tomllib.loads((folder / "config.toml").read_text())
        self.run = wandb.init(
            project="visard", id=id, name=folder.name, dir=folder, config=settings, resume="allow", reinit="create_new"
        )
        known.write_text(json.dumps({"run": id}))

    def ended(self, finished: bool) -> None:
        if self.run is not None:
            self.run.finish(exit_code=0 if finished else 1)

    def write(self, values: dict[str, float]) -> None:
        assert self.run is not None
        self.run.log(values, step=self.step)
