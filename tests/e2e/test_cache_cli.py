"""`visard models cuts` and `visard data cache`: what a network offers, and what runs keep of pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.toys import noise_faces

from visard.cli import main
from visard.data.activations import PLAIN, Activations, activations_folder, entries, store_of
from visard.data.faces import FaceSet


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """What a command prints; it must succeed."""
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["visard", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        found = capsys.readouterr()
        assert not stop.value.code, found.err
        return found.out + found.err

    return call


def fill(faces: FaceSet) -> None:
    seen = Activations(faces, lambda: lambda x: x[:, :1, :2, :2], store_of(faces, "t" * 64, (1, 2, 2), "fp32"))
    seen.wanted = {PLAIN: np.arange(len(faces))}
    seen.prepare()


def test_cuts_of_a_network(said: Callable[..., str]) -> None:
    found = json.loads(said("models", "cuts", "tiny", "--size", "64", "--json"))
    assert [cut["layer"] for cut in found] == ["layer1", "layer2", "layer3", "fc"]
    assert [cut["layer"] for cut in found if cut["tail"]] == ["fc"]
    assert found[-1]["shape"] == [2048]
    table = said("models", "cuts", "cnn_gru", "--size", "8000")
    assert "last:1" in table
    assert "bottleneck.1" in table


def test_listing_and_clearing(said: Callable[..., str], tmp_path: Path) -> None:
    assert "no activations" in said("data", "cache", "list")
    one, two = (noise_faces(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    for faces in (one, two):
        fill(faces)
    listed = said("data", "cache", "list")
    assert all(word in listed for word in ("one", "two", "1x2x2", "72", "float32"))
    assert "1 removed" in said("data", "cache", "clear", str(one.path))
    assert [Path(e.about["path"]).name for e in entries()] == ["two"]
    fill(one)
    assert "2 removed" in said("data", "cache", "clear")
    assert not entries()


def test_a_set_that_is_replaced_takes_its_activations_with_it(said: Callable[..., str], tmp_path: Path) -> None:
    from PIL import Image

    for person in ("a", "b"):
        (tmp_path / "photos" / person).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (64, 64), (40 * i, 90, 120)).save(tmp_path / "photos" / person / f"{i}.png")
    target = str(tmp_path / "set")
    said("data", "import", "folder", str(tmp_path / "photos"), "--out", target, "--size", "32", "--align", "none")
    fill(FaceSet.open(target))
    assert len(entries()) == 1
    said(
        "data",
        "import",
        "folder",
        str(tmp_path / "photos"),
        "--out",
        target,
        "--size",
        "32",
        "--align",
        "none",
        "--overwrite",
    )
    assert not [path for path in activations_folder().iterdir() if path.is_dir()]
