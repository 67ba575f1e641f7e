"""Errors by group of face sets: names of groups, failures to enrol, the command, runs and their report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

import visard
from visard.cli import main
from visard.config import EvaluationSettings
from visard.data import faces as sets
from visard.data.detection import FiveFraming
from visard.data.faces import FaceSet, FaceSetWriter, FaceView
from visard.data.joined import Joined, Member
from visard.data.sources import importing
from visard.data.sources.importing import import_faces
from visard.data.synthetic.render import SyntheticSpec
from visard.data.synthetic.sets import make
from visard.errors import UsageError, VisardError
from visard.evaluation.groups import errors_by
from visard.report.html import Section
from visard.report.page import run_sections
from visard.report.run_folder import read_run


def face_set(path: Path, skipped: list[tuple[int, int, int, int]] | None, info: dict | None = None) -> FaceSet:
    """Eight people with three pictures each, in two domains, half of them with glasses; skipped rows as stored."""
    people = np.repeat(np.arange(8), 3)
    names = [f"p{k}" for k in range(8)]
    writer = FaceSetWriter(
        path, count=24, size=8, names=names, domains=["a", "b"], attributes=["Glasses"], info=info or {"kind": "folder"}
    )
    with writer:
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
        pixels[0, 0, 0] = list(path.name.encode()[:3])  # no two sets are the same
        marks = np.array([[1], [-1], [0]], np.int8)[np.tile([0, 0, 1], 8)]
        marks[-1] = 0
        writer.write(0, pixels, people.astype(np.int32), people % 2, marks, [f"{k}.png" for k in range(24)])
        if skipped is not None:
            writer.attach(sets.SKIPPED, np.array(skipped, np.int32).reshape(-1, 4))
        writer.close()
    return FaceSet.open(path)


def features(view: FaceView, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((100, 6))[view.identity] + 0.5 * rng.standard_normal((len(view), 6))


def test_failures_to_enrol_are_counted_by_group(tmp_path: Path) -> None:
    rows = [
        (0, 0, sets.NO_FACE, 1), (0, 0, sets.LOW_QUALITY, -1), (1, 1, sets.UNREADABLE, 1),
        (8, 1, sets.NO_FACE, 0), (8, 1, sets.NO_FACE, 1), (2, 0, sets.TOO_FEW, 1),
    ]  # fmt: skip
    faces = face_set(tmp_path / "set", rows)
    view = faces.all()
    found = errors_by([features(view)], [view], "domain", fmr=0.1, bootstrap=20)
    a, b = found.groups
    assert (a.name, b.name) == ("a", "b")
    assert a.enrolment is not None
    assert b.enrolment is not None
    assert found.everyone.enrolment is not None
    assert (a.enrolment.failure.errors, a.enrolment.failure.trials, a.enrolment.people) == (2, 14, 0)
    assert (b.enrolment.failure.errors, b.enrolment.failure.trials) == (2, 14)
    assert (b.enrolment.unreadable, b.enrolment.people) == (1, 1)  # person 8 has no picture left
    assert (found.everyone.enrolment.failure.errors, found.everyone.enrolment.failure.trials) == (4, 28)
    by_glasses = errors_by([features(view)], [view], "Glasses", fmr=0.1, bootstrap=0)
    assert [g.name for g in by_glasses.groups] == ["Glasses", "not Glasses", "unknown"]
    counted = [g.enrolment.failure.errors for g in by_glasses.groups if g.enrolment is not None]
    assert counted == [2, 1, 1]
    assert sum(two.fnmr.trials for two in by_glasses.between) == 16  # pairs with and without glasses
    some = view.take(view.identity < 4)  # a test set of a run: of person 8 nothing is known here
    part = errors_by([features(some)], [some], "domain", fmr=0.1, bootstrap=0)
    assert part.everyone.enrolment is not None
    assert (part.everyone.enrolment.failure.errors, part.everyone.enrolment.people) == (2, 0)


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    old = face_set(tmp_path / "old", None, {"kind": "folder", "skipped_count": 3}).all()
    found = errors_by([features(old)], [old], "domain", bootstrap=0)
    assert found.groups[0].enrolment is None
    assert "import it again" in found.warnings[-1]
    for name, info in (("none", {"kind": "folder", "skipped_count": 0}), ("drawn", {"kind": "synthetic"})):
        view = face_set(tmp_path / name, None, info).all()
        enrolment = errors_by([features(view)], [view], "domain", bootstrap=0).groups[0].enrolment
        assert enrolment is not None
        assert enrolment.failure.errors == 0
    broken = face_set(tmp_path / "broken", [(0, 7, 0, 0)])
    with pytest.raises(VisardError, match="no list of skipped pictures"):
        broken.skipped()
    with pytest.raises(UsageError, match="has no attribute 'Hat'"):
        errors_by([features(old)], [old], "Hat")
    one = old.take(old.domain == 0)
    with pytest.raises(UsageError, match="by domain: 1 group to compare"):
        errors_by([features(one)], [one], "domain")


def test_people_of_two_sets_are_different_people(tmp_path: Path) -> None:
    """Both sets call their people 0 to 7; a view that comes twice counts once."""
    one, two = (face_set(tmp_path / name, []).all() for name in ("one", "two"))
    found = errors_by([features(one), features(two, 1), features(one)], [one, two, one], "domain", bootstrap=0)
    assert [g.name for g in found.groups] == ["one: a", "one: b", "two: a", "two: b"]
    assert (found.everyone.people, found.everyone.pictures) == (16, 48)


def test_skipped_pictures_of_sites_in_one_run(tmp_path: Path) -> None:
    """Person 8 of either set has no picture left: two people, beyond the sixteen who have."""
    one = face_set(tmp_path / "one", [(1, 1, sets.NO_FACE, 1), (8, 0, sets.NO_FACE, -1)])
    two = face_set(tmp_path / "two", [(8, 1, sets.LOW_QUALITY, 0), (2, 0, sets.UNREADABLE, 1)])
    both = Joined([Member("one", one), Member("two", two)])
    skipped = both.skipped()
    assert skipped is not None
    assert skipped.identity.tolist() == [1, 16, 17, 10]
    assert [both.domains[k] for k in skipped.domain] == ["one/b", "one/a", "two/b", "two/a"]
    assert skipped.reason.tolist() == [sets.NO_FACE, sets.NO_FACE, sets.LOW_QUALITY, sets.UNREADABLE]
    assert skipped.attributes[:, 0].tolist() == [1, -1, 0, 1]
    found = errors_by([features(both.all())], [both.all()], "domain", bootstrap=0)
    assert found.everyone.enrolment is not None
    assert (found.everyone.enrolment.failure.errors, found.everyone.enrolment.people) == (3, 2)
    old = face_set(tmp_path / "old", None, {"kind": "folder", "skipped_count": 3})
    assert Joined([Member("one", one), Member("old", old)]).skipped() is None


def test_the_importer_keeps_whose_pictures_it_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dark pictures have no face, empty files are unreadable, and one person has only dark ones."""

    class Dark(FiveFraming):
        def _squares(self, picture, size):
            if picture.mean() < 10:
                raise ValueError(sets_no_face)
            if picture.mean() < 20:
                raise ValueError("quality 0.10 is below 0.5")
            from visard.data.pictures import Framed

            return [Framed(np.full((size, size, 3), 200, np.uint8))]

    from visard.data.pictures import NO_FACE as sets_no_face

    monkeypatch.setattr(importing, "FiveFraming", Dark)
    monkeypatch.setattr(importing, "open_detector", lambda *_: type("D", (), {"name": "dark"})())
    shade = {"x/ann/1": 100, "x/ann/2": 0, "x/bob/1": 0, "x/bob/2": 0, "y/cy/1": 90, "y/cy/2": 15, "y/di/1": 80}
    for name, value in shade.items():
        file = tmp_path / "photos" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), value, np.uint8)).save(file)
    (tmp_path / "photos/y/di/2.png").touch()
    report = import_faces("folder", tmp_path / "photos", tmp_path / "set", domains=True)
    assert report.pictures == 3
    faces = FaceSet.open(report.path)
    skipped = faces.skipped()
    assert skipped is not None
    assert faces.names == ["x/ann", "y/cy", "y/di"]
    rows = list(zip(skipped.identity.tolist(), skipped.domain.tolist(), skipped.reason.tolist(), strict=True))
    assert rows == [
        (0, 0, sets.NO_FACE), (3, 0, sets.NO_FACE), (3, 0, sets.NO_FACE), (1, 1, sets.LOW_QUALITY),
        (2, 1, sets.UNREADABLE),
    ]  # fmt: skip


def test_eval_by_domain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["visard", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    view = FaceSet.open(make(SyntheticSpec(24, 4, 32, ("north", "south")), tmp_path / "faces")).all()
    np.save(tmp_path / "f.npy", features(view).astype(np.float32))
    about = {"data": {"name": "faces", "fingerprint": view.faces.fingerprint()}, "rows": 96, "dimensions": 6}
    (tmp_path / "f.json").write_text(json.dumps(about))
    words = ["eval", str(tmp_path / "f.npy"), "--data", str(tmp_path / "faces"), "--by", "domain", "--fmr", "0.01"]
    assert call(*words) == 0
    text = capsys.readouterr().out
    assert "Errors by domain, one threshold for all" in text
    assert "north with south" in text
    assert call(*words, "--json") == 0
    record = json.loads(capsys.readouterr().out)["groups"]["domain"]
    assert record["fmr_target"] == 0.01
    assert [g["people"] for g in record["groups"]] == [12, 12]
    assert call(*words[:-4], "--by", "Male") == 0
    assert "not Male" in capsys.readouterr().out
    assert call(*words[:-4], "--by", "Mole") == 2
    assert "has no attribute 'Mole'" in capsys.readouterr().err


def test_an_attribute_that_is_none_is_refused_before_anything_is_embedded(tmp_path: Path) -> None:
    class Busy(nn.Module):
        def forward(self, x: object) -> object:
            raise AssertionError("pictures were embedded")

    faces = face_set(tmp_path / "set", [])
    model = visard.FaceModel(Busy(), {"model": "busy", "embedding": "4", "size": str(faces.size)})
    for by, error in (("Mole", UsageError), ("Glasses", AssertionError), ("domain", AssertionError)):
        with pytest.raises(error, match="has no attribute 'Mole'" if by == "Mole" else "were embedded"):
            visard.evaluate(model, faces, settings=EvaluationSettings(by=(by,)))


def test_a_run_and_its_report_have_errors_by_domain(tmp_path: Path) -> None:
    settings = {
        "name": "two", "method": {"name": "fedavg", "rounds": 1}, "model": {"name": "tiny"},
        "data": {"identities": 24, "images_per_identity": 6, "size": 32, "domains": ["north", "south"]},
        "partition": {"clients": 2, "test_identities": 4}, "evaluation": {"bootstrap": 10, "fmr": 0.05},
        "engine": {"kind": "local"},
    }  # fmt: skip
    run = visard.run(settings, out=tmp_path / "run")
    record = run.metrics["groups"]["domain"]
    assert [g["name"] for g in record["groups"]] == ["north", "south"]
    assert record["everyone"]["people"] == 8
    section = next(s for s in run_sections(read_run(tmp_path / "run"), None) if s.id == "groups")
    assert isinstance(section, Section)
    assert "north with south" in section.body
    assert "too few for a figure" in section.body
    with pytest.raises(UsageError, match="has no attribute 'Mole'"):
        visard.run(settings | {"evaluation": {"by": ["Mole"]}}, out=tmp_path / "other")
    assert not (tmp_path / "other").exists()
