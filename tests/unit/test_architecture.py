"""Who may import whom: imports go downwards through the layers, and never in a circle."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "visard"
FILES = sorted(SOURCE.rglob("*.py"))

# from the bottom to the top; a room may import its own layer and those below it
LAYERS = (
    {"errors", "files", "at_rest", "numerics", "disclosure", "downloads"}
    | {"onnx_process", "plugins", "presets", "processes", "text"},
    {"data", "models"},
    {"core"},
    {"learning"},
    {"clustering", "crypto"},
    {"aggregation"},
    {"evaluation"},
    {"methods"},
    {"config"},
    {"engines"},
    {"deployment"},
    {"runs", "report", "inference"},
    {"studies"},
    {"cli", "__init__", "__main__"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
NAMED = re.compile(r"visard(\.[a-z_0-9]+)+")  # a module in a string: "visard.a.b:function", or a program for -m


def module_of(path: Path) -> str:
    parts = ("visard", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(path: Path) -> set[str]:
    """Every module that a file names: absolute, relative and lazy imports, those for types alone, and in strings."""
    found: set[str] = set()
    package = module_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {full if (full := f"{module}.{a.name}") in MODULES else module for a in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = NAMED.fullmatch(node.value.partition(":")[0])
            found |= {node.value.partition(":")[0]} if named else set()
    return found


@functools.cache
def graph() -> dict[str, set[str]]:
    return {module: {m for m in imports(path) if m in MODULES} - {module} for module, path in MODULES.items()}


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen, todo = set[str](), list(edges[start])
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                todo += edges.get(node, ())
        reach[start] = seen
    groups = {frozenset([a, *(b for b in reach[a] if a in reach.get(b, ()))]) for a in edges if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def test_every_room_has_its_layer() -> None:
    assert {room(module) for module in MODULES} <= set(LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    up = {m for m in graph()[module] if LEVEL[room(m)] > LEVEL[room(module)]}
    assert not up


def test_no_file_imports_in_a_circle() -> None:
    assert not circles(graph())


def folder(module: str) -> str:
    """The folder of a module; a file outside the folders stands for itself."""
    parent = MODULES[module].relative_to(SOURCE).parent
    return str(parent) if str(parent) != "." else MODULES[module].name


def test_no_folder_imports_in_a_circle() -> None:
    folders: dict[str, set[str]] = {}
    for module, used in graph().items():
        folders.setdefault(folder(module), set()).update({folder(m) for m in used} - {folder(module)})
    assert not circles(folders)


def test_the_graph_sees_every_way_to_import(tmp_path: Path) -> None:
    """The test of the test: each kind of import counts."""
    file = SOURCE / "core" / "client.py"
    seen = {
        "import visard.cli": "visard.cli",
        "from visard.cli import console": "visard.cli.console",
        "from . import method": "visard.core.method",
        "from .method import Stage": "visard.core.method",
        "from ..cli import console": "visard.cli.console",
        "def f():\n    from visard.cli import console": "visard.cli.console",
        "if TYPE_CHECKING:\n    from visard.cli import console": "visard.cli.console",
        "x = 'visard.cli.console:bar'": "visard.cli.console",
        "run([sys.executable, '-m', 'visard.cli.console'])": "visard.cli.console",
    }
    for text, module in seen.items():
        assert module in imports(_pretended(tmp_path, file, text)), text
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def _pretended(folder: Path, path: Path, text: str) -> Path:
    """A file with another text at the place of `path`."""

    class Pretended(type(path)):  # type: ignore[misc]
        def read_text(self, *_: object, **__: object) -> str:
            return text

    return Pretended(path)


def modules_used() -> Iterator[tuple[str, str]]:
    for path in FILES:
        for name in imports(path):
            yield str(path.relative_to(SOURCE)), name.split(".")[0]


def test_optional_packages_stay_in_their_rooms() -> None:
    for file, package in modules_used():
        assert package != "flwr" or file.startswith("deployment/flower/"), file
        assert package not in ("gmpy2", "tenseal") or file.startswith("crypto/"), file


def test_nothing_unpickles() -> None:
    unpicklers = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
    for file, package in modules_used():
        assert package not in unpicklers or file == "data/unpickle.py", file
    for path in FILES:
        assert "allow_pickle=True" not in path.read_text(), path
        assert "weights_only=False" not in path.read_text(), path


def waits(call: ast.Call) -> bool:
    """Whether a call opens a file by its path as Python does, which waits where a named pipe is in its place.

    A new file beside another one (`replacing`) and the files of the package are no danger.
    """
    text, function = ast.unparse(call), call.func
    if "beside.open(" in text or "files(" in text or "opener=private" in text or "os.devnull" in text:
        return False
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute):
        return False
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else ""
    by_mode = first in ("r", "rb", "r+b", "a", "ab") or any(k.arg == "encoding" for k in call.keywords)
    opens = function.attr == "open" and (text.startswith("os.open(") or by_mode)
    return opens or function.attr in ("read_bytes", "read_text")


def test_files_are_opened_without_waiting() -> None:
    safe = {SOURCE / "files.py", SOURCE / "presets" / "__init__.py"}  # what the others call, and files of the package
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if path not in safe
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and waits(node)
    ]
    assert found == []


def test_no_file_is_longer_than_can_be_read_in_one_sitting() -> None:
    assert not {str(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 600}
