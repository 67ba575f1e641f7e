"""What an answer under CKKS gives away (its noise), and what is refused before the cipher library sees it."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="needs the extra ckks")

from tests.sealed_wire import method

from visard.crypto import ckks, session
from visard.crypto import ckks as residues
from visard.crypto import ckks as seal
from visard.crypto import ckks as seal_file
from visard.crypto.ckks import ANSWER, DEGREE, KEY, OFFER, PRIMES, SLOTS, PrivateKey, PublicKey
from visard.crypto.packed import BOUND
from visard.errors import UsageError, VisardError

RNG = np.random.default_rng(0)


@functools.cache
def keys(which: int = 0) -> tuple[PrivateKey, PublicKey]:
    return ckks.generate(64)


def test_rotations_factors_and_constants() -> None:
    private, public = keys()
    x, D, c = (RNG.uniform(-1, 1, SLOTS) for _ in range(3))
    turned = public.rotated(private.offer(x), 4)
    answer = public.answer({0: [(turned[0], D), (turned[3], 2 * D)], 2: [(turned[1], D)]}, 20 * c)
    expected = 20 * c + D * x + 2 * D * np.roll(x, -3 * 64) + np.roll(D * np.roll(x, -64), -2 * 8 * 64)
    assert np.abs(private.open(answer) - expected).max() < 2**-28


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sum_of_answers_fits(sign: int) -> None:
    """All slots at the limit is the largest a coefficient gets: the constant one is their mean."""
    private, public = keys()
    largest = np.full(SLOTS, sign * BOUND)
    both = residues.add([public.answer({}, largest) for _ in range(2)], 2, ANSWER, "a sum")
    assert np.abs(private.open(both) - 2 * largest).max() < 2**-27


def test_the_noise_of_an_answer_is_the_flood_whatever_was_computed() -> None:
    """Uniform coefficients of 2^107 at scale 2^143 are Gaussian in the slots with a deviation of 5.4e-10."""
    private, public = keys()
    offer = private.offer(RNG.uniform(-1, 1, SLOTS))
    spread = 2.0**ckks.FLOOD / ckks.PRODUCT * (DEGREE / 6) ** 0.5
    for terms in ({}, {0: [(public.rotated(offer, 1)[0], np.full(SLOTS, 1.0))]}):
        first, second = (private.open(public.answer(terms, np.zeros(SLOTS))) for _ in range(2))
        assert np.std(first - second) == pytest.approx(2**0.5 * spread, rel=0.1)


def test_the_flood_exceeds_the_noise_of_the_longest_rows_by_2_to_the_50(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of length 30 over 64 columns, through all rotations, on an offer of zeros: what comes out is noise alone."""
    monkeypatch.setattr(ckks, "_flooded", lambda x: x)
    private, public = keys()
    turned = public.rotated(private.offer(np.zeros(SLOTS)), 8)
    terms: Any = {g: [(x, np.full(SLOTS, 30 / 8) * RNG.choice([-1, 1], SLOTS)) for x in turned] for g in range(8)}
    plain = seal.library().Plaintext()
    private._loaded.decryptor.decrypt(public.answer(terms, np.zeros(SLOTS)), plain)
    slots = np.array(seal.ring().encoder.decode_double(plain))
    coefficient = np.std(slots) * ckks.PRODUCT * (2 / DEGREE) ** 0.5
    assert coefficient / ckks.FACTOR > 2**8, "the worst case was met"
    assert 6 * coefficient < 2 ** (ckks.FLOOD - 50)


def test_both_polynomials_of_an_answer_are_new_every_time() -> None:
    private, public = keys()
    turned = public.rotated(private.offer(RNG.uniform(-1, 1, SLOTS)), 1)
    terms, zero = {0: [(turned[0], np.ones(SLOTS))]}, np.zeros(SLOTS)
    one, two = (residues.residues_from_bytes(public.answer(terms, zero), 2, ANSWER, "") for _ in range(2))
    assert (one == two).mean() < 0.001
    assert private.offer(zero) != private.offer(zero)


def test_the_flood_is_uniform_down_to_the_lowest_bit() -> None:
    """Noise from 53-bit numbers would leave the low bits of wide coefficients at 0."""
    noise = np.array(ckks.flood(), object)
    assert len(noise) == DEGREE
    assert -(2**107) <= noise.min() < -(2**106)
    assert 2**106 < noise.max() < 2**107
    for bit in (0, 1, 20, 52, 53, 80, 106):
        assert abs(np.mean([(int(e) >> bit) & 1 for e in noise]) - 0.5) < 0.04, bit  # 7 deviations


def test_residues_there_and_back() -> None:
    array = np.stack([np.stack([RNG.integers(0, p, DEGREE, np.uint64) for p in PRIMES]) for _ in range(2)])
    data = residues.residues_to_bytes(array)
    assert len(data) == residues.residues_size(2, KEY)
    assert (residues.residues_from_bytes(data, 2, KEY, "x") == array).all()
    twice = residues.residues_from_bytes(residues.add([data, data], 2, KEY, "x"), 2, KEY, "x")
    assert all(int(t) == 2 * int(a) % PRIMES[1] for t, a in zip(twice[0, 1, :50], array[0, 1, :50], strict=True))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d[:-1], "bytes, expected"),
        (lambda d: d + b"x", "bytes, expected"),
        (lambda d: b"", "bytes, expected"),
        (lambda d: b"\xff" * len(d), "not below its prime"),
        (lambda d: bytes(len(d)), "a polynomial is zero"),
    ],
)
def test_malformed_ciphertexts_are_refused(damage: Any, words: str) -> None:
    private, public = keys()
    offer = private.offer(np.zeros(SLOTS))
    with pytest.raises(VisardError, match=f"^an offer: .*{words}"):
        public.rotated(damage(offer), 1)
    answer = public.answer({}, np.zeros(SLOTS))
    with pytest.raises(VisardError, match=f"^an answer: .*{words}"):
        private.open(damage(answer))


def test_malformed_keys_are_refused() -> None:
    _, public = keys()
    with pytest.raises(VisardError, match="^her key has 3 bytes, expected"):
        PublicKey(64, b"abc").check("her key")
    with pytest.raises(VisardError, match="^her key: .*not below its prime"):
        PublicKey(64, b"\xff" * len(public.data)).check("her key")
    with pytest.raises(VisardError, match="power of 2"):
        ckks.generate(60)


def test_a_random_seed_or_number_breaks_nothing_but_the_sender_s_own_result() -> None:
    private, public = keys()
    offer = private.offer(np.zeros(SLOTS))
    noise = residues.residues_from_bytes(offer[: -seal_file.SEED], 1, OFFER, "")[:, :, ::-1]
    wrong = residues.residues_to_bytes(noise) + bytes(seal_file.SEED)
    terms = {0: [(public.rotated(wrong, 1)[0], np.ones(SLOTS))]}
    assert np.abs(private.open(public.answer(terms, np.zeros(SLOTS)))).max() > 1e-3


def test_what_the_library_raises_becomes_one_line() -> None:
    _, public = keys()
    far = public.rotated(keys()[0].offer(np.zeros(SLOTS)), 1)[0]
    with pytest.raises(VisardError, match="an answer is refused by the cipher library: [^\n]*$"):
        public.answer({0: [(far, np.full(SLOTS, 1e60))]}, np.zeros(SLOTS))
    with pytest.raises(VisardError, match="an answer is refused by the cipher library"):
        public.answer({}, np.full(SLOTS, 1e9))


def test_keys_travel_with_the_hello_and_are_bound_by_it() -> None:
    words, kept = session.hello("a", "", 512, True, 64)
    other, _ = session.hello("b", "", 512, True, 64)
    session.introduce("a", kept, {"a": words, "b": other}, 512, ["b"], {}, 64)
    swapped = words[:64] + other[64:-16] + words[-16:]
    with pytest.raises(VisardError, match="another key as this client's own"):
        session.introduce("a", kept, {"a": swapped, "b": other}, 512, ["b"], {}, 64)
    certified = 64 + session.certificate_bytes(512)
    with pytest.raises(VisardError, match="the CKKS key of b has 100 bytes"):
        session.introduce("a", kept, {"a": words, "b": other[: certified + 100] + other[-16:]}, 512, ["b"], {}, 64)
    plain, mine = session.hello("a", "", 512, True)
    with pytest.raises(VisardError, match="the hello of b is [0-9]+ bytes too long"):
        session.introduce("a", mine, {"a": plain, "b": other}, 512, ["b"], {})


def test_another_file_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal_file, "VERSION", (9, 9))
    with pytest.raises(UsageError, match=r"files of SEAL 4\.\d+, which visard does not know"):
        keys()[0].offer(np.zeros(SLOTS))


def test_without_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(seal_file.os, "memfd_create")
    private, public = keys()
    x = RNG.uniform(-1, 1, SLOTS)
    turned = public.rotated(private.offer(x), 1)
    answer = public.answer({0: [(turned[0], np.ones(SLOTS))]}, np.zeros(SLOTS))
    assert np.abs(private.open(answer) - x).max() < 2**-28


def test_settings() -> None:
    with pytest.raises(UsageError, match="carries the packed protocol, not both"):
        method(scheme="ckks", protocol="both")


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    seal.library.cache_clear()
    monkeypatch.setitem(sys.modules, "tenseal", None)
    monkeypatch.setitem(sys.modules, "tenseal.sealapi", None)
    try:
        with pytest.raises(UsageError, match=r"pip install 'visard\[ckks\]'"):
            seal.library()
    finally:
        seal.library.cache_clear()
