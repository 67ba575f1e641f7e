"""People taken out of galleries and face sets: what is left is as if they had never been there, and a receipt."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.e2e.smoke import smoke

import visard
from visard.at_rest import Key
from visard.cli import main
from visard.config import load
from visard.data.activations import Store, activations_folder
from visard.data.faces import FaceSet
from visard.data.pairs import load_galleries, load_pairs, load_template_pairs, load_templates
from visard.data.removal import Receipt, digests, person_digest, remove_people
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError
from visard.files import file_digest
from visard.inference.gallery import Gallery
from visard.runs.run import resume

ROOT = Path(__file__).resolve().parents[2]
PEOPLE, EACH, SIDE = 8, 5, 32
GONE = "person-3"
ABOUT = {
    "model": "m",
    "model_file": "m",
    "order": "rgb",
    "mean": "0.5",
    "std": "0.5",
    "size": "32",
    "align": "none",
    "flip": "0",
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each person; two pictures are unreadable, and all of one person."""
    folder = tmp_path_factory.mktemp("photos") / "photos"
    rng = np.random.default_rng(0)
    for person in range(PEOPLE):
        (folder / f"person-{person}").mkdir(parents=True)
        for k in range(EACH):
            Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(folder / f"person-{person}/{k}.png")
    for name in ("person-2/1.png", "person-3/1.png", "person-9/0.png", "person-9/1.png", "person-10/0.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no picture")
    return folder


def imported(photos: Path, out: Path, without: str = "") -> Path:
    """A face set with pairs, quality and landmarks; of pictures without a person if one is named."""
    source = out.with_name(f"{out.name}-photos")
    shutil.copytree(photos, source)
    if without:
        shutil.rmtree(source / without)
    people = [p for p in range(PEOPLE) if f"person-{p}" != without]
    same = [f"person-{p}/0.png,person-{p}/1.png,1" for p in people]
    other = [f"person-{a}/2.png,person-{b}/3.png,0" for a, b in zip(range(7), range(1, 8), strict=True)]
    lines = [*same, *(line for line in other if not without or without not in line)]
    out.with_suffix(".csv").write_text("file_a,file_b,same,fold\n" + "\n".join(f"{line},0" for line in lines) + "\n")
    import_faces("folder", source, out, size=SIDE, pairs=out.with_suffix(".csv"), align="none")
    faces = FaceSet.open(out)
    values = faces.pixels.reshape(len(faces), -1).astype(np.float32)
    np.save(out / "quality.npy", values[:, :3])
    np.save(out / "landmarks.npy", values[:, :10].reshape(-1, 5, 2))
    return out


def new_receipt(folder: Path, *people: str) -> Receipt:
    return Receipt(folder / "receipt.json", "face set", "faces", people or (GONE,))


def content(folder: Path) -> dict[str, object]:
    faces = FaceSet.open(folder)
    arrays = {p.name: np.load(p).tolist() for p in folder.glob("*.npy")}
    header = json.loads((folder / "faces.json").read_text())
    return {**arrays, "files.npy": [faces.file(k) for k in range(len(faces))], **header}


def without_source(found: dict[str, object]) -> dict[str, object]:
    info = found["info"]
    assert isinstance(info, dict)
    return {**found, "info": {k: v for k, v in info.items() if k != "source"}}


def test_a_set_is_as_if_it_had_been_imported_without_the_person(photos: Path, tmp_path: Path) -> None:
    one, never = imported(photos, tmp_path / "one"), imported(photos, tmp_path / "never", GONE)
    before, theirs = digests(one), FaceSet.open(one).pixels[FaceSet.open(one).identity == 3]
    assert len(theirs) == EACH - 1
    made = new_receipt(tmp_path)
    remove_people(one, [GONE], made)
    assert without_source(content(one)) == without_source(content(never))
    assert FaceSet.open(one).fingerprint() == FaceSet.open(never).fingerprint()
    assert len(load_pairs(FaceSet.open(one))) == len(load_pairs(FaceSet.open(never)))
    for path in one.iterdir():
        data = path.read_bytes()
        assert b"person-3" not in data
        assert not any(picture.tobytes() in data for picture in theirs)
    text = made.path.read_text()
    receipt = json.loads(text)
    assert "person" not in text.replace("person_", "")
    assert receipt["state"] == "done"
    assert receipt["people"] == [person_digest(made.proof, GONE)] != [person_digest(made.proof, "person-2")]
    assert made.proof.hex() not in text
    assert receipt["removed"] == {"people": 1, "pictures": EACH - 1}
    assert {f["file"]: f["before"] for f in receipt["files"]} == before
    assert {f["file"]: f["after"] for f in receipt["files"]} == digests(one)
    seen = {one["what"]: one["removed"] for one in receipt["looked_at"]}
    assert seen["quality"] == seen["landmarks"] == EACH - 1
    assert seen["skipped"] == seen["files that were skipped"] == 1
    assert seen["stored activations"] == 0, "what was looked at and not found is in it too"
    assert not [p for p in tmp_path.iterdir() if ".partial-" in p.name or ".replaced-" in p.name]


def test_who_has_only_files_that_were_skipped(photos: Path, tmp_path: Path) -> None:
    one, never = imported(photos, tmp_path / "one"), imported(photos, tmp_path / "never", "person-9")
    remove_people(one, ["person-9"], new_receipt(tmp_path, "person-9"))
    left, expected = (without_source(content(folder)) for folder in (one, never))
    assert [left["info"], left["names"]] == [expected["info"], expected["names"]]
    assert b"person-9" not in (one / "faces.json").read_bytes()
    assert len(np.load(one / "skipped.npy")) == len(np.load(never / "skipped.npy")) == 3


def test_templates_galleries_and_other_arrays(photos: Path, tmp_path: Path) -> None:
    folder = imported(photos, tmp_path / "one")
    faces = FaceSet.open(folder)
    count = len(faces)
    template = np.repeat(np.arange(count // 2 + 1), 2)[:count]  # two pictures each: some of two people
    member = np.column_stack([np.arange(count), template, np.zeros(count), faces.identity]).astype(np.int64)
    np.save(folder / "templates_0.npy", member)
    np.save(folder / "scores_0.npy", np.arange(count, dtype=np.float32))
    every = np.unique(template)
    np.save(folder / "template_pairs_0.npy", np.column_stack([every, every[::-1], every * 0]).astype(np.int32))
    for name in ("gallery_0_G1", "probes_0"):
        np.save(folder / f"{name}.npy", np.column_stack([every, every]).astype(np.int64))
    header = json.loads((folder / "faces.json").read_text())
    header["info"]["ijb"] = {"splits": [0], "galleries": ["G1"]}
    (folder / "faces.json").write_text(json.dumps(header))
    theirs = np.flatnonzero(faces.identity == 3)
    files = [faces.file(row) for row in range(count)]
    remove_people(folder, [GONE], new_receipt(tmp_path))
    now = FaceSet.open(folder)
    found = load_templates(now)
    expected = [(files[row], int(template[row]), float(row)) for row in range(count) if row not in theirs]
    assert [
        (now.file(int(r)), int(t), float(s)) for r, t, s in zip(found.row, found.template, found.score, strict=True)
    ] == expected
    left = {t for _, t, _ in expected}
    assert left < set(every.tolist()), "a template of this person alone"
    pairs = load_template_pairs(now)
    assert set(pairs.first.tolist()) | set(pairs.second.tolist()) <= left
    assert (
        set(load_galleries(now).galleries["G1"].template.tolist())
        == left
        == set(load_galleries(now).probes.template.tolist())
    )
    np.save(folder / "unknown.npy", np.zeros(3))
    before = digests(folder)
    with pytest.raises(VisardError, match="unknown.npy has no row for each picture"):
        remove_people(folder, ["person-4"], replace(new_receipt(tmp_path, "person-4"), path=tmp_path / "other.json"))
    assert digests(folder) == before


def test_activations_go_under_whatever_path(photos: Path, tmp_path: Path) -> None:
    one, other = imported(photos, tmp_path / "one"), imported(photos, tmp_path / "other", "person-1")
    common = {"count": 1, "shape": [4], "dtype": "float32"}
    stores = [
        Store.open(activations_folder(), {"path": str(path), "faces": faces, **common}).folder
        for path, faces in ((one, "a"), (tmp_path / "link", file_digest(one / "images.npy")), (other, "b"))
    ]
    made = new_receipt(tmp_path)
    remove_people(one, [GONE], made)
    assert [folder.exists() for folder in stores] == [False, False, True]
    assert {"what": "stored activations", "where": "the cache folder", "found": 2, "removed": 2} in made.looked_at
    shutil.rmtree(stores[2])


KILLS = {
    "while it copies": "from visard.data.storage import FaceSetWriter as W; W.attach = lambda *given: os._exit(9)",
    "between old and new": (
        "from visard.data import storage as s; rename = Path.rename\n"
        "def once(a, b):\n    rename(a, b); os._exit(9)\n"
        "Path.rename = once"
    ),
    "before the old one goes": (
        "from visard.data import storage as s; tree = s.shutil.rmtree\n"
        "s.shutil.rmtree = lambda path, **how: os._exit(9) if '.replaced-' in str(path) else tree(path, **how)"
    ),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_loses_nothing_and_leaves_nothing(photos: Path, tmp_path: Path, moment: str) -> None:
    one, never = imported(photos, tmp_path / "one"), imported(photos, tmp_path / "never", GONE)
    whole = content(one)
    program = (
        f"import os, sys\nfrom pathlib import Path\n{KILLS[moment]}\nfrom visard.cli import main\n"
        f"sys.argv = ['visard', 'data', 'remove', {str(one)!r}, {GONE!r}, '--receipt', {str(tmp_path / 'r.json')!r}]\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stdout + done.stderr
    if moment == "before the old one goes":
        assert any(".replaced-" in p.name for p in tmp_path.iterdir())
        with pytest.raises(UsageError, match="what an interrupted removal had left is gone now"):
            remove_people(one, [GONE], new_receipt(tmp_path))
        assert json.loads((tmp_path / "r.json").read_text())["state"] == "begun"
    else:
        if moment != "between old and new":
            assert content(one) == whole
        made = new_receipt(tmp_path)
        remove_people(one, [GONE], made)
        assert json.loads(made.path.read_text())["state"] == "done"
    assert without_source(content(one)) == without_source(content(never))
    assert not [p for p in tmp_path.iterdir() if ".partial-" in p.name or ".replaced-" in p.name]


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["visard", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert not stop.value.code, said.err
    return said.out


def test_what_runs_keep_goes_and_models_stay(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = imported(photos, tmp_path / "one"), imported(photos, tmp_path / "two", "person-1")
    small = {m: [s for s in smoke(m) if not s.startswith(("data.", "partition."))] for m in ("fedavg", "fedfr-joint")}
    sets = [
        f"data={{sets=[{{path='{one}'}}, {{path='{two}'}}]}}",
        "partition.kind=sites",
        "partition.test_identities=2",
    ]
    visard.run(load("fedfr-joint", [*small["fedfr-joint"], *sets]), out=tmp_path / "runs" / "both")
    alone = [f"data.source={one}", "partition.clients=2"]
    visard.run(load("fedavg", [*small["fedavg"], *alone]), out=tmp_path / "runs" / "alone")
    both, kept = tmp_path / "runs" / "both", {p.name for p in (tmp_path / "runs" / "both").rglob("*") if p.is_file()}
    assert kept >= {"class_vectors.safetensors", "manifest.json"}
    partition = json.loads((both / "partition.json").read_text())
    person = next(  # somebody of the second set whom its site has, and no test
        name for number, name in enumerate(FaceSet.open(two).names)
        if {len(FaceSet.open(one)) + int(r) for r in np.flatnonzero(FaceSet.open(two).identity == number)}
        & set(partition["clients"]["two"]["train"])
    )  # fmt: skip
    linked = Path(shutil.copytree(both, tmp_path / "runs" / "linked"))  # a run from elsewhere, with a link to another's
    shutil.rmtree(linked / "checkpoint")
    mine = tmp_path / "mine"
    (mine / "clients").mkdir(parents=True)
    for name in ("manifest.json", "server-1.bin", "clients/my.pack"):
        (mine / name).write_text("mine")
    (linked / "checkpoint").symlink_to(mine)
    out = call(monkeypatch, capsys, "data", "remove", two, person, "--runs", tmp_path / "runs", "--case", "request 17")
    assert [p.read_text() for p in mine.rglob("*") if p.is_file()] == ["mine"] * 3, "links are not followed"
    shutil.rmtree(linked)
    assert "run both: two had pictures of them" in out
    (file,) = tmp_path.glob("two.removed-*.json")
    receipt = json.loads(file.read_text())
    assert receipt["case"] == "request 17"
    assert person not in file.read_text()
    assert receipt["people"] == [person_digest(bytes.fromhex(out.split()[-1]), person)]
    runs = {one["where"]: one for one in receipt["looked_at"] if one["what"].startswith("states")}
    assert runs.keys() == {"both"}, "the other run had another set"
    assert runs["both"]["clients"] == ["two"]
    left = {p.name for p in both.rglob("*") if p.is_file()}
    gone = {"class_vectors.safetensors", "manifest.json", *(n for n in kept if n.endswith((".pack", ".bin")))}
    assert left == kept - gone
    assert (tmp_path / "runs" / "alone" / "checkpoint" / "manifest.json").exists()
    with pytest.raises(VisardError):
        resume(both)


def test_refusals_change_nothing(photos: Path, tmp_path: Path) -> None:
    one = imported(photos, tmp_path / "one")
    before = digests(one)
    with pytest.raises(UsageError, match=r"has no person 'person-33' \(did you mean 'person-3'\?\)$"):
        remove_people(one, ["person-33"], new_receipt(tmp_path))
    with pytest.raises(UsageError, match="that is everyone"):
        remove_people(one, [f"person-{k}" for k in range(PEOPLE)], new_receipt(tmp_path))
    with pytest.raises(UsageError, match="no folder"):
        remove_people(one, [GONE], Receipt(tmp_path / "nowhere" / "r.json", "face set", "one", (GONE,)))
    import_faces("folder", photos, tmp_path / "bare", size=SIDE, align="none", unlabelled=True)
    (name,) = FaceSet.open(tmp_path / "bare").names
    with pytest.raises(UsageError, match="not known who is in the pictures"):
        remove_people(tmp_path / "bare", [name], new_receipt(tmp_path))
    assert digests(one) == before
    assert not (tmp_path / "receipt.json").exists()


def test_a_folder_in_the_place_of_a_file_is_refused(photos: Path, tmp_path: Path) -> None:
    """The set is written anew in its place: what is not its own would be lost."""
    folder = imported(photos, tmp_path / "faces")
    (folder / "landmarks.npy").unlink()
    (folder / "landmarks.npy").mkdir()
    (folder / "landmarks.npy" / "mine.txt").write_text("mine")
    with pytest.raises(VisardError, match=r"landmarks\.npy is not a file"):
        remove_people(folder, [GONE], new_receipt(tmp_path))
    assert (folder / "landmarks.npy" / "mine.txt").read_text() == "mine"
    assert GONE in FaceSet.open(folder).names
    shutil.rmtree(folder / "landmarks.npy")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes\.txt, which is no part of a set"):
        remove_people(folder, [GONE], new_receipt(tmp_path))
    assert (folder / "notes.txt").read_text() == "mine"
    assert GONE in FaceSet.open(folder).names
    assert not (tmp_path / "receipt.json").exists(), "a receipt of what did not begin"


@pytest.mark.parametrize("text", ["my letter", '{"state": "done"}', "[]"])
def test_a_receipt_takes_the_place_of_no_other_file(photos: Path, tmp_path: Path, text: str) -> None:
    folder, receipt = imported(photos, tmp_path / "faces"), new_receipt(tmp_path)
    receipt.path.write_text(text)
    with pytest.raises(VisardError, match=r"receipt\.json (exists|cannot be read)"):
        remove_people(folder, [GONE], receipt)
    assert receipt.path.read_text() == text
    assert GONE in FaceSet.open(folder).names


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_gallery_and_its_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], encrypted: bool
) -> None:
    key = Key.make(tmp_path / "my.key") if encrypted else None
    features = np.random.default_rng(1).normal(size=(12, 8)).astype(np.float32)
    people = np.repeat(["anna", "bert", "cleo"], 4)
    path = tmp_path / "staff.gallery"
    Gallery.enrol(people.tolist(), features, ABOUT).save(path, key)
    stale = tmp_path / ".staff.gallery.999999999.tmp"
    stale.write_bytes(path.read_bytes())
    before = file_digest(path)
    more = ["--encrypt-with", key.path] if key else []
    out = call(monkeypatch, capsys, "gallery", "remove", path, "bert", *more)
    assert "1 removed; the gallery has 2" in out
    now, never = (
        Gallery.load(path, key),
        Gallery.enrol(people[people != "bert"].tolist(), features[people != "bert"], ABOUT),
    )
    assert now.names == never.names == ("anna", "cleo")
    for part in ("templates", "pictures", "probes", "owner"):
        assert np.array_equal(getattr(now, part), getattr(never, part)), part
    assert not stale.exists()
    (file,) = tmp_path.glob("staff.gallery.removed-*.json")
    receipt = json.loads(file.read_text())
    assert "bert" not in file.read_text()
    assert receipt["people"] == [person_digest(bytes.fromhex(out.split()[-1]), "bert")]
    assert receipt["files"] == [{"file": "staff.gallery", "before": before, "after": file_digest(path)}]
    assert receipt["removed"] == {"people": 1, "pictures": 4}
    assert {one["what"]: one["removed"] for one in receipt["looked_at"]} == {
        "templates": 1, "features of pictures that thresholds are read off": 4,
        "files of an interrupted writer": 1, "search indexes": 0,
    }  # fmt: skip
    assert file.stat().st_mode & 0o077 == 0
