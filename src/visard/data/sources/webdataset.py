"""WebDataset tar shards: files of one sample share a name up to the first dot, such as 0001.jpg and 0001.cls."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from visard.data.listing import Listing, Slices, number
from visard.data.pictures import EXTENSIONS
from visard.errors import UsageError

MAX_LABEL = 2**20  # bytes of a file with labels
LABELS = ("cls", "json", "txt", "id")  # in this order, if the user names none


def read(source: Path, *, label: str | None = None, image: str | None = None) -> Listing:
    """List the pictures of a .tar shard, or of all shards in a folder, without unpacking them.

    `image` and `label` are endings of files in a sample. The label is the text of a .cls, .txt or .id file, or in a
    .json file the key `label` (`json:key` names another); its identity is that text.
    """
    paths = sorted(source.glob("*.tar")) if source.is_dir() else [source]
    if not paths:
        raise UsageError(f"{source} has no .tar files")
    wanted, _, key = (label or "").partition(":")
    endings = (wanted.lstrip("."),) if wanted else LABELS
    pictures = (f".{image.lstrip('.').lower()}",) if image else EXTENSIONS
    places, files, labels = list[tuple[int, int, int]](), list[str](), list[str]()
    for shard, path in enumerate(paths):
        for name, sample in _samples(path, pictures, endings):
            at = next((sample[ending] for ending in sample if f".{ending}".endswith(pictures)), None)
            if not isinstance(at, tuple):
                continue
            ending = next((ending for ending in endings if isinstance(sample.get(ending), bytes)), None)
            if ending is None:
                raise UsageError(f"{path}: sample {name} has no label ({', '.join(f'.{e}' for e in endings)})")
            labels.append(_label(f"{path}: sample {name}", sample[ending], ending, key or "label"))
            files.append(f"{path.name}/{name}")
            places.append((shard, *at))
    if not files:
        raise UsageError(f"{source} holds no pictures")
    return Listing(Slices(paths, *np.array(places, np.int64).T), files, *number(labels))


Sample = dict[str, tuple[int, int] | bytes]  # ending -> place of a picture, or a label


def _samples(path: Path, pictures: tuple[str, ...], labels: tuple[str, ...]) -> Iterator[tuple[str, Sample]]:
    """Samples of one shard in order: neighbours with the same name up to the first dot."""
    current, sample = None, Sample()
    for name, member, shard in _members(path):
        folder, _, file = name.rpartition("/")
        stem, _, ending = file.partition(".")
        full = f"{folder}/{stem}" if folder else stem
        if full != current:
            if current is not None:
                yield current, sample
            current, sample = full, Sample()
        if f".{ending}".lower().endswith(pictures):
            sample[ending.lower()] = (member.offset_data, member.size)
        elif ending in labels and member.size <= MAX_LABEL:
            data = shard.extractfile(member)
            sample[ending] = data.read() if data else b""
    if current is not None:
        yield current, sample


class _Bounded(io.BufferedReader):
    """A file that makes room for no more than is left of it: tarfile asks for as much as a header says."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        return super().read(size if size is None or size < 0 else min(size, max(0, left)))


def _members(path: Path) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarFile]]:
    """Plain files of a shard, without links, devices and sparse files. Nothing is ever unpacked to disk."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    length = path.stat().st_size
    try:
        # uncompressed: a picture is a slice of the file
        with _Bounded(io.FileIO(path)) as file, tarfile.open(fileobj=file, mode="r:") as shard:
            for member in shard:
                if member.offset_data + member.size > length:
                    raise UsageError(f"{path} is cut short in {member.name[:80]!r}")
                if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    yield member.name.removeprefix("./"), member, shard
                shard.members = []  # type: ignore[attr-defined]  # tarfile remembers every member
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path} is no plain tar file, or damaged: {' '.join(str(error).split())[:100]}") from None


def _label(where: str, data: tuple[int, int] | bytes, ending: str, key: str) -> str:
    assert isinstance(data, bytes)
    try:
        if ending != "json":
            text = data.decode().strip()
        else:
            content = json.loads(data)
            value = content.get(key) if isinstance(content, dict) else None
            text = str(value).strip() if isinstance(value, (str, int)) else ""
    except (ValueError, RecursionError):
        text = ""
    if not text or len(text) > 200 or not text.isprintable():
        raise UsageError(f"{where} has no usable label in .{ending}")
    return text
