"""Sets of sensor readings or feature vectors with classes and users, behind the interface of a face set.

A class stands where an identity stands and a user (a room, a camera) where a domain stands, so that partitions, views
and engines work on them as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.faces import FaceSet
from visard.data.layout import array_path, map_array
from visard.errors import UsageError, VisardError
from visard.files import fsync_folder, read_json, write_json

READINGS = "readings.json"
KINDS: dict[str, npt.DTypeLike] = {"values": np.float32, "identity": np.int32, "domain": np.int16}


class Readings(FaceSet):
    """values (N, ...) float32, identity (N,): the class, domain (N,): the user; `size`: how many numbers a row has."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path).absolute()
        header = _header(self.path)
        arrays = {name: map_array(self.path, name, None).view(np.ndarray) for name in KINDS}
        for name, array in arrays.items():
            if array.dtype != KINDS[name] or len(array) != header["count"] or not array.flags.c_contiguous:
                raise VisardError(f"{self.path} is broken: {name}.npy does not fit {READINGS}")
        self.images = arrays["values"]
        self.identity, self.domain = arrays["identity"], arrays["domain"]
        self.attributes = np.zeros((len(self.identity), 0), np.int8)
        self.names, self.domains, self.attribute_names = header["classes"], header["users"], []
        self.info = header["info"]
        self.size = int(np.prod(self.images.shape[1:]))
        for name, numbers, names in (("identity", self.identity, self.names), ("domain", self.domain, self.domains)):
            if numbers.min() < 0 or numbers.max() >= len(names):
                raise VisardError(f"{self.path} is broken: a number in {name}.npy has no name in {READINGS}")

    def __reduce__(self) -> tuple[Callable[[Path], FaceSet], tuple[Path]]:
        return Readings, (self.path,)

    def __repr__(self) -> str:
        return f"Readings({str(self.path)!r}: {len(self)} rows of {len(self.names)} classes)"

    @property
    def synthetic(self) -> bool:
        """There are no pictures to show."""
        return False

    def file(self, row: int) -> str:
        """Readings come from no file of their own."""
        return f"{self.domains[self.domain[row]]}/{row}"


def is_readings(path: Path) -> bool:
    return (path / READINGS).is_file()


def write_readings(
    out: Path,
    values: npt.ArrayLike,
    classes: Sequence[str],
    identity: npt.ArrayLike,
    users: Sequence[str],
    domain: npt.ArrayLike,
    info: dict[str, Any],
    overwrite: bool = False,
) -> Path:
    """Write a set beside `out`, then rename it."""
    arrays = {"values": values, "identity": identity, "domain": domain}
    typed = {name: np.ascontiguousarray(array, KINDS[name]) for name, array in arrays.items()}
    count = len(typed["values"])
    if not count or any(len(array) != count for array in typed.values()):
        raise VisardError(f"{out}: {count} rows, {len(typed['identity'])} classes, {len(typed['domain'])} users")
    if not np.isfinite(typed["values"]).all():
        raise VisardError(f"{out}: a reading is not finite")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already: choose another place or overwrite it explicitly")
    if out.exists() and not is_readings(out):
        raise UsageError(f"{out} holds no readings, so it is not overwritten")
    beside = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        for name, array in typed.items():
            np.save(array_path(beside, name), array, allow_pickle=False)
        write_json(
            beside / READINGS,
            {"version": 1, "count": count, "classes": list(classes), "users": list(users), "info": info},
        )
        if out.exists():
            shutil.rmtree(out)
        beside.rename(out)
        fsync_folder(out.parent)
    except OSError as error:
        if out.is_dir():  # another process made the same set first
            return out
        raise VisardError(f"cannot write {out}: {error.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return out


def _header(folder: Path) -> dict[str, Any]:
    header = read_json(folder / READINGS)
    fits = isinstance(header, dict) and header.get("version") == 1 and isinstance(header.get("count"), int)
    names = [header.get(k) for k in ("classes", "users")] if fits else []
    if not fits or not all(isinstance(n, list) and n and all(isinstance(s, str) for s in n) for n in names):
        raise VisardError(f"{folder / READINGS} is broken: it needs version 1, count, classes and users")
    return {**header, "info": dict(header.get("info") or {})}
