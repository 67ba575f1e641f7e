"""Benches from a network that the user gives: every row is a valid run, its last part trains, and tables come out."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import early_trunk
from tests.e2e.test_bench import visard
from tests.toys import noise_faces, toy_world

from visard.config import load
from visard.errors import UsageError
from visard.methods.baselines import Pretrain
from visard.methods.fedfr_da import FedFRDA
from visard.methods.negatives import NegativeSettings
from visard.models import build
from visard.models.files import save_model
from visard.studies import FROM_A_NETWORK, find, scales
from visard.studies.execute import jobs_of
from visard.studies.fedfr_da import IN_DEEPER
from visard.studies.hf_maml import STATES


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """A small made-up network."""
    torch.manual_seed(0)
    file = tmp_path / "first.safetensors"
    spec = {"model": "tiny", "embedding": "16", "size": "32"}
    save_model(file, build("tiny", embedding=16, size=32).state_dict(), spec)
    return file


def test_five_seeds_unless_others_are_named(network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", "fedfr-da", "--only", "S Source-Only", "--list")
    seeds = []
    for more in (("--scale", "real", "--model", str(network)), ("--scale", "smoke")):
        assert visard(*words, *more) == 0
        found = [re.findall(r" seed=(\d+)", line) for line in capsys.readouterr().out.splitlines()]
        seeds.append([int(*one) for one in found])
    assert seeds == [[0, 1, 2, 3, 4], [0, 1, 2]]


@pytest.mark.parametrize("name", FROM_A_NETWORK)
def test_every_row_is_a_valid_run_of_a_part_of_the_network(name: str, network: Path, tmp_path: Path) -> None:
    plan = find(name, "real", network)
    begun = []
    for job in jobs_of(plan, [0], tmp_path / "runs"):
        s = job.settings()
        assert s.model.is_cut, job.row.name
        assert s.model.cache == "fp16"
        assert s.model.frozen_norm is None, "batch norm keeps the statistics of the network that was given"
        assert s.frozen_norm
        assert s.model.weights is not None
        if s.model.weights == str(network):
            begun.append(job.row.name)
        method: Any = s.method
        assert not method.training.augment.flip, "no mirrored activations are kept"
    expected = {
        "fedfr-da": [
            "S pre-trained", "S Source-Only", "Target-Only", "L pre-trained", "L Source-Only", "L Source-Only, deeper",
        ],
        "hf-maml": ["start"],
        "fedfr-joint": ["pretrain"],
        "fedface": ["pretrain", *(row.name for row in plan.rows if row.name.startswith("FedAvg"))],
    }  # fmt: skip
    assert begun == expected[name], "all others start from what these made of it"


def test_rates_of_class_vectors_and_steps_of_adaptation(network: Path, tmp_path: Path) -> None:
    """What shows with a network that recognises faces alone: FedFace's eta of w, and HF-MAML's alpha."""
    found = {j.row.name: j.settings().method for j in jobs_of(find("fedface", "real", network), [0], tmp_path)}
    for name, init in (("FedFace", "mean"), ("random trainable", "random")):
        method: Any = found[f"{name}, rate of class vectors 0.001"]
        assert (method.init, method.vectors_lr, method.training.lr) == (init, 0.001, found[name].training.lr)  # type: ignore[attr-defined]
        assert found[name].vectors_lr == 0.3  # type: ignore[attr-defined]
    meta = {j.row.name: j.settings().method for j in jobs_of(find("hf-maml", "real", network), [0], tmp_path)}
    for alpha in (0.01, 0.1, 0.5):
        probed = "equal HF-MAML local" if alpha == 0.01 else f"equal HF-MAML local, alpha {alpha:g}"
        for name, order in ((probed, "hessian-free"), (f"equal HF-MAML local, exact, alpha {alpha:g}", "exact")):
            training: Any = meta[name].training  # type: ignore[attr-defined]
            assert (training.alpha, training.order, training.delta) == (alpha, order, 0.001), name


@pytest.mark.parametrize("batches", [5, 20])
def test_other_lengths_of_tuning_need_no_mirrored_pictures(network: Path, tmp_path: Path, batches: int) -> None:
    """Of the network that all start from too: mirrored pictures would double what the frozen part costs."""
    plan = find("hf-maml", "real", network)
    for job in jobs_of(plan, [0], tmp_path, sets=[f"evaluation.tuning.batches={batches}"]):
        tuning = job.settings().evaluation.tuning
        assert (tuning.batches, tuning.flip) == (batches, False), job.row.name


@pytest.mark.parametrize("row", early_trunk.ROWS)
def test_the_early_trunk_tunes_at_other_lengths_and_changes_nothing_else(
    row: str, network: Path, tmp_path: Path
) -> None:
    found = []
    for batches in (early_trunk.BATCHES, 20):
        preset, overrides = early_trunk.settings_of(row, 3, network, "celeba", tmp_path, batches)
        found.append(load(preset, overrides))
    usual, other = (s.evaluation.tuning for s in found)
    assert (usual.batches, other.batches) == (50, 20)
    assert found[0].model_copy(update={"evaluation": found[1].evaluation}) == found[1]
    assert replace(usual, batches=20) == other
    assert (found[1].model.weights, found[1].seed) == (str(network), 3)


def test_tables_of_the_paper_and_a_grid_of_lambda(network: Path, tmp_path: Path) -> None:
    plan = find("fedfr-da", "real", network)
    titles = [t.title for t in plan.tables]
    assert {"Table 2: all methods, S", "Table 3: all methods, L", "DCL over lambda, L"} <= set(titles)
    methods = {job.row.name: job.settings().method for job in jobs_of(plan, [0], tmp_path)}
    swept = [methods[f"L lambda = {x:g}"] for x in (0.1, 1.0, 10.0)]
    assert [m.dcl for m in swept if isinstance(m, FedFRDA)] == [0.1, 1.0, 10.0]
    joint = find("fedfr-joint", "real", network)
    for lr in scales("fedfr_joint")["real"]["rates"]:
        (table,) = (t for t in joint.tables if t.title == f"Table 1, generic, learning rate {lr:g}")
        terms: dict[str, Any] = {
            j.row.name: j.settings().method for j in jobs_of(joint, [0], tmp_path, only=table.rows[1:])
        }
        used = {
            name.partition(",")[0]: (m.training.lr, m.public.used, m.contrast.weight > 0, m.branch.weight > 0)
            for name, m in terms.items()
            if name in table.rows
        }
        assert used == {
            "FedAvg": (lr, False, False, False), "FedAvg + contrastive": (lr, False, True, False),
            "+ hard negatives": (lr, True, False, False), "+ contrastive": (lr, True, True, False),
        }  # fmt: skip
    assert [t.title for t in joint.tables][:2] == [
        "Table 1, generic: people not seen in training", "Table 1 as printed, generic: IJB-C",
    ]  # fmt: skip


def test_every_baseline_has_a_rate_of_its_own(network: Path, tmp_path: Path) -> None:
    """Chosen on other seeds than the tables'; rows that differ by labels, lambda, E or K alone share that of FL."""
    methods: dict[str, Any] = {
        j.row.name: j.settings().method for j in jobs_of(find("fedfr-da", "real", network), [0], tmp_path)
    }
    rates = {name: methods[f"L {name}"].training.lr for name in ("FL", "Fine-tune", "DAN", "DANN", "Merge")}
    assert rates == {"FL": 0.02, "Fine-tune": 0.001, "DAN": 0.005, "DANN": 0.0003, "Merge": 0.02}
    for name in ("FedFR-DA", "K-means", "lambda = 10", "E = 40", "K = 1", "d = stable"):
        assert methods[f"L {name}"].training.lr == rates["FL"], name
    assert methods["L d = stable"].clustering.d == "stable"
    assert methods["L all three"].clustering.min_quality == 0.8


def test_the_cosface_branch_has_a_weight_of_its_own(network: Path, tmp_path: Path) -> None:
    methods: dict[str, Any] = {
        j.row.name: j.settings().method for j in jobs_of(find("fedfr-joint", "real", network), [0], tmp_path)
    }
    own, ours = methods["branch CosFace"], methods["+ branch"]
    assert (own.branch.kind, own.branch.weight) == ("cosface", 0.03)
    assert (ours.branch.kind, ours.branch.weight) == ("bce", 10.0)
    assert replace(own, branch=ours.branch, personalise=ours.personalise) == ours, "nothing else differs"


def test_personal_rows_with_the_clients_own_pictures_alone(network: Path, tmp_path: Path) -> None:
    """The branch without public pictures, and fine-tuning after FedAvg, beside Ditto, FedRep and FedBABU."""
    plan = find("fedfr-joint", "real", network)
    rows = {j.row.name: j.settings() for j in jobs_of(plan, [0], tmp_path)}
    full: Any = rows["+ branch"].method
    branch: Any = rows["FedAvg + branch"].method
    assert (branch.public.used, branch.contrast.weight, branch.branch) == (False, 0, full.branch)
    like = replace(branch, public=full.public, contrast=full.contrast, personalise=full.personalise)
    assert like == full, "nothing else differs"
    tuned: Any = rows["FedAvg, fine-tune"].method
    assert (tuned.rounds, tuned.personalise.stage, tuned.public.used, tuned.branch.weight) == (0, "finetune", False, 0)
    assert Path(str(rows["FedAvg, fine-tune"].model.weights)).parent.parent.name == "FedAvg"
    kept: Any = rows["KD, class vectors kept"].method
    assert (kept.rounds, kept.personalise.vectors) == (full.rounds, "kept")
    assert replace(kept, rounds=0) == rows["KD"].method
    rates = {name: rows[name].method.training.lr for name in ("pooled", "Ditto", "FedRep", "FedBABU")}  # type: ignore[attr-defined]
    assert rates == {"pooled": 0.01, "Ditto": 0.2, "FedRep": 0.2, "FedBABU": 0.001}, "chosen on other seeds"
    (table,) = (t for t in plan.tables if t.title.startswith("Table 2"))
    for other in ("FedAvg, fine-tune", "Ditto", "FedRep", "FedBABU"):
        assert {("+ branch", other), ("FedAvg + branch", other)} <= set(table.compare)


def test_figures_of_fedfr_joint_and_fedface_are_tables_too(network: Path) -> None:
    """So that they have intervals."""
    joint = {t.title: t for t in find("fedfr-joint", "real", network).tables}
    assert joint["Figure 3 in numbers"].compare == tuple(
        (f"threshold {t:g}", "+ hard negatives") for t in (0.2, 0.3, 0.5)
    )
    assert ("FedFR, 5 each", "FedFace, 5 each") in joint["Figure 4 in numbers"].compare
    (fedface,) = (t for t in find("fedface", "real", network).tables if t.title == "Figure 4 in numbers")
    assert ("FedAvg, common head, 300 clients", "FedAvg, common head, 1 client") in fedface.compare
    assert len(fedface.compare) == 3 * 4


def test_negatives_differ_from_fl_in_negatives_alone(network: Path, tmp_path: Path) -> None:
    rows = {j.row.name: j.settings() for j in jobs_of(find("fedfr-da", "real", network), [0], tmp_path)}
    kinds: set[str] = set()
    for name, s in rows.items():
        method: Any = s.method
        if not name.startswith("L FL, negatives") or name.endswith("deeper"):
            continue
        kinds.add(method.negatives)
        assert replace(method, negatives="none", negatives_by=NegativeSettings()) == rows["L FL"].method
        assert s.partition == rows["L FL"].partition
        public = [one.path for one in s.data.sets if one.role == "public"]
        assert public == (["celeba-public"] if method.negatives == "public" else []), name
    assert kinds == {"class_vectors", "corrected", "noisy", "public"}
    once: Any = rows["L FL, negatives shown once"].method
    assert once.negatives_by.noise * 2 < 1e-5, "a row of length 1 is shown as it is, as with noisy once in a run"
    (table,) = (t for t in find("fedfr-da", "real", network).tables if t.title == "Negatives from other clients, L")
    assert {("L FL, negatives public", other) for other in ("L FL", "L Fine-tune")} <= set(table.compare)


def test_deeper_rows_start_from_one_another(network: Path, tmp_path: Path) -> None:
    """Nothing of the last layer's rows is in them, and all of a table have one number of target pictures."""
    rows = {j.row.name: j.settings() for j in jobs_of(find("fedfr-da", "real", network), [0], tmp_path)}
    deep: dict[str, Any] = {name: s for name, s in rows.items() if name.endswith(", deeper")}
    assert set(deep) == {f"L {name}, deeper" for name in IN_DEEPER}
    (cut,) = {s.model.train for s in deep.values()}
    assert cut != rows["L FL"].model.train
    first = deep.pop("L Source-Only, deeper")
    assert first.model.weights == str(network)
    assert {Path(s.model.weights).parent.parent.name for s in deep.values()} == {"L Source-Only, deeper"}
    fl, pooled = deep["L FL, deeper"], deep["L Fine-tune, deeper"].method
    assert fl.method.rounds * fl.method.training.amount * 4 == pooled.rounds * pooled.training.amount
    assert fl.partition == rows["L FL"].partition, "the same people at the same clients"


def test_what_does_not_go_together_is_one_line(network: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--scale real and --model FILE"):
        find("fedfr-da", "real")
    with pytest.raises(UsageError, match="--scale real and --model FILE"):
        find("fedfr-da", "smoke", network)
    with pytest.raises(
        UsageError, match="bench baselines does not have it; fedfr-da, hf-maml, fedfr-joint, fedface, encrypted-mmd do"
    ):
        find("baselines", "real", network)
    with pytest.raises(UsageError, match="there is no such file"):
        find("fedfr-da", "real", tmp_path / "nowhere.onnx")
    with pytest.raises(UsageError, match=r"method\.rounds = 0 tests the network of model\.weights"):
        Pretrain(rounds=0).start(toy_world(tmp_path).setup())


SMALL = ("partition.min_images=2", "partition.client_images=1", "partition.test_identities=3", "evaluation.pairs=60")
SHORT = ("method.training.batch_size=8", "method.training.amount=2")


def sets(*changes: str) -> list[str]:
    return [part for change in (*SMALL, *changes) for part in ("--set", change)]


def test_fedfr_da_from_a_made_up_network(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows and what they need, from two made-up populations; the same command again keeps everything."""
    monkeypatch.setattr(sys, "argv", [])
    for variable, folder in (("VISARD_DATA", "data"), ("VISARD_CACHE", "cache")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    noise_faces(tmp_path / "data" / "celeba", identities=14, seed=1)
    noise_faces(tmp_path / "data" / "population", identities=12, seed=2)
    words = ["bench", "fedfr-da", "--scale", "real", "--model", str(network), "--seeds", "0", "--out"]
    words += [str(tmp_path / "b")]
    words += [
        "--only",
        "S pre-trained",
        "--only",
        "S FL",
        *sets(*SHORT, "partition.source_identities=8", "partition.clients=2"),
    ]
    assert visard(*words) == 0, capsys.readouterr().err
    read = json.loads((tmp_path / "b" / "results.json").read_text())
    assert "--model first.safetensors" in read["command"]
    rows = {run["row"] for run in read["runs"]}
    assert rows == {"S pre-trained", "S Source-Only", "S FL"}
    runs = tmp_path / "b" / "runs"
    given = json.loads((runs / "S pre-trained" / "seed-0" / "metrics.json").read_text())
    trained = json.loads((runs / "S Source-Only" / "seed-0" / "metrics.json").read_text())
    assert trained["before"]["generic"]["population"] == given["generic"]["population"], "the network as it came"
    assert trained["generic"]["population"] != given["generic"]["population"]
    cell = read["tables"][0]["cells"]["S pre-trained"]["target TAR @ FAR 0.1"]["values"]["0"]
    assert cell == given["generic"]["population"]["verification"]["tar"][0]["tar"]
    capsys.readouterr()
    assert visard(*words) == 0
    assert capsys.readouterr().out.count(": kept") == 3


def test_fedfr_joint_from_a_made_up_network(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    for variable, folder in (("VISARD_DATA", "data"), ("VISARD_CACHE", "cache")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    noise_faces(tmp_path / "data" / "celeba", identities=40, images=12, seed=1)  # FAR 0.001 needs pairs
    few = sets(*SHORT, "partition.public_identities=6", "partition.clients=2", "partition.identities=24")
    few += ["--set", "method.rounds=1"]
    words = ["bench", "fedfr-joint", "--scale", "real", "--model", str(network), "--seeds", "0"]
    words += ["--out", str(tmp_path / "b")]
    assert visard(*words, "--only", "+ branch", "--only", "Ditto", *few) == 0, capsys.readouterr().err
    read = json.loads((tmp_path / "b" / "results.json").read_text())
    assert {run["row"] for run in read["runs"]} == {"pretrain", "+ branch", "Ditto"}
    (second,) = (t for t in read["tables"] if t["title"].startswith("Table 2"))
    assert set(second["cells"]) == {"+ branch", "Ditto"}


def test_fedface_from_a_made_up_network(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figure 5 on unseen people: what a row gained less what it lost is how its TAR changed."""
    monkeypatch.setattr(sys, "argv", [])
    for variable, folder in (("VISARD_DATA", "data"), ("VISARD_CACHE", "cache")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    noise_faces(tmp_path / "data" / "celeba", identities=40, images=10, seed=1)
    few = sets("partition.public_identities=6", "partition.test_identities=20", "method.rounds=2")
    few += ["--set", "partition.clients=5", "--set", "partition.identities=5"]
    words = ["bench", "fedface", "--scale", "real", "--model", str(network), "--seeds", "0"]
    words += ["--out", str(tmp_path / "b"), "--only", "random fixed", *few]
    assert visard(*words) == 0, capsys.readouterr().err
    read = json.loads((tmp_path / "b" / "results.json").read_text())
    tables = {t["title"].partition(",")[0].partition(":")[0]: t["cells"] for t in read["tables"]}
    tar = {
        row: tables["Table 1 on people not seen in training"][row]["TAR @ FAR 0.01"]["values"]["0"]
        for row in ("pretrain", "random fixed")
    }
    turned = tables["Figure 5 on people not seen in training"]["random fixed"]
    gained, lost = (
        turned[f"{when} @ FAR 0.01"]["values"]["0"]
        for when in ("missed before, matched now", "matched before, missed now")
    )
    assert gained > 0
    assert gained - lost == pytest.approx(tar["random fixed"] - tar["pretrain"], abs=0.002)


def test_hf_maml_from_a_made_up_network(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The network as it came is a row, tested on the same clients, and no activation of a mirror image is computed."""
    monkeypatch.setattr(sys, "argv", [])
    for variable, folder in (("VISARD_DATA", "data"), ("VISARD_CACHE", "cache")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    noise_faces(tmp_path / "data" / "celeba", identities=30, images=10, seed=1)
    few = sets(
        "partition.public_identities=6", "partition.clients=4", "partition.hold_out=1", "partition.identities=16"
    )
    few += ["--set", "evaluation.tuning.pairs=40", "--set", "evaluation.tuning.draws=1"]
    words = ["bench", "hf-maml", "--scale", "real", "--model", str(network), "--seeds", "0"]
    words += ["--out", str(tmp_path / "b"), "--only", "equal not trained", *few]
    assert visard(*words) == 0, capsys.readouterr().err
    read = json.loads((tmp_path / "b" / "results.json").read_text())
    table = read["tables"][0]
    cells = table["cells"]["equal not trained"]
    assert all(cells[f"{who}, {state}"]["values"]["0"] is not None for who in ("trained", "later") for state in STATES)
    assert cells["trained, untuned"]["paper"] is None, "the paper's are at another FAR"
    run = json.loads((tmp_path / "b" / "runs" / "equal not trained" / "seed-0" / "metrics.json").read_text())
    assert run["generic"] == run["before"]["generic"], "nothing was trained"
    done = [np.fromfile(file, np.uint8).sum() for file in (tmp_path / "cache" / "activations").glob("*/plain.done")]
    assert sum(done) > 0
    assert not any(np.fromfile(f, np.uint8).any() for f in (tmp_path / "cache" / "activations").glob("*/mirror.done"))
