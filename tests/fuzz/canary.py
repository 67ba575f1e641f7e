"""Readers that misbehave, so that a test can see the fuzzer notice."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import numpy as np

from tests.fuzz.formats import Format, command
from visard.cli.console import say
from visard.errors import VisardError


def bug(folder: Path, scratch: Path) -> None:
    raise KeyError("x")


def caught_memory(folder: Path, scratch: Path) -> None:
    """An attempt that the system refuses and the reader hides."""
    try:
        np.ones(2**40)
    except MemoryError:
        raise VisardError("too large") from None


def memory(folder: Path, scratch: Path) -> None:
    np.ones(3 * 2**27)


def untouched_memory(folder: Path, scratch: Path) -> None:
    np.empty(3 * 2**27)


def slow(folder: Path, scratch: Path) -> None:
    while True:
        time.sleep(0.01)


def code(folder: Path, scratch: Path) -> None:
    exec("x = 1")


def started(folder: Path, scratch: Path) -> None:
    subprocess.run(["true"], check=True)


def shell(folder: Path, scratch: Path) -> None:
    os.system("true")


def elsewhere(folder: Path, scratch: Path) -> None:
    (scratch / ".." / ".." / ".." / "visard-fuzz-canary").write_text("x")


def removed(folder: Path, scratch: Path) -> None:
    Path("/tmp/visard-fuzz-canary-absent").unlink(missing_ok=True)


def dies(folder: Path, scratch: Path) -> None:
    os.abort()


def good(folder: Path, scratch: Path) -> None:
    (scratch / "x").write_text("x")
    say("all is well")
    raise VisardError("one line")


CANARIES = {
    f"canary {name}": Format(lambda folder: None, read)
    for name, read in {
        "error": bug, "memory caught": caught_memory, "memory": memory, "memory untouched": untouched_memory,
        "hang": slow,
        "sentinel exec": code, "sentinel process": started, "sentinel shell": shell, "sentinel elsewhere": elsewhere,
        "sentinel removed": removed, "died": dies, "refused": good,
    }.items()
}  # fmt: skip
__all__ = ["CANARIES", "command"]
