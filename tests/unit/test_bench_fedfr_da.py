"""The bench of FedFR-DA: every row of every scale is a valid run, and E x R stays the same over Figure 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.test_rfw import rfw as rfw_folder

from visard.data.faces import FaceSet
from visard.data.sources.importing import import_faces
from visard.inference.model import embed, evaluate, load_model
from visard.methods.fedfr_da import FedFRDA
from visard.models import build
from visard.models.files import save_model
from visard.report.run_folder import EventLog
from visard.studies import find, paper
from visard.studies.execute import jobs_of
from visard.studies.fedfr_da import f_score, idle, rfw_columns, slowest
from visard.studies.plan import SCALES
from visard.studies.results import NoMetric, metric_of


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_is_a_valid_run(scale: str, tmp_path: Path) -> None:
    plan = find("fedfr-da", scale)
    settings = {job.row.name: job.settings() for job in jobs_of(plan, [0], tmp_path)}
    methods = {s.method.name for s in settings.values()}
    assert methods == {"pretrain", "target-only", "central", "finetune", "dan", "dann", "fedfr-da"}
    for name, s in settings.items():
        assert s.partition.kind == "domains"
        if isinstance(s.method, FedFRDA):
            assert (s.method.training.unit == "iterations") == ("by epochs" not in name)
            assert (s.method.dcl > 0) == ("FedFR-DA" in name)
            assert s.model.weights is not None
            assert s.model.class_vectors is not None
    iterations = {
        s.method.rounds * s.method.training.amount
        for name, s in settings.items()
        if isinstance(s.method, FedFRDA) and not any(word in name for word in (" E = ", "longer", "by epochs"))
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


@pytest.mark.parametrize("scale", SCALES)
def test_the_papers_figures_of_l_stand_beside_its_number_of_clients(scale: str, tmp_path: Path) -> None:
    plan = find("fedfr-da", scale)
    clients = {job.row.name: job.settings().partition.clients for job in jobs_of(plan, [0], tmp_path)}
    tables = {table.title.split(":")[0]: table for table in plan.tables if table.title.endswith(", L")}
    assert (clients["L FedFR-DA, K = 1"], clients["L K = 1"]) == (1, 1)
    for number, row in (("Table 3", "L FedFR-DA, K = 1"), ("Table 5", "L FedFR-DA, K = 1")):
        assert tables[number].paper[row]["target accuracy"] == 91.55
        assert "L FedFR-DA" not in tables[number].paper
    assert tables["Table 5"].paper["L K = 1"]["target accuracy"] == 91.12
    assert tables["Table 4"].paper["L FL"]["target accuracy"] == 90.43
    if scale != "smoke":
        assert clients["L FL"] == 4


def test_merge_from_scratch_is_a_run_of_its_own(tmp_path: Path) -> None:
    """The paper trains on both domains from nothing; smaller scales go on from the source's network."""
    for scale in SCALES:
        merge = next(r for r in find("fedfr-da", scale).rows if r.name == "S Merge")
        assert merge.needs() == (() if scale == "paper" else ("S Source-Only",))
        assert ("method.head_start=means" in merge.set) == (scale != "paper")


def test_rounds_of_epochs_wait_for_the_source(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for k, (stage, seconds) in enumerate((("label", (9.0, 9.0)), ("federate", (4.0, 1.0)), ("federate", (2.0, 2.0)))):
        log.write("round", stage=stage, round=k, step=k, seconds=1.0, bytes_up=0, bytes_down=0, asked=1, replied=1,
                  figures={}, clients={f"client-{i}": {"seconds": s} for i, s in enumerate(seconds)})  # fmt: skip
    assert slowest(tmp_path) == 3.0
    assert idle(tmp_path) == pytest.approx(1 - (5 / 8 + 1) / 2)
    rows = {job.row.name: job.settings().method for job in jobs_of(find("fedfr-da", "small"), [0], tmp_path)}
    one, other = rows["L FL by epochs"], rows["L FL"]
    assert isinstance(one, FedFRDA)
    assert isinstance(other, FedFRDA)
    assert (one.training.unit, one.training.amount, one.rounds) == ("epochs", 1, other.rounds)


def test_the_last_labelling_counts(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for number, (stage, figures) in enumerate((("label", {"pairwise_f": 0.4}), ("federate", {}),
                                               ("federate", {"pairwise_f": 0.1}), ("federate", {}))):  # fmt: skip
        log.write("round", stage=stage, round=number, seconds=1.0, bytes_up=0, bytes_down=0, asked=1, replied=1,
                  figures=figures)  # fmt: skip
    assert f_score(tmp_path) == 0.1


def test_rfw_is_the_test_of_the_papers_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a run's model on the set rfw: as the protocol gives them, made once, a clear line without the set."""
    monkeypatch.setenv("VISARD_DATA", str(tmp_path / "data"))
    run = tmp_path / "run"
    run.mkdir()
    spec = {"model": "tiny", "embedding": "16", "size": "112"}
    save_model(run / "model.safetensors", build("tiny", embedding=16, size=112).state_dict(), spec)
    column = {c.title: c for c in rfw_columns("target", "African")}
    with pytest.raises(NoMetric, match=r"no face set 'rfw'.*visard data import rfw"):
        metric_of(column["target accuracy"], run)
    faces = FaceSet.open(import_faces("rfw", rfw_folder(tmp_path / "RFW"), tmp_path / "data" / "rfw").path)
    model = load_model(run / "model.safetensors")
    result = evaluate(model, faces, protocols=("rfw",)).to_dict()["rfw"]["groups"]["African"]
    assert metric_of(column["target accuracy"], run) == pytest.approx(result["accuracy"])
    assert metric_of(column["target TAR @ FAR 0.1"], run) == pytest.approx(result["roc"]["tar"][0]["tar"])
    f = embed(model, faces, flip=True)[:6]
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    rest, owner = [1, 2, 4, 5], [0, 0, 1, 1]
    right = [owner[int(np.argmax(f[rest] @ f[query]))] == who for query, who in ((0, 0), (3, 1))]
    assert metric_of(column["target rank-1"], run) == np.mean(right)
    (run / "model.safetensors").unlink()
    assert metric_of(column["target rank-1"], run) == np.mean(right)
    with pytest.raises(NoMetric, match="no domain Indian"):
        metric_of(rfw_columns("source", "Indian")[0], run)


def test_the_papers_figures_are_those_of_its_tables() -> None:
    known = paper("fedfr_da")
    assert known["S"]["FedFR-DA"]["target accuracy"] == 82.50
    assert known["L"]["Merge"]["source rank-1"] == 94.38
    assert known["L"]["FINCH"]["F-score"] == 70.08
    assert known["S"]["FL"]["target TAR @ FAR 0.01"] == 44.23
