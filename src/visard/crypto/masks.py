r"""Masks that cancel: of the answers that several parties send to one owner, it can read the sum and no part.

    masked answer of s = m_s + sum over the others r of  +F(k_sr) if s < r, -F(k_sr) if s > r

F expands the secret of two parties, known to neither the owner nor the server, to uniform numbers in the range of the
owner's plaintexts (Bonawitz et al. 2017, without drop-outs: an exchange needs every answer). So the owner can add up
sealed answers itself, and whoever relays them can neither alter one nor hand out a part that could be read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

Seeds = list[tuple[int, bytes]]  # sign and seed, for each other party
SPARE = 16  # bytes more than a number has: reduced, it is uniform to 2^-128


def seeds(me: str, secrets: Mapping[str, bytes], about: bytes) -> Seeds:
    """For the parties with these common secrets; `about` is what all of them know that they answer."""
    found = {
        other: hmac.new(secret, b"visard mask" + about, hashlib.sha256).digest() for other, secret in secrets.items()
    }
    return [(1 if me < other else -1, seed) for other, seed in found.items()]


def numbers(seeds: Seeds, count: int, modulus: int) -> list[int]:
    """So many masks modulo `modulus`, summed over the others."""
    width = (modulus.bit_length() + 7) // 8 + SPARE
    total = [0] * count
    for sign, seed in seeds:
        stream = hashlib.shake_256(seed).digest(width * count)
        for i in range(count):
            total[i] += sign * int.from_bytes(stream[i * width : (i + 1) * width], "big")
    return [m % modulus for m in total]
