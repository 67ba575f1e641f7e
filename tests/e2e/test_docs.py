"""Every command that the documentation shows works, on smaller jobs."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image
from tests.e2e.smoke import SMOKE, smoke

from visard import plugins
from visard.cli import main
from visard.cli.models import drawn
from visard.data.faces import FaceSet
from visard.data.synthetic.render import SyntheticSpec
from visard.data.synthetic.sets import make

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALL_ADAPTATION = ["method.rounds=1", "method.training.amount=2", "engine.kind=local"]
NOT_HERE = {"results"}  # pages that report long runs on data that a reader may not have


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [w for w in words if w and w[0] == "visard"]


def run_command(words: list[str]) -> None:
    """Run one command in process; runs are made small unless the page itself says how large."""
    own = {"--resume", "--from"} & set(words) or any(w.endswith(".toml") for w in words)
    if words[1] == "run" and not own:
        given = {w.partition("=")[0] for w in words}
        small = [
            s for s in smoke(words[2]) if s.partition("=")[0] not in given - {"method.rounds", "partition.clients"}
        ]
        size = [s for s in small if not s.startswith(("data.size", "model.embedding"))]
        if "--data" in words:  # the sets of the page say how many people and clients there are
            size = [s for s in size if not s.startswith(("data.", "partition."))]
        if any("data.source" in w for w in words):
            size = [s for s in size if not s.startswith(("data.", "partition."))]  # presets follow the people at hand
        words = [*words, *(part for s in size for part in ("--set", s))]
    if words[1] == "bench" and len(words) > 2:
        small = [s for s in SMOKE if not s.startswith("evaluation.every")]
        words = [*words, *(part for s in small for part in ("--set", s))]
    if words[1] == "adapt":
        words = [*words, *(part for s in SMALL_ADAPTATION for part in ("--set", s))]
    sys.argv = words
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, f"{' '.join(words)} ended with {stop.code}"


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each person, with photos."""
    folder = tmp_path_factory.mktemp("photos")
    faces = FaceSet.open(make(SyntheticSpec(identities=30, images_per_identity=5, size=112), folder / "drawn"))
    for row, picture in enumerate(faces.pixels):
        person = folder / "photos" / f"person-{faces.identity[row]}"
        person.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(person / f"{row % 5}.png")
    return folder / "photos"


@pytest.fixture
def desk(here: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a reader has: the examples, and a folder of photos. `--data synthetic` is a small set."""
    (here / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [])
    shutil.copytree(photos, here / "photos")
    few = {"identities": 24, "images_per_identity": 6}
    monkeypatch.setattr("visard.cli.models.drawn", lambda side, **how: drawn(side, **few))
    return here


PAGES_WITH_COMMANDS = [p for p in PAGES if not NOT_HERE & set(p.parts) and commands(p)]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_the_page(page: Path, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if page == ROOT / "README.md":  # its run is made by `make demo` before
        run_command(["visard", "run", "demo", "--out", "runs/demo"])
    for words in commands(page):
        run_command(words)
    if page.parent.name == "tasks":  # with what the commands made
        for block in blocks(page, "python"):
            code = block.replace('method="fedfr-da", ', f'method="fedfr-da", overrides={SMALL_ADAPTATION!r}, ')
            exec(compile(code, str(page), "exec"), {})
    capsys.readouterr()


def test_python_of_the_quickstart(desk: Path) -> None:
    run_command(shlex.split("visard data import folder photos --out data/mine"))
    run_command(["visard", "run", "fedavg", "--out", "runs/python"])
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        for block in blocks(page, "python"):
            small = ", ".join(repr(s) for s in SMOKE if "size" not in s and "model." not in s)
            code = block.replace('overrides=["', f'overrides=[{small}, "').replace("rounds=10", "rounds=1")
            shutil.rmtree("runs", ignore_errors=True)
            exec(compile(code, str(page), "exec"), {})


SMALLER = {
    "identities=24": "identities=8", "identities=30": "identities=8", "rounds: int = 6": "rounds: int = 1",
    "method.rounds=4": 'method.rounds=1", "method.training.amount=2', "method.rounds=6": "method.rounds=1",
    "identities=64": "identities=24", '"identities": 48': '"identities": 24',
}  # fmt: skip


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "notebooks").glob("*.md")), ids=lambda p: p.stem)
def test_cells_of_the_notebook(
    page: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    monkeypatch.setitem(plugins._added, "methods", dict(plugins._added["methods"]))  # a method of a cell goes again
    cells = blocks(page, r"\{code-cell\} python")
    assert len(cells) > 1
    for cell in cells:
        for large, small in SMALLER.items():
            cell = cell.replace(large, small)
        exec(compile(cell, str(page), "exec", dont_inherit=True), vars(notebook))
    assert [*(here / "runs").rglob("metrics.json")]
    capsys.readouterr()
