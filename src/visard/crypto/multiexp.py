r"""Many linear maps of the same ciphertexts: $\mathrm{Enc}(\sum_l k_{rl} m_l)$ for every row r at once.

The powers 0 .. 2^w - 1 of each ciphertext are tabulated once and shared by all rows (Straus). Exponents are shifted by
2^t to be non-negative, which one inverse for all rows undoes:
$\prod c_l^{k_l} = \prod c_l^{k_l + 2^t} (\prod c_l)^{-2^t}$.
"""

from __future__ import annotations

from collections.abc import Sequence

from visard.crypto.costs import count
from visard.crypto.gmp import gmp
from visard.crypto.paillier import PublicKey


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
