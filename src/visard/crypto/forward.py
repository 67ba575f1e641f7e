r"""The paper's protocol (Kang et al. 2022, Sections 4.2-4.3): monomials under the sender's key, masked decryption.

The peer sends Enc(g_m), of every sample or (compressed, Eq. 11) their means. The owner computes the ciphertexts of its
own gradient, entry by entry, adds a mask and refreshes; the peer decrypts and returns; the owner takes the mask off.
The mask is uniform modulo n, a one-time pad: what the peer decrypts is independent of the gradient.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from visard.crypto.fixed_point import FixedPoint
from visard.crypto.gmp import gmp
from visard.crypto.paillier import PrivateKey, PublicKey
from visard.ops.mmd import Polynomial
from visard.ops.monomials import Expansion, expand

FRACTION = 24  # bits after the point, of a monomial and of a factor


@dataclass(frozen=True)
class Forward:
    """One direction of the paper for features of length L, with a polynomial kernel of any degree."""

    kernel: Polynomial
    length: int  # L
    compressed: bool = True  # A: means over the batch instead of every sample

    @property
    def terms(self) -> Expansion:
        return expand(self.kernel, self.length)

    def offered(self, n: int) -> int:
        """Ciphertexts of an offer."""
        return len(self.terms.received) * (1 if self.compressed else n)

    def offer(self, key: PublicKey, b: Tensor) -> list[int]:
        """Own monomials under the own key."""
        values = self.terms.values(b.detach().double())
        # a sample's share of the mean, so that both variants give the same sum
        sent = values.mean(0) if self.compressed else values / len(b)
        return [key.encrypt(m) for m in FixedPoint(FRACTION).encode(sent)]

    def means(self, key: PublicKey, offer: Sequence[int]) -> list[int]:
        """Enc(E g_m): an uncompressed offer is added up first."""
        size = len(self.terms.received)
        sums = list(offer[:size])
        for start in range(size, len(offer), size):
            sums = [key.add(c, d) for c, d in zip(sums, offer[start : start + size], strict=True)]
        return sums

    def combine(self, key: PublicKey, means: Sequence[int], factors: Tensor, known: Tensor) -> list[int]:
        """Enc(factors @ E g + known), refreshed: factors (outputs, monomials), known (outputs,)."""
        codec, constants = FixedPoint(FRACTION), FixedPoint(2 * FRACTION).encode(known)
        inverses = [int(gmp.invert(c, key.n2)) for c in means]  # a negative power costs no more than a positive one
        results = []
        for row, constant in zip(factors, constants, strict=True):
            total = key.add_plain(1, constant)
            for c, inverse, k in zip(means, inverses, codec.encode(row), strict=True):
                if k:
                    total = key.add(total, key.multiply(c if k > 0 else inverse, abs(k)))
            results.append(key.refresh(total))
        return results

    def mask(self, key: PublicKey, ciphers: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ciphertexts plus masks, and the masks."""
        masks = [secrets.randbelow(int(key.n)) for _ in ciphers]
        return [key.add_plain(c, m) for c, m in zip(ciphers, masks, strict=True)], masks

    def unveil(self, private: PrivateKey, ciphers: Sequence[int]) -> list[int]:
        """Masked plaintexts modulo n."""
        return [private.decrypt(c) % int(private.public.n) for c in ciphers]

    def unmask(self, key: PublicKey, numbers: Sequence[int], masks: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The values behind the masks."""
        n = int(key.n)
        plain = ((v - m) % n for v, m in zip(numbers, masks, strict=True))
        return FixedPoint(2 * FRACTION).decode((v - n if 2 * v > n else v for v in plain), shape)
