"""`visard.run` and `visard.resume`: as in `visard.runs.run`, with a progress bar in a terminal or notebook."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from visard.cli.console import RunWatcher, console
from visard.runs import run as runs

P = ParamSpec("P")
R = TypeVar("R")


def shown(function: Callable[P, R]) -> Callable[P, R]:
    """The function with a progress bar as its watcher, in a terminal or a notebook, unless it gets another watcher."""

    @wraps(function)
    def call(*values: P.args, **named: P.kwargs) -> R:
        given = inspect.signature(function).bind(*values, **named)
        if given.arguments.get("watcher") is not None or not (console.is_terminal or console.is_jupyter):
            return function(*values, **named)
        watcher = RunWatcher()
        given.arguments["watcher"] = watcher
        try:
            return function(*given.args, **given.kwargs)
        finally:
            watcher.close()

    return call


run = shown(runs.run)
resume = shown(runs.resume)
