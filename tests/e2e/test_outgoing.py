"""Postprocessors of replies in whole runs: the same bits on every engine, and the ledger declares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.smoke import SMOKE
from torch import Tensor

import visard
from visard.aggregation.outgoing import norm


def weights(run: Path) -> dict[str, Tensor]:
    return visard.load_model(run / "model.safetensors").network.state_dict()


@pytest.mark.usefixtures("here")
def test_the_same_bits_on_every_engine_and_the_ledger_says_so() -> None:
    settings = [*SMOKE, "method.rounds=1", 'outgoing=[{name="clip", norm=0.01}]']
    for engine in ("local", "pool"):
        visard.run("fedavg", out=engine, overrides=[*settings, f"engine.kind={engine}", "engine.workers=2"])
    visard.run("fedavg", out="plain", overrides=[*settings, "outgoing=[]", "engine.kind=local"])
    a, b, c = (Path(name) for name in ("local", "pool", "plain"))
    for file in ("model.safetensors", "ledger.json", "metrics.json"):
        assert (a / file).read_bytes() == (b / file).read_bytes(), file
    assert json.loads((a / "ledger.json").read_text())["outgoing"] == [{"name": "clip", "norm": 0.01}]
    assert "outgoing" not in json.loads((c / "ledger.json").read_text())
    moved = norm({k: v.double() - weights(a)[k].double() for k, v in weights(c).items() if v.is_floating_point()})
    assert moved > 0.1, "or clipping would not show"
