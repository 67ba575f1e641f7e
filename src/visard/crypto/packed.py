r"""The packed protocol: a client's own features under its own key, many samples in one ciphertext.

    owner    the client whose features, key and gradient they are        peer    a client on the other side
    offer    Enc(a), packed along samples: one column for each feature and one for |a|^2
    answer   the peer's plaintext moments applied to the columns (`moments.rows_of`: the same factor for all samples,
             so packing survives), plus constants, with new randomness, under the owner's key

The owner decrypts what it needs for its own gradient: one round trip, no mask, and no client decrypts for another. For
a kernel of degree 1 the peer's mean is all that is needed: no offer, the peer sends it under the owner's key.

`Packed` runs it under Paillier, `PackedCkks` under CKKS. Answers of several peers to one owner are masked:

    masked answer of s = m_s + sum over the other peers r of  +F(k_sr) if s < r, -F(k_sr) if s > r

F expands the secret of two peers, known to neither the owner nor the server, to uniform numbers in the range of the
owner's plaintexts (Bonawitz et al. 2017, without drop-outs: an exchange needs every answer). The masks cancel in the
sum, which is all that the owner can read, and a server that relays answers can neither alter nor read a part.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visard.crypto import ckks, moments
from visard.crypto.ckks import ANSWER, DEGREE, SLOTS, stride
from visard.crypto.moments import Moments, Rows
from visard.crypto.paillier import BITS, PrivateKey, PublicKey
from visard.errors import UsageError, VisardError
from visard.learning.mmd import Polynomial

FRACTION = 20  # bits after the point, of a feature and of a moment
HEADROOM = 7  # bits before the point with the sign: sums of weighted answers stay below 64
BOUND = 30.0  # of one answer of weight 1; the weights of all that are added up sum to less than 2
TOO_LARGE = "an answer does not fit its slots: lower method.noise, or weight_decay where the loss is monitored"
SPARE = 16  # bytes more than a number has: reduced, it is uniform to 2^-128
Seeds = list[tuple[int, bytes]]  # sign and seed of a mask, for each other peer


@dataclass(frozen=True)
class Packing(ABC):
    """One direction for features (n, L) inside the unit ball, whichever cipher carries it."""

    kernel: Polynomial
    length: int  # L

    def __post_init__(self) -> None:
        if self.kernel.degree not in (1, 2):
            raise VisardError(f"the packed protocol computes kernels of degree 1 and 2, not {self.kernel.degree}")

    def offered(self, n: int) -> int:
        """Ciphertexts of an offer."""
        return self.ciphers(self.length + 1, n) if self.kernel.degree == 2 else 0

    def offer(self, key: Any, a: Tensor) -> list[Any]:
        """Own features and their squared lengths under the own key."""
        if self.kernel.degree == 1:
            return []
        return self.encrypt(key, self.columns(a))

    def answered(self, n: int, loss: bool) -> int:
        """Ciphertexts of an answer."""
        return self.ciphers(*self._shape(n, loss))

    def answer(
        self, key: Any, offer: Sequence[Any], n: int, m: Moments, weight: float, loss: bool = False, extra: float = 0.0
    ) -> list[Any]:
        """The rows of the own moments applied to the owner's n samples, under the owner's key."""
        if self.kernel.degree == 1:
            values = [m.B1, (m.Q + extra / self.kernel.c[1])[None]] if loss else [m.B1]
            means = weight * torch.cat(values)
            if not float(means.abs().max()) <= BOUND * abs(weight):
                raise VisardError(TOO_LARGE)  # by how much would reveal something to the server
            return self.encrypt_answer(key, means)
        rows = moments.rows_of(m, self.kernel, weight, loss, extra)
        if not rows.bound() <= BOUND * abs(weight):
            raise VisardError(TOO_LARGE)
        return self.apply(key, offer, n, rows)

    def values(self, private: Any, answer: Sequence[Any], n: int, loss: bool = False) -> Tensor:
        """The values of an answer, or of a sum of answers: (n, rows) of degree 2, (1, L or L + 1) of degree 1."""
        table = self.decrypt(private, answer, *self._shape(n, loss))
        return table if self.kernel.degree == 1 else table.t()

    def columns(self, a: Tensor) -> Tensor:
        """The content of an offer: features and their squared lengths (L + 1, n)."""
        a = a.detach().double()
        square = (a * a).sum(1)
        if not float(square.max()) <= 1 + 1e-6:
            raise VisardError("a feature lies outside the unit ball")
        return torch.cat([a.t(), square[None]])

    def _shape(self, n: int, loss: bool) -> tuple[int, int]:
        """Rows of an answer, and numbers in each: one for a sample, or of degree 1 all in one row."""
        return (1, self.length + loss) if self.kernel.degree == 1 else (self.length + 1 + loss, n)

    @abstractmethod
    def cipher_bytes(self, kind: str) -> int:
        """Length of a ciphertext of an "offer" or an "answer"."""

    @abstractmethod
    def ciphers(self, rows: int, n: int) -> int:
        """How many ciphertexts hold so many rows of n numbers."""

    @abstractmethod
    def encrypt(self, key: Any, columns: Tensor) -> list[Any]:
        """Columns (c, n) of an offer under the own key."""

    @abstractmethod
    def encrypt_answer(self, key: PublicKey, values: Tensor) -> list[Any]:
        """One row of numbers as an answer that needs no offer, under the owner's key."""

    @abstractmethod
    def apply(self, key: Any, offer: Sequence[Any], n: int, rows: Rows) -> list[Any]:
        """The rows applied to the offered columns, with new randomness."""

    @abstractmethod
    def decrypt(self, private: Any, answer: Sequence[Any], rows: int, n: int) -> Tensor:
        """The numbers (rows, n) of an answer or of a sum of answers; refused if they overflow their slots."""

    @abstractmethod
    def mask(self, key: Any, answer: Sequence[Any], seeds: Seeds) -> list[Any]:
        """The answer plus masks that cancel in the sum over all who answer."""

    @abstractmethod
    def total(self, key: Any, answers: Sequence[Sequence[Any]]) -> list[Any]:
        """The sum of several peers' answers, still encrypted."""


@dataclass(frozen=True)
class Packed(Packing):
    """Under Paillier, up to 65 samples of a feature in one ciphertext."""

    key_bits: int = BITS

    @property
    def slots(self) -> Slots:
        return Slots(2 * FRACTION + HEADROOM, self.key_bits)

    def cipher_bytes(self, kind: str) -> int:
        return self.key_bits // 4

    def ciphers(self, rows: int, n: int) -> int:
        return rows * self.slots.plaintexts(n)

    def encrypt(self, key: PublicKey, columns: Tensor) -> list[int]:
        encoded = [FixedPoint(FRACTION).encode(column) for column in columns]
        return [key.encrypt(m) for column in encoded for m in self.slots.pack(column)]

    def encrypt_answer(self, key: PublicKey, values: Tensor) -> list[int]:
        return [key.encrypt(m) for m in self.slots.pack(FixedPoint(2 * FRACTION).encode(values))]

    def apply(self, key: PublicKey, offer: Sequence[int], n: int, rows: Rows) -> list[int]:
        factors = [FixedPoint(FRACTION).encode(row) for row in rows.matrix()]
        constants = FixedPoint(2 * FRACTION).encode(rows.constant)
        chunks, ones = self.slots.plaintexts(n), self.slots.pack([1] * n)
        answers: list[list[int]] = []
        for chunk in range(chunks):
            maps = key.linear_maps(offer[chunk::chunks], factors)
            shifted = (key.add_plain(c, k * ones[chunk]) for c, k in zip(maps, constants, strict=True))
            answers.append([key.refresh(c) for c in shifted])
        return [c for row in zip(*answers, strict=True) for c in row]

    def decrypt(self, private: PrivateKey, answer: Sequence[int], rows: int, n: int) -> Tensor:
        plain, chunks = [private.decrypt(c) for c in answer], self.slots.plaintexts(n)
        found = [self.slots.unpack(plain[i : i + chunks], n) for i in range(0, len(plain), chunks)]
        return FixedPoint(2 * FRACTION).decode([v for row in found for v in row], (rows, n))

    def mask(self, key: PublicKey, answer: Sequence[int], seeds: Seeds) -> list[int]:
        masks = mask_numbers(seeds, len(answer), int(key.n))
        return [key.add_plain(c, m) for c, m in zip(answer, masks, strict=True)]

    def total(self, key: PublicKey, answers: Sequence[Sequence[int]]) -> list[int]:
        return [functools.reduce(key.add, group) for group in zip(*answers, strict=True)]


@dataclass(frozen=True)
class Slots:
    """Many small signed integers in one plaintext of a key of `key_bits` bits: slots that add and scale together.

        plaintext = sum of v_i 2^(width i),  |v_i| < 2^(width - 1)

    A negative slot borrows from the one above it; `unpack` carries the sign back, so sums stay exact as long as no
    slot leaves its range. An overflow would corrupt the neighbour in silence: both ends check their bounds.
    """

    width: int  # bits
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


@dataclass(frozen=True)
class FixedPoint:
    """x -> round(x 2^bits): one fixed exponent, so that nothing about a value shows in the form of its encoding."""

    bits: int

    def encode(self, values: Tensor) -> list[int]:
        """Integers of the values in row-major order."""
        x = values.detach().double().flatten()
        if not bool(torch.isfinite(x).all()):
            raise VisardError("a value to encrypt is not finite")
        return [int(v) for v in torch.round(x * 2.0**self.bits).tolist()]

    def decode(self, numbers: Iterable[int], shape: Sequence[int]) -> Tensor:
        """float64 values of the integers."""
        unit = 1 << self.bits
        return torch.tensor([int(v) / unit for v in numbers], dtype=torch.float64).reshape(tuple(shape))


@dataclass(frozen=True)
class PackedCkks(Packing):
    r"""Under CKKS: the same rows, with an error below 2^-28 in each instead of rounding to 2^-40.

        block    slots of one column: the largest batch size, rounded up to a power of 2
        tile     one ciphertext: up to SLOTS / block columns, repeated until it is full

    The peer's map is a matrix M (rows, columns), the same for all samples. With columns repeated with period p, the
    block of row r becomes $\sum_{d < p} M_{r,(r+d) \bmod p}\, x_{r+d}$: a sum over rotations of x (Halevi and Shoup
    2014). Slots that belong to no sample and no row are multiplied by 0 and get no constant, so they tell nothing.
    """

    n: int = 64  # samples of a batch
    largest: int = 0  # samples of the largest batch of any client, where batches differ: keys serve one block

    @property
    def block(self) -> int:
        return block_of(max(self.n, self.largest))

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return SLOTS // self.block

    def cipher_bytes(self, kind: str) -> int:
        return ckks.OFFER_BYTES if kind == "offer" else ckks.ANSWER_BYTES

    def ciphers(self, rows: int, n: int) -> int:
        return -(-n // SLOTS) if self.kernel.degree == 1 else len(self._tiles(rows))

    def encrypt(self, key: ckks.PrivateKey, columns: Tensor) -> list[bytes]:
        offers = []
        for tile in self._tiles(len(columns)):
            period = power_of_2(len(tile))
            padded = np.zeros((period, self.block))
            padded[: len(tile), : columns.shape[1]] = columns[tile.start : tile.stop].numpy()
            offers.append(key.offer(np.tile(padded, (self.width // period, 1)).ravel()))
        return offers

    def encrypt_answer(self, key: Any, values: Tensor) -> list[bytes]:
        chunks = [values[i : i + SLOTS].numpy() for i in range(0, len(values), SLOTS)]
        return [key.answer({}, np.pad(chunk, (0, SLOTS - len(chunk)))) for chunk in chunks]

    def apply(self, key: ckks.PublicKey, offer: Sequence[bytes], n: int, rows: Rows) -> list[bytes]:
        M, constants, step = rows.matrix().numpy(), rows.constant.numpy(), stride(self.block)
        tiles, answers = self._tiles(M.shape[1]), []
        turned = [key.rotated(x, min(step, power_of_2(len(t)))) for x, t in zip(offer, tiles, strict=True)]
        for mine in self._tiles(len(M)):
            terms: dict[int, list[tuple[object, np.ndarray]]] = {}
            for tile, x in zip(tiles, turned, strict=True):
                for d, diagonal in enumerate(_diagonals(M[mine][:, tile])):
                    long, short = divmod(d, step)
                    if diagonal.any():
                        terms.setdefault(long, []).append((x[short], self._spread(diagonal, long * step)))
            answers.append(key.answer(terms, self._spread(constants[mine])))
        return answers

    def decrypt(self, private: ckks.PrivateKey, answer: Sequence[bytes], rows: int, n: int) -> Tensor:
        plain = np.concatenate([private.open(c) for c in answer])
        if not float(np.abs(plain).max()) < 2 ** (HEADROOM - 1):
            raise VisardError("an answer overflows its slots")
        table = plain[None] if self.kernel.degree == 1 else plain.reshape(-1, self.block)
        return torch.from_numpy(table[:rows, :n].copy())

    def mask(self, key: Any, answer: Sequence[bytes], seeds: Seeds) -> list[bytes]:
        size, prime = len(answer), ckks.PRIMES[0]
        masks = np.array(mask_numbers(seeds, size * DEGREE, prime), np.uint64).reshape(size, DEGREE)
        return [ckks.shift(c, m) for c, m in zip(answer, masks, strict=True)]

    def total(self, key: Any, answers: Sequence[Sequence[bytes]]) -> list[bytes]:
        return [ckks.add(group, 2, ANSWER, "an answer") for group in zip(*answers, strict=True)]

    def _tiles(self, count: int) -> list[range]:
        return [range(i, min(i + self.width, count)) for i in range(0, count, self.width)]

    def _spread(self, values: np.ndarray, back: int = 0) -> np.ndarray:
        """One number for each column, moved on by `back` columns, in all slots of its samples."""
        spread = np.zeros((self.width, self.block))
        spread[: len(values), : self.n] = values[:, None]
        return np.roll(spread, back, 0).ravel()


def block_of(n: int) -> int:
    """Slots of a column of n samples under CKKS."""
    if n > SLOTS // 4:
        raise UsageError(f"a batch of {n}: CKKS carries batches of up to {SLOTS // 4}")
    return power_of_2(n)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


def _diagonals(M: np.ndarray) -> np.ndarray:
    """D (p, rows) with D[d, r] = M[r, (r + d) mod p] for the period p of the columns."""
    period = power_of_2(M.shape[1])
    padded = np.pad(M, ((0, 0), (0, period - M.shape[1])))
    r = np.arange(len(M))
    return np.stack([padded[r, (r + d) % period] for d in range(period)])


def mask_seeds(me: str, secrets: Mapping[str, bytes], about: bytes) -> Seeds:
    """For the peers with these common secrets; `about` is what all of them know that they answer."""
    found = {
        other: hmac.new(secret, b"visard mask" + about, hashlib.sha256).digest() for other, secret in secrets.items()
    }
    return [(1 if me < other else -1, seed) for other, seed in found.items()]


def mask_numbers(seeds: Seeds, count: int, modulus: int) -> list[int]:
    """So many masks modulo `modulus`, summed over the other peers."""
    width = (modulus.bit_length() + 7) // 8 + SPARE
    total = [0] * count
    for sign, seed in seeds:
        stream = hashlib.shake_256(seed).digest(width * count)
        for i in range(count):
            total[i] += sign * int.from_bytes(stream[i * width : (i + 1) * width], "big")
    return [m % modulus for m in total]
