"""Settings and curves of a run in MLflow.

    visard run fedavg --set 'engine.watchers=["mlflow"]' --out runs/mine

They go where MLFLOW_TRACKING_URI says; without it into a store of files, the folder `mlruns` beside the run.
"""

from __future__ import annotations

import json
import os
import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from visard.errors import UsageError
from visard.files import read_text, write_json
from visard.runs.trackers.scalars import ScalarTracker

EXPERIMENT = "visard"
MOST = 900  # metrics in one request: MLflow takes 1,000
ODD = re.compile(r"[^\w\-./ ]")  # characters that MLflow does not allow in names


class MLflow(ScalarTracker):
    """One run of MLflow for each run folder, which keeps its id: a resumed run continues it."""

    files = ("mlflow.json",)

    def __init__(self, folder: Path) -> None:
        store = os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which newer versions ask for
            store = (folder.absolute().parent / "mlruns").as_uri()
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError:
            raise UsageError("engine.watchers = mlflow: pip install 'visard[mlflow]'") from None
        self._client, self._metric, self._param = MlflowClient(tracking_uri=store), Metric, Param
        self._run = ""

    def begun(self, folder: Path) -> None:
        known = folder / "mlflow.json"
        if known.is_file():
            self._run = str(json.loads(read_text(known))["run"])
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(EXPERIMENT)
        settings = tomllib.loads(read_text(folder / "config.toml"))
        run = self._client.create_run(experiment, run_name=folder.name)
        self._run = run.info.run_id
        parameters = [self._param(ODD.sub("_", name), str(value)[:6000]) for name, value in _flat(settings)]
        for first in range(0, len(parameters), 100):
            self._client.log_batch(self._run, params=parameters[first : first + 100])
        write_json(known, {"run": self._run})

    def ended(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "FAILED")

    def write(self, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(ODD.sub("_", name), float(value), now, self.step) for name, value in values.items()]
        for first in range(0, len(rows), MOST):
            self._client.log_batch(self._run, metrics=rows[first : first + MOST])


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
