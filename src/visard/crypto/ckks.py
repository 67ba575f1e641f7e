r"""CKKS (Cheon, Kim, Kim, Song 2017) on TenSEAL's SEAL, for linear maps of a peer's encrypted numbers.

    offer    numbers in slots under the owner's secret key, scale 2^105, three primes, second polynomial as a seed
    answer   of scale 2^143 (values up to 64), flooded, then brought down to one prime

An answer's noise depends on the numbers that the responder multiplied with, and the owner, who has the key, sees it.
So an answer gets a fresh encryption under the owner's public key (which hides the second polynomial) and uniform noise
of 2^107, over 2^50 times what the linear map leaves (2^15 to 2^17 at scale 2^38, for the longest rows), added to
integer coefficients: noise that is encoded from floating-point slots would have 53 bits and leave the lowest ones,
where the map's own noise is, as they are. Values come out with an error below 2^-28. Decrypted numbers stay with
their owner: shown to others they would tell about its key (Li and Micciancio 2021).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from visard.crypto import residues, seal_file
from visard.crypto.costs import count
from visard.crypto.residues import ANSWER, DEGREE, KEY, OFFER, PRIMES, SLOTS
from visard.crypto.seal import library, ring
from visard.crypto.seal_file import SEED
from visard.errors import VisardError

OFFERED, FACTOR = 2.0**105, 2.0**38  # scales of an offer and of what it is multiplied with
PRODUCT = OFFERED * FACTOR
ANSWERED = PRODUCT / PRIMES[2] / PRIMES[1]
FLOOD = 107  # bits
OFFER_BYTES, ANSWER_BYTES = residues.size(1, OFFER) + SEED, residues.size(2, ANSWER)
ENCRYPTING, PART = residues.size(2, KEY), residues.size(1, KEY) + SEED  # bytes of keys
PUBLIC_BYTES = ENCRYPTING + 2 * OFFER * PART
Terms = Mapping[int, Sequence[tuple[Any, np.ndarray]]]  # long steps -> (rotated offer, factors (SLOTS,))


def stride(block: int) -> int:
    """Blocks of a long step: the root of the number of blocks, or twice that."""
    return 1 << (SLOTS // block).bit_length() // 2


@dataclass(frozen=True)
class PublicKey:
    """A party's public key, with keys to rotate its ciphertexts by one block of slots and by `stride` blocks."""

    block: int
    data: bytes = field(repr=False)

    def rotated(self, offer: bytes, steps: int) -> list[Any]:
        """The offer, rotated by 0 .. steps - 1 blocks."""
        array = residues.from_bytes(offer[:-SEED], 1, OFFER, "an offer")
        with explained("an offer"):
            turned = [_ciphertext(array, OFFER, OFFERED, seed=offer[-SEED:])]
            for _ in range(steps - 1):
                further = library().Ciphertext()
                ring().evaluator.rotate_vector(turned[-1], self.block, _public(self).galois, further)
                turned.append(further)
        return turned

    def answer(self, terms: Terms, constants: np.ndarray) -> bytes:
        r"""Enc(constants + $\sum_g$ of the sum of terms[g], rotated by g long steps), sanitised.

        Rotations come between one g and the next, from the last on, so that one key serves them all.
        """
        with explained("an answer"):
            mine, evaluator, total = _public(self), ring().evaluator, None
            for g in reversed(range(max(terms, default=-1) + 1)):
                if total is not None:
                    evaluator.rotate_vector_inplace(total, self.block * stride(self.block), mine.galois)
                for x, factors in terms.get(g, ()):
                    part = library().Ciphertext()
                    evaluator.multiply_plain(x, ring().encode(factors.tolist(), FACTOR), part)
                    count("multiplications")
                    if total is None:
                        total = part
                    else:
                        evaluator.add_inplace(total, part)
            fresh = library().Ciphertext()
            mine.encryptor.encrypt(ring().encode(constants.tolist(), PRODUCT), fresh)
            count("encryptions" if total is None else "refreshes")
            if total is not None:
                evaluator.add_inplace(fresh, total)
            return _flooded(fresh)

    def check(self, what: str) -> None:
        """Refuse a received key of the wrong size, or that the library cannot work with."""
        if len(self.data) != PUBLIC_BYTES:
            raise VisardError(f"{what} has {len(self.data)} bytes, expected {PUBLIC_BYTES}")
        try:
            _public(self)
        except VisardError as error:
            raise VisardError(f"{what}: {error}") from None


@dataclass(frozen=True)
class PrivateKey:
    """A party's secret key in the library's own form: it is never sent."""

    data: bytes = field(repr=False)

    def offer(self, numbers: np.ndarray) -> bytes:
        """The numbers (SLOTS,), encrypted."""
        count("encryptions")
        sealed = self._loaded.encryptor.encrypt_symmetric(ring().encode(numbers.tolist(), OFFERED))
        array, seed, _ = seal_file.read_ciphertext(seal_file.written(sealed))
        return residues.to_bytes(array) + seed

    def open(self, answer: bytes) -> np.ndarray:
        """The numbers (SLOTS,) of an answer, or of a sum of answers."""
        count("decryptions")
        array = residues.from_bytes(answer, 2, ANSWER, "an answer")
        with explained("an answer"):
            plain = library().Plaintext()
            self._loaded.decryptor.decrypt(_ciphertext(array, ANSWER, ANSWERED), plain)
            return np.array(ring().encoder.decode_double(plain))

    @functools.cached_property
    def _loaded(self) -> _Private:
        return _Private(seal_file.load(library().SecretKey(), ring().context, self.data))


class _Private:
    def __init__(self, secret: Any) -> None:
        self.encryptor = library().Encryptor(ring().context, secret)
        self.decryptor = library().Decryptor(ring().context, secret)


class _Public:
    def __init__(self, key: PublicKey) -> None:
        what, parms, data = "a CKKS key", ring().parms[KEY], key.data
        encrypting = residues.from_bytes(data[:ENCRYPTING], 2, KEY, what)
        parts = [data[at : at + PART] for at in range(ENCRYPTING, len(data), PART)]
        arrays = [(residues.from_bytes(p[:-SEED], 1, KEY, what), p[-SEED:]) for p in parts]
        by_element = {e: arrays[i * OFFER : (i + 1) * OFFER] for i, e in enumerate(_elements(key.block))}
        with explained(what):
            public = library().PublicKey()
            seal_file.load(public, ring().context, seal_file.ciphertext(encrypting, parms, True, 1.0))
            self.encryptor = library().Encryptor(ring().context, public)
            file = seal_file.galois_keys(by_element, parms)
            self.galois = seal_file.load(library().GaloisKeys(), ring().context, file)


@functools.lru_cache(maxsize=32)
def _public(key: PublicKey) -> _Public:
    return _Public(key)


def generate(block: int) -> tuple[PrivateKey, PublicKey]:
    """New keys, from the library's randomness, which is the system's."""
    if not 1 <= block <= SLOTS // 4 or block & (block - 1):
        raise VisardError(f"a block of {block} slots: must be a power of 2, at most {SLOTS // 4}")
    maker, public = library().KeyGenerator(ring().context), library().PublicKey()
    maker.create_public_key(public)
    array, _, _ = seal_file.read_ciphertext(seal_file.written(public))
    galois = seal_file.read_galois_keys(seal_file.written(maker.create_galois_keys(_elements(block))))
    parts = [residues.to_bytes(a) + seed for e in _elements(block) for a, seed in galois[e]]
    secret = seal_file.saved(maker.secret_key())
    return PrivateKey(secret), PublicKey(block, residues.to_bytes(array) + b"".join(parts))


def _elements(block: int) -> list[int]:
    """Galois elements of the two rotations."""
    return [pow(3, block * steps, 2 * DEGREE) for steps in (1, stride(block))]


def flood() -> list[int]:
    """Uniform integers between -2^FLOOD and 2^FLOOD, one for each coefficient."""
    width, span = FLOOD // 8 + 1, 1 << FLOOD
    random = secrets.token_bytes(width * DEGREE)
    return [int.from_bytes(random[i : i + width], "big") % (2 * span) - span for i in range(0, len(random), width)]


def _flooded(x: Any) -> bytes:
    """x plus noise on every coefficient, divided by its last two primes."""
    evaluator = ring().evaluator
    evaluator.transform_from_ntt_inplace(x)
    array, _, _ = seal_file.read_ciphertext(seal_file.written(x))
    array = array.copy()
    noise = flood()
    for row, prime in zip(array[0], PRIMES, strict=False):
        row += np.array([e % prime for e in noise], np.uint64)
        row %= np.uint64(prime)
    x = _ciphertext(array, OFFER, PRODUCT, ntt=False)
    evaluator.transform_to_ntt_inplace(x)
    for _ in range(OFFER - ANSWER):
        evaluator.rescale_to_next_inplace(x)
    array, _, _ = seal_file.read_ciphertext(seal_file.written(x))
    return residues.to_bytes(array)


def _ciphertext(array: np.ndarray, primes: int, scale: float, *, ntt: bool = True, seed: bytes = b"") -> Any:
    file = seal_file.ciphertext(array, ring().parms[primes], ntt, scale, seed)
    return seal_file.load(library().Ciphertext(), ring().context, file)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever the library raises, in one line."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        raise VisardError(f"{what} is refused by the cipher library: {error}") from None
