"""The lock files hold exactly what pyproject.toml needs, in the versions of constraints.txt, each with its digests."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.lock import IMAGE, LOCKS, ROOT, SITE, UNLOCKED, Pin, parse, project

SETUP, FLOWER = LOCKS


def pins(*files: str) -> dict[str, Pin]:
    return {name: pin for file in files for name, pin in parse((ROOT / file).read_text()).items()}


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def reached(parts: tuple[str, ...]) -> dict[str, list[Requirement]]:
    """Every package that these parts of pyproject.toml need here, and the requirements on it, by what is installed."""
    asked = project()
    found: dict[str, list[Requirement]] = {}
    waiting = [(requirement, "") for part in parts for requirement in asked[part]]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append(requirement)
        for inner in {"", *requirement.extras}:
            if (name, inner) not in seen:
                seen.add((name, inner))
                waiting += [(Requirement(text), inner) for text in metadata.requires(name) or ()]
    return {name: asks for name, asks in found.items() if not re.fullmatch(r"triton|(nvidia|cuda)-.*", name)}


def test_locks_are_of_the_constraints():
    locked = {name: pin.version for name, pin in pins(*LOCKS, SITE).items()}
    assert not [name for name in locked if UNLOCKED.fullmatch(name)]
    assert locked == {name: version for name, version in constraints().items() if name != "torch"}
    assert not pins(SETUP).keys() & pins(FLOWER).keys()
    assert not pins(SETUP).keys() & pins(SITE).keys()


def test_a_container_has_what_it_needs_and_no_tools():
    needed = {name: pin for name, pin in pins(IMAGE).items() if pin.needed()}
    try:
        assert needed.keys() == {name for name in reached(("", "build", "flower")) if not UNLOCKED.fullmatch(name)}
    except metadata.PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: make flower")
    assert needed.items() <= pins(*LOCKS).items(), "the versions and digests of the other locks"
    assert "pytest" not in needed


@pytest.mark.parametrize("file", [*LOCKS, SITE])
def test_each_entry_has_digests(file):
    for name, pin in pins(file).items():
        assert pin.hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in pin.hashes), name


def test_what_pyproject_asks_for_is_locked_in_a_version_that_it_allows():
    locked = {name: pin.version for name, pin in pins(*LOCKS, SITE).items()} | {"torch": constraints()["torch"]}
    for part, asked in project().items():
        for requirement in asked:
            version = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"[{part}] {requirement}: {version} is locked"


def check_complete(files: tuple[str, ...], parts: tuple[str, ...]) -> None:
    needed, locked = reached(parts), pins(*files)
    here = {name for name, pin in locked.items() if pin.needed()}
    assert needed.keys() - {"torch"} == here
    for name in here:
        for requirement in needed[name]:
            assert requirement.specifier.contains(locked[name].version), (
                f"{requirement}: {locked[name].version} is locked"
            )


def test_nothing_is_missing_and_nothing_too_much():
    check_complete((SETUP,), ("", "build", *LOCKS[SETUP]))


def test_nothing_is_missing_and_nothing_too_much_for_the_site():
    pytest.importorskip("sphinx", reason="make site")
    needed = reached(("site",)).keys()
    locked = pins(SETUP, SITE)
    assert needed <= locked.keys()
    assert {name for name, pin in pins(SITE).items() if pin.needed()} <= needed


@pytest.mark.flower
def test_nothing_is_missing_and_nothing_too_much_with_flower():
    pytest.importorskip("flwr")
    check_complete((SETUP, FLOWER), ("", "build", *LOCKS[SETUP], *LOCKS[FLOWER]))


def test_versions_with_known_holes_are_excluded():
    lower = {canonicalize_name(r.name): r.specifier for part in project().values() for r in part}
    holes = {
        "torch": "2.9.1", "pillow": "12.3.0", "cryptography": "46.0.6", "opencv-python-headless": "4.11.0.86",
        "pyarrow": "23.0.0", "onnx": "1.20.1", "scikit-learn": "1.4.2", "setuptools": "78.1.0",
    }  # fmt: skip
    assert not [f"{name} {version}" for name, version in holes.items() if lower[name].contains(version)]


def test_pip_refuses_other_content(tmp_path):
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    _write_wheel(wheel)
    venv.create(tmp_path / "env", with_pip=False)
    lock = tmp_path / "tiny.lock"

    def install(digest: str) -> subprocess.CompletedProcess[str]:
        lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n" if digest else "tiny==1.0\n")
        options = re.search(r"^LOCKED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert options is not None
        command = [sys.executable, "-m", "pip", "--isolated", "--python", str(tmp_path / "env/bin/python"), "install"]
        command += ["--no-index", "--find-links", str(tmp_path), *options[1].split(), str(lock)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    good = _digest(wheel)
    wrong = install(("0" if good[0] != "0" else "1") + good[1:])
    assert wrong.returncode, wrong.stdout
    assert "DO NOT MATCH THE HASHES" in wrong.stderr
    without = install("")
    assert without.returncode, without.stdout
    assert "require-hashes" in without.stderr
    right = install(good)
    assert right.returncode == 0, right.stderr


def _write_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny.py", "")
        file.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny-1.0.dist-info/RECORD", "")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
