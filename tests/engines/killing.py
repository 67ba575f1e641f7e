"""`python -m tests.engines.killing OUT SEED KILLS [SETTING...]`: kill -9 run, server and parties of a deployment.

At random moments one of them dies and is started again at once; a run that ends with an error because of that is
resumed. The finished run must have the bits of a local one, and the ledgers of server and parties must agree. With
aggregation.secure=true every party must have opened the same sums, each once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.smoke import smoke
from tests.engines.deployed import VISARD, Deployment, until

import visard
from visard.deployment.ledger_check import compare
from visard.runs.run import run_id

METHOD = "fedavg"
PARTIES = 3
SETTINGS = [*smoke(METHOD), f"partition.clients={PARTIES}", "method.rounds=6", "evaluation.bootstrap=0"]
LIMITS = ["aggregation.bound=3.0", "aggregation.max_weight=0.5"]  # as runs with real parties have them
MORE: list[str] = []  # settings of the command line
MOST_ATTEMPTS = 40  # resumes of one run


def start_run(there: Deployment, out: Path) -> subprocess.Popen[bytes]:
    """Start the run, or continue it."""
    far = ["engine.kind=flower", f"engine.server='{there.state}'", "engine.wait=40", "engine.min_replies=1.0"]
    words = [part for text in (*SETTINGS, *MORE, *far) for part in ("--set", text)]
    begun = (out / "config.toml").exists()
    command = [str(VISARD), "run", *(["--resume"] if begun else [METHOD, *words]), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": there.paths}
    with (there.folder / "run.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def kill_one(there: Deployment, run: subprocess.Popen[bytes], rng: random.Random) -> str:
    """Kill the run, the server or a party, as often; the server and parties come back at once."""
    victim = rng.choice(["run", "server", f"node-{rng.randint(1, PARTIES)}"])
    if victim == "run":
        run.kill()
        return victim
    before = there.log("server").count("listening")
    there.end(victim, signal.SIGKILL)
    there.restart(victim)
    if victim == "server":
        until(lambda: there.log("server").count("listening") > before, "the server to come back")
    return victim


def finish(there: Deployment, out: Path, rng: random.Random, left: int) -> dict[str, int]:
    """One run to its end, with at most `left` kills on the way; how often who was killed."""
    killed: dict[str, int] = {}
    for _ in range(MOST_ATTEMPTS):
        run = start_run(there, out)
        while run.poll() is None:
            end = time.monotonic() + rng.uniform(1.0, 9.0)
            while run.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            if run.poll() is None and sum(killed.values()) < left:
                victim = kill_one(there, run, rng)
                killed[victim] = killed.get(victim, 0) + 1
        if run.wait() == 0:
            return killed
        if gone := [name for name, process in there.processes.items() if process.poll() is not None]:
            raise SystemExit(f"{gone[0]} ended by itself: {there.log(gone[0])[-500:]}")
    raise SystemExit(f"the run does not finish: {(there.folder / 'run.log').read_text()[-2000:]}")


def check_same(reference: Path, out: Path) -> None:
    """Model, metrics and accepted rows of the ledger, bit for bit."""
    for file in ("model.safetensors", "metrics.json", "ledger.json"):
        if (out / file).read_bytes() != (reference / file).read_bytes():
            raise SystemExit(f"{file} of {out} differs")


def check_ledgers(there: Deployment, out: Path) -> int:
    """The parties' records against the server's; returns how many replies a kill left open."""
    found = compare(out, [there.folder / f"party-{number}" for number in range(1, PARTIES + 1)])
    if not found.agree or found.unchecked:
        raise SystemExit(f"the ledgers of {out} differ: {found.differences[:3]} {dict(found.unchecked)}")
    return len(found.open)


def check_sums(there: Deployment, out: Path) -> int:
    """What the parties have on record of secure sums: the same attempt and the same clients, once; returns how many."""
    found: dict[str, set[tuple[str, str]]] = {}
    for number in range(1, PARTIES + 1):
        (path,) = (there.folder / f"party-{number}" / "states").glob(f"{run_id(out / 'checkpoint')}/run.json")
        for place, known in json.loads(path.read_text())["sums"].items():
            found.setdefault(place.rpartition(" ")[0], set()).add((known["attempt"], known["opened"]))
    if torn := [place for place, opened in found.items() if len(opened) > 1]:
        raise SystemExit(f"the parties have opened different sums of {torn[0]}")
    return sum(int(attempt) > 1 for opened in found.values() for attempt, _ in opened)


def main(folder: Path, seed: int, wanted: int, *more: str) -> None:
    rng = random.Random(seed)
    MORE[:] = more
    secure = "aggregation.secure=true" in more
    folder.mkdir(parents=True, exist_ok=True)
    visard.run(METHOD, overrides=[*SETTINGS, *(() if secure else LIMITS), *more], out=folder / "reference")
    there = Deployment(folder, PARTIES, [f"{party + 1}=client-{party:03d}" for party in range(PARTIES)])
    killed: dict[str, int] = {}
    number = open_replies = again = 0
    try:
        for party in range(PARTIES):
            there.start_node(party + 1, [f"client-{party:03d}"])
        there.wait_server()
        while sum(killed.values()) < wanted:
            out = folder / f"killed-{number}"
            for victim, times in finish(there, out, rng, wanted - sum(killed.values())).items():
                killed[victim] = killed.get(victim, 0) + times
            check_same(folder / "reference", out)
            open_replies += check_ledgers(there, out)
            again += check_sums(there, out) if secure else 0
            number += 1
    finally:
        there.close()
    print(
        f"{sum(killed.values())} kills over {number} runs: the same bits, the ledgers agree "
        f"({open_replies} replies left open); {json.dumps(killed, sort_keys=True)}"
        + (f"; {again} sums were begun again" if secure else "")
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
