"""Sets of readings: on disk, as parties, from the files of Widar3.0, Office-Caltech10 and PAMAP2."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visard.cli import main
from visard.data.faces import FaceSet
from visard.data.partition import partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.sensors import (
    FRAMES,
    HOP,
    READERS,
    READINGS,
    WINDOW,
    Readings,
    cached_sensors,
    draw,
    import_readings,
    office_caltech,
    pamap2,
    widar,
    write_readings,
)
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError

USERS = ("u1", "u2", "u3")


def some(path: Path) -> Readings:
    values, labels, owners = draw(3, 4, 5, USERS, 0)
    return Readings(write_readings(path / "set", values, list("abc"), labels, USERS, owners, {"kind": "test"}))


def test_a_set_comes_back_as_it_was(tmp_path: Path) -> None:
    faces = some(tmp_path)
    values, labels, owners = draw(3, 4, 5, USERS, 0)
    assert np.array_equal(faces.pixels, values)
    assert np.array_equal(faces.identity, labels)
    assert np.array_equal(faces.domain, owners)
    assert (len(faces), faces.size, faces.names, faces.domains) == (36, 5, ["a", "b", "c"], list(USERS))
    assert not faces.synthetic
    make, arguments = faces.__reduce__()  # as it travels to a worker process
    again = make(*arguments)
    assert isinstance(again, Readings)
    assert again.fingerprint() == faces.fingerprint()


def test_readings_with_files_of_the_users_are_not_replaced(tmp_path: Path) -> None:
    given = (np.zeros((4, 2), np.float32), ["a"], np.zeros(4, np.int64), ["u"], np.zeros(4, np.int64), {})
    write_readings(tmp_path / "set", *given)
    write_readings(tmp_path / "set", *given, overwrite=True)
    (tmp_path / "set" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes\.txt, which is no part of a set"):
        write_readings(tmp_path / "set", *given, overwrite=True)
    assert (tmp_path / "set" / "notes.txt").read_text() == "mine"


def test_one_domain_is_a_client_and_the_target_comes_last(tmp_path: Path) -> None:
    faces = some(tmp_path)
    settings = PartitionSettings(kind="one_domain", target_domain=("u1", "u3"), split=(0.75, 0.0, 0.25))
    federation = partition(faces, settings, 0).federation(faces)
    assert list(federation.clients) == ["u2", "target"]
    target = federation.clients["target"]
    assert set(target.train.domain.tolist()) == {0, 2}
    assert (len(target.train), len(target.test)) == (18, 6)
    assert target.n_classes == federation.clients["u2"].n_classes == 3
    assert np.array_equal(target.train.batch([0]), faces.pixels[target.train.index[:1]])


@pytest.mark.parametrize(
    ("sources", "target", "says"),
    [
        ("u9", "u1", "has no domain 'u9'"),
        ("u1", "u1", "must be different"),
        ((), ("u1", "u2", "u3"), "must be different"),
    ],
)
def test_wrong_domains_are_told(tmp_path: Path, sources: str, target: str, says: str) -> None:
    faces = some(tmp_path)
    settings = PartitionSettings(kind="one_domain", source_domain=sources, target_domain=target)
    with pytest.raises(UsageError, match=says):
        partition(faces, settings, 0)


def test_parties_with_other_classes_are_refused(tmp_path: Path) -> None:
    x = np.zeros((4, 2))
    faces = Readings(write_readings(tmp_path / "s", x, ["a", "b"], [0, 1, 0, 0], ["u", "v"], [0, 0, 1, 1], {}))
    with pytest.raises(UsageError, match="the same classes everywhere"):
        partition(faces, PartitionSettings(kind="one_domain", target_domain="u"), 0)


def test_broken_sets_are_one_line(tmp_path: Path) -> None:
    faces = some(tmp_path)
    with pytest.raises(UsageError, match="exists already"):
        some(tmp_path)
    np.save(faces.path / "domain.npy", np.zeros(7, np.int16))
    with pytest.raises(VisardError, match=r"domain\.npy does not fit"):
        Readings(faces.path)
    (faces.path / READINGS).write_text(json.dumps({"version": 2}))
    with pytest.raises(VisardError, match="is broken"):
        Readings(faces.path)
    with pytest.raises(VisardError, match="not finite"):
        write_readings(tmp_path / "x", [[np.nan]], ["a"], [0], ["u"], [0], {})


def test_sensors_are_the_same_for_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = draw(4, 3, 8, ("x", "y"), 7), draw(4, 3, 8, ("x", "y", "z"), 7)
    assert np.array_equal(a[0], b[0][: len(a[0])]), "another user changes nobody else"
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path))
    first = cached_sensors(4, 3, 8, ("x", "y"), 7)
    assert first == cached_sensors(4, 3, 8, ("x", "y"), 7)
    assert np.array_equal(Readings(first).pixels, a[0])


def test_widar_frames_are_picked_evenly(tmp_path: Path) -> None:
    length = np.array([3, 0, 40])
    frames = np.zeros((43, 20, 20), np.float16)
    frames[np.arange(43), 0, np.arange(43) % 20] = 2.0
    np.savez(tmp_path / "bvp.npz", frames=frames, length=length, room=[1, 1, 2], user=[5, 5, 3], gesture=[1, 2, 6])
    found = widar(tmp_path)
    assert found.values.shape == (2, FRAMES, 20, 20)
    assert found.users == ("room-1-user-5", "room-2-user-3")
    assert found.identity.tolist() == [0, 5]
    where = (found.values[1] + 0.25).reshape(FRAMES, -1).argmax(1)
    picks = np.round(np.linspace(0, 39, FRAMES)).astype(int)
    assert np.array_equal(where, (3 + picks) % 20)
    np.testing.assert_allclose((found.values + 0.25).sum((2, 3)), 100, rtol=1e-3)


def test_widar_domains_by_orientation_or_location(tmp_path: Path) -> None:
    numbers = {"room": [1, 1, 2], "user": [5, 6, 3], "orientation": [2, 2, 4], "location": [1, 3, 1]}
    frames = np.ones((6, 20, 20), np.float16)
    np.savez(tmp_path / "bvp.npz", frames=frames, length=[2, 2, 2], gesture=[1, 2, 6], **numbers)  # type: ignore[arg-type]
    found = widar(tmp_path, "orientation")
    assert found.users == ("room-1-orientation-2", "room-2-orientation-4")
    assert found.domain.tolist() == [0, 0, 1]
    assert found.identity.tolist() == [0, 1, 5]
    assert widar(tmp_path, "location").users == ("room-1-location-1", "room-1-location-3", "room-2-location-1")
    assert widar(tmp_path, "room").users == ("room-1", "room-2")
    path, _ = import_readings("widar", tmp_path, tmp_path / "set", by="orientation")
    assert Readings(path).domains == ["room-1-orientation-2", "room-2-orientation-4"]
    with pytest.raises(UsageError, match=r"not 'orientatio' \(did you mean 'orientation'"):
        widar(tmp_path, "orientatio")
    with pytest.raises(UsageError, match="--by is for widar"):
        import_readings("pamap2", tmp_path, tmp_path / "other", by="user")


def test_office_histograms_and_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    for name in ("amazon", "caltech", "dslr", "webcam"):
        counts = rng.integers(0, 9, (5, 800)).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", fts=counts, labels=np.arange(1, 6)[:, None])
    found = office_caltech(tmp_path)
    np.testing.assert_allclose(found.values.mean(1), 1, rtol=1e-6)
    assert found.identity.max() == 4
    monkeypatch.setattr(sys, "argv", ["visard", "data", "import", "office-caltech", str(tmp_path), "--out", "here"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert "20 rows of readings" in capsys.readouterr().out
    assert len(Readings(tmp_path / "here")) == 20
    np.savez(tmp_path / "dslr.npz", labels=[1])
    with pytest.raises(UsageError, match="no array 'fts'"):
        office_caltech(tmp_path)
    (tmp_path / "webcam.npz").unlink()
    with pytest.raises(UsageError, match="is not there"):
        widar(tmp_path / "bvp.npz")


@pytest.mark.parametrize("kind", sorted(READERS))
@pytest.mark.parametrize("content", [b"", b"junk" * 400, b"PK\x03\x04" + bytes(64)])
def test_hostile_files_are_one_line(kind: str, content: bytes, tmp_path: Path) -> None:
    for name in ("bvp.npz", "amazon.npz", "subject101.dat"):
        (tmp_path / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of an empty text file
        with pytest.raises(UsageError):
            READERS[kind](tmp_path)


def test_office31_pictures_of_the_same_classes(tmp_path: Path) -> None:
    for domain, classes in (("amazon", ("mug", "pen")), ("dslr", ("mug", "pen")), ("webcam", ("pen",))):
        for name in classes:
            folder = tmp_path / "office" / domain / "images" / name
            folder.mkdir(parents=True)
            for k in range(3):
                Image.fromarray(np.full((40, 50, 3), 20 * k, np.uint8)).save(folder / f"{k}.png")
    import_faces("office31", tmp_path / "office", tmp_path / "set", size=32)
    faces = FaceSet.open(tmp_path / "set")
    assert (len(faces), sorted(faces.names), list(faces.domains)) == (15, ["mug", "pen"], ["amazon", "dslr", "webcam"])
    settings = PartitionSettings(kind="one_domain", source_domain="amazon", target_domain="dslr")
    clients = partition(faces, settings, 0).federation(faces).clients
    assert {c: data.n_classes for c, data in clients.items()} == {"amazon": 2, "target": 2}
    with pytest.raises(UsageError, match="webcam has 1 classes, the target 2"):
        partition(faces, PartitionSettings(kind="one_domain", target_domain="dslr"), 0)
    with pytest.raises(UsageError, match="no pictures as <domain>/<class>/<picture>"):
        import_faces("office31", tmp_path / "office" / "amazon" / "images", tmp_path / "other")


def test_pamap2_readings_of_a_user_do_not_depend_on_the_others(tmp_path: Path) -> None:
    """A target that is to be adapted to has no part in what the sources learn from, not even by a mean."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(WINDOW + HOP, 54))
    rows[:, 1] = 4
    np.savetxt(tmp_path / "subject101.dat", rows)
    alone = pamap2(tmp_path)
    np.testing.assert_allclose(alone.values[0, :2], rows[:WINDOW, 2:4].mean(0) / (40, 3))
    np.testing.assert_allclose(alone.values[0, 40 + 13], rows[:WINDOW, 15].std() / 30)
    np.savetxt(tmp_path / "subject102.dat", rows * 7 + (np.arange(54) != 1) * 20 - (np.arange(54) == 1) * 24)
    both = pamap2(tmp_path)
    assert both.users == ("user-101", "user-102")
    np.testing.assert_array_equal(both.values[both.domain == 0], alone.values)


def test_pamap2_windows_of_one_activity(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2 * WINDOW + HOP, 54))
    rows[:, 1] = np.where(np.arange(len(rows)) < WINDOW, 4, 5)  # walking, then running
    rows[10:20, 5] = np.nan
    rows[:, 2] = np.nan
    np.savetxt(tmp_path / "subject101.dat", rows)
    found = pamap2(tmp_path)
    assert found.users == ("user-101",)
    assert found.identity.tolist() == [1, 2, 2], "the window with both is left out"
    assert found.values.shape == (3, 2 * 40)
    assert np.isfinite(found.values).all()
    (tmp_path / "subject102.dat").write_text("1 2 3\n")
    with pytest.raises(UsageError, match="54 columns"):
        pamap2(tmp_path)
    with pytest.raises(UsageError, match="no subject1NN"):
        pamap2(tmp_path / "none")
