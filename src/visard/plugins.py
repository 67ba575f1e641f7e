"""Plug-ins: your own methods, backbones, heads and so on, without changing visard's source.

A `Registry` knows the objects of one kind by name. Beside those that come with visard it finds

    package.module:Name    in settings: an attribute of a module that Python can import
    an entry point         of an installed package, in the group visard.methods, visard.backbones, ...
    a file or a module     that `--plugin` or `plugins = [...]` names, and which says @register("methods", "my-method")

Plug-ins are programs: they are imported when the user of this machine names them, on the command line or in a program,
or has installed a package with an entry point. A file of settings may come from anywhere: a plug-in that it names is
imported only if the user names it too (`doubt`). A party of a deployment imports only the modules that its own policy
lists (`allow_only`), whatever the server says.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from visard.errors import PublicError, UsageError, VisardError, did_you_mean
from visard.files import read_bytes
from visard.text import line

T = TypeVar("T")
V = TypeVar("V")

KINDS = (
    "methods", "backbones", "heads", "partitions", "importers", "clusterings", "aggregations", "metrics",
    "optimisers", "postprocessors", "watchers",
)  # fmt: skip
BUILT_IN = "built in"


class _Added(NamedTuple):
    value: Any
    origin: str
    named: bool  # by the user, so that settings record where it comes from


_added: dict[str, dict[str, _Added]] = {kind: {} for kind in KINDS}  # by @register
_loaded: dict[str, str] = {}  # plug-ins named by the user -> digest of the file; "" of a module
_loading: list[str] = []  # the plug-in that is being imported
_allowed: frozenset[str] | None = None  # modules that may be imported; None: any
_trusted: set[str] = set()  # modules and files that the user named, not all imported yet
_doubted: dict[str, str] = {}  # module:Name in a file of settings -> the file


def register(kind: str, name: str) -> Callable[[V], V]:
    """Decorator: register a class or function as `name` in the registry of a kind (`methods`, `heads`, ...)."""
    if kind not in KINDS:
        raise UsageError(f"no plug-ins of kind {kind!r}{did_you_mean(kind, KINDS)}")

    def remember(value: V) -> V:
        origin = _loading[-1] if _loading else f"module {getattr(value, '__module__', '?')}"
        before, named = _added[kind].get(name), bool(_loading)
        if before is not None and before.named and named and before.origin != origin:
            raise UsageError(f"{name!r} of {origin} is already one of the {kind} of {before.origin}")
        if named or before is None or not before.named:
            _added[kind][name] = _Added(value, origin, named)
        return value

    return remember


class Registry(Mapping[str, T], Generic[T]):
    """The objects of one kind by name. Built-in ones may be given as "module:Name", to be imported on first use."""

    def __init__(
        self, kind: str, built_in: Mapping[str, T | str], valid: Callable[[Any], bool] = callable, one: str = ""
    ) -> None:
        self.kind, self.built_in, self._valid = kind, dict(built_in), valid
        self.one = one or kind.removesuffix("s")  # the word for one of them

    def __getitem__(self, name: str) -> T:
        found: Any
        if name in self.built_in:
            found = self.built_in[name]
            if isinstance(found, str):
                found = self.built_in[name] = self._attribute(found)
            return found  # type: ignore[no-any-return]
        if (added := _added[self.kind].get(name)) is not None:
            found = added.value
        elif (point := self._entry_points().get(name)) is not None:
            _check_allowed(point.module, name)
            with _importing(f"the entry point {name!r}"):
                found = point.load()
        elif ":" in name:
            _check_allowed(module := name.partition(":")[0], name)
            if name in _doubted and not _is_named(module):
                raise UsageError(_unnamed(_doubted[name], name, module))
            with _importing(name):
                found = self._attribute(name)
            _loaded.setdefault(module, "")
        else:
            raise KeyError(name)
        if not self._valid(found):
            raise UsageError(f"{name!r} cannot be used as {self.one}: it is {str(found)[:80]}")
        return found  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return ":" in name or any(name in known for known in (self.built_in, _added[self.kind], self._entry_points()))

    def __iter__(self) -> Iterator[str]:
        points = self._entry_points()
        usable = [name for name, point in points.items() if _allowed is None or point.module in _allowed]
        return iter(dict.fromkeys([*self.built_in, *usable, *_added[self.kind]]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def find(self, name: str) -> T:
        """The object of that name; one clear line where there is none."""
        try:
            return self[name]
        except KeyError:
            raise UsageError(f"unknown {self.one} {name!r}{did_you_mean(name, self)}") from None

    def name_of(self, chosen: Any) -> str:
        """The name under which settings find the class of an object again, here and in other processes."""
        kind, name = type(chosen), str(chosen.name)
        added = _added[self.kind].get(name)
        known = name in self and self[name] is kind and (added is None or added.named or name in self.built_in)
        return name if known else f"{kind.__module__}:{kind.__qualname__}"

    def origin(self, name: str) -> str:
        """Where it comes from: built in, a package and its version, a file or a module."""
        if name in self.built_in:
            return BUILT_IN
        if (added := _added[self.kind].get(name)) is not None:
            return added.origin
        point = self._entry_points().get(name)
        if point is None:
            return f"module {name.partition(':')[0]}"
        return f"{point.dist.name} {point.dist.version}" if point.dist else f"module {point.module}"

    def _entry_points(self) -> dict[str, EntryPoint]:
        return _entry_points(f"visard.{self.kind}", tuple(sys.path))

    @staticmethod
    def _attribute(where: str) -> Any:
        module, _, path = where.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return found


@functools.cache
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Those of the packages on this path, which is searched once."""
    return {point.name: point for point in entry_points(group=group)}


def load(plugins: Iterable[str | Path]) -> list[str]:
    """Import plug-ins by file or module; returns them as settings record them: absolute, files with a digest.

    `FILE.py#DIGEST` is refused where the file is no longer what it was: a run does not go on with other code.
    """
    return [_load(str(plugin)) for plugin in plugins]


def _load(plugin: str) -> str:
    name, _, expected = plugin.partition("#")
    if not name.endswith(".py"):
        _check_allowed(name, name)
        if name not in _loaded:
            with _importing(name, f"module {name}"):
                importlib.import_module(name)
            _loaded[name] = ""
        return name
    path = Path(name).absolute()
    _check_allowed("", path.name)
    try:
        digest = hashlib.sha256(read_bytes(path)).hexdigest()[:16]
    except OSError as error:
        raise UsageError(f"plug-in {path}: {error.strerror}") from None
    if expected and digest != expected:
        raise UsageError(f"plug-in {path} has changed since the run began (it had the digest {expected})")
    if _loaded.get(str(path)) != digest:
        with _importing(str(path), f"file {path.name}"):
            _run_file(path)
        _loaded[str(path)] = digest
    return f"{path}#{digest}"


def digests(plugins: Iterable[str]) -> list[str]:
    """The part of recorded plug-ins that determines results: digests of files, names of modules."""
    return [plugin.rpartition("#")[2] for plugin in plugins]


def is_loaded(reference: str) -> bool:
    """Whether the user named the module of `module:Name`; a module that only a model file names is not imported."""
    return reference.partition(":")[0] in _loaded


def named() -> list[str]:
    """Modules and files that the user named, for a child process to `trust`."""
    return sorted({*_loaded, *_trusted})


def trust(modules: Iterable[str]) -> None:
    """The user names these modules and files."""
    _trusted.update(_key(module) for module in modules)


def doubt(tree: Any, where: str) -> None:
    """Note a `module:Name` in a file of settings: it is imported only if the user names the module too."""
    _doubted.update((text, where) for text in _references(tree))


def modules_in(tree: Any, doubted: bool = True) -> list[str]:
    """The modules of all text like `module:Name`, without those that only a file of settings has named."""
    found = [text for text in _references(tree) if doubted or text not in _doubted]
    return list(dict.fromkeys(text.partition(":")[0] for text in found))


def confirmed(listed: Iterable[str], where: str) -> list[str]:
    """The plug-ins that a file of settings lists, if the user has named each: the same file, or one of its digest."""
    found = []
    for plugin in listed:
        name, _, digest = plugin.partition("#")
        same = [path for path, other in _loaded.items() if digest and other == digest]
        if not same and not _is_named(name):
            raise UsageError(_unnamed(where, name, name))
        found.append(f"{same[0]}#{digest}" if same else plugin)
    return found


def again(listed: Iterable[str], tree: Any) -> str:
    """The options to add to a command that reads these settings from a file."""
    names = [plugin.partition("#")[0] for plugin in listed] + [m for m in modules_in(tree) if m in _loaded]
    return "".join(f" --plugin {name}" for name in dict.fromkeys(names))


def _references(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield from [tree] if ":" in tree else []
    elif isinstance(tree, Mapping | list):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _references(value)


def _is_named(plugin: str) -> bool:
    return (key := _key(plugin)) in _loaded or key in _trusted


def _key(plugin: str) -> str:
    name = plugin.partition("#")[0]
    return str(Path(name).absolute()) if name.endswith(".py") else name


def _unnamed(where: str, name: str, plugin: str) -> str:
    return f"{where}: {line(name)} is a program of your machine: to run it, name it as well: --plugin {line(plugin)}"


def allow_only(modules: Iterable[str] | None) -> None:
    """From now on this process imports plug-ins of these modules only, and no files; None: any."""
    global _allowed
    _allowed = None if modules is None else frozenset(modules)


def _check_allowed(module: str, name: str) -> None:
    if _allowed is not None and module not in _allowed:
        raise PublicError(f"the run names the plug-in {name[:100]!r}, which this party does not allow (plugins.allow)")


def _run_file(path: Path) -> None:
    name = f"visard_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


@contextmanager
def _importing(name: str, origin: str | None = None) -> Iterator[None]:
    """Errors of a plug-in become one line that names it; what it registers has this `origin`."""
    before = list(_loading)
    _loading.extend([origin] if origin else [])
    try:
        yield
    except VisardError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise UsageError(f"plug-in {name}: {type(error).__name__}: {text}") from error
    finally:
        _loading[:] = before
