"""Flower's simulation: the bits of the in-process engine, and what bad clients cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("flwr") is None or find_spec("ray") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from tests.e2e.smoke import SMOKE
from tests.engines.deployed import ROOT
from tests.engines.simulated import FAULTS
from tests.engines.test_flower import METHODS, PARTS, assert_same_run, part_of, run, runs, start  # noqa: F401
from tests.engines.test_flower_toys import toy_rounds
from tests.toys import Toy, toy_engine, toy_world

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of flwr
]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory, start: Path, ray: dict[str, str]) -> Path:  # noqa: F811
    """A folder with the runs of all methods on Flower's simulation, and a run with toys."""
    folder = tmp_path_factory.mktemp("simulated")
    settings = (*SMOKE, "evaluation.every=0", "engine.kind=flower", "engine.workers=2")
    wanted = ",".join(["toys", *METHODS, *(f"fedavg@{how}@{start}" for how in PARTS)])
    command = [sys.executable, "-m", "tests.engines.simulated", str(folder), wanted, *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | ray)
    assert done.returncode == 0, done.stderr
    return folder


def test_simulation_refuses_bad_replies_and_keeps_the_bits(tmp_path: Path, simulated: Path) -> None:
    local = toy_engine(tmp_path, toy_world(tmp_path, 5))
    expected = toy_rounds(local, Toy(faults=FAULTS), 3)
    told = json.loads((simulated / "toy.json").read_text())
    reasons = {p["client"]: p["reason"] for p in told["problems"]}
    assert torch.equal(torch.tensor(told["w"]), expected.w)
    assert "not finite" in reasons.pop("client-001")
    assert reasons == {"client-003": "the disk is full"}
    assert told["states"] == {c: {} if c in FAULTS else {"steps": 3} for c in local.clients}


@pytest.mark.parametrize("method", METHODS)
def test_simulation_gives_the_bits_of_local(
    simulated: Path,
    runs: Callable[[str], Path],  # noqa: F811
    method: str,
) -> None:
    assert_same_run(runs(method), simulated / method)


@pytest.mark.parametrize("how", PARTS)
def test_simulation_trains_a_part_with_the_bits_of_local(
    tmp_path: Path,
    simulated: Path,
    start: Path,  # noqa: F811
    how: str,
) -> None:
    run("fedavg", tmp_path / "near", *part_of(start, how))
    assert_same_run(tmp_path / "near", simulated / f"fedavg-{how.replace(':', '-')}")
