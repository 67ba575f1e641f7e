"""Federated face recognition across parties that cannot share their pictures.

>>> import visard
>>> run = visard.run("demo")                                     # doctest: +SKIP
>>> model = visard.load_model("runs/demo/model.safetensors")     # doctest: +SKIP
>>> features = visard.embed(model, "data/mine")                  # doctest: +SKIP
>>> result = visard.evaluate(model, "data/mine")                 # doctest: +SKIP
>>> result.verification.auc                                      # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Adapted",
    "FaceModel",
    "Run",
    "VisardError",
    "__version__",
    "adapt",
    "embed",
    "evaluate",
    "load_model",
    "resume",
    "run",
]

if TYPE_CHECKING:
    from visard.cli.api import resume, run
    from visard.errors import VisardError
    from visard.inference.model import FaceModel, embed, evaluate, load_model
    from visard.report.run_folder import Run
    from visard.runs.adapt import Adapted, adapt

_HOMES = {
    "Adapted": "runs.adapt",
    "FaceModel": "inference.model",
    "Run": "report.run_folder",
    "VisardError": "errors",
    "adapt": "runs.adapt",
    "embed": "inference.model",
    "evaluate": "inference.model",
    "load_model": "inference.model",
    "resume": "cli.api",
    "run": "cli.api",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import visard` and `visard --help` are quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'visard' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"visard.{_HOMES[name]}"), name)
