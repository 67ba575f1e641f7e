"""Keys, ciphertexts and sealed messages: what is accepted, what is refused and with which words."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.crypto import paillier
from visard.crypto.paillier import (
    FixedBase,
    PrivateKey,
    PublicKey,
    counted,
    generate,
    key_from_bytes,
    key_to_bytes,
    load_key,
    load_or_make,
    save_key,
)
from visard.crypto.session import Binding, check_tag, make_tag, pair_secret, seal, session_of, unseal
from visard.errors import UsageError, VisardError

BITS = 512


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return generate(BITS, insecure=True)


def test_small_keys_need_a_word_of_consent() -> None:
    with pytest.raises(UsageError, match="can be broken"):
        generate(1024)
    with pytest.raises(UsageError, match="multiple of 16"):
        generate(1000, insecure=True)


def test_a_key_has_exactly_its_size_and_blum_primes(key: PrivateKey) -> None:
    assert int(key.public.n).bit_length() == BITS
    assert key.p % 4 == key.q % 4 == 3
    assert generate(BITS, insecure=True).public.n != key.public.n


def test_decryption_is_the_textbook_one(key: PrivateKey) -> None:
    """m = L(c^lambda mod n^2) / L(g^lambda mod n^2) mod n with g = 1 + n (Paillier 1999)."""
    n, lam = int(key.public.n), (int(key.p) - 1) * (int(key.q) - 1)
    for m in (0, 1, -1, 2**200 + 17, -(2**300) + 5):
        c = key.public.encrypt(m)
        textbook = (pow(c, lam, n * n) - 1) // n * pow(lam, -1, n) % n
        assert textbook == m % n
        assert key.decrypt(c) == m


def test_textbook_ciphertexts_are_read_too(key: PrivateKey) -> None:
    n = int(key.public.n)
    assert key.decrypt((1 + 77 * n) * pow(123456789, n, n * n) % (n * n)) == 77


def test_another_implementation_agrees(key: PrivateKey) -> None:
    phe = pytest.importorskip("phe", reason="the second implementation is not installed")
    theirs = phe.PaillierPrivateKey(phe.PaillierPublicKey(int(key.public.n)), int(key.p), int(key.q))
    assert theirs.raw_decrypt(key.public.encrypt(4711)) == 4711
    assert key.decrypt(theirs.public_key.raw_encrypt(815)) == 815


def test_refreshing_changes_the_ciphertext_only(key: PrivateKey) -> None:
    c = key.public.encrypt(42)
    fresh = key.public.refresh(c)
    assert fresh != c
    assert key.decrypt(fresh) == 42
    assert key.public.encrypt(42) != c, "encryption is randomised"


def test_plaintexts_that_do_not_fit_are_refused(key: PrivateKey) -> None:
    with pytest.raises(VisardError, match="does not fit a key of 512 bits"):
        key.public.encrypt(int(key.public.n) // 2 + 1)


def test_operations_are_counted(key: PrivateKey) -> None:
    with counted() as costs:
        c = key.public.multiply(key.public.encrypt(3), 5)
        assert key.decrypt(key.public.refresh(c)) == 15
    assert costs == {"encryptions": 1, "decryptions": 1, "multiplications": 1, "refreshes": 1}
    key.public.encrypt(1)
    assert costs["encryptions"] == 1, "what happens outside the block is not counted"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n: n + 1, "small factor"),
        (lambda n: n >> 1 | 1, "has 511 bits"),
        (lambda n: (n // 15) * 15 | (1 << 511), "small factor"),
    ],
)
def test_bad_public_keys_are_refused(key: PrivateKey, change: object, words: str) -> None:
    n = change(int(key.public.n))  # type: ignore[operator]
    with pytest.raises(VisardError, match=words):
        PublicKey.from_bytes(n.to_bytes(BITS // 8, "big"), BITS)


def test_primes_and_squares_are_no_public_keys(key: PrivateKey) -> None:
    import gmpy2

    prime = int(gmpy2.next_prime(1 << (BITS - 1)))
    square = int(gmpy2.next_prime(3 << (BITS // 2 - 2))) ** 2
    for n in (prime, square):
        assert n.bit_length() == BITS
        with pytest.raises(VisardError, match="a prime or a power"):
            PublicKey.from_bytes(n.to_bytes(BITS // 8, "big"), BITS)
    with pytest.raises(VisardError, match="agreed on 1024"):
        PublicKey.from_bytes(key.public.to_bytes(), 1024)


def test_bad_ciphertexts_are_refused(key: PrivateKey) -> None:
    good = key.public.encrypt(1)
    for bad, words in (
        ([0], "out of range"),
        ([1], "out of range"),
        ([int(key.public.n2)], "out of range"),
        ([good, int(key.p) * 7], "not invertible"),
        ([good, good], "twice"),
    ):
        with pytest.raises(VisardError, match=words):
            key.public.check(bad)
    key.public.check([good, key.public.encrypt(1)])


def test_sealed_messages_are_bound_to_their_place(key: PrivateKey) -> None:
    place = Binding("s" * 32, 3, "offer", "client-000", key.public.fingerprint())
    ciphers = [key.public.encrypt(i) for i in range(4)]
    size = key.public.cipher_bytes
    data = seal(place, key.public.to_parts(ciphers), size)
    assert key.public.from_parts(unseal(data, place, size, 4), "it") == ciphers
    for change, words in (
        ({"session": "t" * 32}, "its session is"),
        ({"exchange": 4}, "its exchange is 3, expected 4"),
        ({"kind": "answer"}, "its kind is 'offer', expected 'answer'"),
        ({"sender": "client-001"}, "its sender is"),
        ({"key": "0" * 16}, "its key is"),
    ):
        with pytest.raises(VisardError, match=words):
            unseal(data, replace(place, **change), size, 4)  # type: ignore[arg-type]
    with pytest.raises(VisardError, match="its count is 4, expected 5"):
        unseal(data, place, size, 5)
    with pytest.raises(VisardError, match="bytes, expected"):
        unseal(data[:-1], place, size, 4)
    with pytest.raises(VisardError, match="not a sealed message"):
        unseal(b"\0\0\0\x05hello", place, size, 4)
    with pytest.raises(VisardError, match="offer from client-000: a ciphertext occurs twice"):
        key.public.from_parts(key.public.to_parts([ciphers[0]] * 4), "offer from client-000")


def test_a_tag_shows_any_change() -> None:
    secret = pair_secret("session", {"a": b"1" * 32, "b": b"2" * 32})
    assert secret == pair_secret("session", {"b": b"2" * 32, "a": b"1" * 32})
    assert secret != pair_secret("other", {"a": b"1" * 32, "b": b"2" * 32})
    sent = b"message" + make_tag(secret, b"message")
    assert check_tag(secret, sent, "x") == b"message"
    for i in range(len(sent)):
        changed = sent[:i] + bytes([sent[i] ^ 1]) + sent[i + 1 :]
        with pytest.raises(VisardError, match="seal is broken"):
            check_tag(secret, changed, "answer from b")


def test_a_session_depends_on_every_hello() -> None:
    hellos = {"a": b"key a", "b": b"key b"}
    assert session_of(hellos) == session_of(dict(reversed(hellos.items())))
    assert len({session_of(h) for h in (hellos, hellos | {"b": b"x"}, {"a": b"key ak", "b": b"ey b"})}) == 3


@pytest.mark.parametrize(("p", "q"), [(2**256 - 2**200, 2**256 - 2**201), (1, 2**511)])
def test_a_key_file_whose_numbers_are_no_two_primes_is_one_line(tmp_path: Path, p: int, q: int) -> None:
    path = tmp_path / "own.key"
    path.write_text(json.dumps({"format": paillier.FORMAT, "bits": (p * q).bit_length(), "p": f"{p:x}", "q": f"{q:x}"}))
    path.chmod(0o600)
    for trusted in (False, True):
        with pytest.raises(UsageError, match=r"own\.key: (holds a damaged key|a private key does not fit)"):
            load_key(path, (p * q).bit_length(), trusted=trusted)


def test_key_files_are_private_and_never_overwritten(key: PrivateKey, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "client.key"
    save_key(path, key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path, BITS).public == key.public
    with pytest.raises(UsageError, match="never overwritten"):
        save_key(path, key)
    with pytest.raises(UsageError, match="holds a key of 512 bits, not 1024"):
        load_key(path, 1024)
    os.chmod(path, 0o640)
    with pytest.raises(UsageError, match="can be read by others"):
        load_key(path, BITS)
    os.chmod(path, 0o600)
    path.write_text("{}")
    with pytest.raises(UsageError, match="not a key file"):
        load_key(path, BITS)
    with pytest.raises(UsageError, match="cannot be read"):
        load_key(tmp_path / "none", BITS)
    with pytest.raises(UsageError, match="a key of 1000 bits: must be a multiple of 16"):
        load_or_make(tmp_path / "odd.key", 1000, insecure=True)
    made = load_or_make(tmp_path / "new.key", BITS, insecure=True)
    assert load_or_make(tmp_path / "new.key", BITS, insecure=True).public == made.public


def test_damaged_keys_are_refused(key: PrivateKey) -> None:
    data = key_to_bytes(key)
    assert key_from_bytes(data, BITS).p == key.p
    broken = data.replace(f"{int(key.p):x}".encode(), f"{int(key.p) + 1:x}".encode())
    with pytest.raises(VisardError, match="damaged|small factor"):
        key_from_bytes(broken, BITS)
    with pytest.raises(VisardError, match="does not fit"):
        PrivateKey(key.p, key.q + 2, key.public)


def test_as_many_keys_as_a_party_has_peers_keep_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class Counting(FixedBase):
        def __init__(self, base: int, modulus: int, bits: int) -> None:
            built.append(modulus)
            super().__init__(base, modulus, bits)

    monkeypatch.setattr(paillier, "FixedBase", Counting)
    keys = [generate(256, insecure=True) for _ in range(12)]
    for _ in range(2):
        for key in keys:
            assert key.decrypt(key.public.encrypt(7)) == 7
    assert len(built) == 12
    other = generate(256, insecure=True)
    first, second = (other.public.encrypt_from(-7, seed) for seed in (b"1", b"2"))
    assert (other.decrypt(first), other.decrypt(second)) == (-7, -7)
    assert first != second
    assert first == other.public.encrypt_from(-7, b"1")
    assert len(built) == 12
