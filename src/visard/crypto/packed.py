"""The reversed protocol: a party's own features under its own key, many samples in one ciphertext.

The owner sends Enc(a) packed along samples, one ciphertext for a feature. The peer multiplies by its plaintext moments
(`ops.moments.rows_of`: the same factor for all slots, so packing survives), adds constants, refreshes and returns; the
owner decrypts what it needs for its own gradient. One round trip, no mask, and nobody decrypts for another. For a
kernel of degree 1 the peer's mean is all that is needed: the peer sends it under the owner's key.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visard.crypto import moments
from visard.crypto.moments import Moments, Rows
from visard.crypto.paillier import BITS, PrivateKey, PublicKey, count, gmp
from visard.errors import VisardError
from visard.learning.mmd import Polynomial

# ----------
# Many small signed integers in one plaintext: slots that add and scale together.
#
#     plaintext = sum of v_i 2^(width i),  |v_i| < 2^(width - 1)
#
# A negative slot borrows from the one above it; `unpack` carries the sign back, so sums stay exact as long as no
# slot leaves its range. An overflow would corrupt the neighbour in silence: both ends check their bounds.


@dataclass(frozen=True)
class Slots:
    """Slots of `width` bits in plaintexts of a key of `key_bits` bits."""

    width: int
    key_bits: int

    def __post_init__(self) -> None:
        if self.width < 2 or self.capacity < 1:
            raise VisardError(f"slots of {self.width} bits do not fit a key of {self.key_bits} bits")

    @property
    def capacity(self) -> int:
        """Slots of one plaintext; two bits stay free, so that the packed number is between -n/2 and n/2."""
        return (self.key_bits - 2) // self.width

    def plaintexts(self, count: int) -> int:
        """How many plaintexts `count` values need."""
        return -(-count // self.capacity)

    def pack(self, values: Sequence[int]) -> list[int]:
        """Plaintexts of the values in order; the last one may be part full."""
        half = 1 << (self.width - 1)
        if any(not -half < v < half for v in values):
            raise VisardError(f"a value does not fit a slot of {self.width} bits")
        size = self.capacity
        return [
            sum(v << (self.width * i) for i, v in enumerate(values[start : start + size]))
            for start in range(0, len(values), size)
        ]

    def unpack(self, plaintexts: Sequence[int], count: int) -> list[int]:
        """The `count` values; refused if anything is left over, which only an overflow or a lie can cause."""
        if len(plaintexts) != self.plaintexts(count):
            raise VisardError(f"{len(plaintexts)} packed numbers where {self.plaintexts(count)} are expected")
        mask, half = (1 << self.width) - 1, 1 << (self.width - 1)
        values: list[int] = []
        for number in plaintexts:
            rest = int(number)
            for _ in range(min(self.capacity, count - len(values))):
                v = rest & mask
                v = v - (mask + 1) if v >= half else v
                values.append(v)
                rest = (rest - v) >> self.width
            if rest:
                raise VisardError("a packed number overflows its slots")
        return values

    def ones(self, count: int) -> list[int]:
        """Plaintexts with 1 in each of `count` slots: times v, they add v to all of them."""
        return self.pack([1] * count)


# ----------
# Many linear maps of the same ciphertexts: $\mathrm{Enc}(\sum_l k_{rl} m_l)$ for every row r at once.
#
# The powers 0 .. 2^w - 1 of each ciphertext are computed once and shared by all rows (Straus). Exponents are shifted by
# 2^t to be non-negative, which one inverse for all rows undoes:
# $\prod c_l^{k_l} = \prod c_l^{k_l + 2^t} (\prod c_l)^{-2^t}$.


def linear_maps(key: PublicKey, ciphers: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    """One ciphertext for each row of integer coefficients; not refreshed."""
    count("multiplications", len(rows) * len(ciphers))
    n2 = gmp.mpz(key.n2)
    t = max((abs(k).bit_length() for row in rows for k in row), default=0)
    digits, window = _windows(t + 1, len(rows))
    mask = (1 << window) - 1
    tables = [_powers(gmp.mpz(c), 1 << window, n2) for c in ciphers]
    shift = gmp.mpz(1)
    for c in ciphers:
        shift = shift * c % n2
    shift = gmp.invert(gmp.powmod(shift, 1 << t, n2), n2)
    results = []
    for row in rows:
        exponents = [k + (1 << t) for k in row]
        result = gmp.mpz(1)
        for digit in reversed(range(digits)):
            if result != 1:
                result = gmp.powmod(result, 1 << window, n2)
            at = digit * window
            for table, e in zip(tables, exponents, strict=True):
                if d := (e >> at) & mask:
                    result = result * table[d] % n2
        results.append(int(result * shift % n2))
    return results


def _powers(base: int, n: int, modulus: int) -> list[int]:
    powers = [gmp.mpz(1), base]
    while len(powers) < n:
        powers.append(powers[-1] * base % modulus)
    return powers


def _windows(bits: int, rows: int) -> tuple[int, int]:
    """(digits, window) with the fewest multiplications for each ciphertext: 2^w for the table, a digit a row."""
    window = min(range(1, 9), key=lambda w: 2**w + rows * -(-bits // w))
    return -(-bits // window), window


# ----------
# Real numbers as integers with one fixed exponent: nothing about a value shows in its encoding's form.


@dataclass(frozen=True)
class FixedPoint:
    """x -> round(x 2^bits), refused where |x| exceeds `limit`."""

    bits: int
    limit: float = math.inf

    def encode(self, values: Tensor) -> list[int]:
        """Integers of the values in row-major order."""
        x = values.detach().double().flatten()
        if not bool(torch.isfinite(x).all()):
            raise VisardError("a value to encrypt is not finite")
        if len(x) and float(x.abs().max()) > self.limit:
            raise VisardError(f"a value to encrypt is {float(x.abs().max()):.4g}, above the limit of {self.limit:g}")
        return [int(v) for v in torch.round(x * 2.0**self.bits).tolist()]

    def decode(self, numbers: Iterable[int], shape: Sequence[int]) -> Tensor:
        """float64 values of the integers."""
        unit = 1 << self.bits
        return torch.tensor([int(v) / unit for v in numbers], dtype=torch.float64).reshape(tuple(shape))


# ----------
# Masks that cancel: of the answers that several parties send to one owner, it can read the sum and no part.
#
#     masked answer of s = m_s + sum over the others r of  +F(k_sr) if s < r, -F(k_sr) if s > r
#
# F expands the secret of two parties, known to neither the owner nor the server, to uniform numbers in the range of the
# owner's plaintexts (Bonawitz et al. 2017, without drop-outs: an exchange needs every answer). So the owner can add up
# sealed answers itself, and whoever relays them can neither alter one nor hand out a part that could be read.

Seeds = list[tuple[int, bytes]]  # sign and seed, for each other party
SPARE = 16  # bytes more than a number has: reduced, it is uniform to 2^-128


def seeds(me: str, secrets: Mapping[str, bytes], about: bytes) -> Seeds:
    """For the parties with these common secrets; `about` is what all of them know that they answer."""
    found = {
        other: hmac.new(secret, b"visard mask" + about, hashlib.sha256).digest() for other, secret in secrets.items()
    }
    return [(1 if me < other else -1, seed) for other, seed in found.items()]


def mask_numbers(seeds: Seeds, count: int, modulus: int) -> list[int]:
    """So many masks modulo `modulus`, summed over the others."""
    width = (modulus.bit_length() + 7) // 8 + SPARE
    total = [0] * count
    for sign, seed in seeds:
        stream = hashlib.shake_256(seed).digest(width * count)
        for i in range(count):
            total[i] += sign * int.from_bytes(stream[i * width : (i + 1) * width], "big")
    return [m % modulus for m in total]


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
        added = mask_numbers(seeds, len(answer), int(key.n))
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
