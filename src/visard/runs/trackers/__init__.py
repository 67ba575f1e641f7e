"""Trackers: watchers that write runs to other tools, named by `engine.watchers` in the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from visard.engines.watchers import Watcher
from visard.plugins import Registry

# name -> f(run folder)
WATCHERS: Registry[Callable[[Path], Watcher]] = Registry(
    "watchers",
    {
        "tensorboard": "visard.runs.trackers.tensorboard:TensorBoard",
        "mlflow": "visard.runs.trackers.mlflow:MLflow",
    },
)
