"""A party proves its key in the first packet, by a signature in the ClientHello that opens a TLS connection.

So the server can tell its parties from unknown connections before it spends memory or time on them. The signature is
one more name in the list of protocols (ALPN, RFC 7301), which TLS itself ignores. It does not replace authentication:
every call over the connection is signed too. A connection without it is also served, within the limits for unknown
ones.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

MARK = b"visard-1."  # how the protocol name of a proof begins
PARTS = "visard-parts"  # the protocol of a connection that carries parts of messages alone
SIGNED = b"visard: a party asks to be let in\n"
ALGORITHM = ec.ECDSA(hashes.SHA256())
AHEAD, OLD = 5.0, 300.0  # seconds that the clocks may differ, as for the signatures of calls
USES = 4  # of one proof: connections that a party opens at the same moment may share it
HEADER = 5  # bytes of a TLS record's header
LONGEST = HEADER + 2**14  # bytes of a TLS record


def party_context(ca: Path, key: ec.EllipticCurvePrivateKey) -> ssl.SSLContext:
    """The TLS context of a party, for a server whose certificate `ca` has signed."""
    context = _Context(ssl.PROTOCOL_TLS_CLIENT)
    context.key = key
    context.load_verify_locations(str(ca))
    return context


class _Context(ssl.SSLContext):
    """Adds a fresh proof to the protocols, which httpx sets for each connection."""

    key: ec.EllipticCurvePrivateKey

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        super().set_alpn_protocols([*alpn_protocols, proof(self.key, time.time())])


def proof(key: ec.EllipticCurvePrivateKey, now: float) -> str:
    """A proof: the id of the key, the time, and the signature of both."""
    said = _short(key.public_key()) + int(now * 1e6).to_bytes(8, "big")
    return MARK.decode() + urlsafe_b64encode(said + key.sign(SIGNED + said, ALGORITHM)).decode()


class Proofs:
    """Checks the proofs of the registered parties; each is valid only a few times, so eavesdropping gains little."""

    def __init__(self, keys: Iterable[tuple[str, ec.EllipticCurvePublicKey]]) -> None:
        self.admit(keys)
        self._seen: dict[
            bytes, tuple[float, int]
        ] = {}  # content of a proof -> until when it is valid, and how often it was used

    def admit(self, keys: Iterable[tuple[str, ec.EllipticCurvePublicKey]]) -> None:
        """From now on only these keys of parties are valid."""
        self._keys = {_short(key): (party, key) for party, key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def party(self, hello: bytes, now: float) -> str | None:
        """Whose proof a ClientHello holds, or None."""
        named = next((name for name in alpn_names(hello) if name.startswith(MARK)), None)
        if named is None:
            return None
        try:
            data = urlsafe_b64decode(named[len(MARK) :])
        except ValueError:
            return None
        said, signature = data[:16], data[16:]
        at = int.from_bytes(said[8:], "big") / 1e6
        until, uses = self._seen.get(said, (now + OLD + AHEAD, 0))
        if said[:8] not in self._keys or not -OLD < at - now < AHEAD or uses >= USES:
            return None
        party, key = self._keys[said[:8]]
        try:
            key.verify(signature, SIGNED + said, ALGORITHM)
        except InvalidSignature:
            return None
        while self._seen and next(iter(self._seen.values()))[0] < now:
            del self._seen[next(iter(self._seen))]
        self._seen[said] = until, uses + 1
        return party


def _short(key: ec.EllipticCurvePublicKey) -> bytes:
    """The id of a key: eight bytes."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()[:8]


def bytes_needed(data: bytes) -> int | None:
    """How many bytes it takes to read a ClientHello that begins with `data`; None if it does not begin like one."""
    if len(data) < HEADER:
        return HEADER if b"\x16\x03".startswith(data[:2]) else None
    length = int.from_bytes(data[3:5], "big")
    return HEADER + length if data[:2] == b"\x16\x03" and 4 <= length <= 2**14 else None


def alpn_names(hello: bytes) -> list[bytes]:
    """The names in the list of protocols of a ClientHello; none if it has no such list or is malformed (RFC 8446)."""
    try:
        message = _Reader(hello[HEADER:])
        if message.number(1) != 1:  # client_hello
            return []
        body = _Reader(message.block(3))
        body.take(2 + 32)  # version, random
        body.block(1)  # session
        body.block(2)  # cipher suites
        body.block(1)  # compression
        extensions = _Reader(body.block(2))
        while extensions.left:
            kind, data = extensions.number(2), extensions.block(2)
            if kind == 16:  # application_layer_protocol_negotiation
                names = _Reader(_Reader(data).block(2))
                found = []
                while names.left:
                    found.append(names.block(1))
                return found
    except EOFError:
        pass
    return []


class _Reader:
    """Reads numbers and blocks from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise EOFError
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def block(self, width: int) -> bytes:
        """A block: its length, then so many bytes."""
        return self.take(self.number(width))
