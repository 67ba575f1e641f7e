"""Files that are opened without waiting and written atomically, safe file names, and JSON and TOML values in and out.

What is in the place of a file may be a named pipe, which waits for a writer, or a device, which never ends. So visard
opens files with the functions below, or calls `check_file` before a library opens one by its path.

What visard writes is private unless the writer says `SHARED`: pictures, features, templates, class vectors and states
are about people, and by default no other account may read them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from visard.errors import UsageError, VisardError, one_line
from visard.text import escaped

PRIVATE = 0o600  # mode of files that only their owner may read
PRIVATE_FOLDER = 0o700
SHARED = 0o666  # as the umask has it: reports, metrics, settings, generic models
LONGEST_NAME = 120  # bytes of a file name that is made from text
NO_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND
MAX_TOML = 2**20  # bytes of a file of settings
MAX_DOTS = 64  # in one line of it: tomllib takes the square of the parts of a key
MAX_DEPTH = 64  # of lists and tables within each other in a file: what walks or writes a tree later calls itself


def check_file(path: str | os.PathLike[str]) -> None:
    """An OSError with one clear line if something is there that is neither a file nor a folder."""
    with suppress(FileNotFoundError):
        what = NO_FILES.get(stat.S_IFMT(os.stat(path).st_mode))
        if what is not None:
            raise OSError(errno.EINVAL, f"it is {what}, not a file", os.fspath(path))


def open_handle(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = PRIVATE) -> int:
    """`os.open` of a file: it never waits. A new file has `mode`."""
    check_file(path)
    return os.open(path, flags | os.O_NONBLOCK, mode)  # if a pipe took the place of the file in between


def private(path: str | os.PathLike[str], flags: int) -> int:
    """For `open(..., opener=private)`: a file, never waited for; if it is new, only its owner may read it."""
    return open_handle(path, flags)


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """A file to read."""
    return open(path, "rb", opener=private)


def open_text(path: str | os.PathLike[str], errors: str = "strict", encoding: str = "utf-8") -> TextIO:
    """A file of text to read, line by line."""
    return open(path, encoding=encoding, errors=errors, opener=private)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file."""
    with open_file(path) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """The content of a file of text."""
    with open_text(path, errors) as file:
        return file.read()


def flush_to_disk(path: Path) -> None:
    """Make the content of a file durable; of a folder, the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, data: bytes, mode: int = PRIVATE, new: bool = False) -> None:
    """Write and fsync, without atomicity: for files that nothing refers to yet, or that must be `new`.

    `mode` is of a file that does not exist yet.
    """
    how = os.O_EXCL if new else os.O_TRUNC
    try:
        with os.fdopen(open_handle(path, os.O_WRONLY | os.O_CREAT | how, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # of a full disk the error does not say where
        raise


@contextmanager
def replacing(path: Path, parents: bool = False, mode: int = PRIVATE) -> Iterator[Path]:
    """The path of an empty file beside `path`: it takes its place when the block ends well, else it is removed.

    The folder must exist, or is made with its `parents`. The file has `mode` from the beginning; a block that puts
    another one in its place gets the mode at the end.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: no folder {path.parent}")
        beside.unlink(missing_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # follows no link
        mode = stat.S_IMODE(os.fstat(handle).st_mode)  # without what the umask takes away
        os.close(handle)
        yield beside
        os.chmod(beside, mode)
        flush_to_disk(beside)
        os.replace(beside, path)
        flush_to_disk(path.parent)
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # most often it is not there
            beside.unlink()


def unfinished(path: Path) -> list[Path]:
    """Files left beside `path` by processes that were killed while `replacing` it."""
    names = re.compile(rf"\.{re.escape(path.name)}\.(\d{{1,9}})\.tmp")
    found = ((file, names.fullmatch(file.name)) for file in sorted(path.parent.iterdir()))
    return [file for file, name in found if name and not alive(int(name[1]))]


def alive(process: int) -> bool:
    """Whether another process has this number."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def write_atomically(path: Path, data: bytes | str, mode: int = PRIVATE, parents: bool = False) -> None:
    """Write a whole file, atomically and durably."""
    with replacing(path, parents, mode) as beside:
        write_durably(beside, data.encode() if isinstance(data, str) else data)


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Refuse a second process on the same folder."""
    path = folder / ".lock"
    try:  # nothing in the file is changed, and a link, which may lead to another file, is not followed
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, SHARED)
    except OSError as error:
        why = "it is a link" if path.is_symlink() else error.strerror
        raise VisardError(f"cannot write {path}: {why}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise VisardError(f"{folder} is being written by another visard") from None
        yield
    finally:
        os.close(lock)


def safe_name(text: str) -> str:
    """A file name for any text, without an ending: itself where it is letters, digits and `_-~.`, else with `%xx`.

    It is never a path, a hidden file or longer than `LONGEST_NAME`, and different texts have different names.
    """
    name = quote(text, safe="", errors="surrogatepass")
    if not name or name.startswith("."):
        name = f"%2E{name[1:]}" if name else "%"
    if len(name) > LONGEST_NAME:  # quote() leaves no % before a hyphen, so that no text is called like a shortened one
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        name = f"{name[: LONGEST_NAME - 34]}%-{digest}"
    return name


def write_json(path: Path, value: Any, mode: int = PRIVATE) -> None:
    """Indented JSON, atomically; NaN and infinities are refused because other readers refuse them."""
    write_atomically(path, escaped(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)) + "\n", mode)


def read_json(path: Path) -> Any:
    """The JSON value in `path`; one clear line if it is missing or corrupt."""
    try:
        tree = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise VisardError(f"{path} is missing") from None
    except OSError as error:
        raise VisardError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # too deep, or a number of thousands of digits
        raise VisardError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    if depth(tree) > MAX_DEPTH:
        raise VisardError(f"{path} cannot be read: more than {MAX_DEPTH} lists or objects within each other")
    return tree


def depth(tree: Any) -> int:
    """How many lists and tables are within each other."""
    levels, level = 0, [tree]
    while level := [value for value in level if isinstance(value, dict | list)]:
        levels += 1
        level = [part for value in level for part in (value.values() if isinstance(value, dict) else value)]
    return levels


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """The tables in a text from anywhere; one clear line, in bounded time, if it is no TOML."""
    if len(text) > MAX_TOML:
        raise UsageError(f"{where} is not a file of settings: it has more than {MAX_TOML} characters")
    for number, row in enumerate(text.split("\n"), 1):
        if row.count(".") > MAX_DOTS and re.sub(r"\d\.\d", "", row).count(".") > MAX_DOTS:
            raise UsageError(f"{where} is not valid TOML: line {number} has a key of more than {MAX_DOTS} parts")
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid TOML: {one_line(error)}") from None
    if depth(tree) > MAX_DEPTH:
        raise UsageError(f"{where} is not a file of settings: more than {MAX_DEPTH} lists or tables within each other")
    todo: list[Any] = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, dict | list):
            todo += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:  # so says TOML; Python cannot print longer ones
            raise UsageError(f"{where} is not valid TOML: a whole number has more than 64 bits")
    return tree


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: dataclasses and arrays too, sets sorted, None for NaN and infinity."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return [plain(v) for v in sorted(value)]
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist())
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")


def number(value: Any) -> float | None:
    """A finite number from a JSON value, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """A whole number from a JSON value, or None for anything else."""
    if type(value) is int and -(2**63) < value < 2**63:  # nearly always; a ledger has very many of them
        return value
    value = number(value)
    return None if value is None else int(value)


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def json_list(value: Any) -> list[Any]:
    """A JSON list, or an empty one for anything else."""
    return value if isinstance(value, list) else []


def cache_folder() -> Path:
    """$VISARD_CACHE, or visard in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("VISARD_CACHE") or base / "visard")
