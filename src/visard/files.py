"""Writing files so that a crash at any moment leaves the old file or the new one, never half of one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from visard.errors import VisardError

PRIVATE = 0o600  # mode of files that only their owner may read


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write and fsync, without atomicity: for files that nothing refers to yet. `mode` is of a new file."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def write_atomically(path: Path, data: bytes | str, mode: int = 0o666) -> None:
    """Write beside, fsync, rename, fsync the folder."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durably(beside, data.encode() if isinstance(data, str) else data, mode)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise VisardError(f"cannot write {path}: {error.strerror or error}") from None
    fsync_folder(path.parent)


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Refuse a second process on the same folder."""
    try:
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise VisardError(f"cannot write {folder / '.lock'}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise VisardError(f"{folder} is being written by another visard") from None
        yield


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, atomically; NaN and infinities are refused because other readers refuse them."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in `path`; one clear line if it is missing or corrupt."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise VisardError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise VisardError(f"{path} cannot be read as JSON: {error}") from None
