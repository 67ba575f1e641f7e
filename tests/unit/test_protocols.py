"""Protocols on face sets: what the glue hands to the arrays' functions, features on disk, and wrong use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.pictures import encode, pixels

import visard
from visard.cli.models import ijb_rows, rfw_rows
from visard.config import EvaluationSettings
from visard.data.faces import FaceSet
from visard.data.pairs import load_galleries, load_pairs, load_template_pairs, load_templates
from visard.data.pictures import template
from visard.data.sources.bin import write_bin
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError
from visard.evaluation.benchmarks import by_group, lfw, rfw, squared_distances, ten_folds
from visard.evaluation.ijb import (
    Pooled,
    Switches,
    pool,
    search_galleries,
    search_legacy,
    template_scores,
    verify_templates,
)
from visard.inference.features import manifest_path, read_features, write_features
from visard.inference.model import FaceModel, open_data
from visard.models import build
from visard.models.inputs import Inputs

SIDE = 32
QUICK = EvaluationSettings(bootstrap=10, pairs=40)


@pytest.fixture(scope="module")
def model() -> FaceModel:
    torch.manual_seed(0)
    network = build("tiny_nobn", embedding=8, size=SIDE).eval()
    return FaceModel(network, Inputs(size=SIDE).to_spec() | {"model": "tiny_nobn", "embedding": "8"})


def person(number: int, picture: int) -> bytes:
    """A noisy picture in a person's colour and pattern."""
    base, noise = (x.astype(np.float64) for x in (pixels(number, SIDE), pixels(1000 + 50 * number + picture, SIDE)))
    return encode(np.clip(0.7 * base + 0.3 * noise, 0, 255).astype(np.uint8))


def write_pairs(path: Path, count: int, start: int = 0) -> None:
    """A .bin file with alternately a genuine and an impostor pair."""
    pictures = []
    for k in range(start, start + count):
        other = (k, 1) if k % 2 == 0 else (k + 500, 0)
        pictures += [person(k, 0), person(*other)]
    write_bin(path, pictures, [k % 2 == 0 for k in range(start, start + count)])


def test_lfw_of_a_bin(model: FaceModel, tmp_path: Path) -> None:
    write_pairs(tmp_path / "lfw.bin", 40)
    faces = FaceSet.open(import_faces("bin", tmp_path / "lfw.bin", tmp_path / "lfw", size=SIDE).path)
    found = visard.evaluate(model, faces, protocols=["lfw"], settings=QUICK).to_dict()["lfw"]
    pairs = load_pairs(faces)
    features = visard.embed(model, faces) + visard.embed(model, faces.pixels[:, :, ::-1].copy())
    expected = lfw(features, pairs.first, pairs.second, pairs.same, rates=QUICK.far)
    assert found["fold_accuracy"] == pytest.approx(expected.fold_accuracy)
    assert (found["pairs"], found["roc"]["genuine"]) == (40, 20)
    json.dumps(found, allow_nan=False)


def test_own_pairs(model: FaceModel, tmp_path: Path) -> None:
    write_pairs(tmp_path / "lfw.bin", 20)
    faces = FaceSet.open(import_faces("bin", tmp_path / "lfw.bin", tmp_path / "lfw", size=SIDE).path)
    listed = tmp_path / "mine.csv"
    lines = [f"{2 * k},{2 * k + 1},{int(k % 2 == 0)}" for k in range(20)]
    listed.write_text("row_a,row_b,same\n" + "\n".join(lines) + "\n")
    own = visard.evaluate(model, faces, protocols=["lfw", "verification"], settings=QUICK, pairs=listed)
    assert own.lfw.roc == visard.evaluate(model, faces, protocols=["lfw"], settings=QUICK).lfw.roc
    assert (own.verification.genuine, own.verification.impostors) == (10, 10)
    assert own.verification.intervals["eer"].unit == "pair"


def test_groups_of_a_folder_of_bins(model: FaceModel, tmp_path: Path) -> None:
    (tmp_path / "bins").mkdir()
    for k, race in enumerate(("African", "Asian", "Indian")):
        write_pairs(tmp_path / "bins" / f"{race}_test.bin", 20, 100 * k)
    faces = FaceSet.open(import_faces("rfw", tmp_path / "bins", tmp_path / "rfw", size=SIDE).path)
    found = visard.evaluate(model, faces, protocols=["rfw"], settings=QUICK).to_dict()["rfw"]
    assert list(found["groups"]) == ["African", "Asian", "Indian"]
    pairs = load_pairs(faces)
    features = visard.embed(model, faces, flip=True)
    expected = rfw(
        features, pairs.first, pairs.second, pairs.same, faces.domain[pairs.first], faces.domains, pairs.fold,
        fmr=QUICK.far,
    )  # fmt: skip
    assert found == expected.to_dict()
    rows = {name: (value, note) for name, value, note in rfw_rows(found)}
    assert rows["mean"][0] == f"{expected.mean:.4f}"
    assert rows["FMR Asian (all: 0.1)"][0] == f"{expected.shared[0].fmr['Asian']:.4f}"
    mixed = tmp_path / "mixed.csv"
    mixed.write_text("row_a,row_b,same\n0,45,0\n0,1,1\n")
    with pytest.raises(VisardError, match="pair 0 is of two domains"):
        visard.evaluate(model, faces, protocols=["rfw"], pairs=mixed)


@pytest.fixture(scope="module")
def ijbc(tmp_path_factory: pytest.TempPathFactory) -> FaceSet:
    """Ten people with three templates of two or three pictures each, in the files of IJB-C."""
    root = tmp_path_factory.mktemp("ijb") / "IJBC"
    (root / "loose_crop").mkdir(parents=True)
    (root / "meta").mkdir()
    numbers = " ".join(f"{v:.4f}" for v in template(SIDE).ravel())
    members, scores, subject = [], [], {}
    for t in range(30):
        subject[t] = t % 10
        for k in range(2 + t % 2):
            name = f"{t}-{k}.png"
            (root / "loose_crop" / name).write_bytes(person(t % 10, 10 * t + k))
            members.append(f"{name} {t} {k // 2}")
            scores.append(f"{name} {numbers} 0.{5 + k}")
    pairs = [(a, b, int(a % 10 == b % 10)) for a in range(30) for b in range(a + 1, 30)]
    files = {
        "ijbc_face_tid_mid.txt": members,
        "ijbc_name_5pts_score.txt": scores,
        "ijbc_template_pair_label.txt": [f"{a} {b} {s}" for a, b, s in pairs],
        "ijbc_1N_gallery_G1.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{t},{t}" for t in range(4))],
        "ijbc_1N_gallery_G2.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{t},{t}" for t in range(4, 8))],
        "ijbc_1N_probe_mixed.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{t},{subject[t]}" for t in range(10, 30))],
    }
    for name, lines in files.items():
        (root / "meta" / name).write_text("\n".join(lines) + "\n")
    return FaceSet.open(import_faces("ijb", root, root.parent / "set", size=SIDE).path)


@pytest.mark.parametrize("text", ["N1D1F1", "N0D1F0", "N1D0F1", "n0d0f0"])
def test_ijb_with_its_switches(text: str, ijbc: FaceSet, model: FaceModel) -> None:
    found = visard.evaluate(model, ijbc, protocols=["ijb"], switches=text).to_dict()["ijb"]
    on = Switches.parse(text)
    assert found["switches"] == {"N": on.N, "D": on.D, "F": on.F}
    t = load_templates(ijbc)
    features = visard.embed(model, ijbc, flip=text[-1] == "1")
    score = t.score if text[3] == "1" else None
    pooled = pool(features, t.template, t.media, row=t.row, score=score, keep_norm=text[1] == "1")
    pairs, search = load_template_pairs(ijbc), load_galleries(ijbc)
    roc = verify_templates(pooled, pairs.first, pairs.second, pairs.same)
    assert found["verification"] == [roc.to_dict()]
    galleries = {name: (g.template, g.subject) for name, g in search.galleries.items()}
    probes = (search.probes.template, search.probes.subject)
    assert found["identification"] == [search_galleries(pooled, galleries, probes).to_dict()]
    assert found["mean"]["tar@far=0.01"] == roc.tar[4].tar
    assert found["std"]["rank1"] is None  # one split
    legacy = search_legacy(pooled, galleries, probes)
    assert (legacy.gallery, legacy.probes, legacy.mated) == (8, 20, 16)
    rows = ijb_rows(found)
    assert ("rank1", f"{found['mean']['rank1']:.4f}", text.upper()) in rows
    assert ("tpir@fpir=0.1", f"{legacy.tpir[1].tpir:.4f}", "legacy_insightface") in rows
    json.dumps(found, allow_nan=False)


def test_switches() -> None:
    assert Switches.parse("N0") == Switches(N=False)
    for wrong in ("", "N2", "NDF", "N1N0", "X1"):
        with pytest.raises(UsageError, match="must look like N1D1F1"):
            Switches.parse(wrong)


def test_features_on_disk(ijbc: FaceSet, model: FaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visard.inference.model.AT_ONCE", 7)
    view, seen = ijbc.all(), []
    manifest = write_features(
        model, view, tmp_path / "f.npy", flip=True, progress=lambda done, total: seen.append(done)
    )
    assert seen[-1] == len(ijbc)
    assert manifest == json.loads((tmp_path / "f.json").read_text())
    assert manifest["identity"] == ijbc.identity.tolist()
    assert manifest["data"]["fingerprint"] == ijbc.fingerprint()
    assert manifest["model"]["fingerprint"] == model.fingerprint
    assert (manifest["rows"], manifest["dimensions"], manifest["normalisation"]) == (len(ijbc), 8, "none")
    features = read_features(tmp_path / "f.npy", view)
    assert features == pytest.approx(visard.embed(model, ijbc, flip=True), abs=1e-6)
    found, direct = (
        visard.evaluate(m, ijbc, protocols=["ijb"]).to_dict()["ijb"] for m in (np.asarray(features), model)
    )
    assert found["mean"] == pytest.approx(direct["mean"])
    write_features(model, view, tmp_path / "unit.npy", unit=True)
    unit = np.load(tmp_path / "unit.npy")
    assert np.linalg.norm(unit, axis=1) == pytest.approx(np.ones(len(unit)), abs=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.json", "f.npy", "unit.json", "unit.npy"]


def test_features_that_do_not_fit(ijbc: FaceSet, model: FaceModel, tmp_path: Path) -> None:
    path = tmp_path / "f.npy"
    write_features(model, ijbc.all(), path)
    write_pairs(tmp_path / "o.bin", 4)
    other = FaceSet.open(import_faces("bin", tmp_path / "o.bin", tmp_path / "other", size=SIDE).path)
    with pytest.raises(UsageError, match="holds features of set, not of other"):
        read_features(path, other.all())
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(VisardError, match="damaged or cut short"):
        read_features(path, ijbc.all())
    np.save(path, np.zeros((2, 8), np.float32))
    with pytest.raises(VisardError, match="does not fit its manifest"):
        read_features(path, ijbc.all())
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(VisardError, match="f.npy"):
        read_features(path, ijbc.all())
    manifest_path(path).write_text("[]")
    with pytest.raises(VisardError, match="is no manifest"):
        read_features(path, ijbc.all())
    with pytest.raises(UsageError, match="written as .npy"):
        write_features(model, ijbc.all(), tmp_path / "f.csv")


def test_wrong_use(ijbc: FaceSet, model: FaceModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'ijb'"):
        visard.evaluate(model, ijbc, protocols=["ijbb"])
    with pytest.raises(UsageError, match="carries no pairs"):
        visard.evaluate(model, ijbc, protocols=["lfw"])
    with pytest.raises(UsageError, match="not of views"):
        visard.evaluate(model, ijbc.all().take(np.arange(5)), protocols=["ijb"])
    with pytest.raises(UsageError, match="do not fit the"):
        visard.evaluate(np.zeros((3, 8), np.float32), ijbc)
    write_pairs(tmp_path / "o.bin", 4)
    plain = FaceSet.open(import_faces("bin", tmp_path / "o.bin", tmp_path / "plain", size=SIDE).path)
    with pytest.raises(UsageError, match="not imported as ijb"):
        visard.evaluate(model, plain, protocols=["ijb"])
    with pytest.raises(VisardError, match="at least 2 are needed"):
        visard.evaluate(model, plain, protocols=["rfw"])
    assert len(open_data(plain)) == 8


FEATURES = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
POOLED = Pooled(np.array([1, 3]), np.eye(2, 4, dtype=np.float32))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: squared_distances(FEATURES, [0], [6]), "pair 0 points outside"),
        (lambda: squared_distances(FEATURES, [0, 1], [1]), "2 first and 1 second"),
        (lambda: squared_distances(np.zeros((2, 3)), [0], [1]), "row 0 is all zeros"),
        (lambda: ten_folds([1.0] * 12, [1] * 12), "booleans"),
        (lambda: ten_folds([1.0] * 12, np.ones(12, bool)), "no impostor pairs"),
        (lambda: ten_folds([1.0] * 5, np.array([True, False] * 2 + [True])), "cannot fill ten folds"),
        (lambda: ten_folds([1.0] * 4, np.array([True, False] * 2), [1] * 4), "one fold"),
        (lambda: ten_folds([1.0] * 20, np.array([True, False] * 10), far=0.0), "not in"),
        (lambda: by_group([1.0] * 4, np.array([True, False, True, True]), [0, 0, 1, 1], "ab", [0, 1] * 2), "group b"),
        (lambda: pool(FEATURES, [0] * 6, [0] * 6, row=[0, 1, 2, 3, 4, 9]), "outside"),
        (lambda: pool(FEATURES, [0] * 6, [0] * 6, score=[1.0] * 5), "6 finite numbers"),
        (lambda: pool(np.full((2, 2), np.nan), [0, 1], [0, 0]), "row 0 is not finite"),
        (lambda: pool(np.array([[1.0, 0], [-1, 0], [1, 1]]), [4, 4, 5], [0, 1, 2]), "template 4 cancel"),
        (lambda: pool(np.array([[1.0, 0], [0, 0]]), [4, 5], [0, 1], keep_norm=False), "row 1 is all zeros"),
        (lambda: template_scores(POOLED, [1], [2]), "template 2 has no pictures"),
        (lambda: template_scores(POOLED, [1, 3], [3]), "pairs"),
        (lambda: verify_templates(POOLED, [1], [3], [1]), "booleans"),
        (lambda: search_galleries(POOLED, {}, ([1], [1])), "none given"),
        (lambda: search_legacy(POOLED, {"a": ([1], [7]), "b": ([3], [7])}, ([1], [7])), "several templates"),
        (lambda: search_legacy(POOLED, {"a": ([1], [7])}, ([3], [8])), "none shows an identity"),
    ],
)
def test_arrays_that_make_no_sense(call, says: str) -> None:
    with pytest.raises(VisardError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
