"""Paillier's cryptosystem with the fast encryption of Damgard, Jurik and Nielsen (2010).

    n = p q                modulus; plaintexts live modulo n, ciphertexts modulo n^2
    Enc(m) = (1 + n m) h_n^x mod n^2      x random of |n| / 2 bits, h_n = h^n mod n^2
    h = -H(n)^2 mod n      from a hash of n, so that its owner cannot plant a base of small order

Enc(a) Enc(b) = Enc(a + b) and Enc(a)^k = Enc(k a). The owner of the key can strip the plaintext off a result and look
at its randomness, so every ciphertext that was computed from received ones is refreshed before it leaves, with a
uniform n-th power (`powers.py`): the base h serves for the own key, where all randomness is that of its owner, and for
fresh encryptions, whose randomness has to do with nothing else.
Numbers here are plain integers; ciphertexts are validated when they enter (`PublicKey.check`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from visard.crypto.gmp import gmp
from visard.crypto.powers import KEYS, powers_of
from visard.errors import UsageError, VisardError
from visard.files import PRIVATE, read_bytes, write_durably

BITS = 3072  # 128-bit security; 2048 gives 112
INSECURE_BELOW = 2048
WINDOW = 8  # bits of the exponent a table row covers; 40 MB a key at 3072 bits, built once in half a second
ALPHA = 2**16  # no prime below it divides a modulus
# counted; multiplications are of a ciphertext by a number, refreshes give a ciphertext new randomness
OPERATIONS = ("encryptions", "decryptions", "multiplications", "refreshes")
FORMAT = "visard paillier key 1"


_counts: ContextVar[dict[str, float] | None] = ContextVar("counts", default=None)


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """How many operations of each kind this block does, whichever keys do them; never on what."""
    counts = dict.fromkeys(OPERATIONS, 0.0)
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def count(operation: str, amount: int = 1) -> None:
    """Add to a counter of the surrounding `counted()` block, if there is one."""
    if (counts := _counts.get()) is not None:
        counts[operation] += amount


@dataclass(frozen=True)
class PublicKey:
    """The public key; `n` has exactly `bits` bits."""

    n: int
    bits: int
    n2: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", gmp.mpz(self.n))
        object.__setattr__(self, "n2", gmp.mpz(self.n) ** 2)

    @property
    def cipher_bytes(self) -> int:
        """Length of a ciphertext."""
        return self.bits // 4

    def fingerprint(self) -> str:
        """16 hexadecimal digits that people can compare."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def to_bytes(self) -> bytes:
        return int(self.n).to_bytes(self.bits // 8, "big")

    @classmethod
    def from_bytes(cls, data: bytes, bits: int) -> PublicKey:
        """A received key: refused unless it is of the agreed size and looks like a product of two large primes."""
        n = int.from_bytes(data, "big")
        if len(data) != bits // 8 or n.bit_length() != bits:
            raise VisardError(f"a public key has {n.bit_length()} bits, the run agreed on {bits}")
        if gmp.gcd(n, gmp.primorial(ALPHA - 1)) != 1:
            raise VisardError("a public key has a small factor")
        if gmp.is_prime(n) or gmp.is_power(n):
            raise VisardError("a public key is a prime or a power, not a product of two primes")
        return cls(n, bits)

    def encrypt(self, m: int) -> int:
        """A fresh ciphertext of m, |m| < n / 2."""
        return self._encrypt(m, self._noise())

    def encrypt_from(self, m: int, seed: bytes) -> int:
        """As `encrypt`, with Paillier's own r^n for r = H(seed): m and the seed give the same ciphertext again."""
        r = int.from_bytes(hashlib.shake_256(b"visard seed" + seed).digest(self.bits // 8 + 16), "big") % self.n
        return self._encrypt(m, gmp.powmod(r, self.n, self.n2))

    def _encrypt(self, m: int, noise: int) -> int:
        if 2 * abs(m) >= self.n:
            raise VisardError(f"a number of {int(m).bit_length()} bits does not fit a key of {self.bits} bits")
        count("encryptions")
        return int((1 + m * self.n) * noise % self.n2)

    def _noise(self) -> int:
        return _noise_table(int(self.n)).power(secrets.randbits(self.bits // 2))

    def refresh(self, c: int) -> int:
        """The same plaintext with new randomness, of which the owner of the key knows nothing."""
        count("refreshes")
        return int(c * powers_of(int(self.n)).draw() % self.n2)

    def prepare(self, count: int) -> None:
        """Prepare this many refreshes in the background."""
        powers_of(int(self.n)).prepare(count)

    def add(self, c: int, d: int) -> int:
        """A ciphertext of the sum of two plaintexts."""
        return int(gmp.mpz(c) * d % self.n2)

    def add_plain(self, c: int, m: int) -> int:
        """A ciphertext of the plaintext plus m; not refreshed."""
        return int(gmp.mpz(c) * (1 + m * self.n) % self.n2)

    def multiply(self, c: int, k: int) -> int:
        """A ciphertext of the plaintext times k; not refreshed."""
        count("multiplications")
        return int(gmp.powmod(c, k, self.n2))

    def linear_maps(self, ciphers: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
        r"""$\mathrm{Enc}(\sum_l k_{rl} m_l)$ for every row r of integers; not refreshed.

        The powers 0 .. 2^w - 1 of each ciphertext are computed once for all rows (Straus). Exponents are shifted by
        2^t to be non-negative, which one inverse undoes: $\prod c_l^{k_l} = \prod c_l^{k_l + 2^t} (\prod c_l)^{-2^t}$.
        """
        count("multiplications", len(rows) * len(ciphers))
        n2, t = gmp.mpz(self.n2), max((abs(k).bit_length() for row in rows for k in row), default=0)
        # w with the fewest multiplications for each ciphertext: 2^w for the table, one a digit and row
        w = min(range(1, 9), key=lambda w: 2**w + len(rows) * -(-(t + 1) // w))
        tables, shift = [], gmp.mpz(1)
        for c in map(gmp.mpz, ciphers):
            powers = [gmp.mpz(1), c]
            while len(powers) < 1 << w:
                powers.append(powers[-1] * c % n2)
            tables.append(powers)
            shift = shift * c % n2
        shift = gmp.invert(gmp.powmod(shift, 1 << t, n2), n2)
        results = []
        for row in rows:
            exponents, result = [k + (1 << t) for k in row], gmp.mpz(1)
            for at in reversed(range(0, t + 1, w)):  # the exponents' digits, from the highest on
                if result != 1:
                    result = gmp.powmod(result, 1 << w, n2)
                for table, e in zip(tables, exponents, strict=True):
                    if digit := (e >> at) & ((1 << w) - 1):
                        result = result * table[digit] % n2
            results.append(int(result * shift % n2))
        return results

    def check(self, ciphers: Sequence[int]) -> None:
        """Refuse invalid ciphertexts: out of range, not invertible, without randomness, repeated."""
        product = gmp.mpz(1)
        for c in ciphers:
            if not 1 < c < self.n2:
                raise VisardError("a ciphertext is out of range")
            product = product * c % self.n
        if ciphers and gmp.gcd(product, self.n) != 1:
            raise VisardError("a ciphertext is not invertible")
        if len(set(ciphers)) != len(ciphers):
            raise VisardError("a ciphertext occurs twice in one message")

    def to_parts(self, ciphers: Sequence[int]) -> list[bytes]:
        """Ciphertexts as they travel."""
        return [int(c).to_bytes(self.cipher_bytes, "big") for c in ciphers]

    def from_parts(self, parts: Sequence[bytes], what: str) -> list[int]:
        """Ciphertexts that travelled, after every check."""
        ciphers = [int.from_bytes(part, "big") for part in parts]
        try:
            self.check(ciphers)
        except VisardError as error:
            raise VisardError(f"{what}: {error}") from None
        return ciphers


class FixedBase:
    """base^x mod m for 0 <= x < 2^bits by a few multiplications: row j holds base^(d 2^(8j)) for every digit d."""

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


@functools.lru_cache(maxsize=KEYS)  # of public keys only
def _noise_table(n: int) -> FixedBase:
    bits = n.bit_length()
    hashed = hashlib.shake_256(b"visard paillier base" + n.to_bytes(bits // 8, "big")).digest(bits // 8 + 16)
    h = -pow(int.from_bytes(hashed, "big") % n, 2, n) % n
    n2 = n * n
    return FixedBase(int(gmp.powmod(h, n, n2)), n2, bits // 2)


@dataclass(frozen=True)
class PrivateKey:
    """The two primes; decrypts with the Chinese remainder theorem."""

    p: int = field(repr=False)
    q: int = field(repr=False)
    public: PublicKey

    def __post_init__(self) -> None:
        p, q = gmp.mpz(self.p), gmp.mpz(self.q)
        if p * q != self.public.n or min(p, q) < 2 or gmp.gcd(p, q) != 1:
            raise VisardError("a private key does not fit its public key")
        parts = ((p, p * p, gmp.invert(-q, p)), (q, q * q, gmp.invert(-p, q)))
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_p_inverse", gmp.invert(p, q))

    def decrypt(self, c: int) -> int:
        """The plaintext in (-n/2, n/2), with exponentiations whose time does not depend on the key."""
        count("decryptions")
        mp, mq = (
            (gmp.powmod_sec(c % prime2, prime - 1, prime2) - 1) // prime * inverse % prime
            for prime, prime2, inverse in self._parts  # type: ignore[attr-defined]
        )
        m = int(mp + (mq - mp) * self._p_inverse % self.q * self.p)  # type: ignore[attr-defined]
        return m - int(self.public.n) if 2 * m > self.public.n else m


def check_bits(what: str, bits: int, insecure: bool, allow: str = "insecure_keys") -> None:
    """Refuse keys that cannot be made, and short ones unless the setting `allow` permits them."""
    if bits % 16 or bits < 256:
        raise UsageError(f"{what}: must be a multiple of 16, at least 256")
    if bits < INSECURE_BELOW and not insecure:
        raise UsageError(f"{what}: can be broken; tests set {allow}")


def generate(bits: int = BITS, *, insecure: bool = False) -> PrivateKey:
    """A new key pair from the system's randomness; fewer than 2048 bits only with `insecure`."""
    check_bits(f"a key of {bits} bits", bits, insecure)
    while True:
        p, q = _prime(bits // 2), _prime(bits // 2)
        # DJN needs -1 to be a non-square (p = q = 3 mod 4) and a group without small common parts
        if abs(p - q).bit_length() > bits // 2 - 100 and math.gcd(p - 1, q - 1) == 2:
            return PrivateKey(p, q, PublicKey(p * q, bits))


def _prime(bits: int) -> int:
    """A random prime = 3 mod 4 whose two highest bits are set, so that a product has exactly twice its bits."""
    while True:
        candidate = secrets.randbits(bits) | 3 << (bits - 2) | 3
        if gmp.is_prime(candidate, 40):
            return candidate


def save_key(path: Path, key: PrivateKey) -> None:
    """Write a new key file with mode 600; an existing one is never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        write_durably(path, key_to_bytes(key), PRIVATE, new=True)
    except FileExistsError:
        raise UsageError(f"{path} exists already: a key is never overwritten") from None
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror}") from None


def load_key(path: Path, bits: int, *, trusted: bool = False) -> PrivateKey:
    """Read a key file; refused if others can read it, if it is damaged or of another size."""
    try:
        mode = path.stat().st_mode
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"{path} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 it")
    try:
        return key_from_bytes(data, bits, trusted=trusted)
    except VisardError as error:
        raise UsageError(f"{path}: {error}") from None


def load_or_make(path: Path, bits: int, *, insecure: bool = False) -> PrivateKey:
    """The key in `path`, made on first use."""
    if not path.exists():
        key = generate(bits, insecure=insecure)
        with contextlib.suppress(UsageError):  # another process may have been faster
            save_key(path, key)
    return load_key(path, bits)


def key_to_bytes(key: PrivateKey) -> bytes:
    content = {"format": FORMAT, "bits": key.public.bits, "p": f"{int(key.p):x}", "q": f"{int(key.q):x}"}
    return json.dumps(content).encode()


def key_from_bytes(data: bytes, bits: int, *, trusted: bool = False) -> PrivateKey:
    """The key in `data`; one clear line if it is none or not of `bits` bits.

    `trusted`: the client's own key, whose primes were tested when it was made and need not be tested in every step.
    """
    try:
        content = json.loads(data)
        if content["format"] != FORMAT:
            raise ValueError(content["format"])
        p, q = int(content["p"], 16), int(content["q"], 16)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise VisardError("is not a key file of visard") from None
    if (p * q).bit_length() != bits:
        raise VisardError(f"holds a key of {(p * q).bit_length()} bits, not {bits}")
    if trusted:
        return PrivateKey(p, q, PublicKey(p * q, bits))
    if not (gmp.is_prime(p) and gmp.is_prime(q)):
        raise VisardError("holds a damaged key")
    return PrivateKey(p, q, PublicKey.from_bytes((p * q).to_bytes(bits // 8, "big"), bits))
