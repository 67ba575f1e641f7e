"""Encrypted MMD with shared classes: the same bits on the pool and after an interruption; what left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.test_interrupt import Impatient
from tests.e2e.test_methods import assert_same_results

import visard
from visard.report.run_folder import read_events

pytest.importorskip("gmpy2", reason="needs the extra crypto")

SETTINGS = (
    "data.identities=4", "data.images_per_identity=10", "data.size=32", "model.embedding=4",
    "method.training.batch_size=8", "method.min_batch=8", "method.key_bits=512", "method.insecure_keys=true",
    "method.rounds=3", "method.exchanges=2", "method.pretrain_rounds=0", "method.training.schedule=constant",
)  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings that start from a pre-trained network."""
    folder = tmp_path_factory.mktemp("given") / "first"
    first = visard.run(
        "encrypted-mmd-sensors", overrides=[*SETTINGS, "method.rounds=0", "method.pretrain_rounds=2"], out=folder
    )
    return (*SETTINGS, f"model.weights={first.folder / 'model.safetensors'}",
            f"model.class_vectors={first.folder / 'class_vectors.safetensors'}")  # fmt: skip


@pytest.mark.parametrize("pooled", ["false", "true"])
def test_the_same_bits_wherever_it_runs(given: tuple[str, ...], pooled: str, here: Path) -> None:
    settings = [*given, f"method.pooled={pooled}", "engine.kind=local"]
    visard.run("encrypted-mmd-sensors", overrides=settings, out="whole")
    pool = [*settings, "engine.kind=pool", "engine.workers=2"]
    visard.run("encrypted-mmd-sensors", overrides=pool, out="pool")
    assert_same_results(Path("whole"), Path("pool"))
    with pytest.raises(visard.VisardError, match="continue with"):
        visard.run("encrypted-mmd-sensors", overrides=settings, out="stopped", watcher=Impatient())
    visard.resume("stopped")
    assert_same_results(Path("whole"), Path("stopped"))


def test_classifiers_leave_once_as_ciphertext(given: tuple[str, ...], here: Path) -> None:
    run = visard.run("encrypted-mmd-sensors", overrides=[*given, "engine.kind=local"], out="run")
    ledger = json.loads((run.folder / "ledger.json").read_text())
    columns = {name: i for i, name in enumerate(ledger["columns"])}
    assert {row[columns["kind"]] for row in ledger["rows"]} == {"ciphertext", "metric", "statistic", "public_key"}
    rounds = [e for e in read_events(run.folder / "events.jsonl") if e["event"] == "round"]
    assert ["balanced_accuracy" in e["figures"] for e in rounds] == [False, False, True]


def test_a_run_that_handed_over_gets_no_more_rounds(given: tuple[str, ...], here: Path) -> None:
    """Else classifiers would leave again, with as few steps between them as a server likes."""
    visard.run("encrypted-mmd-sensors", overrides=[*given, "engine.kind=local", "method.rounds=1"], out="run")
    with pytest.raises(visard.VisardError, match="encrypted-mmd cannot be given more rounds"):
        visard.resume("run", overrides=["method.rounds=2"])
