"""Ciphertexts on their way: bound to a session, an exchange, a direction and a key, and sealed between two parties.

    header length u32 | header (JSON) | ciphertexts of fixed length | tag of 32 bytes

The header says what the ciphertexts are; the receiver states what it expects and refuses anything else, so a
message of another batch, direction or run is not accepted again. The tag is an HMAC with a secret of the two parties,
so that the server that relays cannot alter or mix messages.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from visard.crypto.paillier import PublicKey
from visard.errors import VisardError

TAG = 32
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Binding:
    """What a message is: which run, which exchange of batches, what it carries, from whom, under whose key."""

    session: str
    exchange: int
    kind: str
    sender: str
    key: str  # fingerprint of the public key


def seal(binding: Binding, key: PublicKey, ciphers: Sequence[int]) -> bytes:
    """The message without its tag."""
    return seal_numbers(binding, ciphers, key.cipher_bytes)


def seal_numbers(binding: Binding, numbers: Sequence[int], length: int) -> bytes:
    """As `seal`, for numbers of `length` bytes each."""
    return seal_parts(binding, [int(c).to_bytes(length, "big") for c in numbers], length)


def seal_parts(binding: Binding, parts: Sequence[bytes], length: int) -> bytes:
    """As `seal`, for anything of `length` bytes each."""
    header = json.dumps(asdict(binding) | {"count": len(parts), "length": length}, sort_keys=True).encode()
    return _LENGTH.pack(len(header)) + header + b"".join(parts)


def unseal(data: bytes, expected: Binding, key: PublicKey, count: int) -> list[int]:
    """The ciphertexts of a message, after every check; without its tag (see `check_tag`)."""
    ciphers = unseal_numbers(data, expected, key.cipher_bytes, count)
    try:
        key.check(ciphers)
    except VisardError as error:
        raise VisardError(f"{expected.kind} from {expected.sender}: {error}") from None
    return ciphers


def unseal_numbers(data: bytes, expected: Binding, length: int, count: int) -> list[int]:
    """As `unseal`, for numbers of `length` bytes each that are not ciphertexts."""
    return [int.from_bytes(part, "big") for part in unseal_parts(data, expected, length, count)]


def unseal_parts(data: bytes, expected: Binding, length: int, count: int) -> list[bytes]:
    """As `unseal`, for anything of `length` bytes each; what is in them is not checked."""
    where = f"{expected.kind} from {expected.sender}"
    header, body = _split(data, where)
    for name, value in (asdict(expected) | {"count": count, "length": length}).items():
        if header.get(name) != value:
            raise VisardError(f"{where}: its {name} is {header.get(name)!r}, expected {value!r}")
    if len(body) != count * length:
        raise VisardError(f"{where}: {len(body)} bytes, expected {count * length}")
    return [body[i : i + length] for i in range(0, len(body), length)]


def _split(data: bytes, where: str) -> tuple[dict[str, object], bytes]:
    try:
        (size,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + size])
        if not isinstance(header, dict):
            raise ValueError
    except (struct.error, ValueError):
        raise VisardError(f"{where}: is not a sealed message") from None
    return header, data[_LENGTH.size + size :]


def tag(secret: bytes, data: bytes) -> bytes:
    """The seal of a message between two parties."""
    return hmac.new(secret, data, hashlib.sha256).digest()


def check_tag(secret: bytes, data: bytes, where: str) -> bytes:
    """The message without its tag, if the tag is right."""
    body, end = data[:-TAG], data[-TAG:]
    if not hmac.compare_digest(tag(secret, body), end):
        raise VisardError(f"{where}: its seal is broken")
    return body


def session_of(hellos: Mapping[str, bytes]) -> str:
    """The name of a run that all parties compute from everybody's key and nonce."""
    digest = hashlib.sha256()
    for party in sorted(hellos):
        for part in (party.encode(), hellos[party]):
            digest.update(_LENGTH.pack(len(part)) + part)
    return digest.hexdigest()[:32]


def pair_secret(session: str, parts: Mapping[str, bytes]) -> bytes:
    """The secret of two parties from the random part that each sent to the other under encryption."""
    digest = hashlib.sha256(b"visard pair " + session.encode())
    for party in sorted(parts):
        digest.update(hashlib.sha256(party.encode()).digest() + parts[party])
    return digest.digest()
