"""Flower as the way to the clients: the only package that imports flwr, which is pinned because parts are private API.

`link` carries requests over a Flower grid, `simulation` runs the clients on Flower's Ray backend, `server` and
`driver` are the server's side of a deployment, `client` is a party's side.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from importlib import metadata

from visard.errors import UsageError

PINNED = "1.41.0"
FLEET = "/v1/fleet/"  # before the paths of calls from outside
PROCESS = "visard-process"  # header of a party's calls: a number that each of its processes draws when it starts
SIGNED = "visard-signature"  # another one: the party's signature of path, time, process and body
CALL_KEY = "visard-call-key"  # of the call with which a party connects: its key for MACs of calls for parts
MAC = "visard-mac"  # of a call for a part, in place of the signature
VERSION = "visard-version"  # and the version of visard at the party
REFUSAL = "visard-refusal"  # header of an answer: why a registered key is not taken

# Flower reads these when it is imported: nothing phones home and nothing is installed at run time.
SILENCE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_LOG_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
os.environ.update(SILENCE)


def statement(path: str, time: str, process: str, body: bytes, digest: str = "") -> bytes:
    """What a party signs of a call, by the `digest` of its body where that is known. Flower's own signature is of the
    time alone."""
    return f"visard call\n{path}\n{time}\n{process}\n{digest or hashlib.sha256(body).hexdigest()}".encode()


def mac(call_key: str, said: bytes) -> str:
    """What stands for the signature of a call for a part: of these there are many, and a signature costs a millisecond
    at both ends. The key came in a call that was signed, over TLS."""
    return hmac.digest(call_key.encode(), said, "sha256").hex()


def require() -> None:
    """One clear line where Flower is missing or another version."""
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise UsageError("this needs Flower: pip install 'visard[flower]'") from None
    if found != PINNED:
        raise UsageError(f"this needs Flower {PINNED}, not {found}: pip install 'visard[flower]'")
