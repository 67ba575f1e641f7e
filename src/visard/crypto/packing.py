"""Many small signed integers in one plaintext: slots that add and scale together.

    plaintext = sum of v_i 2^(width i),  |v_i| < 2^(width - 1)

A negative slot borrows from the one above it; `unpack` carries the sign back, so sums stay exact as long as no
slot leaves its range. An overflow would corrupt the neighbour in silence: both ends check their bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from visard.errors import VisardError


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
