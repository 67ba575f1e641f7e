"""The benches of FedFace and FedFR-joint: valid rows, and the sets of others (LFW, IJB) as they are laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.test_ijb import ijbc_files
from torch import nn

from visard.data.faces import FaceSet
from visard.data.sources.importing import import_faces
from visard.evaluation.benchmarks import pairs_of
from visard.inference.model import embed, evaluate, load_model
from visard.learning.positive import SpreadOut, off_diagonal, spread_out
from visard.methods.fedavg import FedAvg
from visard.methods.fedface import FedFace
from visard.models import build
from visard.models.files import save_model
from visard.studies import find
from visard.studies.execute import jobs_of
from visard.studies.fedface import PAIRS, matched, turned_pairs
from visard.studies.fedfr_joint import IJBC
from visard.studies.plan import SCALES
from visard.studies.results import NotHere, metric_of


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_is_a_valid_run(scale: str, tmp_path: Path) -> None:
    plan = find("fedface", scale)
    methods = {job.row.name: job.settings().method for job in jobs_of(plan, [0], tmp_path)}
    for head, expected in {"common head": (True, False), "masked common head": (True, True)}.items():
        shared = [m for name, m in methods.items() if name.startswith(f"FedAvg, {head}")]
        assert len(shared) == len([n for n in methods if n.startswith("FedAvg")]) / 3
        for method in shared:
            assert isinstance(method, FedAvg)
            assert (method.share_head, method.mask_absent) == expected


@pytest.mark.parametrize("scale", SCALES)
def test_personal_baselines_have_the_data_and_work_of_fedfr_joint(scale: str, tmp_path: Path) -> None:
    found = {job.row.name: job.settings() for job in jobs_of(find("fedfr-joint", scale), [0], tmp_path)}
    joint = found["+ branch"]
    for name in ("Ditto", "FedRep", "FedBABU"):
        own: Any = found[name]
        assert own.method.name == name.lower()
        assert own.model.weights == joint.model.weights
        assert (own.data.source, own.data.size) == (joint.data.source, joint.data.size)
        assert own.partition == joint.partition
        assert own.evaluation == joint.evaluation
        work: Any = joint.method
        assert own.method.rounds == work.rounds
        mine, theirs = own.method.training, work.training
        assert (mine.lr, mine.batch_size, mine.amount) == (theirs.lr, theirs.batch_size, theirs.amount)
        assert (own.method.head.scale, own.method.head.margin) == (work.head.scale, work.head.margin)


def test_at_paper_scale_no_step_of_fedfr_joint_is_clipped(tmp_path: Path) -> None:
    """At the paper's weights every step would be; and the bias of the branch starts from 0, as in the released code."""
    methods: list[Any] = [job.settings().method for job in jobs_of(find("fedfr-joint", "paper"), [0], tmp_path)]
    joint = [m for m in methods if m.name == "fedfr-joint"]
    assert len(joint) > 10
    assert {m.training.clip for m in joint} == {0}
    assert {m.branch.bias_start for m in joint} == {"zero"}


def test_the_papers_spread_out_separates(tmp_path: Path) -> None:
    """lambda = 10 of the mean over all pairs; of the mean for each class one step threw 1,000 vectors together."""
    job = next(j for j in jobs_of(find("fedface", "paper"), [0], tmp_path) if j.row.name == "FedFace")
    method = job.settings().method
    assert isinstance(method, FedFace)
    assert method.spread.weight == 10
    torch.manual_seed(0)
    W = nn.functional.normalize(torch.randn(300, 32) + 0.35 * torch.ones(32))
    before, after = off_diagonal(W)[0], W
    for _ in range(50):
        after = spread_out(after, method.spread)
    assert off_diagonal(after)[0] < 0.8 * before
    assert off_diagonal(spread_out(W, SpreadOut(weight=10.0)))[0] > before


def model_in(folder: Path, seed: int, size: int = 32) -> Path:
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    spec = {"model": "tiny", "embedding": "16", "size": str(size)}
    save_model(folder / "model.safetensors", build("tiny", embedding=16, size=size).state_dict(), spec)
    return folder


def lfw_set(tmp_path: Path, out: Path) -> FaceSet:
    """Twelve people with three pictures, two folds of ten pairs."""
    rng, root = np.random.default_rng(0), tmp_path / "lfw"
    for person in range(12):
        (root / f"P_{person}").mkdir(parents=True)
        colour = rng.integers(110, 140, 3)
        for k in range(3):
            picture = np.clip(colour + rng.integers(-90, 90, (4, 4, 3)).repeat(8, 0).repeat(8, 1), 0, 255).astype(
                np.uint8
            )
            Image.fromarray(picture).save(root / f"P_{person}" / f"P_{person}_{k + 1:04d}.jpg")
    lines = ["2\t5"]
    for fold in range(2):
        lines += [f"P_{5 * fold + k}\t1\t{2 + fold}" for k in range(5)]
        lines += [f"P_{5 * fold + k}\t1\tP_{(5 * fold + k + 1) % 12}\t2" for k in range(5)]
    (root / "pairs.txt").write_text("\n".join(lines) + "\n")
    return FaceSet.open(import_faces("lfw", root, out, size=32, align="none").path)


def test_figure_5_counts_pairs_that_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISARD_DATA", str(tmp_path / "data"))
    before, after = (model_in(tmp_path / "runs" / n / "seed-0", i) for i, n in enumerate(("pretrain", "FedFace")))
    with pytest.raises(NotHere, match="no face set lfw"):
        metric_of(PAIRS[0], after)
    faces = lfw_set(tmp_path, tmp_path / "data" / "lfw")
    expected = []
    for folder in (before, after):
        model = load_model(folder / "model.safetensors")
        chosen = evaluate(model, faces, protocols=("lfw",)).to_dict()["lfw"]["fold_distance"]
        f = embed(model, faces, flip=True).astype(np.float64)
        f /= np.linalg.norm(f, axis=1, keepdims=True)
        pairs = pairs_of(faces, None)
        rows = zip(pairs.first, pairs.second, pairs.same, pairs.fold - pairs.fold.min(), strict=True)
        expected.append([((f[a] - f[b]) ** 2).sum() < chosen[k] for a, b, same, k in rows if same])
        found = matched(folder)
        assert found is not None
        assert found.tolist() == expected[-1]
    gained = np.mean([b and not a for a, b in zip(*expected, strict=True)])
    lost = np.mean([a and not b for a, b in zip(*expected, strict=True)])
    assert (metric_of(PAIRS[0], after), metric_of(PAIRS[1], after)) == (gained, lost)
    assert gained + lost > 0


def test_pairs_that_turned_by_a_slow_loop() -> None:
    """Each network has the threshold that lets one pair of strangers in a hundred pass."""
    rng = np.random.default_rng(3)
    identity = np.repeat(np.arange(30), 4)
    centre = rng.normal(size=(30, 8)).repeat(4, 0)
    features = [(centre + noise * rng.normal(size=centre.shape)).astype(np.float32) for noise in (0.8, 0.6)]
    accepted = []
    for x in features:
        strangers, own = [], []
        for a in range(len(x)):
            for b in range(a):
                cosine = float(x[a] @ x[b]) / float(np.linalg.norm(x[a]) * np.linalg.norm(x[b]))
                (own if identity[a] == identity[b] else strangers).append(cosine)
        bar = sorted(strangers, reverse=True)[len(strangers) // 100]  # the first that must not pass
        accepted.append([cosine > bar for cosine in own])
    gained = np.mean([b and not a for a, b in zip(*accepted, strict=True)])
    lost = np.mean([a and not b for a, b in zip(*accepted, strict=True)])
    assert gained > lost > 0
    found = turned_pairs(features[0], features[1], identity, 0.01)
    assert (found["gained"], found["lost"]) == pytest.approx((gained, lost))


def test_ijbc_stands_beside_the_papers_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISARD_DATA", str(tmp_path / "data"))
    run = model_in(tmp_path / "run", 0, 112)
    for column in IJBC:
        with pytest.raises(NotHere, match="no face set ijbc"):
            metric_of(column, run)
    files = ijbc_files(tmp_path / "IJBC")
    probes = files / "meta" / "ijbc_1N_probe_mixed.csv"
    probes.write_text(probes.read_text() + "4,300,img/5.jpg,3\n")  # somebody of the second gallery too
    faces = FaceSet.open(import_faces("ijb", files, tmp_path / "data" / "ijbc").path)
    result = evaluate(load_model(run / "model.safetensors"), faces, protocols=("ijb",)).to_dict()["ijb"]["mean"]
    names = ("tar@far=1e-05", "tar@far=0.0001", "tpir@fpir=0.01", "tpir@fpir=0.1")
    assert [metric_of(c, run) for c in IJBC] == [result[name] for name in names]
    (table,) = (t for t in find("fedfr-joint", "paper").tables if "IJB-C" in t.title)
    assert table.paper["FedAvg"]["TAR @ FAR 1e-05"] == 73.79
