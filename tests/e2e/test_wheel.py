"""The built wheel in an environment that holds its dependencies and nothing else: no extras, no clone, no tools.

The environment is new; the packages that visard itself asks for, and what they ask for, are linked into it from those
that are installed here, so nothing is fetched. `python -m tests.e2e.test_wheel [PYTHON]` installs from the index
instead, for this Python or for another one, such as python3.14 (long).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.e2e.smoke import SMOKE
from tests.lock import project

ROOT = Path(__file__).resolve().parents[2]
DATA = [
    path.relative_to(ROOT / "src").as_posix()
    for path in (ROOT / "src" / "visard").rglob("*")
    if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
]


def build(folder: Path) -> Path:
    """The wheel, built from a copy: a build leaves files behind in its folder."""
    copy = folder / "source"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(copy)], check=True, capture_output=True)
    (wheel,) = folder.glob("visard-*.whl")
    return wheel


def needed() -> dict[str, metadata.Distribution]:
    """The packages that visard asks for without an extra, and all that they ask for here."""
    found: dict[str, metadata.Distribution] = {}
    waiting = project()[""]
    while waiting:
        requirement = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            found[name] = metadata.distribution(name)
            waiting += [Requirement(text) for text in found[name].requires or ()]
    return found


def link(packages: Path, distributions: dict[str, metadata.Distribution]) -> None:
    """Make distributions of this environment importable in another one."""
    for found in distributions.values():
        for name in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            there = packages / name
            if not there.exists():
                there.symlink_to(Path(str(found.locate_file(name))).resolve())


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build(folder)
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert {name for name in DATA if name not in inside} == set(), "files of the package that the wheel lacks"
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    link(packages, needed())
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(packages)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return folder


def run(empty: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.defpath, "HOME": str(empty), "OMP_NUM_THREADS": "1"}
    program = "import sys; from visard.cli import main; sys.argv[0] = 'visard'; main()"
    command = [str(empty / "env" / "bin" / "python"), "-I", "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=empty, env=environment, timeout=300)


@pytest.fixture(scope="module")
def trained(empty: Path) -> Path:
    """The same, with a run in the folder `out`."""
    small = [part for setting in SMOKE for part in ("--set", setting)]
    ended = run(empty, "run", "fedavg", "--out", "out", *small)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return empty


def test_the_wheel_trains_and_writes_a_report_without_extras(trained: Path) -> None:
    said = run(trained, "--version")
    assert said.stdout == f"visard {metadata.version('visard')}\n", said.stderr
    assert (trained / "out" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["keys", "make", "--out", "k", "--nodes", "1", "--host", "a"], "visard[flower]"),
        (["export", "out/model.safetensors", "--onnx", "model.onnx"], "visard[onnx]"),
        (["report", "out", "--table", "table.parquet"], "visard[parquet]"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(trained: Path, words: list[str], extra: str) -> None:
    ended = run(trained, *words)
    assert ended.returncode != 0
    assert extra in ended.stderr, ended.stderr
    assert "internal error" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def main(python: str = sys.executable) -> None:
    """The same wheel with its dependencies from the index, in an environment of its own."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        wheel = build(folder)
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
        inside = str(folder / "env" / "bin" / "python")
        subprocess.run([inside, "-m", "pip", "install", "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
        small = [part for setting in SMOKE for part in ("--set", setting)]
        for words in (["--version"], ["run", "fedavg", "--out", "out", *small]):
            subprocess.run([str(folder / "env" / "bin" / "visard"), *words], check=True, cwd=folder)
    print("the wheel works with what the index has")


if __name__ == "__main__":
    main(*sys.argv[1:2])
