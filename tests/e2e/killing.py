"""`python killing.py OUT_FOLDER SEED KILLS [PRESET [KEYFILE]]`: run, kill -9 at random moments, resume, until done.

With a key the killed runs encrypt their states; the run that they are compared with does not.

The parent has torch loaded and forks, so that a child starts at once and kills fall into the run itself, not into
its imports. Kills also fall into the writing of checkpoints: every other child kills itself at a random call of
fsync, rename or unlink.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from tests.e2e.smoke import smoke

import visard
from visard.runs.run import make_network  # noqa: F401  (everything is imported before the first fork)

# three of four clients a round: packs of client states die slowly and are compacted on the way
PARTIAL = ["partition.clients=4", "method.participation=0.75"]
MORE = {"fedavg": PARTIAL}


def child(preset: str, out: Path, fatal_call: int | None, key: str) -> None:
    """Start or resume the run; die at the given call of a file operation."""
    calls = 0

    def deadly(real: object) -> object:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == fatal_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)  # type: ignore[operator]

        return wrapped

    if fatal_call is not None:
        for name in ("fsync", "replace", "unlink", "truncate"):
            setattr(os, name, deadly(getattr(os, name)))
    resuming = (out / "config.toml").exists()
    overrides = [*smoke(preset), *MORE.get(preset, []), "method.rounds=6", "evaluation.bootstrap=0"]
    overrides += [f"engine.encrypt_with={key}"] if key else []
    visard.run(preset, overrides=overrides, out=out, resume=resuming, overwrite=False)


def attempt(preset: str, out: Path, rng: random.Random, seconds: float, kill: bool, key: str = "") -> bool:
    """One child; True if it was killed, False if it finished."""
    fatal = rng.randrange(1, 40) if kill and rng.random() < 0.5 else None
    pid = os.fork()
    if pid == 0:
        try:
            child(preset, out, fatal, key)
        except BaseException as error:
            print(f"child failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + rng.uniform(0.02, seconds) if kill and fatal is None else float("inf")
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.002)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit("a child failed")
    return False


def main(folder: Path, seed: int, wanted: int, preset: str = "fedavg", key: str = "") -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    begun = time.monotonic()
    attempt(preset, folder / "reference", rng, 0, kill=False)
    seconds = (time.monotonic() - begun) / 2
    kills = number = 0
    while kills < wanted:
        out = folder / f"killed-{number}"
        while attempt(preset, out, rng, seconds, kill=kills < wanted, key=key):
            kills += 1
        for file in ("model.safetensors", "metrics.json", "ledger.json"):
            if (out / file).read_bytes() != (folder / "reference" / file).read_bytes():
                raise SystemExit(f"{file} differs after {kills} kills (seed {seed})")
        number += 1
    print(f"{kills} kills over {number} runs: the same bits")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
