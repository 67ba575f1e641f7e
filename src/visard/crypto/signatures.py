"""Signatures with the keys of parties: ECDSA on P-384 with SHA-384, of fixed length, with the public key beside it.

A party knows another one by the fingerprint of its key: SHA-256 of the public key in DER form, 64 hexadecimal digits.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from visard.errors import PublicError

CURVE = ec.SECP384R1()
HASH = ec.ECDSA(hashes.SHA384())
POINT, NUMBER = 97, 48  # bytes of a public key, and of each of the two numbers of a signature
ORDER = int(
    "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973", 16
)  # of the curve's group


class Signer:
    """Signs statements with the key of a party."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._point = key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )
        self.fingerprint = fingerprint(key.public_key())

    @classmethod
    def of_secret(cls, secret: bytes) -> Signer:
        """With a key that comes from 32 bytes: of a client in a simulation."""
        number = int.from_bytes(hashlib.sha512(b"visard signing key" + secret).digest(), "big") % (ORDER - 1) + 1
        return cls(ec.derive_private_key(number, CURVE))

    def __call__(self, statement: bytes) -> bytes:
        """The signature of a statement."""
        r, s = decode_dss_signature(self._key.sign(statement, HASH))
        return self._point + r.to_bytes(NUMBER, "big") + s.to_bytes(NUMBER, "big")


def signed_by(statement: bytes, signature: bytes) -> str:
    """The fingerprint of the key that has signed a statement."""
    try:
        if len(signature) != POINT + 2 * NUMBER:
            raise ValueError("wrong length")
        key = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, signature[:POINT])
        r, s = (int.from_bytes(part, "big") for part in (signature[POINT:-NUMBER], signature[-NUMBER:]))
        key.verify(encode_dss_signature(r, s), statement, HASH)
    except (ValueError, InvalidSignature):
        raise PublicError("a signature is not one of what it stands beside") from None
    return fingerprint(key)


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()
