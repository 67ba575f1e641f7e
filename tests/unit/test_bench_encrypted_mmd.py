"""The bench of encrypted MMD: every row of every scale is a valid run, its costs are those of the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visard.config import load
from visard.errors import UsageError
from visard.methods.central_mmd import CentralMMD
from visard.methods.encrypted_mmd import EncryptedMMD
from visard.report.run_folder import EventLog
from visard.studies import find, paper
from visard.studies.encrypted_mmd import COSTS, PROTOCOLS
from visard.studies.execute import jobs_of
from visard.studies.plan import SCALES
from visard.studies.results import curve_of, metric_of


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_is_a_valid_run(scale: str, tmp_path: Path) -> None:
    plan = find("encrypted-mmd", scale)
    settings = {job.row.name: job.settings() for job in jobs_of(plan, [0], tmp_path)}
    for name, s in settings.items():
        assert s.partition.kind == "one_domain"
        assert isinstance(s.method, EncryptedMMD | CentralMMD)
        assert s.method.optimiser == "adam"
        assert (s.method.rounds == 0) == (", none" in name)
        assert (s.model.weights is None) == (", none" in name), "every other row starts from the pre-trained network"
        assert isinstance(s.method, CentralMMD) == (", central" in name)
        if ", encrypted" in name:
            assert isinstance(s.method, EncryptedMMD)
            assert s.method.protocol == "packed"
    for name, protocol in PROTOCOLS.items():
        method = settings[name].method
        assert isinstance(method, EncryptedMMD)
        assert (method.protocol, method.exchanges, method.rounds) == (protocol, 1, 1)
    degrees = [settings[f"degree {k}"].method for k in (1, 2, 3)]
    assert [m.compare.degree for m in degrees if isinstance(m, EncryptedMMD)] == [1, 2, 3]
    for name in ("packed", "A + B"):
        few, many = settings[f"{name}, smaller batches at the target"].method, settings[name].method
        assert isinstance(few, EncryptedMMD)
        assert isinstance(many, EncryptedMMD)
        assert 0 < few.target_batch < few.training.batch_size == many.training.batch_size
        assert few.protocol == many.protocol
    loss = [c for c in plan.curves if c.metric == "training.task"]
    assert loss
    assert all(any(row.endswith(("encrypted", "encrypted, L = 64")) for row in c.rows) for c in loss)
    shown = {name for table in plan.tables for name in table.rows}
    assert any(n.endswith("encrypted") for n in shown)


def test_the_papers_figures_are_those_of_its_tables() -> None:
    known = paper("encrypted_mmd")
    assert known["prediction"]["Room 3 to 1, central, one source"]["balanced accuracy"] == 45.04
    assert known["prediction"]["108, encrypted"]["weighted F1"] == 81.93
    assert known["prediction"]["W to D, encrypted"]["balanced accuracy"] == 46.39
    assert known["costs"]["naive"]["kB"] == 11375.4
    for name in ("A + B", "naive", "A + B, one source"):
        costs = known["costs"][name]
        assert costs["kB"] == pytest.approx(costs["kB of the sources"] + costs["kB of the target"])
    printed = set(known["prediction"])
    rows = {row.name for row in find("encrypted-mmd", "paper").rows}
    assert printed <= rows, "every printed figure has its row"


def test_costs_are_of_one_batch(tmp_path: Path) -> None:
    settings = load("encrypted-mmd-sensors", ["method.rounds=2", "method.exchanges=5", "method.pretrain_rounds=1"])
    (tmp_path / "config.toml").write_text(settings.to_toml())
    events = EventLog(tmp_path / "events.jsonl")
    for step, stage in enumerate(("pretrain", "align", "align")):
        figures = {"encryptions": 50.0, "balanced_accuracy": 0.5 + step / 10}
        events.write(
            "round",
            stage=stage,
            round=max(0, step - 1),
            step=step,
            seconds=10.0,
            asked=1,
            replied=1,
            bytes_up=1,
            bytes_down=1,
            figures=figures,
            clients={"user-1": {"seconds": 2.0}, "user-2": {"seconds": 3.0}, "target": {"seconds": 4.0}},
        )
    columns = ["stage", "round", "client", "message", "field", "kind", "bytes", "encrypted"]
    rows = [
        ["pretrain", 0, "user-1", "Up", "theta", "weights", 7777, False],
        ["align", 0, "user-1", "Moved", "letters", "ciphertext", 10000, True],
        ["align", 1, "target", "Mail", "letters", "ciphertext", 20000, True],
        ["align", 1, "target", "Mail", "figures", "metric", 5555, False],
    ]
    (tmp_path / "ledger.json").write_text(json.dumps({"columns": columns, "rows": rows}))
    (tmp_path / "metrics.json").write_text("{}")
    found = {c.title: metric_of(c, tmp_path) for c in COSTS}
    assert found["seconds"] == 2.0
    assert (found["seconds of the sources"], found["seconds of the target"]) == (1.0, 0.8)
    assert found["encryptions"] == 10.0
    assert (found["kB of the sources"], found["kB of the target"], found["kB"]) == (1.0, 2.0, 3.0)
    assert curve_of("training.balanced_accuracy", tmp_path) == [(1, 0.5), (2, 0.6), (3, 0.7)]


def test_orientations_and_locations_are_domains_too(tmp_path: Path) -> None:
    found = {j.row.name: j.settings() for j in jobs_of(find("encrypted-mmd", "small"), [0], tmp_path)}
    for what in ("orientation", "location"):
        s = found[f"{what.capitalize()}s 2, 3 to 5, encrypted"]
        assert s.data.source == f"widar-{what}"
        assert s.partition.source_domain == (f"room-1-{what}-2", f"room-1-{what}-3")
        assert s.partition.target_domain == (f"room-1-{what}-5",)
        assert s.model.embedding == 64


def test_the_real_scale_has_all_pairs_and_every_kernel(tmp_path: Path) -> None:
    """Every row is a valid run from the network called none of its case; the target drops no units in any of them."""
    plan = find("encrypted-mmd", "real")
    found = {j.row.name: j.settings() for j in jobs_of(plan, [0], tmp_path)}
    assert len(found) == 9 * (12 + 3 + 2 + 3)
    offices = ("amazon", "caltech", "dslr", "webcam")
    pairs = {
        (s.partition.source_domain, s.partition.target_domain) for s in found.values() if "office" in s.data.source
    }
    assert pairs == {((a,), (b,)) for a in offices for b in offices if a != b}
    for name, s in found.items():
        m = s.method
        assert isinstance(m, EncryptedMMD | CentralMMD)
        assert s.model.embedding == 64
        assert m.target_dropout == name.endswith(", none"), "none does not align"
        assert bool(m.target_entropy) == name.endswith("information")
        linear = m.compare.kernel == "taylor" and m.compare.degree == 1
        assert linear == ("linear" in name)
        assert isinstance(m, CentralMMD) == (", central" in name)
        if isinstance(m, CentralMMD):
            assert m.exact == (not name.endswith(("linear", "fitted")))
            assert bool(m.weight) != name.endswith("lambda 0")
        elif not name.endswith("none"):
            assert m.scheme == ("paillier" if linear else "ckks")
    for table in plan.tables:
        assert ("mean, encrypted, linear", "mean, none") in table.compare
        assert all(set(rows) <= set(found) for rows in table.means.values())
    with pytest.raises(UsageError, match="trains its own networks"):
        find("encrypted-mmd", "real", "model.onnx")
