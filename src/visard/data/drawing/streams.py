"""Counter-based random numbers: the n-th number of a stream is a pure function of its address."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERSON, PERSON_GRID, SHOT, SHOT_GRID, SENSOR = range(5)


def raw(seed: int, stream: int, domain: int, rows: Iterable[tuple[int, int]], n: int) -> NDArray[np.uint64]:
    """(B, n) raw 64-bit words of Philox-4x64, a row for each (identity, picture).

    Keyed by (seed, stream), counter (0, picture, identity, domain). One generator is set to each address in
    turn: making a generator takes five times as long as a row of numbers.
    """
    key = np.array([seed, stream], dtype=np.uint64)
    bits = np.random.Philox(key=key)
    counter, buffer = np.zeros(4, dtype=np.uint64), np.zeros(4, dtype=np.uint64)
    state: Any = {
        "bit_generator": "Philox", "state": {"counter": counter, "key": key},
        "buffer": buffer, "buffer_pos": len(buffer), "has_uint32": 0, "uinteger": 0,
    }  # fmt: skip
    out = []
    for identity, picture in rows:
        counter[1:] = picture, identity, domain
        bits.state = state
        out.append(bits.random_raw(n))
    return np.stack(out)


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in (0, 1): the top 53 bits, moved by half a step so that neither end occurs."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


BOUND = 2.4


@cache
def _law() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Standard normal numbers in steps of 1/512 up to ±BOUND and their distribution function."""
    z = np.linspace(-BOUND, BOUND, 2 * round(512 * BOUND) + 1)
    return np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in z.tolist()]), z


def normal(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal by inversion, cut at ±BOUND: no monsters.

    Between neighbours of a table on straight lines, at most 6e-6 off: scipy's exact function would cost more
    time to import than a worker takes to start.
    """
    p, z = _law()
    return np.interp(u, p, z)


LOW = np.uint64(0x0000FFFF0000FFFF)
BANK = 1 << 18  # numbers of sensor noise


@cache
def _bank() -> NDArray[np.float32]:
    """Numbers of unit variance, two a word: each the sum of two 16-bit parts (a triangle).

    Integer sums are exact, so the noise is the same on every machine, and far cheaper than a normal law.
    """
    words = raw(0, SENSOR, 0, [(0, 0)], BANK // 2)[0]
    pairs = ((words & LOW) + ((words >> np.uint64(16)) & LOW)).view(np.uint32)
    centred: NDArray[np.float32] = pairs.astype(np.float32)
    centred -= 65535.0
    centred *= np.float32(6.0**0.5 / 65536.0)
    return centred


def grain(words: NDArray[np.uint64], n: int) -> NDArray[np.float32]:
    """(B, n) of sensor noise: for each word a stretch of one long list of noise, from a place that it names."""
    first = (words % np.uint64(BANK - n)).tolist()
    return np.stack([_bank()[k : k + n] for k in first])
