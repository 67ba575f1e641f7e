"""Who may import whom: the plan of the house, enforced."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "visard"
FILES = sorted(SOURCE.rglob("*.py"))

# room -> rooms of visard it may not import
FORBIDDEN = {
    "methods": {"engines", "evaluation", "report", "cli", "runs", "config", "privacy"},
    "engines": {"methods", "evaluation", "report", "cli", "config"},
    "ops": {"methods", "engines", "evaluation", "report", "cli", "runs", "config", "privacy"},
    "models": {"methods", "engines", "evaluation", "report", "cli", "runs", "config", "privacy"},
    "data": {"methods", "engines", "evaluation", "report", "cli", "runs", "privacy"},
    "report": {"methods", "engines", "cli", "runs"},
    "core": {"methods", "engines", "report", "cli", "runs", "config", "privacy"},
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it is loaded or called; those for type checkers alone do not count."""
    tree = ast.parse(path.read_text())
    typed = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms(path: Path) -> None:
    used = imports(path)
    rooms = {name.split(".")[1] for name in used if name.startswith("visard.")}
    assert not rooms & FORBIDDEN.get(room(path), set())
    if "flower" not in str(path.relative_to(SOURCE)):
        assert not any(name.split(".")[0] == "flwr" for name in used)
    if room(path) != "crypto":
        assert not any(name.split(".")[0] in ("gmpy2", "tenseal") for name in used)


def test_nothing_unpickles() -> None:
    allowed = {"data/unpickle.py"}
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        used = {module.split(".")[0] for module in imports(path)}
        assert name in allowed or not used & {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
        text = path.read_text()
        assert "allow_pickle=True" not in text, name
        assert "weights_only=False" not in text, name


def test_methods_are_short() -> None:
    for path in (SOURCE / "methods").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 160, path.name
