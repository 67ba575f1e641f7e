r"""The reversed protocol: a party's own features under its own key, many samples in one ciphertext.

The owner sends Enc(a) packed along samples, one ciphertext for a feature. The peer multiplies by its plaintext moments
(`ops.moments.rows_of`: the same factor for all slots, so packing survives), adds constants, refreshes and returns; the
owner decrypts what it needs for its own gradient. One round trip, no mask, and nobody decrypts for another. For a
kernel of degree 1 the peer's mean is all that is needed: the peer sends it under the owner's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visard.crypto import masks
from visard.crypto.fixed_point import FixedPoint
from visard.crypto.masks import Seeds
from visard.crypto.multiexp import linear_maps
from visard.crypto.packing import Slots
from visard.crypto.paillier import BITS, PrivateKey, PublicKey
from visard.errors import VisardError
from visard.ops import moments
from visard.ops.mmd import Polynomial
from visard.ops.moments import Moments, Rows

FRACTION = 20  # bits after the point, of a feature and of a moment
HEADROOM = 7  # bits before the point with the sign: sums of weighted answers stay below 64
BOUND = 30.0  # of one answer of weight 1; the weights of all that are added up sum to less than 2
TOO_LARGE = "an answer does not fit its slots: lower method.noise, or weight_decay where the loss is monitored"


@dataclass(frozen=True)
class Reversed:
    """One direction for features (n, L) inside the unit ball, whichever cipher carries it."""

    kernel: Polynomial
    length: int  # L

    def __post_init__(self) -> None:
        if self.kernel.degree not in (1, 2):
            raise VisardError(f"the packed protocol computes kernels of degree 1 and 2, not {self.kernel.degree}")

    def columns(self, a: Tensor) -> Tensor:
        """What an offer holds: features and their squared lengths (L + 1, n)."""
        a = a.detach().double()
        square = (a * a).sum(1)
        if not float(square.max()) <= 1 + 1e-6:
            raise VisardError("a feature lies outside the unit ball")
        return torch.cat([a.t(), square[None]])

    def rows(self, m: Moments, weight: float, loss: bool, extra: float) -> Rows:
        """What an answer applies to the columns, if its values stay within bounds."""
        rows = moments.rows_of(m, self.kernel, weight, loss, extra)
        if not rows.bound() <= BOUND * abs(weight):
            raise VisardError(TOO_LARGE)  # by how much would tell the server something
        return rows

    def means(self, m: Moments, weight: float, loss: bool, extra: float) -> Tensor:
        """What an answer says for a kernel of degree 1 (L,), with the loss (L + 1,)."""
        values = [m.B1, (m.Q + extra / self.kernel.c[1])[None]] if loss else [m.B1]
        limited = weight * torch.cat(values)
        if not float(limited.abs().max()) <= BOUND * abs(weight):
            raise VisardError(TOO_LARGE)
        return limited

    def gradient(self, a: Tensor, values: Tensor, weights: float) -> Tensor:
        r"""$\sum_j w_j \nabla_{a_i} E_j k$ (n, L) in float64; `weights` is the sum of the w."""
        a = a.detach().double()
        if self.kernel.degree == 1:
            return moments.linear_gradient(a, values[0, : self.length], self.kernel, weights)
        return moments.gradient(a, values, self.kernel, weights)

    def mean_kernel(self, a: Tensor, values: Tensor, weights: float) -> float:
        r"""$\sum_j w_j E_{ij} k$ + `extra`, where the answers had the loss."""
        a = a.detach().double()
        if self.kernel.degree == 1:
            B1, Q = values[0, : self.length], float(values[0, self.length])
            return float(moments.linear_mean_kernel(a, B1, Q, self.kernel, weights).mean())
        return float(moments.mean_kernel(a, values, self.kernel, weights).mean())


@dataclass(frozen=True)
class Packed(Reversed):
    """Under Paillier, up to 65 samples of a feature in one ciphertext."""

    key_bits: int = BITS

    @property
    def slots(self) -> Slots:
        return Slots(2 * FRACTION + HEADROOM, self.key_bits)

    def cipher_bytes(self, kind: str) -> int:
        """Length of a ciphertext."""
        return self.key_bits // 4

    def offered(self, n: int) -> int:
        """Ciphertexts of an offer."""
        return (self.length + 1) * self.slots.plaintexts(n) if self.kernel.degree == 2 else 0

    def offer(self, key: PublicKey, a: Tensor) -> list[int]:
        """Own features and their squared lengths, one column after the other, under the own key."""
        if self.kernel.degree == 1:
            return []
        columns = [FixedPoint(FRACTION).encode(column) for column in self.columns(a)]
        return [key.encrypt(m) for column in columns for m in self.slots.pack(column)]

    def answered(self, n: int, loss: bool) -> int:
        """Ciphertexts of an answer."""
        if self.kernel.degree == 1:
            return self.slots.plaintexts(self.length + loss)
        return (self.length + 1 + loss) * self.slots.plaintexts(n)

    def answer(
        self,
        key: PublicKey,
        offer: list[int],
        n: int,
        m: Moments,
        weight: float,
        loss: bool = False,
        extra: float = 0.0,
    ) -> list[int]:
        """The rows of the own moments applied to the owner's n samples, under the owner's key."""
        if self.kernel.degree == 1:
            encoded = FixedPoint(2 * FRACTION).encode(self.means(m, weight, loss, extra))
            return [key.encrypt(p) for p in self.slots.pack(encoded)]
        rows = self.rows(m, weight, loss, extra)
        codec = FixedPoint(FRACTION)
        factors = torch.cat([rows.by_a, rows.by_norm[:, None]], 1)
        by_row = [codec.encode(row) for row in factors]
        constants = FixedPoint(2 * FRACTION).encode(rows.constant)
        chunks, ones = self.slots.plaintexts(n), self.slots.ones(n)
        answers: list[list[int]] = []
        for chunk in range(chunks):
            maps = linear_maps(key, offer[chunk::chunks], by_row)
            shifted = (key.add_plain(c, k * ones[chunk]) for c, k in zip(maps, constants, strict=True))
            answers.append([key.refresh(c) for c in shifted])
        return [c for row in zip(*answers, strict=True) for c in row]

    def mask(self, key: PublicKey, answer: Sequence[int], seeds: Seeds) -> list[int]:
        """The answer plus masks that cancel in the sum over all who answer."""
        added = masks.numbers(seeds, len(answer), int(key.n))
        return [key.add_plain(c, m) for c, m in zip(answer, added, strict=True)]

    def total(self, key: PublicKey, answers: Sequence[Sequence[int]]) -> list[int]:
        """The sum of several parties' answers, still encrypted."""
        first, *others = answers
        total = list(first)
        for answer in others:
            total = [key.add(c, d) for c, d in zip(total, answer, strict=True)]
        return total

    def values(self, private: PrivateKey, answer: list[int], n: int, loss: bool = False) -> Tensor:
        """What an answer, or a sum of answers, says: (n, rows) of degree 2, (1, L or L + 1) of degree 1."""
        plain = [private.decrypt(c) for c in answer]
        codec = FixedPoint(2 * FRACTION)
        if self.kernel.degree == 1:
            size = self.length + loss
            return codec.decode(self.slots.unpack(plain, size), (1, size))
        chunks = self.slots.plaintexts(n)
        rows = [self.slots.unpack(plain[i : i + chunks], n) for i in range(0, len(plain), chunks)]
        return codec.decode([v for row in rows for v in row], (len(rows), n)).t()
