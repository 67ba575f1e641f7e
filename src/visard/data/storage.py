"""A face set on disk: its files and checked header, and the writer, which lets no half-written set be seen."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from visard.errors import UsageError, VisardError
from visard.files import PRIVATE_FOLDER, alive, flush_to_disk, open_file, private, read_bytes, write_durably

HEADER = "faces.json"
ARRAYS: dict[str, npt.DTypeLike] = {
    "images": np.uint8,  # (count, size, size, 3)
    "identity": np.int32,  # (count,), row of `names`
    "domain": np.int16,  # (count,), row of `domains`
    "attributes": np.int8,  # (count, len(attributes)): 1 present, -1 absent, 0 unknown
}
MAX_HEADER = 2**16  # bytes of the header of an array
MAX_PLAIN, MAX_RATIO = 2**28, 100  # bytes of a packed array, unless it is packed less tightly than this
FILES = "files"  # (count,) of fixed-width bytes, UTF-8

Name = Annotated[str, StringConstraints(min_length=1)]


class Header(BaseModel):
    """The content of faces.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1]
    count: int = Field(ge=1)
    size: int = Field(ge=1, le=4096)
    names: list[Name] = Field(min_length=1)
    domains: list[Name] = Field(min_length=1)
    attributes: list[Name]
    info: dict[str, Any]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Header:
        for field in ("names", "domains", "attributes"):
            values: list[str] = getattr(self, field)
            if len(set(values)) != len(values):
                raise ValueError(f"{field} has a name twice")
        return self


def read_header(folder: Path) -> Header:
    """Read and check `folder`/faces.json."""
    path = folder / HEADER
    if not folder.is_dir():
        raise UsageError(f"no face set at {folder}: no such folder")
    if not path.is_file():
        raise UsageError(f"{folder} is no face set: it has no {HEADER} (visard data import makes one of pictures)")
    try:
        return Header.model_validate_json(read_bytes(path))
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
    """The file of the array `name` of the set."""
    return folder / f"{name}.npy"


def map_array(folder: Path, name: str, shape: tuple[int, ...] | None) -> np.ndarray[Any, Any]:
    """Map one array read-only; its length on disk and, unless None, its shape and type are checked."""
    path = array_path(folder, name)
    if not path.is_file():
        raise VisardError(f"{folder} is incomplete: {path.name} is missing")
    array = map_npy(path)
    if shape is None:
        return array
    kind_fits = array.dtype.kind == "S" if name == FILES else array.dtype == ARRAYS[name]
    if not kind_fits or array.shape != shape or not array.flags.c_contiguous:
        raise VisardError(f"{path} does not fit {HEADER}: {array.dtype} {array.shape}, expected {shape}")
    return array


def map_npy(path: Path) -> np.ndarray[Any, Any]:
    """The array in a .npy file from anywhere, mapped read-only; one clear line if it is anything else."""
    try:
        with open_file(path) as file:
            _npy_header(file)
        # open_memmap reads the .npy format alone: no zip, no pickle, and a short file is a ValueError
        array: np.ndarray[Any, Any] = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # its header is Python that is parsed, and fails in more ways than numpy documents
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise VisardError(f"{path} is damaged or cut short, or no .npy file: {reason}") from None
    return array


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and type of a .npy file; what numpy does not stand is refused.

    It allocates any length of a header, and divides by the size of an entry, even by 0, which ends the process.
    """
    version, start = np.lib.format.read_magic(file), file.tell()
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if length > MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    file.seek(start)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, columns_first, kind = read(file)
    if kind.kind not in "biufcS" or not kind.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"it holds no numbers but {str(kind)[:60]} {str(shape)[:60]}")
    return shape, columns_first, kind


def read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of numbers in a .npz file from anywhere, by name; it takes no more memory than its bytes explain."""
    found = {}
    try:
        with open_file(path) as opened, zipfile.ZipFile(opened) as file:
            for part in file.infolist():
                if part.filename.endswith(".npy"):
                    found[part.filename.removesuffix(".npy")] = _npz_part(file, part)
    except Exception as error:  # zip files and .npy headers fail in more ways than is documented
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UsageError(f"{path} is damaged or cut short, or no .npz file: {reason}") from None
    return found


def _npz_part(file: zipfile.ZipFile, part: zipfile.ZipInfo) -> np.ndarray[Any, Any]:
    if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others allocate whatever a file claims
        raise ValueError(f"{part.filename} is packed in an unusual way")
    with file.open(part) as content:
        shape, columns_first, kind = _npy_header(content)
        length = math.prod(shape) * kind.itemsize
        if content.tell() + length != part.file_size or length > max(MAX_PLAIN, MAX_RATIO * part.compress_size):
            raise ValueError(f"{part.filename} says that it has {length} bytes")
        values = np.frombuffer(content.read(length), kind)
    return values.reshape(shape, order="F" if columns_first else "C")


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


class FaceSetWriter:
    """Write `count` pictures of `size` x `size` in any order; `close` makes the set appear at `out`.

    Everything is written to a folder beside `out`, which is renamed in the end. Pictures go straight to disk; the
    labels (a few dozen bytes a picture) wait in memory for `close`.
    """

    def __init__(
        self,
        out: Path,
        *,
        count: int,
        size: int,
        names: list[str],
        domains: list[str],
        attributes: list[str],
        info: dict[str, Any],
        overwrite: bool = False,
    ) -> None:
        self.out = Path(out)
        self._overwrite = overwrite
        self._refuse_existing()
        try:
            self._header = Header(
                version=1, count=count, size=size, names=names, domains=domains, attributes=attributes, info=dict(info)
            )
        except ValidationError as error:
            raise VisardError(f"face set header: {first_problem(error)}") from None
        self.folder = self.out.with_name(f"{self.out.name}.partial-{os.getpid()}")
        self._identity = np.zeros(count, np.int32)
        self._domain = np.zeros(count, np.int16)
        self._attributes = np.zeros((count, len(attributes)), np.int8)
        self._files: list[bytes] = [b""] * count
        self._written = np.zeros(count, bool)
        self._picture_bytes = size * size * 3
        self._open = False
        self._at_exit = partial(_remove_own, self.folder.absolute(), os.getpid())
        atexit.register(self._at_exit)  # a signal may come before the caller's `with` begins
        try:
            _remove_stale(self.out)
            self.folder.mkdir(PRIVATE_FOLDER, parents=True)
            self._images = open(array_path(self.folder, "images"), "w+b", opener=private)  # noqa: SIM115
            self._open = True
            self._offset = self._write_image_header(count)
            self._images.truncate(self._offset + count * self._picture_bytes)
        except OSError as error:
            self.abort()
            raise VisardError(f"cannot write {self.folder}: {error.strerror}") from None

    @property
    def info(self) -> dict[str, Any]:
        """The header's information on the set's origin; may be changed until `close`."""
        return self._header.info

    def _refuse_existing(self) -> None:
        if not (self.out.exists() or self.out.is_symlink()):
            return
        if not self._overwrite:
            raise UsageError(f"{self.out} exists already: --overwrite replaces it, or choose another place")
        replaceable = self.out.is_dir() and ((self.out / HEADER).is_file() or not any(self.out.iterdir()))
        if not replaceable or self.out.is_symlink():
            raise UsageError(f"{self.out} is no face set, so it is not overwritten")
        refuse_others(self.out)

    def _write_image_header(self, count: int) -> int:
        """Write the .npy header for `count` pictures and return its length."""
        shape = (count, self._header.size, self._header.size, 3)
        self._images.seek(0)
        np.lib.format.write_array_header_1_0(self._images, {"descr": "|u1", "fortran_order": False, "shape": shape})
        return self._images.tell()

    def write(
        self,
        start: int,
        images: npt.NDArray[np.uint8],
        identity: npt.ArrayLike,
        domain: npt.ArrayLike,
        attributes: npt.ArrayLike,
        files: list[str],
    ) -> None:
        """Store pictures (n, size, size, 3) and their labels as rows start .. start + n - 1."""
        n, header = len(images), self._header
        rows = slice(start, start + n)
        ids, doms = np.asarray(identity), np.asarray(domain)
        marks = np.asarray(attributes).reshape(n, -1) if n else np.zeros((0, len(header.attributes)))
        if images.dtype != np.uint8 or images.shape[1:] != (header.size, header.size, 3):
            have = f"{images.dtype} {images.shape}"
            raise VisardError(f"{self.out}: pictures are {have}, not uint8 of size {header.size}")
        if start < 0 or start + n > header.count:
            raise VisardError(f"{self.out}: rows {start} to {start + n - 1} do not fit {header.count} pictures")
        if ids.shape != (n,) or doms.shape != (n,) or marks.shape != (n, len(header.attributes)) or len(files) != n:
            raise VisardError(f"{self.out}: labels do not fit {n} pictures at row {start}")
        for what, numbers, known in (("identity", ids, header.names), ("domain", doms, header.domains)):
            if n and not (numbers.min() >= 0 and numbers.max() < len(known)):
                raise VisardError(f"{self.out}: {what} out of range at row {start}")
        if not np.isin(marks, (-1, 0, 1)).all():
            raise VisardError(f"{self.out}: an attribute is not -1, 0 or 1 at row {start}")
        self._identity[rows], self._domain[rows], self._attributes[rows] = ids, doms, marks
        self._files[rows] = [name.encode("utf-8", "surrogateescape") for name in files]
        self._written[rows] = True
        with _writing(self.folder):
            self._images.seek(self._offset + start * self._picture_bytes)
            self._images.write(np.ascontiguousarray(images).data)

    def attach(self, name: str, values: np.ndarray[Any, Any]) -> None:
        """Store one more array beside the pictures, for `FaceSet.extra(name)`."""
        if name in ARRAYS or name == FILES or not name.isidentifier():
            raise VisardError(f"{self.out}: an extra array cannot be called {name!r}")
        with _writing(self.folder):
            self._save_array(name, values)

    def _save_array(self, name: str, values: np.ndarray[Any, Any]) -> None:
        with open(array_path(self.folder, name), "wb", opener=private) as file:
            np.save(file, values, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())

    def drop(self, keep: npt.NDArray[np.bool_]) -> None:
        """Of the first len(keep) rows, keep those where `keep` is true, without gaps."""
        rows = np.flatnonzero(keep)
        with _writing(self.folder):
            for row, old in enumerate(rows):
                if row != old:
                    self._images.seek(self._offset + int(old) * self._picture_bytes)
                    picture = self._images.read(self._picture_bytes)
                    self._images.seek(self._offset + row * self._picture_bytes)
                    self._images.write(picture)
        for labels in (self._identity, self._domain, self._attributes, self._written):
            labels[: len(rows)] = labels[rows]
        self._written[len(rows) :] = False
        self._files[: len(rows)] = [self._files[row] for row in rows]

    def renumber(self, identity: npt.NDArray[np.integer[Any]]) -> None:
        """Replace identity number k by identity[k] everywhere; `close` checks that it has a name."""
        self._identity = identity.astype(np.int32)[self._identity]

    def close(self, count: int | None = None, names: list[str] | None = None) -> Path:
        """Finish with the first `count` rows (all by default) and move the set to its place.

        `names` replaces the identity names, for an importer that knows only now which ones are left.
        """
        count = self._header.count if count is None else count
        names = self._header.names if names is None else names
        if not self._open:
            raise VisardError(f"{self.out} is closed already")
        try:
            if not 1 <= count <= self._header.count or not self._written[:count].all():
                missing = count - int(self._written[:count].sum())
                raise VisardError(f"{self.out}: {missing} of {count} pictures were never written")
            if int(self._identity[:count].max()) >= len(names):
                raise VisardError(f"{self.out}: an identity has no name")
            with _writing(self.out):
                self._save(count, names)
                self._move()
        finally:
            self.abort()
        return self.out

    def _save(self, count: int, names: list[str]) -> None:
        # numpy pads the header so that the first axis may change without moving the data
        if self._write_image_header(count) != self._offset:
            raise VisardError(f"{self.out}: the image file cannot be shortened in place")
        self._images.truncate(self._offset + count * self._picture_bytes)
        self._images.flush()
        os.fsync(self._images.fileno())
        self._save_array("identity", self._identity[:count])
        self._save_array("domain", self._domain[:count])
        self._save_array("attributes", self._attributes[:count])
        self._save_array(FILES, np.array(self._files[:count], f"S{max(1, max(map(len, self._files[:count])))}"))
        # the header comes last: a folder without it is no face set
        text = self._header.model_copy(update={"count": count, "names": names}).model_dump_json(indent=1)
        write_durably(self.folder / HEADER, (text + "\n").encode())
        flush_to_disk(self.folder)

    def _move(self) -> None:
        self._refuse_existing()
        old = self.out.with_name(f"{self.out.name}.replaced-{os.getpid()}")
        if self.out.exists():
            self.out.rename(old)
        self.folder.rename(self.out)
        flush_to_disk(self.out.parent)
        shutil.rmtree(old, ignore_errors=True)

    def abort(self) -> None:
        """Discard an unfinished set; harmless after `close`."""
        if self._open:
            self._images.close()
            self._open = False
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self._at_exit)

    def __enter__(self) -> FaceSetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None and self._open:
            self.close()
        else:
            self.abort()


def is_of_set(path: Path, header: str = HEADER) -> bool:
    """Whether a file may be one of a set, by its name."""
    return path.suffix == ".npy" or path.name == header


def others(folder: Path, header: str = HEADER) -> list[str]:
    """Names in a folder that are no files of a set."""
    left = re.compile(rf"\.{re.escape(header)}\.\d+\.tmp")  # by a writer that was killed
    own = [p for p in folder.iterdir() if p.is_file() and is_of_set(p, header)]
    return sorted(p.name for p in folder.iterdir() if p not in own and not left.fullmatch(p.name))


def refuse_others(folder: Path, header: str = HEADER) -> None:
    """Refuse to replace a folder with files of the user's in it."""
    if found := others(folder, header):
        raise UsageError(f"{folder} holds {found[0]}, which is no part of a set, so it is not replaced: move it first")


def _remove_own(folder: Path, process: int) -> None:
    """Remove what a process has written, unless this is a child of it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror}") from None


def recover(out: Path) -> int:
    """Finish what killed writers of a set began: a complete new set is moved into place, leftovers are removed.

    Returns how many folders of dead processes there were.
    """
    found = 0
    for path in _stale(out, "replaced"):
        found += 1
        if out.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(out)
            flush_to_disk(out.parent)
    return found + _remove_stale(out)


def _remove_stale(out: Path) -> int:
    """Remove what this or a dead process left half-written beside `out`; returns how many folders."""
    stale = _stale(out, "partial")
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return len(stale)


def _stale(out: Path, kind: str) -> list[Path]:
    prefix = f"{out.name}.{kind}-"
    beside = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    named = [(path, path.name.removeprefix(prefix)) for path in beside if path.name.startswith(prefix)]
    dead = [path for path, process in named if process.isdecimal() and not alive(int(process)) and path.is_dir()]
    return [path for path in dead if not path.is_symlink() and not others(path)]  # a folder of the user's stays
