"""Models in and out, protocols and galleries from the command line: what is printed, and one line on bad input."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visard.cli import main
from visard.data.sources.importing import import_faces
from visard.models import build
from visard.models.files import save_model

PEOPLE, EACH, SIDE = 12, 4, 32


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, a model that tells them apart, a face set, a gallery and an InsightFace checkpoint."""
    folder = tmp_path_factory.mktemp("desk")
    rng = np.random.default_rng(0)
    for person in range(PEOPLE):
        (folder / "photos" / f"person-{person}").mkdir(parents=True)
        base = rng.integers(0, 256, (4, 4, 3)).repeat(SIDE // 4, 0).repeat(SIDE // 4, 1)
        for k in range(EACH):
            noisy = np.clip(base + rng.integers(-40, 40, base.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / "photos" / f"person-{person}" / f"{k}.png")
    torch.manual_seed(0)
    weights = build("tiny", embedding=32, size=SIDE).state_dict()
    save_model(folder / "m.safetensors", weights, {"model": "tiny", "embedding": "32", "size": str(SIDE)})
    torch.save(build("iresnet18", embedding=16, size=SIDE).state_dict(), folder / "backbone.pth")
    lines = [f"person-{k}/0.png,person-{k}/1.png,1\nperson-{k}/0.png,person-{k - 1}/2.png,0" for k in range(PEOPLE)]
    text = "file_a,file_b,same\n" + "\n".join(lines).replace("person--1", "person-5") + "\n"
    (folder / "pairs.csv").write_text(text)
    import_faces("folder", folder / "photos", folder / "set", size=SIDE, pairs=folder / "pairs.csv", align="none")
    return folder


@pytest.fixture
def work(desk: Path, here: Path) -> Path:
    for path in desk.iterdir():
        if path.suffix == ".pth":
            (here / path.name).symlink_to(path)  # large, and no command writes there
        else:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, here / path.name)
    return here


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output (spaces folded) and standard error of a command."""
    monkeypatch.delenv("VISARD_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["visard", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


@pytest.fixture
def visard_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command that must succeed, and give its output."""

    def call(*arguments: str) -> str:
        code, out, err = run(capsys, monkeypatch, *arguments)
        assert code == 0, err
        return out

    return call


def test_enrol_identify_verify(work: Path, visard_: Callable[..., str]) -> None:
    out = visard_("enroll", "photos", "--model", "m.safetensors", "--gallery", "g.gallery")
    assert "48 pictures of 12 people" in out
    answer = json.loads(visard_("identify", "photos/person-3/0.png", "photos/person-7/1.png", "--gallery", "g.gallery",
                                "--far", "0.05", "--top", "3", "--json"))  # fmt: skip
    assert [image["matches"][0]["person"] for image in answer["images"]] == ["person-3", "person-7"]
    assert all(len(image["matches"]) == 3 for image in answer["images"])
    assert answer["threshold"]["comparisons"] == 48 * 11
    for image in answer["images"]:
        accepted = image["matches"][0]["score"] >= answer["threshold"]["value"]
        assert image["person"] == (image["matches"][0]["person"] if accepted else None)
    out = visard_("identify", "photos/person-3/0.png", "--gallery", "g.gallery", "--fpir", "0.25")
    assert "person-3" in out
    assert "of 48 comparisons" in out
    never = visard_("identify", "photos/person-3/0.png", "--gallery", "g.gallery", "--threshold", "1", "--json")
    assert json.loads(never)["images"][0]["person"] is None
    same = json.loads(visard_("verify", "photos/person-3/0.png", "photos/person-3/0.png", "--gallery", "g.gallery",
                              "--json"))  # fmt: skip
    assert same["score"] == pytest.approx(1, abs=1e-6)
    assert same["same"] is True
    out = visard_("verify", "photos/person-3/0.png", "photos/person-4/0.png", "--model", "m.safetensors",
                  "--threshold", "0.9999")  # fmt: skip
    assert "different people" in out
    out = visard_("verify", "photos/person-3/0.png", "photos/person-4/0.png", "--model", "m.safetensors")
    assert "no decision without a threshold" in out


def test_mirror_images_of_a_gallery_are_those_of_its_queries(work: Path, visard_: Callable[..., str]) -> None:
    """Enrolled with --flip from one picture each: the same picture has a score of 1, by search and by pair."""
    for person in range(PEOPLE):
        for k in range(1, EACH):
            (work / "photos" / f"person-{person}" / f"{k}.png").unlink()
    visard_("enroll", "photos", "--model", "m.safetensors", "--gallery", "g.gallery", "--flip")
    picture = "photos/person-3/0.png"
    found = json.loads(visard_("identify", picture, "--gallery", "g.gallery", "--json"))
    assert found["images"][0]["matches"][0] == {"person": "person-3", "score": pytest.approx(1, abs=1e-6)}
    other = "photos/person-4/0.png"
    pair = json.loads(visard_("verify", picture, other, "--gallery", "g.gallery", "--json"))["score"]
    plain = json.loads(visard_("verify", picture, other, "--model", "m.safetensors", "--json"))["score"]
    matches = {m["person"]: m["score"] for m in found["images"][0]["matches"]}
    if "person-4" in matches:
        assert pair == pytest.approx(matches["person-4"], abs=1e-6)
    assert pair != pytest.approx(plain, abs=1e-6)


def test_faces_of_another_size_are_resized(work: Path, visard_: Callable[..., str]) -> None:
    import_faces("folder", work / "photos", work / "large", size=48, align="none")
    out = visard_("eval", "m.safetensors", "--data", "large", "--protocol", "verification")
    assert "note the pictures have 48 x 48 pixels, the model takes 32 x 32: they are reduced" in out
    assert "accuracy" in out
    assert "48 x 48" in visard_("embed", "large", "--model", "m.safetensors", "--out", "f.npy")
    assert "48 x 48" in visard_("cluster", "large", "--model", "m.safetensors", "--out", "l.csv")
    args = ("--data", "large", "--protocol", "verification", "--json")
    assert json.loads(visard_("eval", "f.npy", *args)) == json.loads(visard_("eval", "m.safetensors", *args))
    assert "the pictures have" not in visard_("eval", "m.safetensors", "--data", "set", "--protocol", "verification")


def test_an_encrypted_gallery(
    work: Path, visard_: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers with a key; nothing without it."""
    picture = ("photos/person-3/0.png", "--gallery", "g.gallery")
    key = ("--encrypt-with", "my.key")
    visard_("enroll", "photos", "--model", "m.safetensors", "--gallery", "g.gallery")
    found = visard_("identify", *picture, "--json")
    same = visard_("verify", "photos/person-3/0.png", *picture, "--json")
    people = visard_("gallery", "list", "g.gallery", "--json")
    visard_("keys", "file", "--out", "my.key")
    visard_("gallery", "encrypt", "g.gallery", *key)
    assert b"person-3" not in (work / "g.gallery").read_bytes()
    assert visard_("identify", *picture, "--json", *key) == found
    assert visard_("verify", "photos/person-3/0.png", *picture, "--json", *key) == same
    assert visard_("gallery", "list", "g.gallery", "--json", *key) == people
    (work / "new" / "zoe").mkdir(parents=True)
    (work / "photos/person-5/0.png").rename(work / "new/zoe/0.png")
    visard_("enroll", "new", "--model", "m.safetensors", "--gallery", "g.gallery", "--add", *key)
    visard_("gallery", "remove", "g.gallery", "person-3", "person-5", *key)
    listed = json.loads(visard_("gallery", "list", "g.gallery", "--json", *key))
    assert {row["person"] for row in listed} == {f"person-{k}" for k in range(12) if k not in (3, 5)} | {"zoe"}
    assert "zoe" in visard_("gallery", "list", "g.gallery", *key)
    visard_("enroll", "photos", "--model", "m.safetensors", "--gallery", "other.gallery", *key)
    visard_("keys", "file", "--out", "other.key")
    refused = {
        ("identify", *picture): "g.gallery is encrypted: give its key (--encrypt-with KEYFILE)",
        ("identify", *picture, "--encrypt-with", "other.key"): "g.gallery is encrypted with another key than",
        ("gallery", "remove", "g.gallery", "nobody-here", *key): "'nobody-here' is not enrolled",
        ("gallery", "remove", "g.gallery", "persn-7", *key): "'persn-7' is not enrolled (did you mean 'person-7'?)",
        ("gallery", "encrypt", "g.gallery", *key): "g.gallery is encrypted: give its key",
        ("keys", "file", "--out", "my.key"): "never overwritten",
        ("gallery", "list", "other.gallery", "--encrypt-with", "photos"): "cannot be read",
    }
    (work / "swapped.gallery").write_bytes((work / "other.gallery").read_bytes())
    refused["gallery", "list", "swapped.gallery", *key] = "swapped.gallery was changed, cut short or given another name"
    for arguments, line in refused.items():
        code, _, text = run(capsys, monkeypatch, *arguments)
        assert code in (1, 2), arguments
        assert line in " ".join(text.split()), text
        assert text.count("\n") <= 2, text
    (work / "my.key").chmod(0o644)
    assert "can be read by others" in run(capsys, monkeypatch, "gallery", "list", "g.gallery", *key)[2]


def test_people_are_added(work: Path, visard_: Callable[..., str]) -> None:
    (work / "new").mkdir()
    (work / "photos" / "person-11").rename(work / "new" / "person-11")
    visard_("enroll", "photos", "--model", "m.safetensors", "--gallery", "g.gallery")
    out = visard_("enroll", "new", "--model", "m.safetensors", "--gallery", "g.gallery", "--add")
    assert "4 pictures of 1 person; the gallery has 12" in " ".join(out.split())
    out = visard_("identify", "new/person-11/2.png", "--gallery", "g.gallery", "--json")
    assert json.loads(out)["images"][0]["matches"][0]["person"] == "person-11"


def test_features_and_evaluation(work: Path, visard_: Callable[..., str]) -> None:
    out = visard_("embed", "set", "--model", "m.safetensors", "--out", "f.npy", "--flip")
    assert "48 x 32 features" in out
    assert json.loads((work / "f.json").read_text())["flip"] is True
    args = ("--data", "set", "--protocol", "verification", "--flip", "--json")
    assert json.loads(visard_("eval", "f.npy", *args)) == json.loads(visard_("eval", "m.safetensors", *args))
    ten = json.loads(visard_("eval", "m.safetensors", "--data", "set", "--protocol", "lfw", "--json"))["lfw"]
    assert ten["pairs"] == 24
    out = visard_("eval", "m.safetensors", "--data", "set", "--protocol", "lfw", "--list", "pairs.csv")
    assert "accuracy" in out
    assert f"{ten['accuracy']:.4f}" in out
    out = visard_("eval", "backbone.pth", "--data", "set", "--input", "arcface", "--size", str(SIDE))
    assert "auc" in out


@pytest.mark.slow
def test_export_and_int8(work: Path, visard_: Callable[..., str]) -> None:
    out = visard_("export", "m.safetensors", "--onnx", "m.onnx")
    assert "largest difference from PyTorch" in out
    one, two = (
        json.loads(visard_("eval", m, "--data", "set", "--protocol", "verification", "--json"))["verification"]
        for m in ("m.safetensors", "m.onnx")
    )
    assert one["auc"] == pytest.approx(two["auc"], abs=1e-4)
    for extra in ((), ("--static",)):
        out = visard_("export", "m.onnx", "--onnx", "small.onnx", "--int8", "--data", "set", *extra)
        assert "mean cosine of features before and after" in out
        assert "auc" in out
    assert (work / "small.onnx").stat().st_size < (work / "m.onnx").stat().st_size / 2


def other_model(here: Path) -> None:
    weights = build("tiny", embedding=32, size=SIDE).state_dict()
    save_model(here / "o.safetensors", weights, {"model": "tiny", "embedding": "32", "size": str(SIDE)})


def written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda here: (here / name).write_bytes(content) and None


def nothing(here: Path) -> None:
    """All that is needed is there."""


def hostile(here: Path) -> None:
    """A pickle that would make a file if anybody ran it."""
    (here / "evil.pth").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


ENROLL = ("enroll", "photos", "--model", "m.safetensors", "--gallery")
IDENTIFY = ("identify", "photos/person-1/0.png", "--gallery", "g.gallery")
CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], int, str]] = {
    "a gallery that exists": (nothing, (*ENROLL, "g.gallery"), 2, "g.gallery exists"),
    "a file that is no gallery is not replaced": (nothing, (*ENROLL, "pairs.csv", "--overwrite"), 1, "pairs.csv"),
    "adding to nothing": (nothing, (*ENROLL, "new.gallery", "--add"), 2, "no gallery at new.gallery"),
    "adding people twice": (nothing, (*ENROLL, "g.gallery", "--add"), 2, "person-0 is enrolled already"),
    "enrolling from nowhere": (nothing, ("enroll", "gone", *ENROLL[2:], "n.gallery"), 2, "gone"),
    "an unknown alignment": (nothing, (*ENROLL, "n.gallery", "--align", "eyes"), 2, "alignment 'eyes'"),
    "no gallery": (nothing, (*IDENTIFY[:3], "gone.gallery"), 2, "no gallery at gone.gallery"),
    "a junk gallery": (written("j.gallery", b"junk"), (*IDENTIFY[:3], "j.gallery"), 1, "j.gallery is not a readable"),
    "a model as gallery": (nothing, (*IDENTIFY[:3], "m.safetensors"), 1, "m.safetensors is no gallery"),
    "another model": (other_model, (*IDENTIFY, "--model", "o.safetensors"), 2, "is not the model that made"),
    "a picture that is missing": (nothing, ("identify", "gone.png", *IDENTIFY[2:]), 2, "gone.png"),
    "a folder of pictures": (
        nothing, ("identify", "photos/person-1", *IDENTIFY[2:]), 2, "photos/person-1 is a folder or a zip file",
    ),
    "a folder to compare": (
        nothing, ("verify", "photos/person-1", "photos/person-1/0.png", "--model", "m.safetensors"), 2, "is a folder",
    ),
    "a picture that is none": (nothing, ("identify", "pairs.csv", *IDENTIFY[2:]), 1, "pairs.csv: not a picture"),
    "an impossible rate": (nothing, (*IDENTIFY, "--far", "2"), 2, "rate 2"),
    "an impossible threshold": (nothing, (*IDENTIFY, "--threshold", "7"), 2, "between -1 and 1"),
    "verify without a model": (nothing, ("verify", "a.png", "b.png"), 2, "name a model"),
    "an unknown input": (nothing, ("eval", "m.safetensors", "--data", "set", "--input", "arcfac"), 2, "'arcface'"),
    "an impossible size": (nothing, ("eval", "m.safetensors", "--data", "set", "--size", "64"), 2, "of 32 pixels"),
    "a mean that is none": (nothing, ("eval", "m.safetensors", "--data", "set", "--mean", "x"), 2, "mean 'x'"),
    "a junk onnx": (written("j.onnx", b"junk"), ("eval", "j.onnx", "--data", "set"), 1, "j.onnx is not a readable"),
    "an empty onnx": (written("j.onnx", b""), ("eval", "j.onnx", "--data", "set"), 1, "j.onnx is not a readable"),
    "a hostile pickle": (hostile, ("eval", "evil.pth", "--data", "set"), 1, "evil.pth"),
    "a file of another kind": (nothing, ("eval", "pairs.csv", "--data", "set"), 2, "a model file ends in"),
    "features that are missing": (nothing, ("eval", "gone.npy", "--data", "set"), 2, "no features at gone.npy"),
    "features without a manifest": (written("f.npy", b"x"), ("eval", "f.npy", "--data", "set"), 1, "f.json is missing"),
    "a rate that is none": (
        nothing, ("eval", "m.safetensors", "--data", "set", "--far", "2"), 2, "rates must be numbers in (0, 1)",
    ),
    "photographs that were not imported": (
        nothing, ("eval", "m.safetensors", "--data", "photos"), 2, "visard data import makes one of pictures",
    ),
    "ijb of a plain set": (nothing, ("eval", "m.safetensors", "--data", "set", "--protocol", "ijb"), 2, "as ijb"),
    "rfw of one domain": (nothing, ("eval", "m.safetensors", "--data", "set", "--protocol", "rfw"), 1, "at least 2"),
    "switches that are none": (
        nothing, ("eval", "m.safetensors", "--data", "set", "--switches", "NDF"), 2, "N1D1F1",
    ),
    "a list that is missing": (
        nothing, ("eval", "m.safetensors", "--data", "set", "--protocol", "lfw", "--list", "gone.csv"), 2, "gone.csv",
    ),
    "features in a folder that is missing": (
        nothing, ("embed", "set", "--model", "m.safetensors", "--out", "gone/f.npy"), 2, "no folder gone",
    ),
    "features as text": (nothing, ("embed", "set", "--model", "m.safetensors", "--out", "f.csv"), 2, "written as .npy"),
    "export to another ending": (nothing, ("export", "m.safetensors", "--onnx", "m.pb"), 2, "must end in .onnx"),
    "static without data": (
        nothing, ("export", "m.safetensors", "--onnx", "m.onnx", "--int8", "--static"), 2, "--static needs --data",
    ),
    "an opset that is none": (nothing, ("export", "m.safetensors", "--onnx", "m.onnx", "--opset", "3"), 2, "opset 3"),
}  # fmt: skip


@pytest.fixture(scope="module")
def gallery(desk: Path) -> Path:
    """A gallery of the photos, made once."""
    from visard.inference.gallery import enrol_folder
    from visard.inference.model import load_model

    path = desk / "g.gallery"
    enrol_folder(desk / "photos", load_model(desk / "m.safetensors"))[0].save(path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(
    case: str, gallery: Path, work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, arguments, code, says = CASES[case]
    prepare(work)
    before = {p: p.read_bytes() for p in work.rglob("*") if p.is_file()}
    got, _, text = run(capsys, monkeypatch, *arguments)
    assert says in " ".join(text.split()), text
    assert got == code, text
    assert "internal error" not in text
    assert len(text.strip().splitlines()) == 1, text
    assert {p: p.read_bytes() for p in work.rglob("*") if p.is_file()} == before, "nothing was changed or left behind"
