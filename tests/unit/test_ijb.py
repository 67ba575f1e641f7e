"""IJB-A, IJB-B and IJB-C layouts: templates, media, pairs and galleries as the files say, and damaged files."""

from pathlib import Path

import numpy as np
import pytest
from tests.unit.pictures import encode, pixels

from visard.data.faces import FaceSet
from visard.data.pairs import load_galleries, load_pairs, load_template_pairs, load_templates, splits
from visard.data.pictures import template
from visard.data.sources import ijb
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError

# file, template, medium; subjects: template 1, 5 -> 100; 2 -> 200; 3 -> 300; 4 -> unknown to the 1N files
MEMBERS = [("1.jpg", 1, 11), ("2.jpg", 1, 11), ("3.jpg", 2, 12), ("4.jpg", 3, 13), ("5.jpg", 4, 14), ("6.jpg", 5, 15)]
PAIRS = [(1, 5, 1), (1, 2, 0), (3, 4, 0), (2, 4, 0)]


def put(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


@pytest.fixture
def ijbc(tmp_path: Path) -> Path:
    return ijbc_files(tmp_path / "IJBC")


def ijbc_files(root: Path) -> Path:
    """Made-up pictures in the layout of IJB-C."""
    numbers = " ".join(f"{value:.4f}" for value in template(112).ravel())
    scores = ""
    for k, (name, _, _) in enumerate(MEMBERS):
        put(root / "loose_crop" / name, encode(pixels(k, 112)))
        scores = f"{name} {numbers} 0.9{k}\n" + scores  # the other way round: lines are matched by name
    put(root / "meta" / "ijbc_name_5pts_score.txt", scores)
    put(root / "meta" / "ijbc_face_tid_mid.txt", "".join(f"{n} {t} {m}\n" for n, t, m in MEMBERS))
    put(root / "meta" / "ijbc_template_pair_label.txt", "".join(f"{a} {b} {s}\n" for a, b, s in PAIRS))
    head = "TEMPLATE_ID,SUBJECT_ID,FILENAME,FACE_X\n"
    put(root / "meta" / "ijbc_1N_gallery_G1.csv", head + "1,100,img/1.jpg,3\n1,100,img/2.jpg,3\n2,200,img/3.jpg,3\n")
    put(root / "meta" / "ijbc_1N_gallery_G2.csv", head + "3,300,img/4.jpg,3\n")
    put(root / "meta" / "ijbc_1N_probe_mixed.csv", head + "5,100,img/6.jpg,3\n")
    return root


def test_everything_is_kept(ijbc: Path, tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("ijb", ijbc, tmp_path / "set").path)
    assert (len(faces), faces.size) == (6, 112)
    assert faces.names == ["100", "200", "300", "template-4"]
    assert faces.identity.tolist() == [0, 0, 1, 2, 3, 0]
    assert np.abs(faces.extra("landmarks") - template(112)).max() < 1e-3
    assert splits(faces) == [0]
    t = load_templates(faces)
    assert (t.row.tolist(), t.template.tolist()) == ([0, 1, 2, 3, 4, 5], [1, 1, 2, 3, 4, 5])
    assert (t.media.tolist(), t.subject.tolist()) == ([11, 11, 12, 13, 14, 15], [100, 100, 200, 300, -1, 100])
    assert t.score == pytest.approx([0.90, 0.91, 0.92, 0.93, 0.94, 0.95])
    p = load_template_pairs(faces)
    assert list(zip(p.first.tolist(), p.second.tolist(), p.same.astype(int).tolist(), strict=True)) == PAIRS
    g = load_galleries(faces)
    assert {name: (x.template.tolist(), x.subject.tolist()) for name, x in g.galleries.items()} == {
        "G1": ([1, 2], [100, 200]),
        "G2": ([3], [300]),
    }
    assert (g.probes.template.tolist(), g.probes.subject.tolist()) == ([5], [100])


def test_lost_pictures_take_their_templates_along(ijbc: Path, tmp_path: Path) -> None:
    put(ijbc / "loose_crop" / "2.jpg", b"broken")
    (ijbc / "loose_crop" / "3.jpg").unlink()
    report = import_faces("ijb", ijbc, tmp_path / "set")
    faces = FaceSet.open(report.path)
    assert [file for file, _ in report.skipped] == ["2.jpg", "3.jpg"]
    t = load_templates(faces)
    assert (t.row.tolist(), t.template.tolist()) == ([0, 1, 2, 3], [1, 3, 4, 5])
    assert load_template_pairs(faces).first.tolist() == [1, 3]
    assert load_galleries(faces).galleries["G1"].template.tolist() == [1]
    about = faces.info["ijb"]
    assert (about["templates_dropped"], about["pairs_dropped"]) == (1, 2)


@pytest.mark.parametrize("folders", [False, True])
def test_without_1n_and_1_1_files(ijbc: Path, tmp_path: Path, folders: bool) -> None:
    for path in [*(ijbc / "meta").glob("*1N*"), ijbc / "meta" / "ijbc_template_pair_label.txt"]:
        path.unlink()
        if folders:
            path.mkdir()
    faces = FaceSet.open(import_faces("ijb", ijbc, tmp_path / "set").path)
    assert load_templates(faces).subject.tolist() == [-1] * 6
    with pytest.raises(UsageError, match="has no galleries"):
        load_galleries(faces)
    with pytest.raises(UsageError, match=r"no template_pairs_0\.npy"):
        load_template_pairs(faces)
    with pytest.raises(UsageError, match=r"splits 0: 3 is not one"):
        load_templates(faces, 3)
    with pytest.raises(UsageError, match=r"no pairs\.npy"):
        load_pairs(faces)


def test_the_list_of_pairs_is_parsed_in_blocks(ijbc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.integers(1, 6, (500, 2)), rng.integers(0, 2, 500)])
    text = "\n".join(" ".join(map(str, row)) for row in table)
    put(ijbc / "meta" / "ijbc_template_pair_label.txt", text)  # no newline at the end
    monkeypatch.setattr(ijb, "BLOCK", 37)
    faces = FaceSet.open(import_faces("ijb", ijbc, tmp_path / "set").path)
    p = load_template_pairs(faces)
    assert np.array_equal(np.column_stack([p.first, p.second, p.same]), table)
    put(ijbc / "meta" / "ijbc_template_pair_label.txt", text.replace("\n", " x\n", 101).replace(" x\n", "\n", 100))
    with pytest.raises(UsageError, match=r"label\.txt:101: expected two templates and a label"):
        import_faces("ijb", ijbc, tmp_path / "bad")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ijbc_face_tid_mid.txt", None, "is no IJB"),
        ("ijbc_face_tid_mid.txt", "", "lists no pictures"),
        ("ijbc_face_tid_mid.txt", "1.jpg 1\n", r"tid_mid\.txt:1: expected a file name, a template and a medium"),
        ("ijbc_face_tid_mid.txt", "1.jpg x 1\n", r"tid_mid\.txt:1: expected a number, found 'x'"),
        ("ijbc_face_tid_mid.txt", "1.jpg 99999999999999 1\n", r"tid_mid\.txt:1: expected a number"),
        ("ijbc_name_5pts_score.txt", None, r"no \*_name_5pts_score\.txt"),
        ("ijbc_name_5pts_score.txt", "", r"has no line for 1\.jpg"),
        ("ijbc_name_5pts_score.txt", "1.jpg 1 2\n", r"score\.txt:1: expected a file name, ten coordinates"),
        ("ijbc_name_5pts_score.txt", "1.jpg 1 2 3 4 5 6 7 8 9 x 1\n", r"score\.txt:1: expected five landmarks"),
        ("ijbc_name_5pts_score.txt", "1.jpg 1 2 3 4 5 6 7 8 9 9 x\n", r"score\.txt:1: expected a score"),
        ("ijbc_template_pair_label.txt", "", "lists no pairs"),
        ("ijbc_template_pair_label.txt", "1 2 0\n1 2\n", r"label\.txt:2: expected two templates and a label"),
        ("ijbc_template_pair_label.txt", "1 2 0\n\n1 2 2\n", r"label\.txt:3"),
        ("ijbc_template_pair_label.txt", "1 -2 0\n", r"label\.txt:1"),
        ("ijbc_template_pair_label.txt", "1 2.5 0\n", r"label\.txt:1"),
        ("ijbc_template_pair_label.txt", "1 9 0\n", "templates 1 and 9, of which one has no pictures"),
        ("ijbc_template_pair_label.txt", "x" * 5000, r"label\.txt:1"),
        ("ijbc_1N_gallery_G1.csv", "", "lists no templates"),
        ("ijbc_1N_gallery_G1.csv", "a,b\n1\n", r"G1\.csv:2: expected a template and a subject"),
        ("ijbc_1N_gallery_G1.csv", "a,b\n1,x\n", r"G1\.csv:2: expected a number"),
        ("ijbc_1N_gallery_G1.csv", "a,b\n1,2\n1,3\n", r"G1\.csv:3: template 1 has two subjects"),
        ("ijbc_1N_probe_mixed.csv", None, "galleries but no"),
        ("other_face_tid_mid.txt", "1.jpg 1 1\n", "has 2 files"),
        ("../loose_crop", None, "no such file or folder"),
    ],
)
def test_damaged_files_are_one_line(ijbc: Path, tmp_path: Path, file: str, text: str | None, message: str) -> None:
    path = ijbc / "meta" / file
    if path.is_dir():
        path.rename(tmp_path / "IJBC" / "away")
    elif text is None:
        path.unlink()
    else:
        put(path, text)
    with pytest.raises(UsageError, match=message) as caught:
        import_faces("ijb", ijbc, tmp_path / "set")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["IJBC"]


def test_files_outside_the_folder_are_not_read(ijbc: Path, tmp_path: Path) -> None:
    put(tmp_path / "secret.png", encode(pixels(0)))
    for name in ("../../secret.png", str(tmp_path / "secret.png")):
        for file in ("ijbc_face_tid_mid.txt", "ijbc_name_5pts_score.txt"):
            text = (ijbc / "meta" / file).read_text()
            put(ijbc / "meta" / file, text.replace("\n6.jpg ", f"\n{name} ").replace("6.jpg ", f"{name} ", 1))
        report = import_faces("ijb", ijbc, tmp_path / "set", overwrite=True)
        assert report.skipped == [(name, "the file lies outside the folder")]
        for file in ("ijbc_face_tid_mid.txt", "ijbc_name_5pts_score.txt"):
            put(ijbc / "meta" / file, (ijbc / "meta" / file).read_text().replace(name, "6.jpg"))


def test_a_damaged_set(ijbc: Path, tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("ijb", ijbc, tmp_path / "set").path)
    np.save(faces.path / "templates_0.npy", np.array([[99, 1, 1, 1]]))
    with pytest.raises(VisardError, match="does not fit the templates"):
        load_templates(faces)
    np.save(faces.path / "scores_0.npy", np.ones(1, np.float32))
    with pytest.raises(VisardError, match="not in the set"):
        load_templates(faces)
    np.save(faces.path / "gallery_0_G1.npy", np.ones(3))
    with pytest.raises(VisardError, match="damaged"):
        load_galleries(faces)
    for name in ("a" * 300, "é" * 100, "../../x"):
        faces.info["ijb"]["galleries"] = [name]
        with pytest.raises(VisardError, match=r"set has no gallery_0_.*\.npy$"):
            load_galleries(faces)


# IJB-A ----------------------------------------------------------------------------------------------

HEAD = (
    "TEMPLATE_ID,SUBJECT_ID,FILE,MEDIA_ID,SIGHTING_ID,FRAME,FACE_X,FACE_Y,FACE_WIDTH,FACE_HEIGHT,"
    "RIGHT_EYE_X,RIGHT_EYE_Y,LEFT_EYE_X,LEFT_EYE_Y,NOSE_BASE_X,NOSE_BASE_Y\n"
)
POINTS = "38.2946,51.6963,73.5318,51.5014,56.0252,71.7366"  # of the template: nothing moves


@pytest.fixture
def ijba(tmp_path: Path) -> Path:
    """Two splits; picture 3 has two people, picture 2 no landmarks."""
    root = tmp_path / "IJBA"
    for k in range(1, 5):
        put(root / "images" / "img" / f"{k}.png", encode(pixels(k, 112)))
    box = "0,0,112,112"
    rows = {
        1: f"10,7,img/1.png,91,,,{box},{POINTS}\n",
        2: "10,7,img/2.png,92,,,30,40,20,10,,,,,,\n",
        3: f"11,8,img/3.png,93,,,{box},73.5318,51.5014,38.2946,51.6963,56.0252,71.7366\n",  # eyes the other way round
        4: "12,7,img/3.png,93,,,50,50,40,40,,,,,,\n",
        5: f"13,9,img/4.png,94,,,{box},{POINTS}\n",
    }
    for k, members in ((1, (1, 2, 3, 4)), (2, (3, 5))):
        folder = root / "IJB-A_11_sets" / f"split{k}"
        put(folder / f"verify_metadata_{k}.csv", HEAD + "".join(rows[m] for m in members))
        put(folder / f"verify_comparisons_{k}.csv", "10,11\n10,12\n" if k == 1 else "11,13\n")
    folder = root / "IJB-A_1N_sets" / "split1"
    put(folder / "search_gallery_1.csv", HEAD + rows[1] + rows[3])
    put(folder / "search_probe_1.csv", HEAD + rows[5] + rows[4])
    put(folder / "train_1.csv", HEAD)
    return root


def test_ijba(ijba: Path, tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("ijb", ijba, tmp_path / "set").path)
    assert len(faces) == 5  # a face is a picture and a box
    assert splits(faces) == [1, 2]
    assert [faces.file(k) for k in range(5)] == [f"img/{k}.png" for k in (1, 2, 3, 3, 4)]
    assert [faces.names[k] for k in faces.identity] == ["7", "7", "8", "7", "9"]
    with pytest.raises(UsageError, match="splits 1, 2: None is not one"):
        load_templates(faces)
    one, two = load_templates(faces, 1), load_templates(faces, 2)
    found = set(zip(one.row.tolist(), one.template.tolist(), one.media.tolist(), one.subject.tolist(), strict=True))
    assert found == {(0, 10, 91, 7), (1, 10, 92, 7), (2, 11, 93, 8), (3, 12, 93, 7), (4, 13, 94, 9)}
    assert len(one.row) == 5
    assert sorted(two.template.tolist()) == [11, 13]
    pairs = load_template_pairs(faces, 1)
    assert (pairs.first.tolist(), pairs.second.tolist(), pairs.same.tolist()) == ([10, 10], [11, 12], [False, True])
    search = load_galleries(faces, 1)
    assert (search.galleries["A"].template.tolist(), search.probes.subject.tolist()) == ([10, 11], [7, 9])
    for row, seed in ((0, 1), (2, 3)):  # eyes and nose where the template has them
        assert np.abs(faces.images[row].astype(int) - pixels(seed, 112)).max() <= 12
    # 30, 40, 20 x 10 and 1.3 times the longer side around its centre: 26 pixels from (27, 32)
    inside = faces.images[1].astype(int)[8:-8:26, 8:-8:26]
    assert inside.std() > 20
    assert not np.array_equal(faces.images[1], faces.images[3])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("11_sets/split1/verify_metadata_1.csv", "", r"metadata_1\.csv:1: no column TEMPLATE_ID"),
        ("11_sets/split1/verify_metadata_1.csv", HEAD, "lists no pictures"),
        ("11_sets/split1/verify_metadata_1.csv", HEAD + "1,2\n", r"metadata_1\.csv:2: expected 16 values, found 2"),
        ("11_sets/split1/verify_metadata_1.csv", HEAD + "x,7,a,1,,,0,0,1,1,,,,,,\n", ":2: a number is missing"),
        ("11_sets/split1/verify_metadata_1.csv", HEAD + "1,7,a,1,,,0,nan,1,1,,,,,,\n", ":2: a number is out of range"),
        ("11_sets/split1/verify_metadata_1.csv", HEAD + "10,5,a,1,,,0,0,1,1,,,,,,\n", "template 10 of split 1 has two"),
        ("11_sets/split1/verify_comparisons_1.csv", "10,x\n", r"comparisons_1\.csv:1: expected two templates"),
        ("11_sets/split1/verify_comparisons_1.csv", "10,99\n", r"comparisons_1\.csv:1: template 99 has no pictures"),
        ("11_sets/split1/verify_comparisons_1.csv", "", "lists no pairs"),
        ("1N_sets/split1/search_probe_1.csv", None, "only one of search_gallery and search_probe"),
    ],
)
def test_ijba_damaged(ijba: Path, tmp_path: Path, file: str, text: str | None, message: str) -> None:
    path = ijba / f"IJB-A_{file}"
    path.unlink() if text is None else put(path, text)
    with pytest.raises(UsageError, match=message) as caught:
        import_faces("ijb", ijba, tmp_path / "set")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["IJBA"]
