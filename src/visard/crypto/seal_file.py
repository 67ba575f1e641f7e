"""Ciphertexts and keys in the file format of SEAL 4, so that its parser only ever reads headers that we wrote.

    header of 16 bytes | parameters id | is_ntt | polynomials | degree | primes | scale | 1 | array (| seed)

The library reads and writes files alone; here they are in memory. What it writes is compressed (zstd), what we write
is not. With a seed the second polynomial is left out: whoever knows the seed makes it again.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from visard.crypto import residues
from visard.errors import UsageError

HEADER = struct.Struct("<HBBBBHQ")  # magic, size of the header, version, compression, 0, size of all
MEMBERS = struct.Struct("<4QBQQQdQ")
COUNT = struct.Struct("<Q")
MAGIC, VERSION, PLAIN, ZSTD = 0xA15E, (4, 3), 0, 2
SEED = 64
BLAKE2XB = b"\1"


def ciphertext(array: np.ndarray, parms: Sequence[int], ntt: bool, scale: float, seed: bytes = b"") -> bytes:
    """A file of SEAL; `array` (polynomials, primes, degree), with a seed its first polynomial alone."""
    polynomials = len(array) + bool(seed)
    body = MEMBERS.pack(*parms, ntt, polynomials, array.shape[2], array.shape[1], scale, 1)
    body += framed(COUNT.pack(array.size) + np.ascontiguousarray(array, "<u8").tobytes())
    return framed(body + (framed(BLAKE2XB + seed) if seed else b""))


def galois_keys(keys: Mapping[int, Sequence[tuple[np.ndarray, bytes]]], parms: Sequence[int]) -> bytes:
    """Keys for rotations by Galois elements, each of several seeded ciphertexts."""
    body = [struct.pack("<4Q", *parms), COUNT.pack(residues.DEGREE)]
    parts = {(element - 1) // 2: key for element, key in keys.items()}
    for index in range(residues.DEGREE):
        key = parts.get(index, ())
        body += [COUNT.pack(len(key)), *(ciphertext(array, parms, True, 1.0, seed) for array, seed in key)]
    return framed(b"".join(body))


def framed(body: bytes) -> bytes:
    return HEADER.pack(MAGIC, HEADER.size, *VERSION, PLAIN, 0, HEADER.size + len(body)) + body


def read_ciphertext(data: bytes, at: int = 0) -> tuple[np.ndarray, bytes, int]:
    """(array, seed, where it ends) of a ciphertext without its header."""
    *_, polynomials, degree, primes, _, _ = MEMBERS.unpack_from(data, at)
    at += MEMBERS.size + HEADER.size
    (count,) = COUNT.unpack_from(data, at)
    array = np.frombuffer(data, "<u8", count, at + COUNT.size).reshape(-1, primes, degree)
    at += COUNT.size + 8 * count
    if len(array) == polynomials:
        return array, b"", at
    at += HEADER.size + len(BLAKE2XB)
    return array, data[at : at + SEED], at + SEED


def read_galois_keys(data: bytes) -> dict[int, list[tuple[np.ndarray, bytes]]]:
    """Element -> its seeded ciphertexts, from what the library wrote."""
    (indices,) = COUNT.unpack_from(data, 32)
    at, found = 40, dict[int, list[tuple[np.ndarray, bytes]]]()
    for index in range(indices):
        (count,) = COUNT.unpack_from(data, at)
        at += COUNT.size
        for _ in range(count):
            array, seed, at = read_ciphertext(data, at + HEADER.size)
            found.setdefault(2 * index + 1, []).append((array, seed))
    return found


def written(thing: Any) -> bytes:
    """What the library writes, unpacked and without its header."""
    data = saved(thing)
    magic, _, major, minor, compression, _, _ = HEADER.unpack_from(data)
    if (magic, compression, major, minor) != (MAGIC, ZSTD, *VERSION):
        raise UsageError(f"tenseal writes files of SEAL {major}.{minor}, which visard does not know")
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj().decompress(data[HEADER.size :])


def saved(thing: Any) -> bytes:
    """What the library writes, as it is."""
    with _file(b"") as path:
        thing.save(path)
        with open(path, "rb") as f:
            return f.read()


def load(thing: Any, context: Any, data: bytes) -> Any:
    """Let the library read `data` into `thing`."""
    with _file(data) as path:
        thing.load(context, path)
    return thing


@contextmanager
def _file(data: bytes) -> Iterator[str]:
    """A path to a file in memory, or where the system has none to a private one."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("visard"), "wb") as f:
            f.write(data)
            f.flush()
            yield f"/proc/self/fd/{f.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as named:  # mode 600
            named.write(data)
            named.flush()
            yield named.name
