"""Bad input of every kind: one line that says what and where, exit code 1 or 2, no traceback, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.e2e.smoke import SMOKE

import visard
from visard.cli import main
from visard.config import load
from visard.errors import UsageError
from visard.files import write_durably
from visard.models import build
from visard.models.files import save_model


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run to be damaged copies of."""
    return visard.run("fedavg", overrides=SMOKE, out=tmp_path_factory.mktemp("bad") / "run").folder


@pytest.fixture
def run_copy(finished: Path, here: Path) -> Path:
    shutil.copytree(finished, here / "run")
    return here / "run"


def visard_says(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    monkeypatch.delenv("VISARD_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["visard", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    code = stop.value.code
    return int(code or 0), capsys.readouterr().err


def sets(*changes: str) -> list[str]:
    return [part for change in (*SMOKE, *changes) for part in ("--set", change)]


def run(*changes: str) -> list[str]:
    return ["run", "fedavg", *sets(*changes), "--out", "out"]


def photos(folder: Path, people: int = 3, each: int = 3) -> Path:
    rng = np.random.default_rng(0)
    for i in range(people):
        (folder / f"p{i}").mkdir(parents=True)
        for k in range(each):
            Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8)).save(folder / f"p{i}" / f"{k}.png")
    return folder


def one_picture_each(here: Path) -> list[str]:
    from visard.data.sources.importing import import_faces

    import_faces("folder", photos(here / "photos", 12, 1), here / "set", size=32, workers=1, align="none")
    return run("data.source=set")


def truncated_set(here: Path) -> list[str]:
    from visard.data.sources.importing import import_faces

    import_faces("folder", photos(here / "photos", 12, 4), here / "set", size=32, workers=1, align="none")
    with (here / "set" / "images.npy").open("r+b") as f:
        f.truncate(3000)
    return run("data.source=set")


def written(name: str, text: str, arguments: list[str]) -> Callable[[Path], list[str]]:
    def make(here: Path) -> list[str]:
        (here / name).write_text(text)
        return arguments

    return make


def celeba(identity: str) -> Callable[[Path], list[str]]:
    def make(here: Path) -> list[str]:
        photos(here / "celeba" / "img_align_celeba", 1, 2)
        (here / "celeba" / "identity_CelebA.txt").write_text(identity)
        return ["data", "import", "celeba", "celeba", "--out", "set"]

    return make


def all_corrupt(here: Path) -> list[str]:
    for i in range(3):
        (here / "photos" / f"p{i}").mkdir(parents=True)
        (here / "photos" / f"p{i}" / "a.jpg").write_bytes(b"\xff\xd8 not a picture")
    return ["data", "import", "folder", "photos", "--out", "set"]


def other_size_model(here: Path) -> list[str]:
    weights = build("tiny", size=64).state_dict()
    save_model(here / "m.safetensors", weights, {"model": "tiny", "embedding": "128", "size": "64"})
    from visard.data.sources.importing import import_faces

    import_faces("folder", photos(here / "photos", 12, 4), here / "set", size=32, workers=1, align="none")
    return ["eval", "m.safetensors", "--data", "set"]


def foreign_folder(here: Path) -> list[str]:
    (here / "out").mkdir()
    (here / "out" / "thesis.tex").write_text("years of work")
    return [*run(), "--overwrite"]


def args(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda here: list(arguments)


CASES: dict[str, tuple[Callable[[Path], list[str]], int, str]] = {
    "unknown preset": (args("run", "fedavgg"), 2, "did you mean 'fedavg'"),
    "missing settings file": (args("run", "nowhere.toml"), 2, "nowhere.toml cannot be read"),
    "settings that are no TOML": (written("a.toml", "method = [", ["run", "a.toml"]), 2, "a.toml is not valid TOML"),
    "settings without a method": (written("a.toml", "seed = 1", ["run", "a.toml"]), 2, "[method] needs a name"),
    "a folder as settings": (lambda h: (h / "d").mkdir() or ["run", "d"], 2, "is a folder"),
    "unknown method": (args(*run("method.name=fedagv")), 2, "unknown method 'fedagv' (did you mean 'fedavg'?)"),
    "unknown setting": (args(*run("method.traning.lr=1")), 2, "method.traning (did you mean 'training'?)"),
    "unknown nested setting": (args(*run("method.training.lrr=1")), 2, "method.training.lrr (did you mean 'lr'?)"),
    "unknown section": (args(*run("modell.name=tiny")), 2, "unknown setting modell"),
    "wrong type": (args(*run("method.rounds=many")), 2, "method.rounds = 'many'"),
    "value out of range": (args(*run("method.participation=1.5")), 2, "method.participation = 1.5"),
    "negative learning rate": (args(*run("method.training.lr=-1")), 2, "training.lr = -1"),
    "negative seed": (args(*run("seed=-1")), 2, "seed = -1"),
    "malformed --set": (args("run", "fedavg", "--set", "rounds"), 2, "section.key=value"),
    "unknown model": (args(*run("model.name=tinny")), 2, "unknown model 'tinny' (did you mean 'tiny'?)"),
    "unknown engine": (args("run", "fedavg", "--engine", "warp"), 2, "engine.kind = 'warp'"),
    "a false accept rate that is none": (args(*run("evaluation.far=[0.01, 2]")), 2, "evaluation.far"),
    "unknown data set": (args(*run("data.source=nowhere")), 2, "no face set 'nowhere'"),
    "unknown population": (args(*run('data.domains=["mars"]')), 2, "mars"),
    "more clients than people": (args(*run("partition.clients=500")), 2, "clients"),
    "more test people than there are": (args(*run("partition.test_identities=500")), 2, "test_identities = 500"),
    "unknown attribute": (
        args(*run("partition.kind=attribute", 'partition.attributes=["Mail","!Male","Young"]')), 2, "Mail",
    ),
    "attribute expression that does not parse": (
        args(*run("partition.kind=attribute", 'partition.attributes=["Male &","!Male","Young"]')), 2, "Male &",
    ),
    "one picture of each person": (one_picture_each, 2, "two pictures"),
    "truncated face set": (truncated_set, 1, "images.npy"),
    "missing weights to start from": (args(*run("model.weights=gone.safetensors")), 2, "gone.safetensors"),
    "weights that are no model": (
        written("w.safetensors", "junk", run("model.weights=w.safetensors")), 1, "w.safetensors",
    ),
    "learning rate that explodes": (args(*run("method.training.lr=1e30", "method.training.clip=0")), 1, "good replies"),
    "output folder that holds something else": (foreign_folder, 2, "is not a run: it is not overwritten"),
    "output path that is a file": (written("out", "x", run()), 2, "out is a file"),
    "resume of nothing": (args("run", "--resume", "--out", "void"), 2, "no run to resume"),
    "run without arguments": (args("run"), 2, "give a preset"),
    "import from nowhere": (args("data", "import", "folder", "gone", "--out", "set"), 2, "gone"),
    "unknown importer": (args("data", "import", "celebb", ".", "--out", "set"), 2, "celebb"),
    "import of corrupt pictures alone": (all_corrupt, 2, "could be used"),
    "CelebA without its identity file": (
        lambda h: photos(h / "celeba" / "img_align_celeba") and ["data", "import", "celeba", "celeba", "--out", "set"],
        2, "identity_CelebA.txt",
    ),
    "CelebA identity file with a bad line": (celeba("p0/0.png 1\np0/1.png\n"), 2, "identity_CelebA.txt:2"),
    "zero people": (args("data", "make", "--identities", "0", "--out", "set"), 2, "identities"),
    "giant pictures": (args("data", "make", "--size", "4096", "--out", "set"), 2, "pixels wide, not 4096"),
    "show of no set": (args("data", "show", "gone"), 2, "no face set 'gone'"),
    "model file that is missing": (args("eval", "gone.safetensors", "--data", "synthetic"), 2, "gone.safetensors"),
    "model file that is junk": (
        written("m.safetensors", "junk", ["eval", "m.safetensors", "--data", "synthetic"]), 1, "m.safetensors",
    ),
    "rates that are no numbers": (
        lambda h: [*other_size_model(h), "--far", "often"], 2, "--far often",
    ),
    "report of no run": (args("report", "gone"), 2, "gone"),
    "report of a folder of runs": (
        written("events.jsonl", "", ["report", ".."]), 2, "there are runs inside",
    ),
    "a run's folder as a model": (
        written("model.safetensors", "", ["eval", ".", "--data", "synthetic"]), 2, "is a folder: give ./model",
    ),
    "unknown command": (args("trian"), 2, "trian"),
    "unknown option": (args("run", "fedavg", "--speed", "9"), 2, "--speed"),
    "a setting as an option": (args("run", "fedavg", "--rounds", "9"), 2, "with --set, for example --set method"),
    "an option that is nearly right": (args("run", "fedavg", "--resum"), 2, "--resume"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(
    case: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, code, says = CASES[case]
    arguments = make(here)
    before = {p: p.read_bytes() for p in here.rglob("*") if p.is_file()}
    got, text = visard_says(arguments, capsys, monkeypatch)
    assert says in " ".join(text.split()), text
    assert got == code, text
    assert "Traceback" not in text
    assert "internal error" not in text
    if "Usage:" not in text:  # the command line's own help has more lines
        assert len(text.strip().splitlines()) == 1, text
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was changed"
    assert not list(here.rglob("*.partial-*")), "nothing half-imported"


def damage_manifest(folder: Path) -> None:
    (folder / "checkpoint" / "manifest.json").write_text("{")


def damage_server(folder: Path) -> None:
    (file,) = (folder / "checkpoint").glob("server-*.bin")
    file.write_bytes(file.read_bytes()[:-7])


def change_settings(folder: Path) -> None:
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))


def newer_format(folder: Path) -> None:
    path = folder / "checkpoint" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [(damage_manifest, "manifest.json"), (damage_server, "is damaged"), (change_settings, "other settings"),
     (newer_format, "format 99")],
)  # fmt: skip
def test_damaged_checkpoints(
    damage: Callable[[Path], None],
    says: str,
    run_copy: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(run_copy)
    code, text = visard_says(["run", "--resume", "--out", str(run_copy)], capsys, monkeypatch)
    assert code == 1
    assert says in text
    assert len(text.strip().splitlines()) == 1
    assert (run_copy / "model.safetensors").exists(), "results of the earlier run are still there"


def test_an_earlier_run_is_never_lost_by_accident(
    run_copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p: p.read_bytes() for p in run_copy.rglob("*") if p.is_file()}
    code, text = visard_says(["run", "fedavg", *sets(), "--out", str(run_copy)], capsys, monkeypatch)
    assert (code, "use --resume" in text) == (2, True)
    assert all(p.read_bytes() == content for p, content in before.items())


def test_unreadable_pictures_are_skipped_and_listed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos")
    (here / "photos" / "p1" / "1.png").write_bytes(b"")
    (here / "photos" / "p2" / "9.jpg").write_bytes(b"\xff\xd8\xff")
    words = ["data", "import", "folder", "photos", "--out", "set", "--size", "32", "--align", "none"]
    monkeypatch.setattr(sys, "argv", ["visard", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out = " ".join(capsys.readouterr().out.split())
    assert not stop.value.code
    assert "8 pictures of 3 people" in out
    assert "p1/1.png" in out
    assert "p2/9.jpg" in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "locked").mkdir(mode=0o500)
    code, text = visard_says(["run", "fedavg", *sets(), "--out", "locked/run"], capsys, monkeypatch)
    assert (code, "locked/run" in text) == (2, True)


@pytest.mark.parametrize(
    ("preset", "setting"),
    [
        ("fedface", "method.training.lr=-1"),
        ("fedface", "method.margin=-1"),
        ("fedfr-joint", "method.training.batch_size=0"),
        ("hf-maml", "method.rounds=0"),
        ("dann", "method.hidden=0"),
        ("fedfr-da", "method.dcl=-0.1"),
        ("fedavg", "method.participation=1.5"),
        ("encrypted-mmd", "method.exchanges=0"),
    ],
)
def test_bounds_hold_in_every_method(preset: str, setting: str) -> None:
    with pytest.raises(UsageError, match=re.escape(setting.partition("=")[0])):
        load(preset, [setting])


def test_a_file_that_cannot_be_opened_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        (tmp_path / "a folder").open()

    monkeypatch.setattr("visard.cli.commands", lambda: refuse)
    got, text = visard_says(["run"], capsys, monkeypatch)
    assert got == 1
    assert " ".join(text.split()).endswith("a folder: No such file or directory")
    assert "internal error" not in text


@pytest.mark.parametrize("named", [True, False])
def test_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Errors of writing do not say which file it was, unlike those of opening."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write() -> None:
        write_durably(tmp_path / "server-000001.bin", b"x") if named else full()

    monkeypatch.setattr("visard.cli.commands", lambda: write)
    monkeypatch.setattr("os.fsync", full)
    got, text = visard_says(["run"], capsys, monkeypatch)
    assert got == 1
    assert "internal error" not in text
    assert ("server-000001.bin: " if named else "a file could not be written: ") in " ".join(text.split())
    assert "No space left on device" in text
