"""`kill -9` at 20 random moments, also inside checkpoints: the final weights, figures and ledger keep their bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from visard.at_rest import Key

ROOT = Path(__file__).resolve().parents[2]
PROTECTED = """
[method]
name = "fedavg"
[aggregation]
rule = "trimmed-mean"
optimiser = "adam"
[[outgoing]]
name = "compress"
"""


@pytest.mark.parametrize(
    ("preset", "kills", "settings"),
    [
        ("fedavg", 20, []),
        ("fedfr-da", 10, []),  # it has stages
        ("fedavg", 10, ["engine.encrypt_with"]),
        ("fedavg", 3, ["engine.kind=pool", "engine.workers=2"]),
        ("fedfr-da", 3, ["method.negatives=noisy"]),  # clients keep what they have shown
        ("protected", 6, []),  # the server optimiser and the clients' error feedback have states
    ],
)
def test_kills_change_nothing(tmp_path: Path, preset: str, kills: int, settings: list[str]) -> None:
    if settings == ["engine.encrypt_with"]:
        settings = [f"engine.encrypt_with={Key.make(tmp_path / 'my.key').path}"]
    if preset == "protected":
        preset = str(tmp_path / "protected.toml")
        Path(preset).write_text(PROTECTED)
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.killing", str(tmp_path), "7", str(kills), preset, *settings],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert int(done.stdout.split()[0]) >= kills
