"""Counter-based random numbers: the n-th number of a stream is a pure function of its address."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

PERSON, PERSON_GRID, SHOT, SHOT_GRID, SENSOR = range(5)


def raw(seed: int, stream: int, domain: int, identity: int, picture: int, n: int) -> NDArray[np.uint64]:
    """n raw 64-bit words of Philox-4x64 keyed by (seed, stream), counter (0, picture, identity, domain)."""
    bits = np.random.Philox(key=[seed, stream], counter=[0, picture, identity, domain])
    return np.asarray(bits.random_raw(n), dtype=np.uint64)


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in (0, 1): the top 53 bits, moved by half a step so that neither end occurs."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(u: NDArray[np.float64], bound: float = 2.4) -> NDArray[np.float64]:
    """Standard normal by inversion, cut at ±bound: no monsters."""
    return np.asarray(np.clip(ndtri(u), -bound, bound), dtype=np.float64)


LOW = np.uint64(0x0000FFFF0000FFFF)


def grain(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Two numbers of unit variance a word, for sensor noise: each the sum of two 16-bit parts (a triangle).

    Integer sums are exact, so the noise is the same on every machine, and far cheaper than a normal law.
    """
    pairs = ((words & LOW) + ((words >> np.uint64(16)) & LOW)).view(np.uint32)
    centred = pairs.astype(np.float32)
    centred -= 65535.0
    centred *= np.float32(6.0**0.5 / 65536.0)
    return centred
