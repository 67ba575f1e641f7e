"""The bench of HF-MAML: rows that are compared differ in nothing but how clients train."""

from __future__ import annotations

from typing import Any

import pytest

from visard.config import load
from visard.studies.hf_maml import PARTITIONS, plan
from visard.studies.plan import SCALES, Scale


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def settings(scale: Scale) -> dict[str, dict[str, Any]]:
    """The settings of each row, by dotted name; of imported faces without those that only synthetic ones have."""
    rows = {}
    for row in plan(scale).rows:
        found = flat(load(row.preset, [s.replace("{start}", "x") for s in row.set]).to_dict())
        idle = () if scale == "smoke" else ("data.identities", "data.images_per_identity")
        rows[row.name] = {k: v for k, v in found.items() if k not in idle}
    return rows


@pytest.mark.parametrize("scale", SCALES)
def test_compared_rows_differ_in_their_training_alone(scale: Scale) -> None:
    rows = settings(scale)
    pairs = {(a, b) for table in plan(scale).tables for a, b in table.compare}
    assert {f"{p} HF-MAML local" for p in PARTITIONS} <= {a for a, _ in pairs}
    for a, b in pairs:
        odd = {k for k in rows[a].keys() | rows[b].keys() if rows[a].get(k) != rows[b].get(k)}
        odd = {k for k in odd if not k.startswith("method.training.")} - {"name", "method.name", "method.mu"}
        odd -= {"evaluation.every"}
        assert odd == ({"method.regularisation"} if ("regularised" in a) != ("regularised" in b) else set()), (a, b)


@pytest.mark.parametrize("scale", SCALES)
def test_personal_baselines_train_as_fedavg_does(scale: Scale) -> None:
    rows = settings(scale)
    for name in ("Ditto", "FedRep", "FedBABU"):
        own, fedavg = rows[f"equal {name}"], rows["equal FedAvg local"]
        assert own["method.name"] == name.lower()
        odd = {k for k in own.keys() & fedavg.keys() if own[k] != fedavg[k]}
        assert odd <= {"name", "method.name", "evaluation.every"}, odd
    for table in plan(scale).tables[:6]:
        assert {"Ditto", "FedRep", "FedBABU"} <= {row.split()[1] for row in table.rows}


def test_the_papers_pictures_and_curves() -> None:
    """128 x 128, cropped by a Haar cascade; Figures 1 and 2 are of validation pictures."""
    for name, row in settings("paper").items():
        assert row["data.source"] == "celeba-haar-128", name
        assert row["evaluation.tuning.between"] == "val"
        assert tuple(row["partition.split"]) == (0.7, 0.1, 0.2)
    assert any("--size 128 --align haar --out celeba-haar-128" in note for note in plan("paper").notes)


def test_plain_steps_are_those_of_hf_maml_without_its_adaptation() -> None:
    rows = settings("small")
    plain, meta = rows["lognormal FedAvg local, plain steps"], rows["lognormal HF-MAML local, exact, alpha 0.1"]
    assert plain["method.training.lr"] == meta["method.training.beta"]
    assert plain["method.training.amount"] == meta["method.training.steps"]
    assert plain["method.training.momentum"] == 0
    assert meta["method.training.order"] == "exact"
    assert rows["lognormal HF-MAML local, first order, alpha 0.1"]["method.training.order"] == "first"
    assert {k: meta[k] for k in meta if "alpha" in k} == {"partition.alpha": 0.5, "method.training.alpha": 0.1}
    assert rows["lognormal HF-MAML local"]["method.training.alpha"] == 0.01
