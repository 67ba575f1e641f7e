r"""The reversed protocol under CKKS: columns of samples side by side in the slots of a few ciphertexts.

    block    slots of one column: the batch size, rounded up to a power of 2
    tile     one ciphertext: up to SLOTS / block columns, repeated until it is full

The peer's map is a matrix M (rows, columns), the same for all samples. With columns repeated with period p, the block
of row r becomes $\sum_{d < p} M_{r,(r+d) \bmod p}\, x_{r+d}$: a sum over rotations of x (Halevi and Shoup 2014). Slots
that belong to no sample and no row are multiplied by 0 and get no constant, so they tell nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visard.crypto import ckks, packed
from visard.crypto import ckks as residues
from visard.crypto.ckks import ANSWER, DEGREE, SLOTS, PrivateKey, PublicKey, stride
from visard.crypto.moments import Moments
from visard.crypto.packed import HEADROOM, Reversed, Seeds
from visard.errors import UsageError, VisardError


def block_of(n: int) -> int:
    """Slots of a column of n samples."""
    if n > SLOTS // 4:
        raise UsageError(f"a batch of {n}: CKKS carries batches of up to {SLOTS // 4}")
    return power_of_2(n)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class PackedCkks(Reversed):
    """As `Packed`: the same rows, with an error below 2^-28 in each instead of rounding to 2^-40."""

    n: int = 64  # samples of a batch

    @property
    def block(self) -> int:
        return block_of(self.n)

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return SLOTS // self.block

    def cipher_bytes(self, kind: str) -> int:
        """Length of a ciphertext."""
        return ckks.OFFER_BYTES if kind == "offer" else ckks.ANSWER_BYTES

    def offered(self, n: int) -> int:
        """Ciphertexts of an offer."""
        return len(self._tiles(self.length + 1)) if self.kernel.degree == 2 else 0

    def offer(self, key: PrivateKey, a: Tensor) -> list[bytes]:
        """Own features and their squared lengths under the own key."""
        if self.kernel.degree == 1:
            return []
        columns = self.columns(a).numpy()
        return [key.offer(self._slots(columns[tile], power_of_2(len(tile)))) for tile in self._tiles(len(columns))]

    def answered(self, n: int, loss: bool) -> int:
        """Ciphertexts of an answer."""
        if self.kernel.degree == 1:
            return -(-(self.length + loss) // SLOTS)
        return len(self._tiles(self.length + 1 + loss))

    def answer(
        self, key: PublicKey, offer: Sequence[bytes], n: int, m: Moments, weight: float, loss: bool = False,
        extra: float = 0.0,
    ) -> list[bytes]:  # fmt: skip
        """The rows of the own moments applied to the owner's samples, under the owner's key and sanitised."""
        if self.kernel.degree == 1:
            values = self.means(m, weight, loss, extra).numpy()
            chunks = [values[i : i + SLOTS] for i in range(0, len(values), SLOTS)]
            return [key.answer({}, np.pad(chunk, (0, SLOTS - len(chunk)))) for chunk in chunks]
        rows = self.rows(m, weight, loss, extra)
        M = torch.cat([rows.by_a, rows.by_norm[:, None]], 1).numpy()
        constants, tiles = rows.constant.numpy(), self._tiles(M.shape[1])
        turned = [
            key.rotated(x, min(stride(self.block), power_of_2(len(t)))) for x, t in zip(offer, tiles, strict=True)
        ]
        answers = []
        for mine in self._tiles(len(M)):
            terms: dict[int, list[tuple[object, np.ndarray]]] = {}
            for tile, x in zip(tiles, turned, strict=True):
                for d, diagonal in enumerate(_diagonals(M[mine][:, tile])):
                    long, short = divmod(d, stride(self.block))
                    if diagonal.any():
                        back = np.roll(np.pad(diagonal, (0, self.width - len(mine))), long * stride(self.block))
                        terms.setdefault(long, []).append((x[short], self._spread(back)))
            answers.append(key.answer(terms, self._spread(np.pad(constants[mine], (0, self.width - len(mine))))))
        return answers

    def mask(self, key: PublicKey, answer: Sequence[bytes], seeds: Seeds) -> list[bytes]:
        """The answer plus masks that cancel in the sum over all who answer."""
        size, prime = len(answer), residues.PRIMES[0]
        added = np.array(packed.mask_numbers(seeds, size * DEGREE, prime), np.uint64).reshape(size, DEGREE)
        return [residues.shift(c, m, "an answer") for c, m in zip(answer, added, strict=True)]

    def total(self, key: PublicKey, answers: Sequence[Sequence[bytes]]) -> list[bytes]:
        """The sum of several parties' answers, still encrypted."""
        return [residues.add(group, 2, ANSWER, "an answer") for group in zip(*answers, strict=True)]

    def values(self, private: PrivateKey, answer: Sequence[bytes], n: int, loss: bool = False) -> Tensor:
        """What an answer, or a sum of answers, says: (n, rows) of degree 2, (1, L or L + 1) of degree 1."""
        plain = np.concatenate([private.open(c) for c in answer])
        if not float(np.abs(plain).max()) < 2 ** (HEADROOM - 1):
            raise VisardError("an answer overflows its slots")
        if self.kernel.degree == 1:
            return torch.from_numpy(plain[: self.length + loss])[None]
        rows = plain.reshape(-1, self.block)[: self.length + 1 + loss, :n]
        return torch.from_numpy(rows.T.copy())

    def _tiles(self, count: int) -> list[range]:
        return [range(i, min(i + self.width, count)) for i in range(0, count, self.width)]

    def _slots(self, columns: np.ndarray, period: int) -> np.ndarray:
        """Columns (c, n) in the slots of a tile, repeated with this period."""
        padded = np.zeros((period, self.block))
        padded[: len(columns), : columns.shape[1]] = columns
        return np.tile(padded, (self.width // period, 1)).ravel()

    def _spread(self, values: np.ndarray) -> np.ndarray:
        """One number for each column (width,) in all slots of its samples."""
        spread = np.zeros((self.width, self.block))
        spread[:, : self.n] = values[:, None]
        return spread.ravel()


def _diagonals(M: np.ndarray) -> np.ndarray:
    """D (p, rows) with D[d, r] = M[r, (r + d) mod p] for the period p of the columns."""
    period = power_of_2(M.shape[1])
    padded = np.pad(M, ((0, 0), (0, period - M.shape[1])))
    r = np.arange(len(M))
    return np.stack([padded[r, (r + d) % period] for d in range(period)])
