"""Fingerprints of what visard computes, to compare before and after a change that must not change any of it.

    python -m tests.oracle > before.txt      # then change the code
    python -m tests.oracle > after.txt && diff before.txt after.txt

Every registered method runs on its smoke settings, one method runs between real processes on loopback (where Flower
is installed), and the renderer draws some faces. One line each: what, file, SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import visard
from tests.e2e.smoke import smoke
from tests.engines.deployed import Deployment
from visard.methods import METHODS

DEPLOYED = "fedavg"
FACES = ("--identities", "16", "--images", "3", "--size", "48", "--seed", "5", "--domains", "north,south")


def fingerprints(name: str, run: Path) -> Iterator[str]:
    """A line for each file of a run folder that must not change."""
    for file in [*sorted(run.rglob("*.safetensors")), *(run / f"{f}.json" for f in ("metrics", "ledger", "partition"))]:
        if file.exists() and "checkpoint" not in file.parts:
            yield f"{name:16} {file.relative_to(run)!s:40} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def methods(folder: Path) -> Iterator[str]:
    for name in METHODS:
        visard.run(name, out=folder / name, overrides=smoke(name))
        yield from fingerprints(name, folder / name)


def deployment(folder: Path) -> Iterator[str]:
    """A server and three parties, each a process of its own."""
    folder.mkdir()
    there = Deployment(folder, 3, [f"{number + 1}=client-{number:03d}" for number in range(3)])
    try:
        for number in range(3):
            there.start_node(number + 1, [f"client-{number:03d}"])
        there.wait_server()
        there.wait_connected(*(f"node-{number}" for number in (1, 2, 3)))
        where = ["engine.kind=flower", f"engine.server='{there.state}'", "engine.wait=60", "engine.min_replies=1.0"]
        visard.run(DEPLOYED, out=folder / "run", overrides=[*smoke(DEPLOYED), *where])
    finally:
        there.close()
    yield from fingerprints(f"{DEPLOYED}/deployed", folder / "run")


def faces(folder: Path) -> Iterator[str]:
    """The pixels of the renderer, every domain."""
    command = [str(Path(sys.executable).with_name("visard")), "data", "make", "--out", str(folder), *FACES]
    subprocess.run(command, check=True, capture_output=True)
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.suffix != ".json":
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            yield f"{'faces':16} {file.relative_to(folder)!s:40} {digest}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["VISARD_CACHE"] = str(folder / "cache")
        parts = [faces(folder / "faces"), methods(folder)]
        if find_spec("flwr") is not None:
            parts.append(deployment(folder / "far"))
        for part in parts:
            for line in part:
                print(line, flush=True)


if __name__ == "__main__":
    main()
