"""Face sets on disk: what is written is read back, damage is one clear line, views keep their labels."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from visard.data.faces import ClientData, FaceSet, FaceSetWriter, FaceView, describe, list_sets
from visard.data.storage import recover
from visard.errors import UsageError, VisardError

IDENTITY = [0, 0, 1, 1, 1, 2, 3, 3]


def pictures(n: int, size: int = 8) -> np.ndarray:
    """Pictures that tell their row in every pixel."""
    return np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, size, size, 3)).copy()


def writer(out: Path, count: int = 8, overwrite: bool = False, **changes: object) -> FaceSetWriter:
    fields = {
        "size": 8,
        "names": ["Ann", "Bob", "Cem", "Dœ"],
        "domains": ["north", "south"],
        "attributes": ["Male", "Young"],
        "info": {"kind": "synthetic"},
    }
    return FaceSetWriter(out, count=count, overwrite=overwrite, **{**fields, **changes})  # type: ignore[arg-type]


def fill(w: FaceSetWriter, rows: range = range(8)) -> None:
    n = len(rows)
    marks = np.tile([[1, -1]], (n, 1))
    w.write(
        rows.start,
        pictures(8)[rows.start : rows.stop],
        [IDENTITY[i] for i in rows],
        [i % 2 for i in rows],
        marks,
        [f"a/é{i}.jpg" for i in rows],
    )


@pytest.fixture
def faces(tmp_path: Path) -> FaceSet:
    with writer(tmp_path / "set") as w:
        fill(w, range(4, 8))  # any order
        fill(w, range(4))
    return FaceSet.open(tmp_path / "set")


def test_what_is_written_is_read_back(faces: FaceSet) -> None:
    assert (len(faces), faces.size, faces.synthetic) == (8, 8, True)
    assert isinstance(faces.images, np.memmap)
    assert not faces.images.flags.writeable
    assert faces.images.shape == (8, 8, 8, 3)
    assert faces.images[:, 0, 0, 0].tolist() == list(range(8))
    assert faces.identity.tolist() == IDENTITY
    assert faces.domain.tolist() == [0, 1] * 4
    assert [str(a.dtype) for a in (faces.identity, faces.domain, faces.attributes)] == [
        "int32",
        "int16",
        "int8",
    ]
    assert faces.attribute("Young").tolist() == [-1] * 8
    assert faces.file(3) == "a/é3.jpg"
    assert faces.names[3] == "Dœ"


def test_unknown_attribute_is_suggested(faces: FaceSet) -> None:
    with pytest.raises(UsageError, match=r"no attribute 'Yong'.*'Young'"):
        faces.attribute("Yong")


def test_fingerprint_is_stable_and_sees_changes(tmp_path: Path, faces: FaceSet) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(faces.path, copied)
    assert FaceSet.open(copied).fingerprint() == faces.fingerprint()
    assert len(faces.fingerprint()) == 16
    with writer(tmp_path / "other", names=["Ann", "Bob", "Cem", "Eve"]) as w:
        fill(w)
    assert FaceSet.open(tmp_path / "other").fingerprint() != faces.fingerprint()


def test_describe_counts(faces: FaceSet) -> None:
    result = describe(faces)
    assert (result["pictures"], result["identities"], result["pictures_per_identity"]) == (8, 4, [1, 2.0, 3])


def test_fewer_rows_than_announced(tmp_path: Path) -> None:
    w = writer(tmp_path / "set", count=1000)
    fill(w)
    w.close(count=8, names=["Ann", "Bob", "Cem", "D"])
    faces = FaceSet.open(tmp_path / "set")
    assert len(faces) == 8
    assert faces.names[3] == "D"
    assert faces.images[7].max() == 7
    assert (tmp_path / "set" / "images.npy").stat().st_size < 8 * 8 * 8 * 3 + 200


def test_rows_that_were_never_written_are_refused(tmp_path: Path) -> None:
    w = writer(tmp_path / "set")
    fill(w, range(4))
    with pytest.raises(VisardError, match="4 of 8 pictures were never written"):
        w.close()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> None:
        with writer(tmp_path / "set") as w:
            fill(w)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("own", ["notes.txt", "photos/anna.jpg", ".hidden", "a.tmp"])
def test_a_set_with_files_of_the_users_is_not_replaced(tmp_path: Path, own: str) -> None:
    with writer(tmp_path / "set") as w:
        fill(w)
    (tmp_path / "set" / own).parent.mkdir(exist_ok=True)
    (tmp_path / "set" / own).write_text("mine")
    with pytest.raises(UsageError, match=rf"set holds {Path(own).parts[0]}, which is no part of a set"):
        writer(tmp_path / "set", overwrite=True)
    assert (tmp_path / "set" / own).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_folders_called_like_rests_of_a_writer_stay(tmp_path: Path) -> None:
    for name in ("set.partial-old", "set.replaced-2020-01", "set.partial-999999999", "set.replaced-999999999"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo.jpg").write_text("mine")
    with writer(tmp_path / "set") as w:
        fill(w)
    assert recover(tmp_path / "set") == 0
    assert len([path for path in tmp_path.glob("*/photo.jpg") if path.read_text() == "mine"]) == 4


def test_a_killed_writer_leaves_no_set_and_its_rest_is_cleared(tmp_path: Path) -> None:
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import test_faces as t;"
        "w = t.writer(Path(sys.argv[1])); t.fill(w); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "set", Path(__file__).parent], check=False)
    assert done.returncode == 9
    (rest,) = tmp_path.iterdir()
    assert ".partial-" in rest.name
    assert list_sets(tmp_path) == []
    with pytest.raises(UsageError, match=r"no faces\.json"):
        FaceSet.open(rest)
    with writer(tmp_path / "set") as w:
        fill(w)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert list_sets(tmp_path) == [tmp_path / "set"]


def test_existing_sets_are_kept_unless_told(tmp_path: Path, faces: FaceSet) -> None:
    with pytest.raises(UsageError, match="exists already"):
        writer(faces.path)
    with writer(faces.path, overwrite=True, domains=["east", "west"]) as w:
        fill(w)
    assert FaceSet.open(faces.path).domains == ["east", "west"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="no face set, so it is not overwritten"):
        writer(tmp_path / "precious", overwrite=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": pictures(2, 9)}, "pictures are uint8"),
        ({"images": pictures(2).astype(np.float32)}, "pictures are float32"),
        ({"start": 7}, "do not fit 8 pictures"),
        ({"identity": [0, 4]}, "identity out of range"),
        ({"domain": [0, -1]}, "domain out of range"),
        ({"attributes": [[0, 2], [0, 0]]}, "not -1, 0 or 1"),
        ({"files": ["only one"]}, "labels do not fit 2 pictures"),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    row = {"start": 0, "images": pictures(2), "identity": [0, 1], "domain": [0, 0], "files": ["a", "b"]}
    row["attributes"] = [[0, 0], [1, -1]]
    with pytest.raises(VisardError, match=message), writer(tmp_path / "set") as w:
        w.write(**{**row, **change})  # type: ignore[arg-type]


def damage_header(**changes: object):
    def apply(path: Path) -> None:
        header = json.loads((path / "faces.json").read_text())
        (path / "faces.json").write_text(json.dumps({**header, **changes}))

    return apply


def cut(name: str, keep: int):
    return lambda path: os.truncate(path / name, keep)


def save(name: str, values: np.ndarray):
    return lambda path: np.save(path / name, values)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "faces.json").write_text("{"), r"faces\.json is broken"),
        (lambda path: (path / "faces.json").write_bytes(b"\xff\xfe\x00"), r"faces\.json is broken"),
        (damage_header(version=2), r"faces\.json is broken: version"),
        (damage_header(count="8"), "count"),
        (damage_header(count=9), r"images\.npy does not fit"),
        (damage_header(size=16), r"images\.npy does not fit"),
        (damage_header(surprise=1), "surprise"),
        (damage_header(names=["A", "A", "B", "C"]), "names has a name twice"),
        (damage_header(names=["A", "B"]), r"identity\.npy has no name"),
        (cut("images.npy", 700), r"images\.npy is damaged or cut short"),
        (cut("images.npy", 0), r"images\.npy is damaged or cut short"),
        (cut("identity.npy", 20), r"identity\.npy is damaged or cut short"),
        (lambda path: (path / "files.npy").unlink(), r"files\.npy is missing"),
        (save("identity.npy", np.zeros(8)), r"identity\.npy does not fit"),
        (save("files.npy", np.zeros(8)), r"files\.npy does not fit"),
        (save("domain.npy", np.full(8, 7, np.int16)), r"domain\.npy has no name"),
        (lambda path: np.save(path / "domain.npy", [{}], allow_pickle=True), r"domain\.npy is damaged"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_damage_is_one_line(faces: FaceSet, damage, message: str) -> None:
    path = faces.path
    del faces
    damage(path)
    with pytest.raises(VisardError, match=message) as caught:
        FaceSet.open(path)
    assert "\n" not in str(caught.value)
    assert "set" in str(caught.value)


def test_view_labels_and_batches(faces: FaceSet) -> None:
    view = FaceView.of(faces, [7, 2, 3])
    assert view.index.tolist() == [2, 3, 7]
    assert view.labels.tolist() == [0, 0, 1]
    assert view.classes.tolist() == [1, 3]
    assert view.identity.tolist() == [1, 1, 3]
    assert (len(view), view.n_classes) == (3, 2)
    batch = view.batch(np.array([2, 0, 0]))
    assert type(batch) is np.ndarray
    assert batch[:, 5, 5, 1].tolist() == [7, 2, 2]
    assert view.attributes.tolist() == [[1, -1]] * 3
    assert view.domain.tolist() == [0, 1, 1]


def test_take_keeps_the_labels(faces: FaceSet) -> None:
    view = FaceView.of(faces, [2, 3, 6, 7])
    assert view.take([3, 1]).index.tolist() == [3, 7]
    assert view.take(view.labels == 1).labels.tolist() == [1, 1]
    assert view.take(view.labels == 1).classes.tolist() == view.classes.tolist()
    empty = view.take([])
    assert (len(empty), empty.batch([]).shape) == (0, (0, 8, 8, 3))


def test_all_uses_the_numbers_of_the_set(faces: FaceSet) -> None:
    assert faces.all().labels.tolist() == IDENTITY
    assert faces.all().n_classes == 4


def test_wrong_views_are_refused(faces: FaceSet) -> None:
    one = np.array([1])
    with pytest.raises(VisardError, match="out of range"):
        FaceView.of(faces, [8])
    with pytest.raises(VisardError, match="out of range"):
        FaceView.of(faces, [-1])
    with pytest.raises(VisardError, match="lack an identity"):
        FaceView.of(faces, [0], classes=one)
    with pytest.raises(VisardError, match="not ascending"):
        FaceView.of(faces, [0, 2], classes=np.array([1, 0]))
    with pytest.raises(VisardError, match="labels do not fit"):
        FaceView(faces, np.array([0]), np.array([0]), one)
    with pytest.raises(VisardError, match="ascending"):
        FaceView(faces, np.array([1, 0]), np.array([0, 0]), np.array([0]))


def test_client_views_share_labels(faces: FaceSet) -> None:
    classes = np.array([0, 1])
    data = ClientData(
        FaceView.of(faces, [0, 2], classes), FaceView.of(faces, [], classes), FaceView.of(faces, [3], classes)
    )
    assert data.n_classes == 2
    assert data.test.labels.tolist() == [1]
    with pytest.raises(VisardError, match="different labels"):
        ClientData(FaceView.of(faces, [0]), FaceView.of(faces, [0]), FaceView.of(faces, [2]))


def test_a_view_travels_as_path_and_rows(faces: FaceSet) -> None:
    wire = pickle.dumps(FaceView.of(faces, [2, 3, 7]))
    assert len(wire) < 1500
    back = pickle.loads(wire)  # noqa: S301
    assert back.batch([2])[0, 0, 0, 0] == 7
    assert back.faces.path == faces.path


def test_extra_arrays(tmp_path: Path) -> None:
    w = writer(tmp_path / "set")
    fill(w)
    w.attach("pairs", np.eye(3))
    with pytest.raises(VisardError, match="cannot be called"):
        w.attach("../evil", np.eye(3))
    w.close()
    faces = FaceSet.open(tmp_path / "set")
    assert faces.extra("pairs").tolist() == np.eye(3).tolist()
    with pytest.raises(UsageError, match=r"no landmarks\.npy"):
        faces.extra("landmarks")


def test_a_million_pictures_open_at_once_without_memory(tmp_path: Path) -> None:
    """A sparse file of 12 GB: opening must neither read nor allocate it."""
    n = 1_000_000
    w = FaceSetWriter(tmp_path / "big", count=n, size=64, names=["x"], domains=["d"], attributes=["A"] * 1, info={})
    w._written[:] = True
    w.close()
    program = (
        "import sys, time; from visard.data.faces import FaceSet;"
        "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096;"
        "m, t = rss(), time.perf_counter(); faces = FaceSet.open(sys.argv[1]);"
        "print(time.perf_counter() - t, rss() - m, len(faces))"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc on this system")
    run = subprocess.run([sys.executable, "-c", program, tmp_path / "big"], check=True, capture_output=True, text=True)
    seconds, memory, count = run.stdout.split()
    assert int(count) == n
    assert float(seconds) < 1
    assert int(memory) < 60e6


def test_an_end_before_the_context_begins_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "from visard.data.storage import FaceSetWriter; w = FaceSetWriter('set', count=1, size=8, names=['a'], "
        "domains=['all'], attributes=[], info={}); raise SystemExit(143)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120, check=False).returncode == 143
    assert not list(tmp_path.iterdir())
