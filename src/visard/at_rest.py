"""Encryption at rest: only the holder of a key file can read such files, or change them unnoticed.

A file is AES-256-GCM in chunks. Each file has its own key: HKDF-SHA256 of the key file, a random salt and what the file
is (a gallery with this name, the state of this client); the nonce of a chunk is its number and whether it is the last.
So no chunk can be changed, moved, left out, repeated or taken from another file, and no file can replace another. This
is the construction STREAM (Hoang, Reyhanitabar, Rogaway and Vizar, 2015) with one key for each file, as in Tink and
age. It does not notice a file that is replaced by an earlier version of itself.

    MAGIC, id of the key (8 bytes), salt (32 bytes), chunks of at most CHUNK bytes with a tag of 16 each
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from visard.errors import UsageError, VisardError
from visard.files import PRIVATE, open_file, write_durably

MAGIC = b"visard encrypted 1\n"
ID, SALT, TAG = 8, 32, 16  # bytes
HEAD = len(MAGIC) + ID + SALT
CHUNK = 1 << 20
KEY = 32  # bytes of a key file
OPTION = "--encrypt-with KEYFILE"


class Key:
    """A key file: 32 random bytes that no other account can read."""

    def __init__(self, secret: bytes, path: Path) -> None:
        self._secret, self.path = secret, path
        self.id = self._derive(b"id", b"", ID)

    @classmethod
    def make(cls, path: Path) -> Key:
        """A new key file; an existing one is never overwritten."""
        try:
            write_durably(path, secret := secrets.token_bytes(KEY), PRIVATE, new=True)
        except FileExistsError:
            raise UsageError(f"{path} exists already: a key is never overwritten") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        return cls(secret, path)

    @classmethod
    def load(cls, path: str | Path | None) -> Key | None:
        """The key in a file; None where no file is named. A key that others can read is refused."""
        if path is None:
            return None
        path = Path(path).absolute()
        try:
            with open_file(path) as file:
                about = os.fstat(file.fileno())
                secret = file.read(KEY + 1)
        except OSError as error:
            raise UsageError(f"the key {path} cannot be read: {error.strerror}") from None
        if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(about.st_mode)
            raise UsageError(f"the key {path} can be read by others (mode {mode:o}): chmod 600 it")
        if len(secret) != KEY:
            raise UsageError(f"{path} is no key: visard keys file --out {path.name} makes one")
        return cls(secret, path)

    def encrypt(self, data: bytes, what: str) -> bytes:
        """An encrypted file of `data`; decryption needs the same `what`."""
        return b"".join(self.chunks(data, what))

    def chunks(self, data: bytes, what: str) -> Iterator[bytes]:
        """The same in chunks, so that large data is in memory only once."""
        salt = secrets.token_bytes(SALT)
        yield MAGIC + self.id + salt
        cipher, view = self._cipher(salt, what), memoryview(data)
        count = _count(len(view), CHUNK)
        for number in range(count):
            part = view[number * CHUNK : (number + 1) * CHUNK]
            yield cipher.encrypt(_nonce(number, number == count - 1), part, None)

    def decrypt(self, file: BinaryIO, what: str, where: Path | str) -> bytearray:
        """The content of an encrypted file; `where` it is, for messages. Nothing is written anywhere."""
        stored = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(HEAD)
        check_key(self, head[len(MAGIC) :][:ID].hex() if head.startswith(MAGIC) else "", where)
        count = _count(stored - HEAD, CHUNK + TAG)
        content = bytearray(max(0, stored - HEAD - count * TAG))
        cipher, view = self._cipher(head[-SALT:], what), memoryview(content)
        try:
            for number in range(count):
                part = cipher.decrypt(_nonce(number, number == count - 1), file.read(CHUNK + TAG), None)
                view[number * CHUNK : number * CHUNK + len(part)] = part
        except InvalidTag:
            raise VisardError(f"{where} was changed, cut short or given another name since it was encrypted") from None
        return content

    def digest(self, data: bytes) -> str:
        """A keyed digest: it takes the key to compute it, or to test guesses of the data."""
        return hmac.new(self._derive(b"digest", b"", 32), data, hashlib.sha256).hexdigest()

    def _cipher(self, salt: bytes, what: str) -> AESGCM:
        return AESGCM(self._derive(b"file " + what.encode("utf-8", "surrogateescape"), salt, 32))

    def _derive(self, purpose: bytes, salt: bytes, length: int) -> bytes:
        return HKDF(SHA256(), length, salt, b"visard " + purpose).derive(self._secret)


def _count(size: int, each: int) -> int:
    """How many chunks hold so many bytes: at least one, which is marked as the last."""
    return max(1, -(-size // each))


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def is_encrypted(path: Path) -> bool:
    """Whether a file begins like an encrypted one."""
    with open_file(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def check_key(key: Key | None, identity: str, where: Path | str) -> None:
    """Refuse another key than the one with this `identity` ("": not encrypted), with one clear line."""
    if identity and key is None:
        raise UsageError(f"{where} is encrypted: give its key ({OPTION})")
    if key is not None and not identity:
        raise VisardError(f"{where} is not encrypted, although a key is given ({OPTION})")
    if key is not None and identity != key.id.hex():
        raise VisardError(f"{where} is encrypted with another key than {key.path}")


def refuse_encrypted(path: Path) -> None:
    """One clear line where a key is needed and none is given."""
    if is_encrypted(path):
        raise UsageError(f"{path} is encrypted: give its key ({OPTION})")


def decrypt(key: Key, data: bytes, what: str, where: Path | str) -> bytes:
    """The content of an encrypted file that is in memory."""
    return bytes(key.decrypt(io.BytesIO(data), what, where))
