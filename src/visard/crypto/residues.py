"""Polynomials modulo the primes of the CKKS ring, as arrays and as bytes; no cipher library is needed here.

    arrays (polynomials, primes, DEGREE) of uint64, each entry below its prime

What a peer sends is only this: numbers of fixed width, each checked against its prime before anything else sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from visard.errors import VisardError

DEGREE = 8192
SLOTS = DEGREE // 2
BITS = (60, 45, 45, 60)  # 210 of the 218 that a degree of 8192 allows at 128-bit security; the last is for keys alone
PRIMES = (1152921504606748673, 35184371417089, 35184371613697, 1152921504606830593)
OFFER, ANSWER, KEY = 3, 1, 4  # primes of an offer, of an answer, of a key


def size(polynomials: int, primes: int) -> int:
    """Bytes of so many polynomials."""
    return polynomials * DEGREE * sum(_width(i) for i in range(primes))


def to_bytes(residues: np.ndarray) -> bytes:
    """Little-endian numbers, each as wide as its prime needs."""
    words = np.ascontiguousarray(residues, dtype="<u8").view(np.uint8).reshape(*residues.shape, 8)
    return b"".join(poly[i, :, : _width(i)].tobytes() for poly in words for i in range(residues.shape[1]))


def from_bytes(data: bytes, polynomials: int, primes: int, what: str) -> np.ndarray:
    """The array, once length and ranges are right."""
    if len(data) != size(polynomials, primes):
        raise VisardError(f"{what}: {len(data)} bytes, expected {size(polynomials, primes)}")
    found, at = np.zeros((polynomials, primes, DEGREE), np.uint64), 0
    for poly in found:
        for i in range(primes):
            width = _width(i)
            part = np.frombuffer(data, np.uint8, DEGREE * width, at).reshape(DEGREE, width)
            words = np.zeros((DEGREE, 8), np.uint8)
            words[:, :width] = part
            poly[i] = words.view("<u8")[:, 0]
            at += DEGREE * width
            if int(poly[i].max()) >= PRIMES[i]:
                raise VisardError(f"{what}: a number is not below its prime")
        if not poly.any():
            raise VisardError(f"{what}: a polynomial is zero")
    return found


def add(parts: Sequence[bytes], polynomials: int, primes: int, what: str) -> bytes:
    """The sum of ciphertexts that were written by `to_bytes`."""
    total = np.zeros((polynomials, primes, DEGREE), np.uint64)
    modulus = np.array(PRIMES[:primes], np.uint64)[None, :, None]
    for part in parts:
        total = (total + from_bytes(part, polynomials, primes, what)) % modulus
    return to_bytes(total)


def shift(answer: bytes, by: np.ndarray, what: str) -> bytes:
    """An answer with numbers (DEGREE,) below the first prime added to its first polynomial: to what it decrypts to."""
    array = from_bytes(answer, 2, ANSWER, what)
    array[0, 0] = (array[0, 0] + by) % np.uint64(PRIMES[0])
    return to_bytes(array)


def _width(prime: int) -> int:
    return -(-BITS[prime] // 8)
