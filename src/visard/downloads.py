"""Files that visard fetches on request, each with its official address, its length and its digest.

`visard models get NAME` fetches one into the cache, or copies it from a path; nothing is fetched otherwise. A file
with an unknown digest is never kept.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from visard.errors import UsageError, VisardError, did_you_mean, one_line
from visard.files import cache_folder, file_digest, open_file, replacing

TIMEOUT = 30.0  # seconds without an answer
CHUNK = 1 << 16


@dataclass(frozen=True)
class Download:
    """A file at an address."""

    address: str
    length: int
    sha256: str
    licence: str
    also: tuple[str, ...] = ()  # digests of other releases that are as good

    @property
    def file(self) -> str:
        return self.address.rpartition("/")[2]


DOWNLOADS = {
    "yunet": Download(
        "https://media.githubusercontent.com/media/opencv/opencv_zoo/966be4cb6eefc2a4f586ed0581bf4bbaa2533070/"
        "models/face_detection_yunet/face_detection_yunet_2023mar.onnx",
        232589,
        "8f2383e4dd3cfbb4553ea8718107fc0423210dc964f9f4280604804ed2552fa4",
        "MIT, OpenCV Zoo",
        ("ebafce4e3c118d6554634be5c27ab333b4c047a9a8c3faf1d7cf93101c22f0f0",),  # 2026may: free height and width
    ),
}


def kept(name: str) -> Path | None:
    """Where a file is in the cache, or None; its digest is checked every time."""
    path = cache_folder() / "downloads" / _known(name).file
    return path if path.is_file() and is_known(name, path) else None


def is_known(name: str, path: Path) -> bool:
    """Whether a file is the one of that name, by its digest."""
    known = _known(name)
    return file_digest(path) in (known.sha256, *known.also)


def get(name: str, source: Path | str | None = None) -> Path:
    """Fetch a file into the cache, or copy it there from `source`: a path, a folder that holds it, or an address."""
    known = _known(name)
    if source is None and (found := kept(name)) is not None:
        return found
    path = cache_folder() / "downloads" / known.file
    with replacing(path, parents=True) as beside:
        if source is None or str(source).startswith(("http://", "https://")):
            _fetch(str(source or known.address), beside, known)
        else:
            _copy(_in_folder(name, Path(source)), beside, known)
        if not is_known(name, beside):
            raise VisardError(f"{source or known.address} is not {known.file}: its sha256 is {file_digest(beside)}")
    return path


def _known(name: str) -> Download:
    if name not in DOWNLOADS:
        raise UsageError(f"no file {name!r} to get{did_you_mean(name, DOWNLOADS)}")
    return DOWNLOADS[name]


def _in_folder(name: str, source: Path) -> Path:
    """The file itself, or the one in a folder: by its official name, or of any name by its digest."""
    known = _known(name)
    if not source.is_dir() or (source / known.file).is_file():
        return source / known.file if source.is_dir() else source
    files = (p for p in sorted(source.glob(f"*{Path(known.file).suffix}")) if p.is_file())
    small = (p for p in files if p.stat().st_size <= 2 * known.length)
    return next((p for p in small if is_known(name, p)), source / known.file)


def _copy(found: Path, target: Path, known: Download) -> None:
    if not found.is_file():
        raise UsageError(f"no such file: {found}")
    with open_file(found) as file:
        _take(file, target, known, str(found))


def _fetch(address: str, target: Path, known: Download) -> None:
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as answer:
            _take(answer, target, known, address)
    except (OSError, http.client.HTTPException, ValueError) as error:  # no answer, no HTTP, no address
        why = getattr(error, "reason", None) or one_line(error)
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise VisardError(
            f"{known.file} cannot be fetched from {address} ({why}): fetch it elsewhere and give its path with --from"
        ) from None


def _take(source: IO[bytes], target: Path, known: Download, where: str) -> None:
    """Copy at most a little more than the file is long."""
    length = 0
    with target.open("wb") as out:
        while part := source.read(CHUNK):
            length += len(part)
            if length > 2 * known.length:
                raise VisardError(f"{where} is longer than {known.file}, which has {known.length} bytes")
            out.write(part)
        out.flush()
        os.fsync(out.fileno())
