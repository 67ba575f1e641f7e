"""Verification sets as InsightFace packs them: a pickle of 2 N encoded pictures and N booleans, read without pickle."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.listing import Listing, Numbers, Pictures, number
from visard.data.pairs import consecutive_folds, pair_extras
from visard.data.unpickle import Array, load_plain
from visard.errors import UsageError, VisardError
from visard.files import open_file, replacing

Encoded = bytes | memoryview
BYTES = 32  # of a file for each picture, at least


def read(source: Path) -> Listing:
    """List the pictures of a .bin file, or of every .bin file in a folder (each one a domain, such as a race).

    Pair i is pictures 2 i and 2 i + 1; folds are ten blocks of pairs in order. Identities are not in the file:
    the two pictures of a "same" pair get one identity, those of a "different" pair two.
    """
    paths = sorted(source.glob("*.bin")) if source.is_dir() else [source]
    if not paths:
        raise UsageError(f"{source} has no .bin files")
    pictures: list[Encoded] = []
    files, owners, domains, tables = list[str](), list[str](), list[str](), list[Numbers]()
    for path in paths:
        encoded, same = read_bin(path)
        pair = np.arange(len(same))
        first = 2 * pair + len(pictures)
        tables.append(np.stack([first, first + 1, same, consecutive_folds(len(same))], 1))
        name = path.stem.removesuffix("_test")
        files += [f"{path.name}:{k}" for k in range(len(encoded))]
        owners += [f"{name}-{k // 2}{'' if same[k // 2] else 'ab'[k % 2]}" for k in range(len(encoded))]
        domains += [name] * len(encoded)
        pictures += encoded
    info: dict[str, Any] = {"identities": "unknown"}
    extras = pair_extras(np.concatenate(tables), files, info)
    return Listing(_InMemory(pictures), files, *number(owners), domains=domains, extras=extras, info=info)


def read_bin(path: Path) -> tuple[list[Encoded], npt.NDArray[np.bool_]]:
    """The encoded pictures (2 N) and whether the two of each pair show one identity (N,)."""
    data = map_file(path)
    content = load_plain(data, str(path))
    if not isinstance(content, (tuple, list)) or len(content) != 2 or not isinstance(content[0], (list, tuple)):
        raise UsageError(f"{path} is no verification set: expected (pictures, same)")
    pictures = [_picture(path, k, value) for k, value in enumerate(content[0])]
    if BYTES * len(pictures) > len(data):  # a pickle can name the same picture again and again
        raise UsageError(f"{path} is no verification set: {len(pictures)} pictures in {len(data)} bytes")
    same = _booleans(path, content[1])
    if len(pictures) != 2 * len(same) or not pictures:
        raise UsageError(f"{path} is no verification set: {len(pictures)} pictures for {len(same)} pairs")
    return pictures, same


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped: parts that are not read take no memory."""
    try:
        with open_file(path) as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except ValueError:
        raise UsageError(f"{path} is empty") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def write_bin(path: Path, pictures: Iterable[bytes], same: Sequence[bool]) -> None:
    """Write encoded pictures (2 N) and N booleans as a .bin file that InsightFace reads too (pickle protocol 3)."""
    count = 0
    with replacing(path, parents=True) as beside, beside.open("wb") as file:
        file.write(b"\x80\x03](")
        for picture in pictures:
            if not 0 < len(picture) < 2**32:
                raise VisardError(f"{path}: picture {count} has {len(picture)} bytes")
            file.write(b"B" + struct.pack("<I", len(picture)) + picture)
            count += 1
        if count != 2 * len(same) or not count:
            raise VisardError(f"{path}: {count} pictures for {len(same)} pairs")
        file.write(b"e](" + b"".join(b"\x88" if value else b"\x89" for value in same) + b"e\x86.")


class _InMemory(Pictures):
    """Pictures that are slices of mapped files."""

    def __init__(self, pictures: list[Encoded]) -> None:
        self._pictures = pictures

    def read(self, item: int) -> bytes:
        return bytes(self._pictures[item])

    def close(self) -> None:
        self._pictures = []


def _picture(path: Path, k: int, value: object) -> Encoded:
    if isinstance(value, Array) and value.kind == "u1" and sum(size > 1 for size in value.shape) <= 1:
        return value.data
    if isinstance(value, (bytes, memoryview)):
        return value
    what = f"an array of shape {value.shape}" if isinstance(value, Array) else f"a {type(value).__name__}"
    raise UsageError(f"{path}: picture {k} is {what}, not the bytes of an encoded picture")


def _booleans(path: Path, value: object) -> npt.NDArray[np.bool_]:
    if isinstance(value, Array) and len(value.shape) == 1:
        value = np.frombuffer(value.data, value.kind).tolist()
    if not isinstance(value, (list, tuple)) or not all(isinstance(x, int) and x in (0, 1) for x in value):
        raise UsageError(f"{path} is no verification set: the second part is no list of booleans")
    return np.array(value, bool)
