"""Where encoded pictures are read from, by number: folders, zip files, slices of larger files."""

from __future__ import annotations

import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from visard.data import pictures
from visard.errors import UsageError


class Pictures(Protocol):
    """Encoded pictures by number; `read` is called from several threads at once."""

    def read(self, item: int) -> bytes:
        """The bytes of one picture."""

    def close(self) -> None:
        """Let go of open files."""


class Stream(ABC):
    """Encoded pictures that can only be had one after the other."""

    @abstractmethod
    def stream(self, items: Sequence[int]) -> Iterator[bytes]:
        """The bytes of the pictures `items`, whose numbers ascend; empty where there is none."""

    def close(self) -> None:  # noqa: B027
        """Let go of open files."""


def check_length(length: int) -> None:
    """Refuse a picture of no or of too many bytes, before it is read."""
    if length > pictures.MAX_BYTES:
        raise ValueError(f"{length} bytes are too many")
    if length == 0:
        raise ValueError("the file is empty")


def open_container(path: Path) -> Container:
    """The folder or zip at `path`; anything else is a one-line error."""
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    try:
        return Container(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is neither a folder nor a zip file: {' '.join(str(error).split())}") from None


@dataclass
class Container:
    """A folder or a zip file that pictures are read from by name; nothing is ever unpacked to disk."""

    path: Path

    def __post_init__(self) -> None:
        self._zip = None if self.path.is_dir() else zipfile.ZipFile(self.path)

    def names(self) -> list[str]:
        """Every file inside, with forward slashes, sorted; hidden files and folders are left out."""
        found = self._walk() if self._zip is None else (i.filename for i in self._zip.infolist() if not i.is_dir())
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
            check_length(self._zip.getinfo(name).file_size)
            return self._zip.read(name)
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError("the file lies outside the folder")
        file = self.path / name
        check_length(file.stat().st_size)
        return file.read_bytes()

    def close(self) -> None:
        """Close the zip file, if it is one."""
        if self._zip is not None:
            self._zip.close()


@dataclass(frozen=True)
class Files:
    """Pictures that are files of a folder or zip: number -> name."""

    container: Container
    names: Sequence[str]

    def read(self, item: int) -> bytes:
        """The bytes of one picture."""
        return self.container.read(self.names[item])

    def close(self) -> None:
        """Close the zip file, if it is one."""
        self.container.close()


@dataclass(frozen=True, eq=False)
class Slices:
    """Pictures that lie in larger files: which file, where it begins, how long it is."""

    paths: list[Path]
    path: npt.NDArray[np.int32]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    def read(self, item: int) -> bytes:
        """The bytes of one picture; the file is opened each time, so that thousands of shards need no handles."""
        length = int(self.length[item])
        check_length(length)
        with self.paths[self.path[item]].open("rb") as file:
            file.seek(int(self.start[item]))
            data: bytes = file.read(length)
        if len(data) != length:
            raise ValueError("the file is cut short")
        return data

    def close(self) -> None:
        """Nothing stays open."""
