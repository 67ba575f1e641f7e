"""Private keys as files that only their owner can read."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

from visard.crypto.gmp import gmp
from visard.crypto.paillier import PrivateKey, PublicKey, generate
from visard.errors import UsageError, VisardError

FORMAT = "visard paillier key 1"


def save_key(path: Path, key: PrivateKey) -> None:
    """Write a new key file with mode 600; an existing one is never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists already: a key is never overwritten") from None
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(handle, "wb") as f:
        f.write(key_to_bytes(key))
        f.flush()
        os.fsync(f.fileno())


def load_key(path: Path, bits: int, *, trusted: bool = False) -> PrivateKey:
    """Read a key file; refused if others can read it, if it is damaged or of another size."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"{path} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 it")
    try:
        return key_from_bytes(data, bits, trusted=trusted)
    except VisardError as error:
        raise UsageError(f"{path}: {error}") from None


def load_or_make(path: Path, bits: int, *, insecure: bool = False) -> PrivateKey:
    """The key in `path`, made on first use."""
    if not path.exists():
        key = generate(bits, insecure=insecure)
        with contextlib.suppress(UsageError):  # another process may have been faster
            save_key(path, key)
    return load_key(path, bits)


def key_to_bytes(key: PrivateKey) -> bytes:
    content = {"format": FORMAT, "bits": key.public.bits, "p": f"{int(key.p):x}", "q": f"{int(key.q):x}"}
    return json.dumps(content).encode()


def key_from_bytes(data: bytes, bits: int, *, trusted: bool = False) -> PrivateKey:
    """The key in `data`; one clear line if it is none or not of `bits` bits.

    `trusted`: of the party itself, whose primes were tested before: every step would test them again.
    """
    try:
        content = json.loads(data)
        if content["format"] != FORMAT:
            raise ValueError(content["format"])
        p, q = int(content["p"], 16), int(content["q"], 16)
    except (ValueError, KeyError, TypeError):
        raise VisardError("is not a key file of visard") from None
    if (p * q).bit_length() != bits:
        raise VisardError(f"holds a key of {(p * q).bit_length()} bits, not {bits}")
    if trusted:
        return PrivateKey(p, q, PublicKey(p * q, bits))
    if not (gmp.is_prime(p) and gmp.is_prime(q)):
        raise VisardError("holds a damaged key")
    return PrivateKey(p, q, PublicKey.from_bytes((p * q).to_bytes(bits // 8, "big"), bits))
