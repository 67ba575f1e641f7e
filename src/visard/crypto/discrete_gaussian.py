r"""Integers with the probabilities of a discrete Gaussian, from a key: the same key gives the same integers.

P(x) is proportional to exp(-x^2 / (2 sigma^2)) for every integer x. Noise of this kind is added to integers exactly,
so its lowest bits give nothing away, as those of floating-point noise do (Mironov 2012). A draw is the rejection of
Canonne, Kamath and Steinke 2020, Algorithm 3, on uniform numbers of 53 bits in the place of exact fractions.
"""

from __future__ import annotations

import hmac
import math

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from visard.errors import VisardError

Integers = npt.NDArray[np.int64]

CHUNK = 2**17  # candidates that are looked at together
MOST = 2.0**40  # largest sigma: integers stay exact as floats


class Stream:
    """Random bits from a secret and a label: AES-256 in counter mode."""

    def __init__(self, secret: bytes, *label: bytes) -> None:
        text = b"".join(len(part).to_bytes(8, "big") + part for part in (b"visard noise", *label))
        key = hmac.digest(secret, text, "sha256")
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """So many integers of 64 bits."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """So many numbers between 0 and 1, neither of which is among them."""
        return uniform(self.words(count))


def uniform(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """The 53 highest bits of each word as a number between 0 and 1."""
    numbers: npt.NDArray[np.float64] = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return numbers


def discrete_gaussian(stream: Stream, sigma: float, count: int) -> Integers:
    r"""`count` integers; zeros where sigma is 0.

    A candidate takes two words. The first gives a sign and $k = \lfloor -t \ln U \rfloor$ with $t = \lfloor \sigma
    \rfloor + 1$, a discrete Laplace variable where minus zero is left out; the second accepts it with probability
    $\exp(-(k - \sigma^2 / t)^2 / (2 \sigma^2))$.
    """
    if not 0 <= sigma <= MOST:
        raise VisardError(f"noise of standard deviation {sigma:g} on integers: it must be between 0 and {MOST:g}")
    found: Integers = np.zeros(count, np.int64)
    if sigma == 0:
        return found
    t, have = math.floor(sigma) + 1, 0
    while have < count:
        words = stream.words(2 * CHUNK)
        first, second = words[0::2], words[1::2]
        size = np.floor(-t * np.log(uniform(first)))
        minus = (first & np.uint64(1)).astype(bool)
        good = uniform(second) < np.exp(-((size - sigma**2 / t) ** 2) / (2 * sigma**2))
        good &= ~(minus & (size == 0))
        drawn = np.where(minus, -size, size)[good].astype(np.int64)[: count - have]
        found[have : have + len(drawn)] = drawn
        have += len(drawn)
    return found
