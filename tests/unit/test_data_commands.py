"""`visard data import | export`: exit codes, one line of error, options; and imports from scripts without a guard."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from tests.unit.pictures import encode, pixels

from visard.cli import main
from visard.data.faces import FaceSet
from visard.data.pairs import load_pairs
from visard.data.pictures import QUIET
from visard.data.sources import SOURCES
from visard.data.sources.catalog import draw_pairs, export
from visard.data.sources.importing import import_faces
from visard.errors import UsageError


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for person in range(5):
        for k in range(4):
            path = tmp_path / "photos" / f"p{person}" / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(pixels(10 * person + k)))
    return tmp_path / "photos"


def visard(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["visard", "data", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_an_import_says_how_many_pairs_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for k in (1, 2):
        path = tmp_path / "lfw" / "Ann" / f"Ann_000{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(pixels(k)))
    words = ("import", "lfw", "lfw", "--align", "none", "--size", "32", "--out")
    assert visard(monkeypatch, *words, "without") == 0
    assert "caution no pairs.txt in lfw or beside it" in capsys.readouterr().out
    (tmp_path / "pairs.txt").write_text("1\t1\nAnn\t1\t2\n")
    assert visard(monkeypatch, *words, "with") == 0
    assert "1 pair to compare" in capsys.readouterr().out
    assert visard(monkeypatch, *words, "with") != 0
    assert "with exists already: --overwrite replaces it" in capsys.readouterr().err


def test_there_and_back(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> None:
        assert visard(monkeypatch, *words) == 0

    run("import", "folder", "photos", "--out", "a", "--size", "16", "--align", "none")
    run("export", "a", "a.bin", "--pairs", "30", "--seed", "3")
    run("import", "bin", "a.bin", "--out", "b", "--size", "16")
    run("export", "b", "b.bin")  # its own pairs, in the same order
    assert Path("a.bin").read_bytes() == Path("b.bin").read_bytes()
    run("export", "a", "a.rec")
    run("import", "recordio", "a.rec", "--out", "c", "--size", "16")
    first, pairs, records = FaceSet.open("a"), FaceSet.open("b"), FaceSet.open("c")
    assert np.array_equal(first.images, records.images)
    assert np.array_equal(first.identity, records.identity)
    drawn, kept = draw_pairs(first, 30, 3), load_pairs(pairs)
    assert np.array_equal(first.images[drawn.first], pairs.images[kept.first])
    assert np.array_equal(first.images[drawn.second], pairs.images[kept.second])
    assert np.array_equal(drawn.same, kept.same)
    assert np.array_equal(drawn.fold, kept.fold)
    assert np.array_equal(first.identity[drawn.first] == first.identity[drawn.second], drawn.same)


def test_options_reach_the_importer(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pairs.csv").write_text("file_a,file_b,same\np0/0.png,p1/0.png,0\n")
    assert visard(monkeypatch, "import", "folder", "photos", "--out", "a", "--crop", "8", "--pairs", "pairs.csv") == 0
    faces = FaceSet.open("a")
    assert (faces.size, faces.info["crop"], len(load_pairs(faces))) == (112, 8, 1)


@pytest.mark.parametrize("kind", sorted(SOURCES))
@pytest.mark.parametrize("content", [b"", b"junk" * 400, b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."])
def test_hostile_files_end_with_one_line_and_code_2(
    kind: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.bin").write_bytes(content)
    assert visard(monkeypatch, "import", kind, "x.bin", "--out", "set") == 2
    error = capsys.readouterr().err
    assert error.startswith("visard: ")
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("import", "folder", "photos", "--out", "a", "--label", "x"), "importer folder has no option 'label'"),
        (("import", "flodder", "photos"), "did you mean 'folder'"),
        (("import", "folder", "photos", "--out", "a", "--size", "5000"), "size >= 8 and <= 4096"),
        (("export", "nowhere", "a.bin"), "no face set"),
    ],
)
def test_wrong_use(
    words: tuple[str, ...],
    message: str,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert visard(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err


def test_exports_that_cannot_be(photos: Path, tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("folder", photos, tmp_path / "a", size=16, align="none").path)
    for path, pairs, message in (
        ("x.zip", 10, r"\.bin or \.rec"),
        ("x.bin", 1000, "not enough"),
        ("x.bin", 1, "count >= 2"),
    ):
        with pytest.raises(UsageError, match=message):
            export(faces, tmp_path / path, pairs=pairs)
    assert not list(tmp_path.glob("*x.bin*"))


def test_a_script_needs_no_guard_and_no_processes(photos: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\nfrom visard.data.sources.importing import import_faces\n"
        "r = import_faces('folder', 'photos', 'set', size=16, workers=3, align='none')\n"
        "assert r.pictures == 20 and not multiprocessing.active_children()\n"
    )
    subprocess.run([sys.executable, "-W", "error", str(script)], check=True, cwd=tmp_path)


def test_warnings_of_other_threads_come_back(photos: Path, tmp_path: Path) -> None:
    """Decoders are silenced while they run; the filters afterwards are those from before."""
    before = list(warnings.filters)
    import_faces("folder", photos, tmp_path / "set", size=16, workers=4, align="none")
    assert warnings.filters == before
    with QUIET, QUIET:
        warnings.warn("unheard", stacklevel=1)
    assert warnings.filters == before
