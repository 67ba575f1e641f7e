"""The bench of FedFR-DA: every row of every scale is a valid run, and E x R stays the same over Figure 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from visard.bench import find, paper
from visard.bench.jobs import jobs_of
from visard.bench.plan import SCALES
from visard.methods.fedfr_da import FedFRDA


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_is_a_valid_run(scale: str, tmp_path: Path) -> None:
    plan = find("fedfr-da", scale)
    settings = {job.row.name: job.settings() for job in jobs_of(plan, [0], tmp_path)}
    methods = {s.method.name for s in settings.values()}
    assert methods == {"pretrain", "target-only", "central", "finetune", "dan", "dann", "fedfr-da"}
    for name, s in settings.items():
        assert s.partition.kind == "domains"
        if isinstance(s.method, FedFRDA):
            assert s.method.training.unit == "iterations"
            assert (s.method.dcl > 0) == ("FedFR-DA" in name)
            assert s.model.weights is not None
            assert s.model.class_vectors is not None
    iterations = {
        s.method.rounds * s.method.training.amount
        for name, s in settings.items()
        if isinstance(s.method, FedFRDA) and " E = " not in name and "longer" not in name
    }
    assert len(iterations) == 1
    if scale != "paper":
        passes: list[Any] = [settings[f"L {name}, longer"].method for name in ("Fine-tune", "FedFR-DA")]
        assert passes[0].rounds == passes[1].rounds
        assert passes[0].training.amount == settings["L FL"].partition.clients * passes[1].training.amount
    for name, s in settings.items():
        if " E = " in name:
            assert isinstance(s.method, FedFRDA)
            assert s.method.rounds * s.method.training.amount == pytest.approx(iterations.copy().pop(), rel=0.15)


def test_the_papers_figures_are_those_of_its_tables() -> None:
    known = paper("fedfr_da")
    assert known["S"]["FedFR-DA"]["target accuracy"] == 82.50
    assert known["L"]["Merge"]["source rank-1"] == 94.38
    assert known["L"]["FINCH"]["F-score"] == 70.08
    assert known["S"]["FL"]["target TAR @ FAR 0.01"] == 44.23
