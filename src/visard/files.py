"""Writing files so that a crash at any moment leaves the old file or the new one, never half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from visard.errors import VisardError


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync, without atomicity: for files that nothing refers to yet."""
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write beside, fsync, rename, fsync the folder."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durably(beside, data.encode() if isinstance(data, str) else data)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise VisardError(f"cannot write {path}: {error.strerror or error}") from None
    fsync_folder(path.parent)


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
