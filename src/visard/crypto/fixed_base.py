"""Powers of one fixed number: a table turns an exponentiation into a few multiplications."""

from __future__ import annotations

from visard.crypto.gmp import gmp

WINDOW = 8  # bits of the exponent a table row covers; 40 MB a key at 3072 bits, built once in half a second


class FixedBase:
    """base^x mod m for 0 <= x < 2^bits: row j holds base^(d 2^(8j)) for every digit d."""

    def __init__(self, base: int, modulus: int, bits: int) -> None:
        self.modulus, self.bits = gmp.mpz(modulus), bits
        self._rows = []
        power = gmp.mpz(base)
        for _ in range(-(-bits // WINDOW)):
            row = [gmp.mpz(1)]
            for _ in range(2**WINDOW - 1):
                row.append(row[-1] * power % self.modulus)
            self._rows.append(row)
            power = row[-1] * power % self.modulus

    def power(self, exponent: int) -> int:
        """base^exponent mod m."""
        if not 0 <= exponent < 1 << self.bits:
            raise ValueError("the exponent is outside the table")
        result = gmp.mpz(1)
        digits = exponent.to_bytes(len(self._rows), "little")  # a digit is a byte
        for row, digit in zip(self._rows, digits, strict=True):
            if digit:
                result = result * row[digit] % self.modulus
        return int(result)
