"""CKKS (Cheon, Kim, Kim, Song 2017) on TenSEAL's SEAL, for linear maps of a peer's encrypted numbers.

    offer    numbers in slots under the owner's secret key, scale 2^105, three primes, second polynomial as a seed
    answer   of scale 2^143 (values up to 64), flooded, then brought down to one prime

An answer's noise depends on the numbers that the responder multiplied with, and the owner, who has the key, sees it.
So an answer gets a fresh encryption under the owner's public key (it hides the second polynomial) and uniform noise of
2^107, over 2^50 times what the linear map leaves (2^15 to 2^17 at scale 2^38, for the longest rows), added to integer
coefficients: noise that is encoded from floating-point slots would have 53 bits and leave the lowest ones, where the
map's own noise is, as they are. Values come out with an error below 2^-28. Decrypted numbers stay with their owner:
shown to others they would tell about its key (Li and Micciancio 2021).

What a peer sends is only residues: polynomials modulo the primes of the ring, numbers of fixed width in arrays
(polynomials, primes, DEGREE) of uint64, each checked against its prime before the cipher library sees it.
"""

from __future__ import annotations

import functools
import os
import secrets
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from visard.crypto.paillier import count
from visard.errors import UsageError, VisardError
from visard.files import read_bytes

DEGREE = 8192
SLOTS = DEGREE // 2
BITS = (60, 45, 45, 60)  # 210 of the 218 that a degree of 8192 allows at 128-bit security; the last is for keys alone
PRIMES = (1152921504606748673, 35184371417089, 35184371613697, 1152921504606830593)
WIDTHS = [-(-bits // 8) for bits in BITS]  # bytes of a number modulo each prime
OFFER, ANSWER, KEY = 3, 1, 4  # primes of an offer, of an answer, of a key
OFFERED, FACTOR = 2.0**105, 2.0**38  # scales of an offer and of what it is multiplied with
PRODUCT = OFFERED * FACTOR
ANSWERED = PRODUCT / PRIMES[2] / PRIMES[1]
FLOOD = 107  # bits
SEED = 64  # bytes


def residues_size(polynomials: int, primes: int) -> int:
    """Bytes of so many polynomials."""
    return polynomials * DEGREE * sum(WIDTHS[:primes])


OFFER_BYTES, ANSWER_BYTES = residues_size(1, OFFER) + SEED, residues_size(2, ANSWER)
ENCRYPTING, PART = residues_size(2, KEY), residues_size(1, KEY) + SEED  # bytes of keys
PUBLIC_BYTES = ENCRYPTING + 2 * OFFER * PART
Terms = Mapping[int, Sequence[tuple[Any, np.ndarray]]]  # long steps -> (rotated offer, factors (SLOTS,))


def residues_to_bytes(residues: np.ndarray) -> bytes:
    """Little-endian numbers, each as wide as its prime needs."""
    words = np.ascontiguousarray(residues, dtype="<u8").view(np.uint8).reshape(*residues.shape, 8)
    return b"".join(poly[i, :, : WIDTHS[i]].tobytes() for poly in words for i in range(residues.shape[1]))


def residues_from_bytes(data: bytes, polynomials: int, primes: int, what: str) -> np.ndarray:
    """The array, once length and ranges are right."""
    if len(data) != residues_size(polynomials, primes):
        raise VisardError(f"{what}: {len(data)} bytes, expected {residues_size(polynomials, primes)}")
    found, at = np.zeros((polynomials, primes, DEGREE), np.uint64), 0
    for poly in found:
        for i, width in enumerate(WIDTHS[:primes]):
            words = np.zeros((DEGREE, 8), np.uint8)
            words[:, :width] = np.frombuffer(data, np.uint8, DEGREE * width, at).reshape(DEGREE, width)
            poly[i] = words.view("<u8")[:, 0]
            at += DEGREE * width
            if int(poly[i].max()) >= PRIMES[i]:
                raise VisardError(f"{what}: a number is not below its prime")
        if not poly.any():
            raise VisardError(f"{what}: a polynomial is zero")
    return found


def add(parts: Sequence[bytes], polynomials: int, primes: int, what: str) -> bytes:
    """The sum of ciphertexts in the form of `residues_to_bytes`."""
    total = np.zeros((polynomials, primes, DEGREE), np.uint64)
    modulus = np.array(PRIMES[:primes], np.uint64)[None, :, None]
    for part in parts:
        total = (total + residues_from_bytes(part, polynomials, primes, what)) % modulus
    return residues_to_bytes(total)


def shift(answer: bytes, by: np.ndarray) -> bytes:
    """An answer with numbers (DEGREE,) below the first prime added to its first polynomial: to what it decrypts to."""
    array = residues_from_bytes(answer, 2, ANSWER, "an answer")
    array[0, 0] = (array[0, 0] + by) % np.uint64(PRIMES[0])
    return residues_to_bytes(array)


def stride(block: int) -> int:
    """Blocks of a long step: the root of the number of blocks, or twice that."""
    return 1 << (SLOTS // block).bit_length() // 2


@dataclass(frozen=True)
class PublicKey:
    """A client's public key, with keys to rotate its ciphertexts by one block of slots and by `stride` blocks."""

    block: int
    data: bytes = field(repr=False)

    def rotated(self, offer: bytes, steps: int) -> list[Any]:
        """The offer, rotated by 0 .. steps - 1 blocks."""
        array = residues_from_bytes(offer[:-SEED], 1, OFFER, "an offer")
        with explained("an offer"):
            turned = [_ciphertext(array, OFFER, OFFERED, seed=offer[-SEED:])]
            for _ in range(steps - 1):
                further = library().Ciphertext()
                ring().evaluator.rotate_vector(turned[-1], self.block, _loaded_public(self).galois, further)
                turned.append(further)
        return turned

    def answer(self, terms: Terms, constants: np.ndarray) -> bytes:
        r"""Enc(constants + $\sum_g$ of the sum of terms[g], rotated by g long steps), sanitised.

        Rotations come between one g and the next, from the last on, so that one key serves them all.
        """
        with explained("an answer"):
            mine, evaluator, total = _loaded_public(self), ring().evaluator, None
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
            _loaded_public(self)
        except VisardError as error:
            raise VisardError(f"{what}: {error}") from None


@dataclass(frozen=True)
class PrivateKey:
    """A client's secret key in the library's own form: it is never sent."""

    data: bytes = field(repr=False)

    def offer(self, numbers: np.ndarray) -> bytes:
        """The numbers (SLOTS,), encrypted."""
        count("encryptions")
        sealed = self._loaded.encryptor.encrypt_symmetric(ring().encode(numbers.tolist(), OFFERED))
        array, seed, _ = read_ciphertext(written_by_seal(sealed))
        return residues_to_bytes(array) + seed

    def open(self, answer: bytes) -> np.ndarray:
        """The numbers (SLOTS,) of an answer, or of a sum of answers."""
        count("decryptions")
        array = residues_from_bytes(answer, 2, ANSWER, "an answer")
        with explained("an answer"):
            plain = library().Plaintext()
            self._loaded.decryptor.decrypt(_ciphertext(array, ANSWER, ANSWERED), plain)
            return np.array(ring().encoder.decode_double(plain))

    @functools.cached_property
    def _loaded(self) -> _LoadedPrivate:
        return _LoadedPrivate(self.data)


def generate(block: int) -> tuple[PrivateKey, PublicKey]:
    """New keys, from the library's randomness, which is the system's."""
    if not 1 <= block <= SLOTS // 4 or block & (block - 1):
        raise VisardError(f"a block of {block} slots: must be a power of 2, at most {SLOTS // 4}")
    maker, public = library().KeyGenerator(ring().context), library().PublicKey()
    maker.create_public_key(public)
    array, _, _ = read_ciphertext(written_by_seal(public))
    galois = read_galois_keys(written_by_seal(maker.create_galois_keys(_elements(block))))
    parts = [residues_to_bytes(a) + seed for e in _elements(block) for a, seed in galois[e]]
    return PrivateKey(saved_by_seal(maker.secret_key())), PublicKey(block, residues_to_bytes(array) + b"".join(parts))


def _elements(block: int) -> list[int]:
    """Galois elements of the two rotations."""
    return [pow(3, block * steps, 2 * DEGREE) for steps in (1, stride(block))]


class _LoadedPrivate:
    def __init__(self, data: bytes) -> None:
        secret = load_seal(library().SecretKey(), data)
        self.encryptor = library().Encryptor(ring().context, secret)
        self.decryptor = library().Decryptor(ring().context, secret)


class _LoadedPublic:
    def __init__(self, key: PublicKey) -> None:
        what, parms, data = "a CKKS key", ring().parms[KEY], key.data
        encrypting = residues_from_bytes(data[:ENCRYPTING], 2, KEY, what)
        parts = [data[at : at + PART] for at in range(ENCRYPTING, len(data), PART)]
        arrays = [(residues_from_bytes(p[:-SEED], 1, KEY, what), p[-SEED:]) for p in parts]
        by_element = {e: arrays[i * OFFER : (i + 1) * OFFER] for i, e in enumerate(_elements(key.block))}
        with explained(what):
            public = load_seal(library().PublicKey(), seal_ciphertext(encrypting, parms, True, 1.0))
            self.encryptor = library().Encryptor(ring().context, public)
            self.galois = load_seal(library().GaloisKeys(), seal_galois_keys(by_element, parms))


_loaded_public = functools.lru_cache(maxsize=32)(_LoadedPublic)


def flood() -> list[int]:
    """Uniform integers between -2^FLOOD and 2^FLOOD, one for each coefficient."""
    width, span = FLOOD // 8 + 1, 1 << FLOOD
    random = secrets.token_bytes(width * DEGREE)
    return [int.from_bytes(random[i : i + width], "big") % (2 * span) - span for i in range(0, len(random), width)]


def _flooded(x: Any) -> bytes:
    """x plus noise on every coefficient, divided by its last two primes."""
    evaluator = ring().evaluator
    evaluator.transform_from_ntt_inplace(x)
    array = read_ciphertext(written_by_seal(x))[0].copy()
    noise = flood()
    for row, prime in zip(array[0], PRIMES, strict=False):
        row += np.array([e % prime for e in noise], np.uint64)
        row %= np.uint64(prime)
    x = _ciphertext(array, OFFER, PRODUCT, ntt=False)
    evaluator.transform_to_ntt_inplace(x)
    for _ in range(OFFER - ANSWER):
        evaluator.rescale_to_next_inplace(x)
    return residues_to_bytes(read_ciphertext(written_by_seal(x))[0])


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever the library raises, in one line."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        raise VisardError(f"{what} is refused by the cipher library: {error}") from None


@functools.cache
def library() -> Any:
    """The cipher library, or a clear line where it is not installed."""
    try:
        import tenseal.sealapi as seal
        import zstandard  # noqa: F401
    except ImportError:
        raise UsageError("CKKS needs tenseal: pip install 'visard[ckks]'") from None
    return seal


class Ring:
    """The one set of parameters, 128-bit secure by the library's own table, and what works in it."""

    def __init__(self) -> None:
        seal = library()
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        parameters.set_poly_modulus_degree(DEGREE)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(DEGREE, list(BITS)))
        if tuple(m.value() for m in parameters.coeff_modulus()) != PRIMES:
            raise UsageError("tenseal chooses other primes than visard expects: install the version of constraints.txt")
        self.context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        if not self.context.parameters_set():
            raise UsageError(f"tenseal refuses the parameters: {self.context.parameters_error_message()}")
        self.encoder, self.evaluator = seal.CKKSEncoder(self.context), seal.Evaluator(self.context)
        context = self.context
        self.parms = {KEY: context.key_parms_id(), OFFER: context.first_parms_id(), ANSWER: context.last_parms_id()}

    def encode(self, values: list[float], scale: float) -> Any:
        plain = library().Plaintext()
        self.encoder.encode(values, scale, plain)
        return plain


@functools.cache
def ring() -> Ring:
    return Ring()


# Ciphertexts and keys in the file format of SEAL 4, so that its parser only ever reads headers that were written here:
#
#     header of 16 bytes | parameters id | is_ntt | polynomials | degree | primes | scale | 1 | array (| seed)
#
# The library reads and writes files alone; here they are in memory. What it writes is compressed (zstd), what is
# written here is not. With a seed the second polynomial is left out: it follows from the seed.

HEADER = struct.Struct("<HBBBBHQ")  # magic, size of the header, version, compression, 0, size of all
MEMBERS = struct.Struct("<4QBQQQdQ")
COUNT = struct.Struct("<Q")
MAGIC, VERSION, PLAIN, ZSTD = 0xA15E, (4, 3), 0, 2
BLAKE2XB = b"\1"


def _ciphertext(array: np.ndarray, primes: int, scale: float, *, ntt: bool = True, seed: bytes = b"") -> Any:
    return load_seal(library().Ciphertext(), seal_ciphertext(array, ring().parms[primes], ntt, scale, seed))


def seal_ciphertext(array: np.ndarray, parms: Sequence[int], ntt: bool, scale: float, seed: bytes = b"") -> bytes:
    """A file of SEAL; `array` (polynomials, primes, degree), with a seed its first polynomial alone."""
    polynomials = len(array) + bool(seed)
    body = MEMBERS.pack(*parms, ntt, polynomials, array.shape[2], array.shape[1], scale, 1)
    body += framed(COUNT.pack(array.size) + np.ascontiguousarray(array, "<u8").tobytes())
    return framed(body + (framed(BLAKE2XB + seed) if seed else b""))


def seal_galois_keys(keys: Mapping[int, Sequence[tuple[np.ndarray, bytes]]], parms: Sequence[int]) -> bytes:
    """Keys for rotations by Galois elements, each of several seeded ciphertexts."""
    body = [struct.pack("<4Q", *parms), COUNT.pack(DEGREE)]
    parts = {(element - 1) // 2: key for element, key in keys.items()}
    for index in range(DEGREE):
        key = parts.get(index, ())
        body += [COUNT.pack(len(key)), *(seal_ciphertext(array, parms, True, 1.0, seed) for array, seed in key)]
    return framed(b"".join(body))


def framed(body: bytes) -> bytes:
    return HEADER.pack(MAGIC, HEADER.size, *VERSION, PLAIN, 0, HEADER.size + len(body)) + body


def read_ciphertext(data: bytes, at: int = 0) -> tuple[np.ndarray, bytes, int]:
    """(array, seed, where it ends) of a ciphertext without its header."""
    *_, polynomials, degree, primes, _, _ = MEMBERS.unpack_from(data, at)
    at += MEMBERS.size + HEADER.size
    (count,) = COUNT.unpack_from(data, at)
    array = np.frombuffer(data, "<u8", count, at + COUNT.size).reshape(-1, primes, degree)
    at += COUNT.size + 8 * count
    if len(array) == polynomials:
        return array, b"", at
    at += HEADER.size + len(BLAKE2XB)
    return array, data[at : at + SEED], at + SEED


def read_galois_keys(data: bytes) -> dict[int, list[tuple[np.ndarray, bytes]]]:
    """Element -> its seeded ciphertexts, from what the library wrote."""
    (indices,) = COUNT.unpack_from(data, 32)
    at, found = 40, dict[int, list[tuple[np.ndarray, bytes]]]()
    for index in range(indices):
        (count,) = COUNT.unpack_from(data, at)
        at += COUNT.size
        for _ in range(count):
            array, seed, at = read_ciphertext(data, at + HEADER.size)
            found.setdefault(2 * index + 1, []).append((array, seed))
    return found


def written_by_seal(thing: Any) -> bytes:
    """What the library writes, unpacked and without its header."""
    data = saved_by_seal(thing)
    magic, _, major, minor, compression, _, _ = HEADER.unpack_from(data)
    if (magic, compression, major, minor) != (MAGIC, ZSTD, *VERSION):
        raise UsageError(f"tenseal writes files of SEAL {major}.{minor}, which visard does not know")
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj().decompress(data[HEADER.size :])


def saved_by_seal(thing: Any) -> bytes:
    """What the library writes, as it is."""
    with _file(b"") as path:
        thing.save(path)
        return read_bytes(path)


def load_seal(thing: Any, data: bytes) -> Any:
    """Let the library read `data` into `thing`."""
    with _file(data) as path:
        thing.load(ring().context, path)
    return thing


@contextmanager
def _file(data: bytes) -> Iterator[str]:
    """A path to a file in memory, or where the system has none to a private one."""
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("visard"), "wb") if in_memory else tempfile.NamedTemporaryFile() as f:  # mode 600
        f.write(data)
        f.flush()
        yield f"/proc/self/fd/{f.fileno()}" if in_memory else f.name
