"""Nothing phones home: telemetry and update checks are off, and no process of a deployment looks up a name outside."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from tests.engines.deployed import ROOT, VISARD, Deployment
from tests.toys import toy_world

from visard.deployment.flower import SILENCE

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr

WATCH = Path(__file__).with_name("watched")


def watched(folder: Path) -> dict[str, str]:
    """An environment in which every Python process writes down whom it looks up, and Flower has its own defaults."""
    own = {k: v for k, v in os.environ.items() if k not in SILENCE}
    paths = os.pathsep.join([str(WATCH), str(ROOT)])
    return {**own, "PYTHONPATH": paths, "VISARD_LOOKUPS": str(folder / "lookups"), "OMP_NUM_THREADS": "1"}


def lookups(folder: Path) -> str:
    path = folder / "lookups"
    return path.read_text() if path.exists() else ""


def test_the_watch_sees_what_flower_does_when_left_alone(tmp_path: Path) -> None:
    """Without visard's switches Flower does look for its servers: the test below can fail."""
    code = "from flwr.supercore.telemetry import EventType, event\nevent(EventType.PING).result()\n"
    subprocess.run([sys.executable, "-c", code], env=watched(tmp_path), capture_output=True, timeout=120)
    assert "telemetry.flower.ai" in lookups(tmp_path)


def test_visard_switches_it_off_before_flower_is_imported(tmp_path: Path) -> None:
    code = (
        "import os, visard.deployment.flower\n"
        "from flwr.supercore.telemetry import FLWR_TELEMETRY_ENABLED, EventType, event\n"
        "event(EventType.PING).result()\n"
        "assert FLWR_TELEMETRY_ENABLED == '0'\n"
        f"assert {SILENCE!r}.items() <= os.environ.items()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=watched(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert lookups(tmp_path) == ""
    needed = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    assert needed.items() <= SILENCE.items()


def test_a_deployment_looks_up_nobody_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SILENCE:
        monkeypatch.delenv(name, raising=False)
    for name, value in watched(tmp_path).items():
        monkeypatch.setenv(name, value)
    there = Deployment(tmp_path, 2, ["1=client-000", "2=client-001"], paths=[WATCH])
    try:
        toy_world(tmp_path)
        there.start_node(1, ["client-000"])
        there.start_node(2, ["client-001"])
        there.wait_server()
        there.wait_connected("node-1", "node-2")
        sets = [
            "method.rounds=1", "data.identities=12", "data.images_per_identity=6", "data.size=32", "evaluation.every=0",
            "partition.clients=2", "partition.test_identities=4", "model.embedding=16", "evaluation.pairs=50",
            "evaluation.bootstrap=0", "numerics.threads_per_step=1", "engine.kind=flower", "engine.wait=60",
            f"engine.server='{there.state}'",
        ]  # fmt: skip
        command = [str(VISARD), "run", "fedavg", "--out", str(tmp_path / "run")]
        command += [part for s in sets for part in ("--set", s)]
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr + done.stdout
    finally:
        there.close()
    assert len(set((tmp_path / "lookups.watched").read_text().split())) >= 6, (
        "server, nodes, workers and run are watched"
    )
    assert lookups(tmp_path) == ""
