r"""A polynomial kernel as a sum of products of monomials of both sides (Kang et al. 2022, Eq. 7).

$k(a, b) = \sum_m c_m f_m(a) g_m(b)$. A monomial is the sorted tuple of its indices: (0, 0, 2) is $x_0^2 x_2$, () is 1.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from visard.ops.mmd import Polynomial

Monomial = tuple[int, ...]


@dataclass(frozen=True)
class Expansion:
    """The terms of a kernel for features of one length."""

    terms: tuple[tuple[Monomial, Monomial, float], ...]  # f_m, g_m, c_m
    received: tuple[Monomial, ...]  # distinct g_m other than 1, in the order they are sent

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
                slope = c * times * monomial(a, _without(f, i))
                if g:
                    factors[:, i, place[g]] += slope
                else:
                    known[:, i] += slope
        return factors, known

    def weights(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """E_a k as factors (monomials,) of E g_m, and the part that needs no g."""
        place = {g: i for i, g in enumerate(self.received)}
        factors, known = a.new_zeros(len(self.received)), a.new_zeros(())
        for f, g, c in self.terms:
            mean = c * monomial(a, f).mean()
            if g:
                factors[place[g]] += mean
            else:
                known = known + mean
        return factors, known


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
    return Expansion(terms, tuple(sorted({g for _, g, _ in terms if g}, key=lambda g: (len(g), g))))


def monomial(x: Tensor, indices: Monomial) -> Tensor:
    """The product of the columns (n,); ones for ()."""
    return x[:, list(indices)].prod(1) if indices else x.new_ones(len(x))


def _without(f: Monomial, i: int) -> Monomial:
    at = f.index(i)
    return f[:at] + f[at + 1 :]
