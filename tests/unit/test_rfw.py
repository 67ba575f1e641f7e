"""RFW in its layout of folders, and pair lists that users write."""

from pathlib import Path

import numpy as np
import pytest
from tests.unit.pictures import encode, pixels

from visard.data.faces import FaceSet
from visard.data.pairs import load_pairs
from visard.data.pictures import template
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError

RACES = ("African", "Asian")


def put(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def rfw(root: Path, header: bool = False, landmarks: bool = True) -> Path:
    """Two races with the people m.0a and m.0b, three pictures each, ten pairs in ten folds (or two, with a header)."""
    for r, race in enumerate(RACES):
        points = ""
        for p, person in enumerate(("m.0a", "m.0b")):
            for k in (1, 2, 3):
                put(root / "data" / race / person / f"{person}_{k:04d}.jpg", encode(pixels(100 * r + 10 * p + k, 112)))
                numbers = "\t".join(f"{v:.4f}" for v in (template(112)).ravel())
                points += f"./{race}/{person}/{person}_{k:04d}.jpg\t{p}\t{numbers}\n"
        lines = ["m.0a\t1\t2", "m.0a\t1\tm.0b\t3"] * 5
        head = "2\t1\n" if header else ""
        put(root / "txts" / race / f"{race}_pairs.txt", head + "\n".join(lines[: 4 if header else 10]) + "\n")
        if landmarks:
            put(root / "txts" / race / f"{race}_lmk.txt", points)
    return root


def test_races_pairs_folds_and_landmarks(tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("rfw", rfw(tmp_path / "RFW" / "test"), tmp_path / "a").path)
    also = FaceSet.open(import_faces("rfw", tmp_path / "RFW", tmp_path / "b").path)
    assert faces.fingerprint() == also.fingerprint()
    assert (faces.domains, faces.size, len(faces)) == (list(RACES), 112, 12)
    assert faces.names == ["African/m.0a", "African/m.0b", "Asian/m.0a", "Asian/m.0b"]
    pairs = load_pairs(faces)
    assert pairs.same.tolist() == [True, False] * 10
    assert pairs.fold.tolist() == list(range(10)) * 2
    assert pairs.first.tolist() == [0] * 10 + [6] * 10
    assert pairs.second.tolist() == [1, 5] * 5 + [7, 11] * 5
    assert np.array_equal(faces.domain[pairs.first], np.repeat([0, 1], 10))
    # landmarks at the template's own places: the aligned picture is the picture
    assert np.abs(faces.extra("landmarks") - template(112)).max() < 1e-3
    assert np.abs(faces.images[4].astype(int) - pixels(12, 112)).max() <= 12  # weights of 1/32 pixel


def test_header_line_and_no_landmarks(tmp_path: Path) -> None:
    source = rfw(tmp_path / "RFW", header=True, landmarks=False)
    put(source / "data" / "Asian" / "m.0b" / "m.0b_0003.jpg", b"broken")
    faces = FaceSet.open(import_faces("rfw", source, tmp_path / "set", align="none").path)
    assert load_pairs(faces).fold.tolist() == [0, 0, 1, 1, 0, 1]
    assert (faces.info["pairs"], faces.info["pairs_dropped"], faces.info["align"]) == (6, 2, "none")
    assert np.array_equal(faces.images[0], pixels(1, 112))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("txts/Asian/Asian_pairs.txt", None, r"Asian_pairs\.txt is missing"),
        ("txts/Asian/Asian_pairs.txt", "", r"Asian_pairs\.txt lists no pairs"),
        ("txts/Asian/Asian_pairs.txt", "m.0a 1 x\n", r"Asian_pairs\.txt:1: expected 'name i j'"),
        ("txts/Asian/Asian_pairs.txt", "\x00\xff" * 50, r"Asian_pairs\.txt:1"),
        ("txts/Asian/Asian_lmk.txt", "m.0a_0001.jpg 1 2 3\n", r"Asian_lmk\.txt:1: expected five landmarks"),
    ],
)
def test_broken_files(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    source = rfw(tmp_path / "RFW")
    (source / file).unlink() if text is None else put(source / file, text)
    with pytest.raises(UsageError, match=message) as caught:
        import_faces("rfw", source, tmp_path / "set")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["RFW"]


def test_not_an_rfw(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no RFW"):
        import_faces("rfw", tmp_path, tmp_path / "set")
    (tmp_path / "data").mkdir()
    with pytest.raises(UsageError, match="<race>/<person>/<picture>"):
        import_faces("rfw", tmp_path, tmp_path / "set")


# a user's own list ----------------------------------------------------------------------------------


@pytest.fixture
def people(tmp_path: Path) -> Path:
    for k, name in enumerate(("ann/1", "ann/2", "bob/1", "bob/2")):
        put(tmp_path / "src" / f"{name}.png", encode(pixels(k)))
    return tmp_path / "src"


def test_own_list_at_import_and_later(people: Path, tmp_path: Path) -> None:
    text = "file_a,file_b,same\nann/1.png,ann/2.png,1\nbob/1.png,ann/2.png,0\nbob/2.png,bob/1.png,yes\n"
    put(tmp_path / "pairs.csv", text)
    report = import_faces("folder", people, tmp_path / "set", size=16, pairs=tmp_path / "pairs.csv", align="none")
    faces = FaceSet.open(report.path)
    put(tmp_path / "rows.csv", "row_a,row_b,same,fold\n0,1,1,0\n2,1,0,0\n3,2,1,1\n")
    for pairs, folds in (
        (load_pairs(faces), [0, 0, 1]),
        (load_pairs(faces, tmp_path / "pairs.csv"), [0, 0, 1]),
        (load_pairs(faces, tmp_path / "rows.csv"), [0, 0, 1]),
    ):
        assert (pairs.first.tolist(), pairs.second.tolist()) == ([0, 2, 3], [1, 1, 2])
        assert (pairs.same.tolist(), pairs.fold.tolist()) == ([True, False, True], folds)


def test_a_sorted_list_still_has_folds_of_both_kinds(people: Path, tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("folder", people, tmp_path / "set", size=16, align="none").path)
    put(tmp_path / "rows.csv", "row_a,row_b,same\n" + "0,1,1\n" * 20 + "0,2,0\n" * 30)
    pairs = load_pairs(faces, tmp_path / "rows.csv")
    assert np.bincount(pairs.fold[pairs.same]).tolist() == [2] * 10
    assert np.bincount(pairs.fold[~pairs.same]).tolist() == [3] * 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read .*No such file"),
        ("", r"list\.csv:1: expected the header"),
        ("a,b,same\n", r"list\.csv:1: expected the header"),
        ("row_a,row_b,same\n", "lists no pairs"),
        ("row_a,row_b,same\n0,1\n", r"list\.csv:2: expected 3 values, found 2"),
        ("row_a,row_b,same\n0,1,2\n", r"list\.csv:2: same must be 1 or 0"),
        ("row_a,row_b,same\n0,4,1\n", r"list\.csv:2: '4' is no row of the set \(0 to 3\)"),
        ("row_a,row_b,same\n-1,2,1\n", r"list\.csv:2: '-1' is no row"),
        ("row_a,row_b,same,fold\n1,2,1,x\n", r"list\.csv:2: fold must be a number"),
        ("file_a,file_b,same\nann/1.png,ann/9.png,1\n", r"list\.csv:2: set has no picture ann/9\.png"),
        ("\x00,\xff", r"list\.csv"),
    ],
)
def test_broken_lists(people: Path, tmp_path: Path, text: str | None, message: str) -> None:
    faces = FaceSet.open(import_faces("folder", people, tmp_path / "set", size=16, align="none").path)
    if text is not None:
        put(tmp_path / "list.csv", text)
    with pytest.raises(UsageError, match=message) as caught:
        load_pairs(faces, tmp_path / "list.csv")
    assert "\n" not in str(caught.value)


def test_lists_that_do_not_fit_an_import(people: Path, tmp_path: Path) -> None:
    for text, message in (
        ("row_a,row_b,same\n0,1,1\n", "name files"),
        ("file_a,file_b,same\nann/1.png,nobody.png,1\n", r":2: no picture nobody\.png"),
    ):
        put(tmp_path / "pairs.csv", text)
        with pytest.raises(UsageError, match=message):
            import_faces("folder", people, tmp_path / "set", pairs=tmp_path / "pairs.csv", align="none")
    assert not (tmp_path / "set").exists()


def test_a_damaged_table(people: Path, tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("folder", people, tmp_path / "set", size=16, align="none").path)
    for table in (np.array([[0, 9, 1, 0]]), np.zeros((2, 3), np.int64), np.zeros((2, 4), np.float32)):
        np.save(faces.path / "pairs.npy", table)
        with pytest.raises(VisardError, match="no list of pairs"):
            load_pairs(faces)
