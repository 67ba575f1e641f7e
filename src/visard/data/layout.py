"""The files of a face set on disk: names, types and the checked header."""

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from visard.errors import UsageError, VisardError

HEADER = "faces.json"
VERSION: Literal[1] = 1
ARRAYS: dict[str, npt.DTypeLike] = {
    "images": np.uint8,  # (count, size, size, 3)
    "identity": np.int32,  # (count,), row of `names`
    "domain": np.int16,  # (count,), row of `domains`
    "attributes": np.int8,  # (count, len(attributes)): 1 present, -1 absent, 0 unknown
}
FILES = "files"  # (count,) of fixed-width bytes, UTF-8

Name = Annotated[str, StringConstraints(min_length=1)]


class Header(BaseModel):
    """What faces.json holds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1]
    count: int = Field(ge=1)
    size: int = Field(ge=1, le=4096)
    names: list[Name] = Field(min_length=1)
    domains: list[Name] = Field(min_length=1)
    attributes: list[Name]
    info: dict[str, Any]

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Header":
        for field in ("names", "domains", "attributes"):
            values: list[str] = getattr(self, field)
            if len(set(values)) != len(values):
                raise ValueError(f"{field} has a name twice")
        return self


def make_header(**fields: Any) -> Header:
    """Build a header; what does not fit is a one-line error."""
    try:
        return Header(version=VERSION, **fields)
    except ValidationError as error:
        raise VisardError(f"face set header: {first_problem(error)}") from None


def read_header(folder: Path) -> Header:
    """Read and check `folder`/faces.json."""
    path = folder / HEADER
    if not folder.is_dir():
        raise UsageError(f"no face set at {folder}: no such folder")
    if not path.is_file():
        raise UsageError(f"{folder} is no face set: it has no {HEADER}")
    try:
        return Header.model_validate_json(path.read_bytes())
    except OSError as error:
        raise VisardError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        raise VisardError(f"{path} is broken: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first complaint of pydantic in one line: where, what."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    what = " ".join(problem["msg"].removeprefix("Value error, ").split())
    return f"{where}: {what}" if where else what


def array_path(folder: Path, name: str) -> Path:
    """Where array `name` of the set lies."""
    return folder / f"{name}.npy"


def map_array(folder: Path, name: str, shape: tuple[int, ...] | None) -> np.ndarray[Any, Any]:
    """Map one array read-only; its length on disk and, unless None, its shape and type are checked."""
    path = array_path(folder, name)
    try:
        # open_memmap reads the .npy format alone: no zip, no pickle, and a short file is a ValueError
        array = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise VisardError(f"{folder} is incomplete: {path.name} is missing") from None
    except (OSError, ValueError, EOFError, SyntaxError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise VisardError(f"{path} is damaged or cut short: {reason}") from None
    if shape is None:
        return array
    kind_fits = array.dtype.kind == "S" if name == FILES else array.dtype == ARRAYS[name]
    if not kind_fits or array.shape != shape or not array.flags.c_contiguous:
        raise VisardError(f"{path} does not fit {HEADER}: {array.dtype} {array.shape}, expected {shape}")
    return array


def canonical_json(content: Any) -> bytes:
    """The same bytes for the same content: sorted keys, no spaces, UTF-8."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(*parts: bytes) -> str:
    """SHA-256 over length-prefixed parts, in hexadecimal."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder, so that a rename after it can be trusted."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
