r"""Sums of vectors of which the server that adds them up learns the sum and no part.

After Bonawitz et al., CCS 2017, and Bell et al., CCS 2020 (a member has masks with some others, not with all).

Four phases, each an answer of every member to the server in the middle:

    keys     two X25519 public keys: one that shares are encrypted to, one that masks are agreed with
    shares   Shamir shares of two secrets, of the mask key s and of the own mask b, encrypted to each neighbour
    masked   y_i = x_i + F(b_i) + sum over the neighbours j of  +F(s_ij) if i < j, -F(s_ij) if i > j       mod 2^32
    opened   shares of b_j for every j whose y_j arrived, shares of s_j for every j whose y_j did not; never both

From these the server takes every F(b_j), and the F(s_jk) that nothing cancels, off the sum of the y_i. It
learns neither an x_i nor a sum over fewer members than the threshold. `context` names the one sum that keys and masks
are for; F also depends on a digest of all that the members were asked (`asked`), so that members who were sent
different models or different lists of members have masks that do not cancel.

The ciphers are those of `cryptography`. Sharing a secret is arithmetic modulo a prime and here in a few lines: all
secrets of one sum are opened with the same coefficients, which libraries compute anew for each.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from visard.errors import PublicError, VisardError

Name = str
Vector = npt.NDArray[np.uint32]
Secret = Callable[[str], bytes]  # 32 bytes for a label, the same for the same label

SEED = 16  # bytes of a shared secret
PRIME = 2**130 - 5  # above every secret
SHARE = 17  # bytes of a number below it
CHUNK = 2**15  # numbers of a mask that are made at a time: they stay in the processor's cache
ZEROS = memoryview(bytes(4 * CHUNK))
NONCE = 12  # bytes before an encrypted pair of shares
MOST = 4096  # members of a sum


@dataclass(frozen=True)
class Keys:
    """The public keys of a member."""

    seal: bytes  # shares for it are encrypted to this one
    mask: bytes  # masks are agreed with this one


@dataclass(frozen=True)
class Opened:
    """The shares that a member reveals at the end."""

    own: dict[Name, bytes]  # of b of members whose vector arrived
    key: dict[Name, bytes]  # of s of members whose vector did not


# ---- fixed point ---------------------------------------------------------------------------------------------------


def fraction_bits(members: int, largest: float) -> int:
    """How many bits after the point leave room for a sum over the members of numbers up to `largest`."""
    return 31 - math.ceil(math.log2(members * largest + 1))


def encoded(
    values: npt.NDArray[np.float64], bits: int, largest: float, room: npt.NDArray[np.float64] | None = None
) -> Vector:
    """round(2^bits x) modulo 2^32; numbers beyond `largest`, and those that are not finite, are refused.

    `room` is written on in between; it may be `values`.
    """
    if values.size and not max(float(values.max()), -float(values.min())) <= largest:
        raise PublicError(f"a number is beyond {largest:g}, the range of a secure sum, or not finite")
    scaled = np.multiply(values, 2.0**bits, out=room)
    return np.rint(scaled, out=scaled).astype(np.int32).view(np.uint32)  # `fraction_bits` leaves room for the sum


def decoded(total: Vector, bits: int) -> npt.NDArray[np.float64]:
    """The sum behind a sum of encoded numbers."""
    return total.view(np.int32).astype(np.float64) / 2.0**bits


# ---- who is whose neighbour ----------------------------------------------------------------------------------------


def neighbours(members: Sequence[Name], degree: int, context: bytes) -> dict[Name, tuple[Name, ...]]:
    """The neighbours of each member: all others, or `degree` of them, by a circle in an order that `context` gives.

    Each is the neighbour of its neighbours. The names alone decide, and not their order.
    """
    if len(set(members)) != len(members) or len(members) > MOST:
        raise PublicError(f"{len(members)} members of a secure sum: they must differ, and be {MOST} at most")
    circle = sorted(members, key=lambda name: hashlib.sha256(context + name.encode()).digest())
    n, half = len(circle), degree // 2
    if degree >= n - 1:
        return {name: tuple(sorted(set(circle) - {name})) for name in circle}
    if half < 1:
        raise VisardError(f"{degree} neighbours in a secure sum: at least 2 are needed")
    steps = [*range(-half, 0), *range(1, half + 1)]
    return {name: tuple(sorted(circle[(at + step) % n] for step in steps)) for at, name in enumerate(circle)}


def threshold(holders: int, share: float) -> int:
    """How many of the holders of shares must give theirs: `share` of them, rounded up, 2 at least."""
    return max(2, math.ceil(share * holders - 1e-9))


# ---- shares of a secret --------------------------------------------------------------------------------------------


def split(secret: bytes, holders: int, needed: int, draw: Secret) -> list[bytes]:
    """Shares 1 to `holders` of a secret: values of a polynomial that is the secret at 0, of degree `needed` - 1."""
    # 32 bytes modulo a prime of 130 bits are uniform up to 2^-126
    drawn = [int.from_bytes(draw(f"coefficient {place}"), "big") % PRIME for place in range(1, needed)]
    coefficients = [int.from_bytes(secret, "big"), *drawn]
    found = []
    for x in range(1, holders + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % PRIME
        found.append(value.to_bytes(SHARE, "big"))
    return found


def combined(shares: Mapping[int, bytes], coefficients: Mapping[int, int]) -> bytes:
    """The secret behind shares, by the coefficients of their numbers (`lagrange`)."""
    total = sum(coefficients[x] * int.from_bytes(share, "big") for x, share in shares.items()) % PRIME
    if total >= 1 << (8 * SEED):
        raise VisardError("shares of a secret do not fit each other")
    return total.to_bytes(SEED, "big")


def lagrange(numbers: Collection[int]) -> dict[int, int]:
    """Of each number: its coefficient in the value at 0 of the polynomial through these numbers."""
    found = {}
    for x in numbers:
        top = bottom = 1
        for other in numbers:
            if other != x:
                top, bottom = top * other % PRIME, bottom * (other - x) % PRIME
        found[x] = top * pow(bottom, -1, PRIME) % PRIME
    return found


# ---- masks ---------------------------------------------------------------------------------------------------------


def add_masks(total: Vector, seeds: Collection[tuple[bytes, int]], asked: bytes) -> None:
    """Add F(seed) for each seed with sign 1, and take it off for each with -1, in one pass over the vector.

    F is AES-256 in counter mode under a key from the seed and what was asked.
    """
    streams = [
        (Cipher(algorithms.AES(_derived(seed, b"mask", asked)), modes.CTR(bytes(16))).encryptor(), sign)
        for seed, sign in seeds
    ]
    out = bytearray(4 * CHUNK + 15)
    drawn = np.frombuffer(out, "<u4", CHUNK)
    for start in range(0, len(total), CHUNK):
        part = total[start : start + CHUNK]
        zeros, mask = ZEROS[: 4 * len(part)], drawn[: len(part)]
        for stream, sign in streams:
            stream.update_into(zeros, out)
            (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def _derived(secret: bytes, *info: bytes) -> bytes:
    parts = (b"visard secure sum", *info)
    label = b"".join([piece for part in parts for piece in (len(part).to_bytes(4, "big"), part)])
    return HKDF(SHA256(), 32, None, label).derive(secret)


def _agreed(own: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise PublicError("a public key in a secure sum is malformed") from None


def _mask_key(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_derived(seed, b"mask key"))


# ---- a member ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def member(name: Name, secret: bytes, context: bytes) -> Member:
    """A member, whose agreements with others a process computes once for all phases of a sum."""
    return Member(name, secret, context)


class Member:
    """One member's side. All its secrets come from `secret` and `context`, so nothing must be kept between phases."""

    def __init__(self, name: Name, secret: bytes, context: bytes) -> None:
        self.name, self.context = name, context
        self._secret = secret
        self._seal = X25519PrivateKey.from_private_bytes(self._draw("seal key"))
        self._key_seed, self._own_seed = self._draw("mask key")[:SEED], self._draw("own mask")[:SEED]
        self._mask = _mask_key(self._key_seed)
        self._shared: dict[bytes, bytes] = {}  # by the public key of the other
        self.keys = Keys(self._seal.public_key().public_bytes_raw(), self._mask.public_key().public_bytes_raw())

    def shares(self, around: Mapping[Name, Keys], needed: int) -> dict[Name, bytes]:
        """Both secrets, shared among the neighbours and the member itself and encrypted to each of them."""
        holders = holders_of(self.name, around)
        if not len(holders) / 2 < needed <= len(holders):  # with fewer one half could open both secrets
            raise PublicError(f"{needed} of {len(holders)} shares would open a secret of a secure sum")
        label = hashlib.sha256(b"".join(around[n].seal for n in sorted(around)) + b"%d" % needed).hexdigest()
        split_key = split(self._key_seed, len(holders), needed, lambda text: self._draw(f"{label} key {text}"))
        split_own = split(self._own_seed, len(holders), needed, lambda text: self._draw(f"{label} own {text}"))
        return {
            other: (nonce := secrets.token_bytes(NONCE))
            + self._box(other, around, to=True).encrypt(nonce, key + own, None)
            for other, key, own in zip(holders, split_key, split_own, strict=True)
        }

    def masked(self, vector: Vector, around: Mapping[Name, Keys], asked: bytes) -> Vector:
        """The vector with its masks: the own one, and one for each neighbour that has sent shares."""
        total = vector.copy()
        seeds = [(pair_seed(self._mask, keys.mask), sign(self.name, other)) for other, keys in around.items()]
        add_masks(total, [(self._own_seed, +1), *seeds], asked)
        return total

    def opened(self, around: Mapping[Name, Keys], boxes: Mapping[Name, bytes], arrived: Collection[Name]) -> Opened:
        """The share of b of each neighbour (and of itself) whose vector arrived, of s of those whose did not."""
        own, key = {}, {}
        for other in holders_of(self.name, around):
            if other not in boxes:
                raise PublicError(f"there is no share of {other} in a secure sum")
            try:
                text = self._box(other, around, to=False).decrypt(boxes[other][:NONCE], boxes[other][NONCE:], None)
            except (InvalidTag, ValueError):
                raise PublicError(f"the share of {other} in a secure sum is not what it sent") from None
            if len(text) != 2 * SHARE:
                raise PublicError(f"the share of {other} in a secure sum is malformed")
            if other in arrived:
                own[other] = text[SHARE:]
            else:
                key[other] = text[:SHARE]
        return Opened(own, key)

    def _box(self, other: Name, around: Mapping[Name, Keys], to: bool) -> AESGCM:
        """The cipher for messages between two members in this sum."""
        pair = (self.name, other) if to else (other, self.name)
        info = (self.context, *(name.encode() for name in pair))
        if other == self.name:
            return AESGCM(_derived(self._draw("own box"), *info))
        both = b"".join(k.seal + k.mask for k in sorted((self.keys, around[other]), key=lambda k: k.seal))
        public = around[other].seal
        if public not in self._shared:
            self._shared[public] = _agreed(self._seal, public)
        return AESGCM(_derived(self._shared[public], *info, both))

    def _draw(self, label: str) -> bytes:
        return hmac.digest(self._secret, self.context + b"\0" + label.encode(), "sha256")


def holders_of(name: Name, around: Collection[Name]) -> list[Name]:
    """Who has shares of a member's secrets, in the order of their numbers, from 1."""
    return sorted({name, *around})


def sign(name: Name, other: Name) -> int:
    """The sign of the mask that two members share."""
    return 1 if name < other else -1


def pair_seed(own: X25519PrivateKey, public: bytes) -> bytes:
    """The common seed of two members, from the private key of one and the public key of the other."""
    return _derived(_agreed(own, public), b"pair")


# ---- the server ----------------------------------------------------------------------------------------------------


class Sum:
    """The server's side: vectors are added as they arrive, so memory does not grow with the members."""

    def __init__(self, around: Mapping[Name, Mapping[Name, Keys]], keys: Mapping[Name, Keys], asked: bytes) -> None:
        self.around, self.keys, self.asked = around, keys, asked  # of the members that have sent shares
        self.arrived: set[Name] = set()
        self._total: Vector | None = None

    def add(self, name: Name, masked: Vector) -> None:
        """Take in the masked vector of a member."""
        if self._total is not None and len(masked) != len(self._total):
            raise VisardError(f"{name}: a vector of {len(masked)} numbers, the others have {len(self._total)}")
        if name in self.arrived or name not in self.around:
            raise VisardError(f"{name}: a second vector, or one of a stranger, in a secure sum")
        self._total = masked.copy() if self._total is None else np.add(self._total, masked, out=self._total)
        self.arrived.add(name)

    def result(self, opened: Mapping[Name, Opened], needed: Mapping[Name, int]) -> Vector:
        """The sum over all members whose vector arrived, once enough of their neighbours have opened their shares."""
        if self._total is None:
            raise VisardError("a secure sum over no members")
        coefficients: dict[tuple[int, ...], dict[int, int]] = {}
        seeds: list[tuple[bytes, int]] = []
        for name, around in self.around.items():
            there = name in self.arrived
            if not there and not self.arrived & around.keys():
                continue  # it has a mask in common with no vector that is in the sum
            given: dict[int, bytes] = {}
            for number, holder in enumerate(holders_of(name, around), 1):
                answer = opened.get(holder)
                share = None if answer is None else (answer.own if there else answer.key).get(name)
                if share is not None and len(given) < needed[name]:
                    given[number] = share
            if len(given) < needed[name]:
                lost = "own mask" if there else "masks with others"
                raise VisardError(f"{len(given)} of {needed[name]} shares of the {lost} of {name} are there: too few")
            chosen = tuple(given)
            if chosen not in coefficients:
                coefficients[chosen] = lagrange(chosen)
            seeds += self._left(name, combined(given, coefficients[chosen]))
        add_masks(self._total, seeds, self.asked)
        return self._total

    def _left(self, name: Name, secret: bytes) -> list[tuple[bytes, int]]:
        """The mask to remove of a member whose vector arrived, or those of a lost member with others."""
        if name in self.arrived:
            return [(secret, -1)]
        own = _mask_key(secret)
        if own.public_key().public_bytes_raw() != self.keys[name].mask:
            raise VisardError(f"the shares of the key of {name} give another key: some of them are wrong")
        there = self.around[name].keys() & self.arrived
        return [(pair_seed(own, self.keys[other].mask), -sign(other, name)) for other in there]
