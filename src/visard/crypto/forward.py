r"""The paper's protocol (Kang et al. 2022, Sections 4.2-4.3): monomials under the sender's key, masked decryption.

A polynomial kernel is a sum of products of monomials of both sides (Eq. 7): $k(a, b) = \sum_m c_m f_m(a) g_m(b)$.
The peer sends Enc(g_m), of every sample or (compressed, Eq. 11) their means. Where f_m = 1 it sends nothing: such a
term has no slope for the owner, and what it adds to a loss the peer adds, who alone may learn it. The owner computes
the ciphertexts of its own gradient, entry by entry, adds a mask and refreshes; the peer decrypts and returns; the owner
takes the mask off. The mask is uniform modulo n, a one-time pad: what the peer decrypts is independent of the gradient.
"""

from __future__ import annotations

import functools
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visard.crypto.gmp import gmp
from visard.crypto.packed import FixedPoint
from visard.crypto.paillier import PrivateKey, PublicKey
from visard.learning.mmd import Polynomial

FRACTION = 24  # bits after the point, of a monomial and of a factor
Monomial = tuple[int, ...]  # sorted indices: (0, 0, 2) is x_0^2 x_2, () is 1


@dataclass(frozen=True)
class Expansion:
    """The terms of a kernel for features of one length."""

    terms: tuple[tuple[Monomial, Monomial, float], ...]  # f_m, g_m, c_m
    received: tuple[Monomial, ...]  # distinct g_m other than 1 that come with an f_m other than 1, in the order sent

    def values(self, b: Tensor) -> Tensor:
        """g_m(b_j) (n, monomials) of every row."""
        return torch.stack([monomial(b, g) for g in self.received], 1)

    def slopes(self, a: Tensor) -> tuple[Tensor, Tensor]:
        r"""$\partial k / \partial a_{il}$ as (n, L, monomials) factors of E g_m, and its part (n, L) without g."""
        n, L = a.shape
        known = a.new_zeros(n, L)
        factors = a.new_zeros(n, L, len(self.received))
        place = {g: i for i, g in enumerate(self.received)}
        for f, g, c in self.terms:
            for i, times in Counter(f).items():
                at = f.index(i)
                slope = c * times * monomial(a, f[:at] + f[at + 1 :])
                if g:
                    factors[:, i, place[g]] += slope
                else:
                    known[:, i] += slope
        return factors, known

    def weights(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """E_a k without the terms of f = 1 as factors (monomials,) of E g_m, and the part that needs no g."""
        place = {g: i for i, g in enumerate(self.received)}
        factors, known = a.new_zeros(len(self.received)), a.new_zeros(())
        for f, g, c in self.terms:
            mean = c * monomial(a, f).mean()
            if g and not f:
                continue
            if g:
                factors[place[g]] += mean
            else:
                known = known + mean
        return factors, known

    def alone(self, b: Tensor) -> Tensor:
        """The terms of E k with f = 1, which the side that has b computes."""
        parts = [c * monomial(b, g).mean() for f, g, c in self.terms if g and not f]
        return torch.stack(parts).sum()


@functools.lru_cache(maxsize=4)
def expand(kernel: Polynomial, length: int) -> Expansion:
    """All terms of the kernel for features of this length; symmetric in both sides."""
    distance: dict[tuple[Monomial, Monomial], float] = {}
    for i in range(length):
        distance |= {((i, i), ()): 1.0, ((i,), (i,)): -2.0, ((), (i, i)): 1.0}
    power: dict[tuple[Monomial, Monomial], float] = {((), ()): 1.0}
    total: dict[tuple[Monomial, Monomial], float] = {((), ()): kernel.c[0]}
    for c in kernel.c[1:]:
        product: dict[tuple[Monomial, Monomial], float] = {}
        for (f, g), x in power.items():
            for (f1, g1), y in distance.items():
                key = (tuple(sorted(f + f1)), tuple(sorted(g + g1)))
                product[key] = product.get(key, 0.0) + x * y
        power = product
        for key, x in power.items():
            total[key] = total.get(key, 0.0) + c * x
    terms = tuple((f, g, c) for (f, g), c in sorted(total.items()))
    return Expansion(terms, tuple(sorted({g for f, g, _ in terms if f and g}, key=lambda g: (len(g), g))))


def monomial(x: Tensor, indices: Monomial) -> Tensor:
    """The product of the columns (n,); ones for ()."""
    return x[:, list(indices)].prod(1) if indices else x.new_ones(len(x))


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
