"""The two commands of docs/tasks/i-have-my-own-photos.md, word for word, on raw photographs and a public network."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from visard.cli import main

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
PAGE = ROOT / "docs" / "tasks" / "i-have-my-own-photos.md"
PEOPLE, EACH = 3, 4  # of each site

pytestmark = pytest.mark.shared


def visard(words: list[str]) -> None:
    sys.argv = words
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, words


@pytest.fixture
def desk(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: photographs, an LFW-type folder with pairs.txt, the network and the detector."""
    if not (SHARED / "photos").is_dir():
        pytest.skip("needs ../shared/data/photos")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("VISARD_CACHE", str(here / "cache"))
    (here / "MobileFaceNet.onnx").symlink_to(SHARED / "models" / "MobileFaceNet.onnx")
    visard(["visard", "models", "get", "yunet", "--from", str(SHARED / "models/face_detection_yunet_2026may.onnx")])
    names = []
    for site in sorted((SHARED / "photos").iterdir()):
        for person in sorted(site.iterdir())[:PEOPLE]:
            target, name = here / "photos" / site.name / person.name, f"{site.name}_{person.name}"
            target.mkdir(parents=True)
            (here / "lfw" / name).mkdir(parents=True)
            for k, file in enumerate(sorted(person.iterdir())[:EACH], 1):
                shutil.copy(file, target / file.name)
                shutil.copy(file, here / "lfw" / name / f"{name}_{k:04d}.jpg")
            names.append(name)
    (here / "lfw" / names[0] / f"{names[0]}_0004.jpg").write_bytes(b"no picture")
    genuine = [f"{name}\t1\t{k}" for name in names for k in (2, 3, 4)][:30]
    others = zip(names, names[1:] + names[:1], strict=True)
    impostors = [f"{a}\t{k}\t{b}\t{k}" for a, b in others for k in (1, 2, 3)][:30]
    lines = [line for k in range(10) for part in (genuine, impostors) for line in part[3 * k : 3 * k + 3]]
    (here / "lfw" / "pairs.txt").write_text("10\t3\n" + "\n".join(lines) + "\n")
    return here


def test_raw_photographs_to_figures_in_two_commands(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [b.strip().splitlines() for b in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    photos, lfw = (block for block in blocks if len(block) == 2 and all(line.startswith("visard ") for line in block))
    for line in photos:
        visard(shlex.split(line))
    said = capsys.readouterr().out
    assert "Errors by domain, one threshold for all" in said
    assert "site-a with site-b" in said
    for line in lfw:
        visard(shlex.split(line))
    said = " ".join(capsys.readouterr().out.split())
    assert "1 picture of the source skipped: 1 pair could not be compared" in said
    visard([*shlex.split(lfw[1]), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["left"]["pairs"] == 1
    assert found["lfw"]["pairs"] == 59
    assert found["lfw"]["accuracy"] > 0.85  # raw pixels: about one half
    assert found["lfw"]["roc"]["auc"] > 0.95
