"""`kill -9` at 20 random moments, also inside checkpoints: the final weights, figures and ledger keep their bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from visard.at_rest import Key

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("preset", "kills", "encrypted"),
    [("fedavg", "20", False), ("fedfr-da", "10", False), ("fedavg", "10", True)],  # the second has stages
)
def test_kills_change_nothing(tmp_path: Path, preset: str, kills: str, encrypted: bool) -> None:
    key = [str(Key.make(tmp_path / "my.key").path)] if encrypted else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.killing", str(tmp_path), "7", kills, preset, *key],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"{kills} kills" in done.stdout
