"""The pictures of a source before any is decoded: where their bytes are, and what is known of each."""

from __future__ import annotations

import csv
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from visard.data import pictures
from visard.data.pictures import CENTRE, Crop
from visard.errors import UsageError
from visard.files import check_file, open_file, private, read_bytes

Numbers = npt.NDArray[np.int64]
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)  # LZMA allocates whatever a file claims
PACKED, RATIO = 2**24, 100  # bytes of a picture in a zip file, unless it is packed less tightly than this
# saves more arrays beside the pictures: (item of each row that was kept) -> name of array -> values
Extras = Callable[[Numbers], dict[str, np.ndarray[Any, Any]]]


class Pictures:
    """Encoded pictures, as files hold them, by number; `read` is called from several threads at once."""

    def read(self, item: int) -> bytes:
        """The bytes of one picture."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of open files."""


class Stream(Pictures):
    """Encoded pictures that can only be had one after the other."""

    def stream(self, items: Sequence[int]) -> Iterator[bytes]:
        """The bytes of the pictures `items`, whose numbers ascend; empty where there is none."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Listing:
    """The pictures of a source, numbered from 0 ("items"), and what is known of each."""

    pictures: Pictures
    files: Sequence[str]  # the name of each picture
    identity: npt.NDArray[np.int32]  # of each picture, number of a name
    names: list[str]  # of the identities, in the order that limits and numbers follow
    attribute_names: list[str] = field(default_factory=list)
    attributes: npt.NDArray[np.int8] | None = None  # (files, attribute_names) in {-1, 0, 1}
    domains: Sequence[str] | None = None  # of each picture; the name of the importer by default
    crop: Crop = CENTRE
    align: str = "none"  # unless the user asks for something else; "five" where the pictures are raw photographs
    landmarks: npt.NDArray[np.float32] | None = None  # (files, 5, 2) x, y in the source's pixels, NaN = unknown
    boxes: npt.NDArray[np.float32] | None = None  # (files, 4) x, y, width, height, NaN = unknown
    size: int = 112  # default side in pixels, the usual input of face networks
    extras: Extras | None = None
    info: dict[str, Any] = field(default_factory=dict)


def check_length(length: int) -> None:
    """Refuse a picture of no or of too many bytes, before it is read."""
    if length > pictures.MAX_BYTES:
        raise ValueError(f"{length} bytes are too many")
    if length == 0:
        raise ValueError("the file is empty")


class Container:
    """A folder or a zip file that pictures are read from by name; nothing is ever unpacked to disk."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise UsageError(f"no such file or folder: {path}")
        self.path = path
        try:
            check_file(path)
            self._zip = None if path.is_dir() else zipfile.ZipFile(path)
        except Exception as error:  # a damaged directory of files makes zipfile fail in many ways
            why = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise UsageError(f"{path} is neither a folder nor a zip file: {why}") from None

    def names(self) -> list[str]:
        """Every file inside, with forward slashes, sorted; hidden files and folders are left out."""
        listed = () if self._zip is None else (i.filename for i in self._zip.infolist())
        found = self._walk() if self._zip is None else (name for name in listed if name and not name.endswith("/"))
        parts_of = ((name, name.split("/")) for name in found)
        return sorted(n for n, parts in parts_of if not any(p.startswith(".") or p == "__MACOSX" for p in parts))

    def _walk(self) -> list[str]:
        found, seen = [], set()
        for folder, folders, files in os.walk(self.path, followlinks=True):
            here = os.stat(folder)
            if (here.st_dev, here.st_ino) in seen:  # a link that leads back
                folders.clear()
                continue
            seen.add((here.st_dev, here.st_ino))
            relative = Path(folder).relative_to(self.path)
            found += [(relative / name).as_posix() for name in files]
        return found

    def read(self, name: str) -> bytes:
        """The bytes of one file."""
        if self._zip is not None:
            part = self._zip.getinfo(name)
            check_length(part.file_size)
            if part.compress_size > self.path.stat().st_size:  # zipfile allocates whatever a file claims
                raise ValueError(f"cut short: {part.compress_size} bytes are not in the file")
            if part.compress_type not in PACKINGS:
                raise ValueError("packed in an unusual way")
            if part.file_size > max(PACKED, RATIO * part.compress_size):
                raise ValueError(f"{part.file_size} bytes packed into {part.compress_size}")
            return self._zip.read(part)
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError("the file lies outside the folder")
        file = self.path / name
        check_length(file.stat().st_size)
        return read_bytes(file)

    def close(self) -> None:
        """Close the zip file, if it is one."""
        if self._zip is not None:
            self._zip.close()


@dataclass(frozen=True)
class Files(Pictures):
    """Pictures that are files of a folder or zip: number -> name."""

    container: Container
    names: Sequence[str]

    def read(self, item: int) -> bytes:
        return self.container.read(self.names[item])

    def close(self) -> None:
        self.container.close()


@dataclass(frozen=True, eq=False)
class Slices(Pictures):
    """Pictures that lie in larger files: which file, where it begins, how long it is."""

    paths: list[Path]
    path: Numbers
    start: Numbers
    length: Numbers

    def read(self, item: int) -> bytes:
        """The bytes of one picture; the file is opened each time, so that thousands of shards need no handles."""
        length = int(self.length[item])
        check_length(length)
        with open_file(self.paths[self.path[item]]) as file:
            file.seek(int(self.start[item]))
            data: bytes = file.read(length)
        if len(data) != length:
            raise ValueError("the file is cut short")
        return data


def number(names: Iterable[str]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Give each name a number in the order of first appearance: (number of each, names)."""
    known: dict[str, int] = {}
    numbers = np.fromiter((known.setdefault(name, len(known)) for name in names), np.int32)
    return numbers, list(known)


class Names(Sequence[str]):
    """`count` names, made when they are asked for: millions of strings would fill the memory."""

    def __init__(self, count: int, name: Callable[[int], str]) -> None:
        self._count, self._name = count, name

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, item: Any) -> Any:
        return self._name(item) if not isinstance(item, slice) else [self[k] for k in range(*item.indices(len(self)))]


def printable(name: str) -> str:
    """A file name as text that JSON can hold, also where its bytes are no UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def rows_of(kept: Numbers, count: int) -> Numbers:
    """The row of each of `count` items in the finished set, -1 for those that were left out."""
    rows = np.full(count, -1, np.int64)
    rows[kept] = np.arange(len(kept))
    return rows


def fields(path: Path) -> Iterator[tuple[str, list[str]]]:
    """("file:line", words) of each line that is not empty."""
    with _reading(path) as lines:
        for line_number, line in enumerate(lines, 1):
            if words := line.split():
                yield f"{path}:{line_number}", words


def csv_fields(path: Path) -> Iterator[tuple[str, list[str]]]:
    """("file:line", values without spaces around them) of each line of a CSV file that is not empty."""
    with _reading(path) as lines:
        reader = csv.reader(lines)
        for values in reader:
            if any(value.strip() for value in values):
                yield f"{path}:{reader.line_num}", [value.strip() for value in values]


@contextmanager
def _reading(path: Path) -> Iterator[TextIO]:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="", opener=private) as file:
            yield file
    except (OSError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def coordinates(where: str, words: list[str]) -> npt.NDArray[np.float32]:
    """Five points (5, 2) from ten words."""
    try:
        points = np.array([float(word) for word in words], np.float32)
    except (ValueError, OverflowError):
        points = np.zeros(0, np.float32)
    if points.shape != (10,) or not (np.abs(points) < 1e6).all():
        raise UsageError(f"{where}: expected five landmarks x y, found {' '.join(words)[:60]!r}")
    return points.reshape(5, 2)
