"""FedFR-DA with encrypted alignment: a whole run, the same bits on the pool, and a ledger that says what left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.smoke import smoke
from tests.e2e.test_methods import assert_same_results

import visard
from visard.report.run_folder import read_events

pytest.importorskip("gmpy2", reason="needs the extra crypto")

ALIGNED = (
    "method.align.weight=2.0",
    "method.align.length=4",
    "method.align.batch_size=8",
    "method.align.min_batch=8",
    "method.align.batches=2",
    "method.align.key_bits=512",
    "method.align.insecure_keys=true",
    "partition.clients=2",
)


def test_the_same_bits_locally_and_on_the_pool(tmp_path: Path) -> None:
    first = visard.run("fedfr-da", overrides=[*smoke("fedfr-da"), *ALIGNED], out=tmp_path / "local")
    more = ("engine.kind=pool", "engine.workers=2")
    again = visard.run("fedfr-da", overrides=[*smoke("fedfr-da"), *ALIGNED, *more], out=tmp_path / "pool")
    assert_same_results(first.folder, again.folder)
    rows = json.loads((first.folder / "ledger.json").read_text())["rows"]
    assert {r[5] for r in rows} == {"weights", "count", "metric", "ciphertext", "public_key", "statistic"}
    rounds = [e for e in read_events(first.folder / "events.jsonl") if e["event"] == "round"]
    for e in (e for e in rounds if e["stage"] == "federate"):
        assert e["figures"]["encryptions"] == sum(f["encryptions"] for f in e["clients"].values()) > 0
        assert all(f["seconds"] > 0 for f in e["clients"].values())
    plain = visard.run("fedfr-da", overrides=[*smoke("fedfr-da"), "partition.clients=2"], out=tmp_path / "plain")
    kinds = {r[5] for r in json.loads((plain.folder / "ledger.json").read_text())["rows"]}
    # statistics are those of batch norm
    assert kinds == {"weights", "count", "metric", "statistic"}, "without alignment nothing of it leaves"
