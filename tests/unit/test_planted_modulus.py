"""Owners of a key who planted their modulus, and what each of the two defences keeps from them.

    linked     p - 1 and q - 1 have a large smooth common factor d: powers of one base h are one cyclic group of order d
               in a group that has two. r^n with a uniform r stops it; its certificate is in order.
    folded     primes of n divide q - 1: n-th powers are not all there is beside the plaintext. r^n does not stop it,
               the certificate does.

Both attacks send ciphertexts $w^{n 2^{s l}}$ or $w^{2^{s l}}$ in place of features, so that the randomness of a masked
answer holds $\\sum_l k_l 2^{s l}$ for the coefficients $k_l$ of a row: logarithms modulo many small primes (Pohlig and
Hellman), put together by the Chinese remainder theorem.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log2, prod
from typing import Any

import pytest
import torch
from tests.sealed_wire import method, start, wire

pytest.importorskip("gmpy2", reason="needs the extra crypto")
import gmpy2

from visard.crypto import paillier, session
from visard.crypto.modulus import ROOTS, certificate_bytes, certify, check_certificate, hashes_of
from visard.crypto.moments import moments, rows_of
from visard.crypto.packed import FRACTION, FixedPoint, Packed
from visard.crypto.paillier import PrivateKey, PublicKey, generate, key_to_bytes
from visard.crypto.powers import DIGIT, DISTANCE, Powers, powers_of
from visard.errors import VisardError
from visard.learning.mmd import taylor

BITS, L, N = 512, 4, 6
SHIFT = 26  # bits of the place of one coefficient


def with_order(order: int, low: int, high: int) -> int:
    """A prime between two bounds, 3 modulo 4, one above a multiple of the odd number `order`."""
    low, high = low // (2 * order) + 1, high // (2 * order)
    while True:
        p = 2 * order * ((low + secrets.randbelow(high - low)) | 1) + 1
        if gmpy2.is_prime(p):
            return p


def linked_primes(d: int) -> tuple[int, int]:
    """Two primes with d in both of their orders, whose product has exactly BITS bits."""
    half = BITS // 2
    p, q = (with_order(d, 3 << (half - 2), 1 << half) for _ in range(2))
    return p, q


def primes_from(low: int, least_bits: int) -> list[int]:
    """The next primes, until their product has so many bits."""
    found: list[int] = []
    while prod(found).bit_length() < least_bits:
        found.append(int(gmpy2.next_prime(found[-1] if found else low)))
    return found


@dataclass(frozen=True)
class Planted:
    """A modulus, the numbers to send in place of features, and how to read a row's coefficients off an answer."""

    public: PublicKey
    offer: list[int]
    read: Callable[[int], int]  # an answer -> sum of k_l 2^(s l)


def logarithm(base: int, value: int, order: int, modulus: int) -> int:
    """By trying all: the orders are small."""
    power = 1
    for x in range(order):
        if power == value:
            return x
        power = power * base % modulus
    raise AssertionError("not a power")


def together(remainders: dict[int, int]) -> int:
    """The number of least size with these remainders."""
    modulus = prod(remainders)
    x = sum(r * (modulus // m) * pow(modulus // m, -1, m) for m, r in remainders.items()) % modulus
    return x - modulus if 2 * x > modulus else x


def columns() -> Iterator[int]:
    return (1 << SHIFT * i for i in range(L + 1))


def linked() -> Planted:
    """d divides p - 1 and q - 1."""
    primes = primes_from(100, 190)
    d = prod(primes)
    p, q = linked_primes(d)
    n = p * q
    public = PublicKey(n, BITS)
    h = -pow(_hashed(n), 2, n) % n
    # w: anything modulo p, 1 modulo q; powers of w^n are ciphertexts of 0
    w = 1 + q * (pow(q, -1, p) * (secrets.randbelow(p - 3) + 2 - 1) % p)
    wn = int(gmpy2.powmod(w, n, n * n))

    def read(answer: int) -> int:
        found = {}
        for ell in primes:
            up, uq = (p - 1) // ell, (q - 1) // ell  # to the subgroups of order ell
            hp, hq, wp = pow(h, n * up, p), pow(h, n * uq, q), pow(w, n * up, p)
            if hq == 1 or wp == 1:
                continue
            x = logarithm(hq, pow(answer, uq, q), ell, q)  # the randomness of the refresh, from the q part alone
            rest = pow(answer, up, p) * pow(hp, -x, p) % p  # what is left in the p part
            found[ell] = logarithm(wp, rest, ell, p)
        return together(found)

    return Planted(public, [int(gmpy2.powmod(wn, e, n * n)) for e in columns()], read)


def folded() -> Planted:
    """Small primes of n divide q - 1, where q is the large one."""
    primes = primes_from(1 << 16, 180)
    small = prod(primes)
    q = with_order(small, (1 << (BITS - 1)) // small + 1, (1 << BITS) // small)
    n = small * q
    w = 1 + small * (pow(small, -1, q) * (_generator(q, primes) - 1) % q)

    def read(answer: int) -> int:
        found = {}
        for ell in primes:
            up = (q - 1) // ell  # r^n vanishes, for ell divides n
            found[ell] = logarithm(pow(w, up, q), pow(answer, up, q), ell, q)
        return together(found)

    return Planted(PublicKey(n, BITS), [int(gmpy2.powmod(w, e, n * n)) for e in columns()], read)


def _generator(q: int, primes: list[int]) -> int:
    while True:
        g = secrets.randbelow(q - 3) + 2
        if all(pow(g, (q - 1) // ell, q) != 1 for ell in primes):
            return g


def _hashed(n: int) -> int:
    data = b"visard paillier base" + n.to_bytes(BITS // 8, "big")
    return int.from_bytes(hashlib.shake_256(data).digest(BITS // 8 + 16), "big") % n


def features(seed: int) -> torch.Tensor:
    x = torch.randn(N, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=1).max()


def attacked(planted: Planted) -> tuple[list[int], list[int]]:
    """What the owner reads of each row of a masked answer, and what stands there."""
    kernel, key = taylor(0.7, 2), planted.public
    plan, m = Packed(kernel, L, BITS), moments(features(1))
    key.check(planted.offer)
    answer = plan.mask(key, plan.answer(key, planted.offer, N, m, 1.0), [(1, secrets.token_bytes(32))])
    rows = [FixedPoint(FRACTION).encode(row) for row in rows_of(m, kernel, 1.0).matrix()]
    return [planted.read(c) for c in answer], [sum(k << SHIFT * i for i, k in enumerate(row)) for row in rows]


def power_of_one_base(key: PublicKey, c: int) -> int:
    """How answers were refreshed before."""
    return int(c * paillier._noise_table(int(key.n)).power(secrets.randbits(key.bits // 2)) % key.n2)


def test_a_linked_modulus_read_coefficients_through_powers_of_one_base(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = linked()
    found, _ = attacked(planted)
    again, true = attacked(planted)
    assert not set(found) & set(true), "uniform powers leave nothing to read"
    assert not set(found) & set(again), "what is read is noise"
    monkeypatch.setattr(PublicKey, "refresh", power_of_one_base)
    found, true = attacked(planted)
    assert found == true


def test_products_of_powers_keep_it_too() -> None:
    planted = linked()
    store = powers_of(int(planted.public.n))
    while len(store._made) < store.size:
        store.draw()
    found, _ = attacked(planted)
    again, true = attacked(planted)
    assert not set(found) & set(true)
    assert not set(found) & set(again)


def test_a_folded_modulus_reads_coefficients_unless_its_certificate_is_asked_for() -> None:
    planted = folded()
    found, true = attacked(planted)
    assert found == true, "r^n alone does not stop it"
    PublicKey.from_bytes(planted.public.to_bytes(), BITS)  # nor do the other checks
    for guess in (bytes(certificate_bytes(BITS)), secrets.token_bytes(certificate_bytes(BITS)), best_effort(planted)):
        with pytest.raises(VisardError, match="key of b: its certificate does not hold"):
            check_certificate(planted.public, guess, "the key of b")


def best_effort(planted: Planted) -> bytes:
    """Roots modulo the part of n that has them, and 1 elsewhere."""
    n = int(planted.public.n)
    primes = primes_from(1 << 16, 180)
    q = n // prod(primes)
    part = []
    for rho in hashes_of(planted.public):
        # modulo a small prime ell the map is a bijection unless another prime of n divides ell - 1
        roots = {ell: pow(rho, pow(n, -1, ell - 1), ell) for ell in primes if gmpy2.gcd(n, ell - 1) == 1}
        part.append(together(roots | {q: 1}) % n)
    return b"".join(x.to_bytes(BITS // 8, "big") for x in part)


def test_a_linked_modulus_has_a_certificate() -> None:
    """So the certificate alone would not do: n is coprime to the order of the group."""
    p, q = linked_primes(prod(primes_from(100, 190)))
    key = PrivateKey(p, q, PublicKey(p * q, BITS))
    check_certificate(key.public, certify(key), "it")


def test_certificates_of_honest_keys_hold_and_changed_ones_do_not() -> None:
    key, other = generate(BITS, insecure=True), generate(BITS, insecure=True)
    data = certify(key)
    assert certify(key) == data
    assert len(data) == certificate_bytes(BITS) == ROOTS * BITS // 8
    check_certificate(key.public, data, "it")
    size = BITS // 8
    n = int(key.public.n)
    lifted = b"".join((int.from_bytes(data[i : i + size], "big") + n).to_bytes(size + 1, "big")[-size:]
                      for i in range(0, len(data), size))  # fmt: skip
    for i in range(ROOTS):
        wrong = data[: i * size] + bytes([data[i * size] ^ 1]) + data[i * size + 1 :]
        with pytest.raises(VisardError, match="does not hold"):
            check_certificate(key.public, wrong, "it")
    for bad in (certify(other), data[size:] + data[:size], lifted):
        with pytest.raises(VisardError, match="does not hold"):
            check_certificate(key.public, bad, "it")
    with pytest.raises(VisardError, match="has 511 bytes, expected 512"):
        check_certificate(key.public, data[:-1], "it")
    # a factor below 2^16 with roots that are right: soundness rests on there being none
    small = 65521
    q = with_order(3, (1 << (BITS - 1)) // small + 1, (1 << BITS) // small)
    key = PrivateKey(small, q, PublicKey(small * q, BITS))
    with pytest.raises(VisardError, match="it has a small factor"):
        check_certificate(key.public, certify(key), "it")


def test_the_soundness_of_the_certificate_is_128_bits() -> None:
    assert ROOTS * log2(paillier.ALPHA) >= 128
    assert hashes_of(generate(BITS, insecure=True).public) != hashes_of(generate(BITS, insecure=True).public)
    assert len(set(hashes_of(generate(BITS, insecure=True).public))) == ROOTS


def test_roots_exist_for_as_few_numbers_as_the_proof_says() -> None:
    """n = 7 * 29, 7 divides 28: the map x^n takes 7 units to one."""
    n = 7 * 29
    units = [x for x in range(1, n) if gmpy2.gcd(x, n) == 1]
    assert len({pow(x, n, n) for x in units}) * 7 == len(units)
    honest = 11 * 17
    units = [x for x in range(1, honest) if gmpy2.gcd(x, honest) == 1]
    assert len({pow(x, honest, honest) for x in units}) == len(units)


def hello_of(key: PrivateKey, certificate: bytes) -> bytes:
    return key.public.to_bytes() + certificate + secrets.token_bytes(session.NONCE)


def test_no_client_goes_on_with_a_key_whose_certificate_is_wrong() -> None:
    mine, theirs, third = (generate(BITS, insecure=True) for _ in range(3))
    hellos = {"a": hello_of(mine, certify(mine)), "b": hello_of(theirs, certify(theirs))}
    kept = {"private": key_to_bytes(mine)}
    session.introduce("a", kept, hellos, BITS, ["b"], {})
    for wrong in (certify(third), b"", bytes(certificate_bytes(BITS))):
        with pytest.raises(VisardError, match="the key of b: its certificate"):
            session.introduce("a", kept, hellos | {"b": hello_of(theirs, wrong)}, BITS, ["b"], {})
    with pytest.raises(VisardError, match="the key of c: its certificate"):  # not even one that it does not answer
        session.introduce("a", kept, hellos | {"c": hello_of(third, bytes(certificate_bytes(BITS)))}, BITS, ["b"], {})


def test_a_planted_key_ends_a_run_before_an_answer() -> None:
    planted, net, how = folded(), wire(1, 4), method()
    server = start(how, net)

    def before(step: str, client: str, message: Any) -> Any:
        if step == "introduce" and client == "t":
            own = message.received["s0"]
            message.received["s0"] = planted.public.to_bytes() + own[BITS // 8 :]
        assert step != "answer"
        return message

    net.before = before
    with pytest.raises(VisardError, match="the key of s0: its certificate does not hold"):
        how.round(server, net)


# n-th powers: uniform, new every time, whatever makes them.


def spread(draw: Callable[[], int], group: set[int], times: int) -> float:
    """Chi-square of drawn values against equal shares of the group, over its expectation."""
    counts = Counter(draw() for _ in range(times))
    assert set(counts) <= group
    expected = times / len(group)
    return sum((counts[x] - expected) ** 2 / expected for x in group) / (len(group) - 1)


def test_powers_and_their_products_are_uniform() -> None:
    n = 7 * 11 * 13  # all of Z_n^* has a square root of 1 in each factor: products of few would be seen
    group = {pow(x, n, n * n) for x in range(1, n) if gmpy2.gcd(x, n) == 1}
    assert len(group) == 6 * 10 * 12
    store = Powers(n)
    assert spread(store._power, group, 40 * len(group)) == pytest.approx(1, abs=0.25)
    products = Powers(n)
    while len(products._made) < products.size:
        products._power()
    assert spread(products._product, group, 40 * len(group)) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("bits", [512, 2048, 3072])
def test_there_are_enough_factors_for_the_bound(bits: int) -> None:
    """1/2 sqrt(|G| 2^(-7t) + sum_g g^k P(g divides all differences)) < 2^-128, with P by counting."""
    t, k = Powers((1 << bits) - 1).size, (bits - 1) // 16
    digits = 1 << DIGIT
    terms = [bits - DIGIT * t]
    for g in range(2, digits):
        counts = Counter(x % g for x in range(digits))
        terms.append(k * log2(g) + t * log2(sum(c * c for c in counts.values()) / digits**2))
    total = sum(2.0 ** (x + DISTANCE) for x in terms)
    assert log2(total) - DISTANCE < 2 * -127
    assert 65537**k < 1 << bits


def test_a_product_is_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    n = int(generate(BITS, insecure=True).public.n)
    store, digits = Powers(n), list[bytes]()
    while len(store._made) < store.size:
        store.draw()
    real = secrets.token_bytes
    monkeypatch.setattr(secrets, "token_bytes", lambda count: digits.append(real(count)) or digits[-1])
    found, expected = store.draw(), 1
    for y, byte in zip(store._made, digits[0], strict=True):
        expected = expected * pow(int(y), byte >> (8 - DIGIT), n * n) % (n * n)
    assert found == expected


def test_prepared_powers_are_handed_out_once_each() -> None:
    key = generate(BITS, insecure=True)
    store = Powers(int(key.public.n))
    store.prepare(5)
    store.wait()
    assert len(store._fresh) == 5
    store.prepare(5)
    store.wait()
    assert len(store._fresh) == 5, "as many as asked for are ready"
    drawn = [store.draw() for _ in range(store.size + 20)]
    assert len(set(drawn)) == len(drawn)
    assert len(store._made) == store.size
    store.prepare(5)
    assert not store._fresh, "products need no preparation"
    for c in itertools.islice(drawn, 0, None, 40):
        assert key.decrypt(c) == 0


def test_a_copy_of_the_process_hands_out_other_powers() -> None:
    n = int(generate(BITS, insecure=True).public.n)
    store = powers_of(n)
    store.prepare(3)
    store.wait()
    there, here = os.pipe()
    if not (child := os.fork()):
        os.write(here, str(powers_of(n).draw()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    other = int(os.read(there, 10_000))
    assert other not in {powers_of(n).draw() for _ in range(3)}
