"""Postprocessors, rules and server optimisers in whole runs: the same bits on every engine, true sizes on record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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


@pytest.mark.usefixtures("here")
def test_clients_in_turn_give_the_same_bits_on_every_engine() -> None:
    settings = [*SMOKE, "partition.clients=5", "method.in_turn=2", "aggregation.bound=0.5", "evaluation.every=0"]
    for engine in ("local", "pool"):
        visard.run("fedavg", out=engine, overrides=[*settings, f"engine.kind={engine}", "engine.workers=2"])
    visard.run("fedavg", out="free", overrides=[*settings, "aggregation.bound=0"])
    for file in ("model.safetensors", "ledger.json", "metrics.json"):
        assert (Path("local") / file).read_bytes() == (Path("pool") / file).read_bytes(), file
    free, bound = weights(Path("free")), weights(Path("local"))
    assert any(not torch.equal(free[k], bound[k]) for k in free), "or the limit would not show"


PROTECTED = {
    "median": ['outgoing=[{name="compress", to="fp16"}]', "aggregation.optimiser=sgd"],
    "trimmed-mean": ["aggregation.optimiser=yogi"],
    "geometric-median": ["aggregation.bound=1.0", "aggregation.max_weight=0.4"],
    "multi-krum": ['outgoing=["clip", "compress"]', "aggregation.optimiser=adam", "partition.clients=5"],
    "bulyan": ["partition.clients=7"],
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("rule", PROTECTED)
def test_rules_optimisers_and_compression_give_the_same_bits_on_every_engine(rule: str) -> None:
    settings = [*SMOKE, "evaluation.every=0", *PROTECTED[rule], f"aggregation.rule={rule}"]
    for engine in ("local", "pool"):
        visard.run("fedavg", out=engine, overrides=[*settings, f"engine.kind={engine}", "engine.workers=2"])
    for file in ("model.safetensors", "ledger.json", "metrics.json"):
        assert (Path("local") / file).read_bytes() == (Path("pool") / file).read_bytes(), file
    assert all(bool(torch.isfinite(v).all()) for v in weights(Path("local")).values())


@pytest.mark.flower
@pytest.mark.usefixtures("here")
def test_and_on_flower() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    settings = [*SMOKE, "evaluation.every=0", *PROTECTED["multi-krum"], "aggregation.rule=multi-krum"]
    visard.run("fedavg", out="local", overrides=settings)
    words = [w for s in (*settings, "engine.kind=flower", "engine.workers=2") for w in ("--set", s)]
    code = "from visard.cli import main; main()"  # in a process of its own: Ray leaves warnings behind
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "run", "fedavg", *words, "--out", "flower"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for file in ("model.safetensors", "ledger.json", "metrics.json"):
        assert (Path("local") / file).read_bytes() == (Path("flower") / file).read_bytes(), file


@pytest.mark.usefixtures("here")
def test_compressed_replies_are_smaller_and_train_nearly_the_same() -> None:
    settings = [*SMOKE, "evaluation.every=0", "method.rounds=3"]
    up = {}
    for name, outgoing in (("plain", "[]"), ("int8", '["compress"]')):
        visard.run("fedavg", out=name, overrides=[*settings, f"outgoing={outgoing}"])
        up[name] = json.loads((Path(name) / "metrics.json").read_text())["communication"]["bytes_up"]
        ledger = json.loads((Path(name) / "ledger.json").read_text())
        assert sum(row[6] for row in ledger["rows"] if row[0] == "federate") == up[name]
    assert up["int8"] < 0.45 * up["plain"], "the tiny network has many short entries, whose names count too"
    plain, small = weights(Path("plain")), weights(Path("int8"))
    trained = [k for k, v in plain.items() if v.is_floating_point() and "running" not in k]
    apart = norm({k: plain[k].double() - small[k].double() for k in trained})
    assert 0 < apart < 0.1 * norm({k: plain[k].double() for k in trained})
