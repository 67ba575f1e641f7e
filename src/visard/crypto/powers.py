r"""Uniform n-th powers modulo n^2, the randomness of every answer under another client's key.

    y_i = r_i^n mod n^2    r_i uniform among the units modulo n, i = 1 .. t; each is handed out once
    after that             prod y_i^(x_i), x_i uniform below 2^7

The owner of a key sees the randomness of what it decrypts. Powers $h^x$ of one fixed base lie in one cyclic group. An
owner who planted p - 1 and q - 1 with a large common factor sees what lies beside it and, if that factor is smooth,
computes from it the numbers that its ciphertexts were multiplied with. A uniform power leaves nothing to read.

An exponentiation by n takes fifteen times as long as a power of a fixed base. Products are five times faster, and
uniform too, by the leftover hash lemma: for two choices of exponents with differences $\delta \neq 0$ and
$g = \gcd(\delta_1, \ldots)$, both products are the same for a share $[G : G^g] / |G|$ of all $(y_i)$, at most
$g^k / |G|$ where n has k prime factors. So the distance from uniform, with the $y_i$ known to all, is at most
$\frac{1}{2} \sqrt{|G| 2^{-7t} + \sum_g g^k P(g | \delta)}$, and the sum is $2^{k - t}$ but for smaller terms. No prime
below 2^16 divides n (`modulus.py`), so k < |n| / 16, and $t \geq (|n| + 258) / 7$ and $t \geq |n| / 16 + 258$ keep it
below $2^{-128}$.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
from collections import deque

from visard.crypto.gmp import gmp

KEYS = 32  # moduli of which a process keeps powers: of a client and the peers that it answers
DIGIT = 7  # bits of an exponent in a product
DISTANCE = 258  # twice 129: the distance is a square root


class Powers:
    """n-th powers for one modulus; safe to share between threads."""

    def __init__(self, n: int) -> None:
        self.n, self.n2 = gmp.mpz(n), gmp.mpz(n) ** 2
        bits = n.bit_length()
        self.size = max(-(-(bits + DISTANCE) // DIGIT), bits // 16 + DISTANCE)  # t
        self._made: list[int] = []  # factors of products; they may be known
        self._fresh: deque[int] = deque()  # made and not handed out yet
        self._worker: threading.Thread | None = None

    def draw(self) -> int:
        """An n-th power that was never handed out before."""
        try:
            return self._fresh.popleft()
        except IndexError:
            return self._product() if len(self._made) >= self.size else self._power()

    def prepare(self, count: int) -> None:
        """Make so many more in the background, while there are fewer than products need; returns at once."""
        if self._worker is not None and self._worker.is_alive():
            return
        count = min(count - len(self._fresh), self.size - len(self._made))
        if count > 0:
            self._worker = threading.Thread(target=self._work, args=(count,), name="visard powers", daemon=True)
            self._worker.start()

    def wait(self) -> None:
        """Until what is being prepared is ready."""
        if self._worker is not None:
            self._worker.join()

    def _work(self, count: int) -> None:
        with gmp.context(gmp.get_context(), allow_release_gil=True):
            for _ in range(count):
                self._fresh.append(self._power())

    def _power(self) -> int:
        while gmp.gcd(r := secrets.randbelow(int(self.n) - 1) + 1, self.n) != 1:
            pass
        power = gmp.powmod(r, self.n, self.n2)
        self._made.append(power)
        return int(power)

    def _product(self) -> int:
        """Factors with the same exponent are multiplied first: prod_d (prod of those with digit d)^d (Pippenger)."""
        sums = [gmp.mpz(1)] * (1 << DIGIT)
        for y, byte in zip(self._made[: self.size], secrets.token_bytes(self.size), strict=True):
            digit = byte >> (8 - DIGIT)
            sums[digit] = sums[digit] * y % self.n2
        running = total = gmp.mpz(1)
        for part in reversed(sums[1:]):  # the product of all with digit d or more, once for each d from 1 on
            running = running * part % self.n2
            total = total * running % self.n2
        return int(total)


@functools.lru_cache(maxsize=KEYS)
def powers_of(n: int) -> Powers:
    """Those of a modulus, kept in this process alone."""
    return Powers(n)


os.register_at_fork(after_in_child=powers_of.cache_clear)  # a copy would hand out the same powers
