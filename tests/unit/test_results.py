"""Typed results: the same numbers as the plain ones, read back, shown; what is embedded, and what is said of doubts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.toys import noise_faces

import visard
from visard.data.faces import FaceSet
from visard.data.pairs import load_pairs
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError
from visard.evaluation.metrics import doubts
from visard.evaluation.results import Evaluated
from visard.inference import model as module
from visard.inference.features import read_vectors, write_features
from visard.inference.gallery import enrol_folder, features_of
from visard.inference.model import FaceModel, evaluate, load_model, open_pictures
from visard.models import build
from visard.models.files import save_model

SIDE = 32


@pytest.fixture
def model(tmp_path: Path) -> FaceModel:
    torch.manual_seed(0)
    weights = build("tiny", embedding=8, size=SIDE).state_dict()
    save_model(tmp_path / "m.safetensors", weights, {"model": "tiny", "embedding": "8", "size": str(SIDE)})
    return load_model(tmp_path / "m.safetensors")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six people with four pictures each, of which one is no picture."""
    rng = np.random.default_rng(0)
    for person in range(6):
        (tmp_path / "photos" / f"p{person}").mkdir(parents=True)
        for k in range(4):
            file = tmp_path / "photos" / f"p{person}" / f"p{person}_000{k + 1}.png"
            Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(file)
    (tmp_path / "photos" / "p2" / "p2_0003.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def test_results_are_typed_and_plain_ones_are_as_before(tmp_path: Path, model: FaceModel) -> None:
    faces = noise_faces(tmp_path / "faces", identities=12, images=5)
    found = evaluate(model, faces)
    assert found.verification is not None
    assert found.identification is not None
    record = found.to_dict()
    assert list(record) == ["verification", "identification"]
    assert list(record["verification"])[-3:] == ["intervals", "fold_pairs", "folds_disjoint"]
    assert record["verification"]["auc"] == found.verification.auc
    assert record["identification"]["rank"]["1"] == found.identification.rank[1]
    again = Evaluated.from_dict(record)
    assert again.to_dict() == record
    assert type(again.verification) is type(found.verification)
    assert again.identification is not None
    assert isinstance(again.identification.rank, dict)
    assert again.verification is not None
    assert again.verification.tar[0].far == found.verification.tar[0].far
    for damaged in ({"verification": {"auc": 0.5}}, {"identification": record["identification"] | {"rank": {"x": 1}}}):
        with pytest.raises(VisardError, match="this is no"):
            Evaluated.from_dict(damaged)
    shown = repr(found)
    assert shown.startswith("Evaluated\n  accuracy ")
    assert "tar@far=0.1" in shown


def test_only_pictures_of_pairs_are_embedded(
    tmp_path: Path, model: FaceModel, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten pairs over eight pictures: the others are not read, and their features matter to no figure."""
    faces = noise_faces(tmp_path / "faces", identities=12, images=5)
    rows = [(5 * p, 5 * p + 1, 1) for p in range(5)] + [(5 * p, 5 * p + 5, 0) for p in range(4)] + [(0, 20, 0)]
    listed = tmp_path / "pairs.csv"
    listed.write_text("row_a,row_b,same\n" + "".join(f"{a},{b},{s}\n" for a, b, s in rows))
    read: list[int] = []
    inner = module.embed_view

    def watched(network: object, view: object, **options: object) -> object:
        read.extend(view.index.tolist())  # type: ignore[attr-defined]
        return inner(network, view, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "embed_view", watched)
    heard: list[tuple[int, int]] = []
    found = evaluate(
        model, faces, protocols=("lfw", "verification"), pairs=listed, progress=lambda *said: heard.append(said)
    )
    needed = sorted({r for a, b, _ in rows for r in (a, b)})
    assert sorted(read) == sorted(2 * needed)  # with and without mirror images
    assert heard[-1] == (2 * len(needed), 2 * len(needed))
    monkeypatch.undo()
    whole = evaluate(module.embed(model, faces), faces, protocols=("verification",), pairs=listed)
    assert found.verification is not None
    assert whole.verification is not None
    assert found.verification.auc == whole.verification.auc
    assert found.verification.accuracy == whole.verification.accuracy


def test_pairs_that_skipped_pictures_cost_are_named(tmp_path: Path, model: FaceModel, photos: Path) -> None:
    genuine = [f"p{k}\t1\t2" for k in range(6)] + ["p2\t1\t3", "p2\t3\t4"]
    impostors = [f"p{k}\t1\tp{(k + 1) % 6}\t2" for k in range(6)] + ["p0\t1\tp2\t3", "p5\t9\tp0\t1"]
    (tmp_path / "pairs.txt").write_text("1\t8\n" + "\n".join([*genuine, *impostors]) + "\n")
    set_ = import_faces("lfw", photos, tmp_path / "set", size=SIDE, align="none", pairs=tmp_path / "pairs.txt").path
    faces = FaceSet.open(set_)
    pairs = load_pairs(faces)
    assert (len(pairs), pairs.lost_count) == (12, 4)
    assert pairs.lost[0] == ("p2/p2_0001.png", "p2/p2_0003.png")
    assert pairs.lost[-1] == ("a picture that is not there", "p0/p0_0001.png")
    own = tmp_path / "own.csv"
    lines = [f"p{k}/p{k}_0001.png,p{k}/p{k}_0002.png,1\np{k}/p{k}_0001.png,p{(k + 1) % 6}/p{(k + 1) % 6}_0001.png,0"
             for k in range(6)]  # fmt: skip
    own.write_text("\n".join(["file_a,file_b,same", *lines, "p2/p2_0003.png,p2/p2_0004.png,1"]) + "\n")
    found = evaluate(model, faces, protocols=("lfw",), pairs=own)
    assert (found.left.pictures, found.left.pairs) == (1, 1)
    assert found.left.files == (("p2/p2_0003.png", "p2/p2_0004.png"),)
    assert "1 pair could not be compared (p2/p2_0003.png with p2/p2_0004.png)" in found.warnings[-1]
    assert found.to_dict()["left"]["pairs"] == 1
    own.write_text("file_a,file_b,same\np2/p2_0003.png,p2/p2_0009.png,1\n")
    with pytest.raises(UsageError, match=r"has no picture p2/p2_0003\.png"):
        evaluate(model, faces, protocols=("lfw",), pairs=own)


def test_photographs_arrays_and_sets_are_embedded_alike(tmp_path: Path, model: FaceModel, photos: Path) -> None:
    folder = model.embed(photos, align="none")
    assert (len(folder), len(folder.files)) == (23, 23)
    assert folder.skipped == (("p2/p2_0003.png", "not a picture that can be read"),)
    assert "1 pictures skipped" in repr(folder)
    files = [photos / "p1/p1_0002.png", photos / "p0/p0_0001.png"]
    two = model.embed(files, align="none")
    assert two.files == tuple(map(str, files))
    named = [folder.files.index(f"{file.parent.name}/{file.name}") for file in files]
    np.testing.assert_allclose(two.features, folder.features[named], atol=1e-5)
    odd = tmp_path / "odd"  # a name that does not end like a picture's, and the same file twice
    odd.write_bytes(files[0].read_bytes())
    np.testing.assert_allclose(features_of([odd, odd], model, align="none"), two.features[[0, 0]], atol=1e-5)
    faces = FaceSet.open(import_faces("folder", photos, tmp_path / "set", size=SIDE, align="none").path)
    np.testing.assert_allclose(model.embed(faces).features, folder.features, atol=1e-5)
    np.save(tmp_path / "squares.npy", faces.pixels)
    for source in (faces.pixels, tmp_path / "squares.npy"):
        np.testing.assert_allclose(model.embed(source).features, folder.features, atol=1e-5)
    assert isinstance(open_pictures([str(faces.path)]), type(faces.all()))


def test_features_of_photographs_on_disk(tmp_path: Path, model: FaceModel, photos: Path) -> None:
    manifest = write_features(model, photos, tmp_path / "f.npy", align="none", unit=True)
    assert (manifest["rows"], manifest["dimensions"]) == np.load(tmp_path / "f.npy").shape == (23, 8)
    assert manifest["data"]["skipped"] == [["p2/p2_0003.png", "not a picture that can be read"]]
    whole = model.embed(photos, align="none")
    np.testing.assert_allclose(manifest["norm"], whole.norm, atol=1e-3)
    np.testing.assert_allclose(whole.norm, np.sqrt((whole.features.astype(float) ** 2).sum(1)), rtol=1e-5)
    limit = float(np.sort(whole.norm)[3]) - 1e-4
    gallery, skipped = enrol_folder(photos, model, align="none", min_norm=limit)
    assert int(gallery.pictures.sum()) == 20
    assert sum("its feature has length" in reason for _, reason in skipped) == 3
    with pytest.raises(UsageError, match="not one of 24 pictures could be used"):
        enrol_folder(photos, model, align="none", min_norm=1e9)
    vectors = read_vectors(tmp_path / "f.npy")
    assert vectors.identity is None
    assert vectors.files == model.embed(photos, align="none").files
    with pytest.raises(UsageError, match="not one of 1 pictures could be used"):
        write_features(model, photos / "p2" / "p2_0003.png", tmp_path / "g.npy", align="none")
    assert not (tmp_path / "g.npy").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no pictures"):
        model.embed(tmp_path / "empty")


def test_what_says_little_is_said() -> None:
    spread = {"low": 0.3, "high": 0.6, "level": 0.95}
    record = {"verification": {"auc": 0.53, "impostors": 10**5, "tar": [{"far": 0.01, "tar": 0.45}],
                               "intervals": {"tar/0.01": spread}}}  # fmt: skip
    chance, wide = doubts(record)
    assert chance.startswith("Near chance: the area under the ROC is 53.0 %")
    assert wide.startswith("Wide intervals: TAR at FAR 1 % is 30.0 % to 60.0 %.")
    record["verification"] |= {"auc": 0.61, "intervals": {"tar/0.01": spread | {"high": 0.5}}}
    assert doubts(record) == []


def test_a_run_has_typed_results(tmp_path: Path) -> None:
    settings = {
        "name": "short", "method": {"name": "fedavg", "rounds": 1}, "model": {"name": "tiny"},
        "data": {"identities": 24, "images_per_identity": 6, "size": 32, "domains": ["north", "south"]},
        "partition": {"clients": 2, "test_identities": 4}, "evaluation": {"bootstrap": 10},
        "engine": {"kind": "local"},
    }  # fmt: skip
    run = visard.run(settings, out=tmp_path / "run")
    name, test = next(iter(run.metrics["generic"].items()))
    result = run.results[name].verification
    assert result is not None
    assert result.auc == test["verification"]["auc"]
    assert result.intervals is not None
    assert result.intervals["accuracy"].low == test["verification"]["intervals"]["accuracy"]["low"]
    assert run.groups["domain"].groups[0].name == "north"
    assert run.groups["domain"].to_dict() == run.metrics["groups"]["domain"]
    assert repr(run).startswith(f"Run short (fedavg) in {tmp_path / 'run'}: Finished, 1 round")
