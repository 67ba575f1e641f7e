"""Files about people can be read by their owner alone, under the umask that most machines have."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.e2e.smoke import smoke

from visard import run
from visard.cli import main
from visard.data.sensors import draw, write_readings
from visard.files import SHARED, replacing, write_atomically, write_durably

# what a run leaves for everyone to read; all else in its folder is private
SHOWN = {"config.toml", "events.jsonl", "ledger.json", "metrics.json", "model.safetensors", "report.html", ".lock"}
SHOWN |= {"samples.npy"}  # synthetic faces alone
PEOPLE = 4


@pytest.fixture(autouse=True)
def common_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def readable(folder: Path) -> dict[str, str]:
    """What others could read in a folder: the files, unless one of the folders above them is closed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if mode(path) & 0o077:
            found[str(path.relative_to(folder))] = oct(mode(path))
    return found


def visard(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["visard", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


@pytest.mark.parametrize("method", ["fedface", "fedfr-joint", "pretrain"])
def test_a_run(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(method, out=folder, overrides=smoke(method))
    assert readable(folder).keys() <= SHOWN, readable(folder)
    written = {path.name for path in folder.rglob("*")}
    assert {"manifest.json", "ledger.jsonl", "partition.json", "checkpoint", "clients"} <= written
    assert any(name.startswith("server-") for name in written)
    assert ("class_vectors.safetensors" in written) == (method != "fedface")
    assert mode(folder / "report.html") == 0o644, "reports are there to be shown"
    assert mode(folder / "checkpoint") == mode(folder / "checkpoint" / "clients") == 0o700


def test_imports_galleries_features_labels_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, photos = np.random.default_rng(0), tmp_path / "photos"
    for person in range(PEOPLE):
        (photos / f"p{person}").mkdir(parents=True)
        for k in range(3):
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(photos / f"p{person}" / f"{k}.png")
    out = tmp_path / "out"
    out.mkdir()
    run("fedavg", out=tmp_path / "run", overrides=smoke("fedavg"))
    model = tmp_path / "run" / "model.safetensors"
    visard(monkeypatch, "data", "import", "folder", photos, "--out", out / "set", "--size", "32", "--align", "none")
    visard(monkeypatch, "data", "export", out / "set", out / "set.bin", "--pairs", "6")
    visard(monkeypatch, "data", "export", out / "set", out / "set.rec")
    visard(monkeypatch, "enroll", photos, "--model", model, "--gallery", out / "staff.gallery")
    visard(monkeypatch, "embed", out / "set", "--model", model, "--out", out / "features.npy")
    visard(monkeypatch, "cluster", out / "features.npy", "--out", out / "labels.csv")
    values, labels, owners = draw(3, 4, 5, ("a", "b"), 0)
    write_readings(out / "readings", values, list("abc"), labels, ("a", "b"), owners, {"kind": "test"})
    names = {path.name for path in out.rglob("*")}
    assert {"set.bin", "set.rec", "set.idx", "staff.gallery", "features.npy", "labels.csv", "images.npy"} <= names
    assert not readable(out), readable(out)
    assert mode(out / "set") == mode(out / "readings") == 0o700


def test_private_is_what_a_writer_gets_that_does_not_ask(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "x")
    write_durably(tmp_path / "b", b"x")
    with replacing(tmp_path / "c") as beside:
        assert mode(beside) == 0o600, "from the beginning"
        beside.unlink()
        beside.write_text("some libraries put a file of their own there")
    assert not readable(tmp_path)
    write_atomically(tmp_path / "d", "x", SHARED)
    assert readable(tmp_path) == {"d": "0o644"}


def test_a_file_that_was_readable_is_private_after_it_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    assert readable(tmp_path)
    write_atomically(tmp_path / "old", "y")
    assert not readable(tmp_path)


def test_a_link_that_waits_beside_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / f".a.{os.getpid()}.tmp").symlink_to(tmp_path / "victim")
    write_atomically(tmp_path / "a", "x")
    assert (tmp_path / "victim").read_text() == "kept"
