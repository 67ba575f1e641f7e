"""`python -m tests.e2e.killing OUT_FOLDER SEED KILLS [PRESET [SETTING...]]`: run, kill -9 at random moments, resume.

Settings of the engine (engine.kind=pool, engine.encrypt_with=KEYFILE) are of the killed runs alone, not of the run that
they are compared with.

The parent has torch loaded and forks, so that a child starts at once and kills fall into the run itself, not into
its imports. Kills also fall into the writing of checkpoints: every other child kills itself at a random call of
fsync, rename or unlink. On the pool every third kill hits a worker, and the run itself goes on.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from tests import disk
from tests.e2e.smoke import smoke

import visard
from visard.errors import VisardError
from visard.runs.run import make_network  # noqa: F401  (everything is imported before the first fork)

# three of four clients a round: packs of client states die slowly and are compacted on the way
PARTIAL = ["partition.clients=4", "method.participation=0.75"]
MORE = {"fedavg": PARTIAL}
LENGTH = ["method.rounds=6", "evaluation.every=3", "evaluation.bootstrap=0"]
POOL = "engine.kind=pool"


def child(preset: str, out: Path, fatal_call: int | None, settings: tuple[str, ...]) -> None:
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
    overrides = [
        *smoke(preset),
        *MORE.get(preset, []),
        "method.rounds=6",
        "evaluation.every=3",
        "evaluation.bootstrap=0",
    ]
    visard.run(preset, overrides=[*overrides, *settings], out=out, resume=resuming, overwrite=False)


def attempt(
    preset: str, out: Path, rng: random.Random, seconds: float, kill: bool, settings: tuple[str, ...] = ()
) -> tuple[bool, int]:
    """One child: whether it has finished, and how many processes were killed."""
    worker = kill and POOL in settings and rng.random() < 0.33
    fatal = rng.randrange(1, 40) if kill and not worker and rng.random() < 0.5 else None
    killed = 0
    pid = os.fork()
    if pid == 0:
        try:
            child(preset, out, fatal, settings)
        except VisardError as error:  # with a worker killed while the pool starts: it says so, and is resumed
            print(error, file=sys.stderr, flush=True)
            os._exit(2 if worker else 1)
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
            end = float("inf")
            victim = random_child(pid, rng) if worker else pid
            if victim is not None:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed += victim != pid
        time.sleep(0.002)
    if os.WIFSIGNALED(status):
        return False, killed + 1
    if os.WEXITSTATUS(status) not in (0, 2):
        raise SystemExit("a child failed")
    return os.WEXITSTATUS(status) == 0, killed


def random_child(pid: int, rng: random.Random) -> int | None:
    """One of the processes that a process has started."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(rng.choice(found)) if found else None


def main(folder: Path, seed: int, wanted: int, preset: str = "fedavg", *settings: str) -> None:
    torch.set_num_threads(1)
    disk.do_not_wait()
    rng = random.Random(seed)
    begun = time.monotonic()
    both = tuple(text for text in settings if not text.startswith("engine."))
    attempt(preset, folder / "reference", rng, 0, kill=False, settings=both)
    seconds = (time.monotonic() - begun) * (1.5 if POOL in settings else 0.5)  # its workers take a while to start
    kills = number = 0
    while kills < wanted:
        out = folder / f"killed-{number}"
        finished = False
        while not finished:
            finished, killed = attempt(preset, out, rng, seconds, kills < wanted, settings)
            kills += killed
        for file in ("model.safetensors", "metrics.json", "ledger.json"):
            if (out / file).read_bytes() != (folder / "reference" / file).read_bytes():
                raise SystemExit(f"{file} differs after {kills} kills (seed {seed})")
        number += 1
    print(f"{kills} kills over {number} runs: the same bits")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
