r"""A certificate that a Paillier modulus n is coprime to the order of its group: then r -> r^n permutes the units.

    ALPHA      no prime below it divides n
    rho_i      numbers modulo n from a hash of n, i = 1 .. ROOTS
    sigma_i    the certificate: sigma_i^n = rho_i mod n

Goldberg, Reyzin, Sagga and Baldimtsi 2019 (ePrint 2018/057, Section 3.2, there for square-free moduli). If a prime
divides both n and the order, it is at least ALPHA, so that the map takes at least ALPHA units to one, and at most one
unit in ALPHA has a root: all hashes have one with a probability below ALPHA^-ROOTS = 2^-128, for each n that a cheat
tries. The roots tell nothing: anyone can make pairs (sigma, sigma^n), and a hash chooses of which of them these are.

What it is for: a coprime n makes the ciphertexts of a number one coset of the n-th powers, so that multiplying by a
uniform n-th power (`powers.py`) leaves nothing but the number in a ciphertext, whatever else is wrong with n: further
factors, or p - 1 and q - 1 with a large smooth common factor, which this certificate does not exclude.
"""

from __future__ import annotations

import hashlib

from visard.crypto.gmp import gmp
from visard.crypto.paillier import ALPHA, PrivateKey, PublicKey
from visard.errors import VisardError

ROOTS = 8  # 128 / log2(ALPHA)


def certificate_bytes(bits: int) -> int:
    """Length of a certificate for a modulus of so many bits."""
    return ROOTS * bits // 8


def certify(key: PrivateKey) -> bytes:
    """The certificate of the own modulus: the n-th roots of the hashes, by the Chinese remainder theorem."""
    n, p, q = gmp.mpz(key.public.n), gmp.mpz(key.p), gmp.mpz(key.q)
    back = {prime: gmp.invert(n, prime - 1) for prime in (p, q)}
    roots = []
    for rho in hashes_of(key.public):
        a, b = (gmp.powmod_sec(rho % prime, back[prime], prime) for prime in (p, q))
        roots.append(int(a + (b - a) * gmp.invert(p, q) % q * p))
    return b"".join(root.to_bytes(key.public.bits // 8, "big") for root in roots)


def check_certificate(key: PublicKey, data: bytes, where: str) -> None:
    """Refuse a modulus whose certificate is wrong; `where` says whose it is."""
    size, n = key.bits // 8, key.n
    if len(data) != certificate_bytes(key.bits):
        raise VisardError(f"{where}: its certificate has {len(data)} bytes, expected {certificate_bytes(key.bits)}")
    if n < 2 or gmp.gcd(n, gmp.primorial(ALPHA - 1)) != 1:
        raise VisardError(f"{where}: it has a small factor")
    for i, rho in enumerate(hashes_of(key)):
        root = int.from_bytes(data[i * size : (i + 1) * size], "big")
        if not 0 < root < n or gmp.gcd(rho, n) != 1 or gmp.powmod(root, n, n) != rho:
            raise VisardError(f"{where}: its certificate does not hold")


def hashes_of(key: PublicKey) -> list[int]:
    """rho_i, uniform modulo n."""
    said = b"visard modulus" + key.bits.to_bytes(4, "big") + key.to_bytes()
    streams = (hashlib.shake_256(said + bytes([i])).digest(key.bits // 8 + 16) for i in range(ROOTS))
    return [int(int.from_bytes(stream, "big") % key.n) for stream in streams]
