"""Real processes on loopback: run, server or party are killed at a random moment, and the two records agree."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="visard[flower] is not installed")

from tests.e2e.smoke import SMOKE
from tests.engines.deployed import VISARD, Deployment, until

import visard
from visard.deployment.ledger_check import Comparison, compare, verify
from visard.engines.records import read_records
from visard.runs.run import run_id

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr

ROLES = {1: ["client-000"], 2: ["client-001", "client-002"]}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server and two parties, one of them with two roles."""
    roles = [f"{number}={role}" for number, own in ROLES.items() for role in own]
    made = Deployment(tmp_path_factory.mktemp("ledgers"), 2, roles)
    try:
        for number, own in ROLES.items():
            made.start_node(number, own)
        made.wait_server()
        made.wait_connected("node-1", "node-2")
        yield made
    finally:
        made.close()


def settings(there: Deployment, *more: str) -> list[str]:
    where = (
        "engine.kind=flower",
        f"engine.server='{there.state}'",
        "engine.wait=60",
        "engine.timeout=40",
        "engine.min_replies=1.0",
    )
    return [*SMOKE, "evaluation.every=0", "method.rounds=6", *where, *more]


def start(there: Deployment, out: Path, resume: bool = False, *more: str) -> subprocess.Popen[bytes]:
    sets = [part for s in settings(there, *more) for part in ("--set", s)]
    command = [str(VISARD), "run", *(["--resume"] if resume else ["fedavg", *sets]), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": there.paths}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compared(there: Deployment, out: Path) -> Comparison:
    return compare(out, [there.folder / f"party-{number}" for number in ROLES])


def finish(there: Deployment, out: Path, process: subprocess.Popen[bytes]) -> None:
    """Go on with a run until it is finished; it may be already."""
    if process.returncode == 0:
        return
    for _ in range(5):
        if start(there, out, resume=True).wait(200) == 0:
            return
    raise AssertionError("the run does not come to its end")


@pytest.fixture(scope="module")
def undisturbed(there: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    visard.run("fedavg", out=out, overrides=settings(there))
    return out


def test_without_a_kill_nothing_is_open(there: Deployment, undisturbed: Path) -> None:
    found = compared(there, undisturbed)
    assert (found.open, found.differences, found.unchecked) == ([], [], {})
    assert found.same >= 2 + 3 * 6 + 3 + 3, "greetings, rounds, the last test, and the models that were kept"
    files = verify(there.folder / "party-1").files
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600]
    done = subprocess.run(
        [str(VISARD), "ledger", "compare", str(undisturbed), str(there.folder / "party-1")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": there.paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not compared, for no record of its party was given: client-001 and client-002" in done.stdout
    rows = [line.record for line in read_records(files) if line.record["event"] == "reply"]
    kinds = {kind for row in rows for _, kind, _ in row["parts"]}
    assert kinds == {"weights", "statistic", "class_vectors", "count", "metric"}


@pytest.mark.parametrize("victim", ["run", "server", "node-1", "node-2"])
def test_after_a_kill_the_records_agree(there: Deployment, undisturbed: Path, tmp_path: Path, victim: str) -> None:
    out, chance = tmp_path / "run", random.Random(victim)
    process = start(there, out)
    until((out / "checkpoint" / "manifest.json").exists, "the first round")
    time.sleep(chance.uniform(0.0, 1.0))
    if victim == "run":
        process.kill()
    else:
        there.end(victim, signal.SIGKILL)
        there.restart(victim)
    process.wait(200)
    halfway = compared(there, out)
    assert halfway.differences == []
    finish(there, out, process)
    found = compared(there, out)
    assert found.differences == []
    assert len(found.open) <= (3 if victim in ("run", "server") else 1), "the last reply of each role, or of the party"
    for name in ("ledger.json", "model.safetensors"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
    assert json.loads((out / "metrics.json").read_text()) == json.loads((undisturbed / "metrics.json").read_text())


def test_a_run_that_is_killed_while_it_sends_holds_up_no_party(there: Deployment, tmp_path: Path) -> None:
    """The party has a message whose parts never come. It goes on, and at once: the next run waits for 20 seconds."""
    sets = settings(there, "engine.wait=20")
    killed = (
        "import os, time, visard\nfrom visard.deployment.flower import driver\n"
        "driver.push = lambda *_: (time.sleep(2), os.kill(os.getpid(), 9))\n"  # by then the party has the message
        f"visard.run('fedavg', out={str(tmp_path / 'killed')!r}, overrides={sets!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", killed], env={**os.environ, "PYTHONPATH": there.paths}, check=False)
    assert done.returncode == -signal.SIGKILL
    visard.run("fedavg", out=tmp_path / "next", overrides=sets)
    assert [name for name, process in there.processes.items() if process.poll() is not None] == []
    assert any("its run is over" in there.log(f"node-{number}") for number in ROLES)


def test_a_secure_run_survives_kills_of_run_party_and_server(there: Deployment, tmp_path: Path) -> None:
    """The same weights as without kills, and every party has opened each sum once, with the same clients."""
    secure = ("aggregation.secure=true", "aggregation.signed=true")
    sets = [*SMOKE, "evaluation.every=0", "method.rounds=6", *secure]
    visard.run("fedavg", out=tmp_path / "local", overrides=[*sets, "engine.kind=local"])
    out, chance = tmp_path / "run", random.Random(1)
    process = start(there, out, False, *secure)
    until((out / "checkpoint" / "manifest.json").exists, "the first round")
    for victim in ("node-2", "run", "server"):
        time.sleep(chance.uniform(0.0, 1.5))
        if victim == "run":
            process.kill()
            process.wait(200)
            process = start(there, out, resume=True)
        else:
            there.end(victim, signal.SIGKILL)
            there.restart(victim)
    process.wait(200)
    finish(there, out, process)
    for name in ("model.safetensors", "ledger.json", "metrics.json"):
        assert (out / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name
    assert compared(there, out).differences == []
    opened: dict[str, set[tuple[str, str]]] = {}
    for number in ROLES:
        record = there.folder / f"party-{number}" / "states" / run_id(out / "checkpoint") / "run.json"
        for place, known in json.loads(record.read_text())["sums"].items():
            opened.setdefault(place.rpartition(" ")[0], set()).add((known["attempt"], known["opened"]))
    assert len(opened) == 6, "one sum a round"
    assert all(len(found) == 1 for found in opened.values())
