"""Who calls: what is known of the registered keys, and whether a call from outside is that of a party.

A call is signed with its path, time, process and body. Calls for parts of messages have a MAC in place of the
signature, with a key that came in the signed call with which the party connected. Either counts once. Of two processes
with the same key, the one that connected last speaks for it. Several threads may ask.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, verify_signature

from visard.crypto.signatures import fingerprint, signed_by
from visard.deployment.flower import CALL_KEY, FLEET, MAC, PROCESS, SIGNED, VERSION, mac, statement
from visard.deployment.flower.part import Part
from visard.errors import PublicError
from visard.text import line

KEY, SIGNATURE, TIME = (
    h.encode() for h in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
)
REMEMBER = TIMESTAMP_TOLERANCE + 2 * SYSTEM_TIME_TOLERANCE  # seconds after which the age alone refuses a call
SAY_AGAIN = 60.0  # seconds between lines about the same trouble
Headers = Mapping[bytes, bytes]


class TurnedAway(Exception):
    """A call that is not served: the status of the answer, and why if the caller may know."""

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(status, why)
        self.status, self.why = status, why


class Callers:
    """Parties as their calls show them."""

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self._say, self._lock = say, threading.Lock()
        self._keys: dict[bytes, tuple[str, ec.EllipticCurvePublicKey, str]] = {}  # party, key, its fingerprint
        self._refusals: dict[str, str] = {}  # fingerprint of a known key -> why it is not taken
        self._processes: dict[str, bytes] = {}  # party -> its process
        self._call_keys: dict[str, str] = {}  # fingerprint of a party's key -> its key for MACs
        self._seen: dict[bytes, None] = {}  # digests of what calls say, each of which counts once
        self._ages: deque[tuple[float, bytes]] = deque()  # until when, in order
        self._said: dict[str, float] = {}  # what was said, and when to say it again
        self.heard: dict[str, tuple[float, str]] = {}  # party -> when it last called, and its version

    def admit(
        self, keys: Iterable[tuple[str, ec.EllipticCurvePublicKey]], refused: Mapping[str, str] | None = None
    ) -> None:
        """From now on these keys of parties are taken. The `refused` (fingerprint -> why) among them hear why not."""
        found = [(public_key_to_bytes(key), party, key) for party, key in keys]
        self._refusals = dict(refused or {})
        self._keys = {b64encode(data): (party, key, fingerprint(key)) for data, party, key in found}

    def signer(self, headers: Headers) -> tuple[str, str]:
        """The party that has signed a call, and the fingerprint of its key, before the body is read.

        That is Flower's signature, which is of the time alone; Flower also checks its age.
        """
        party, key, own = self._keys.get(headers.get(KEY, b""), ("", None, ""))
        try:
            signature = b64decode(headers.get(SIGNATURE, b""), validate=True)
        except ValueError:
            raise TurnedAway(401) from None
        if key is None or not verify_signature(key, headers.get(TIME, b""), signature):
            raise TurnedAway(401)
        self._check_taken(own)
        return party, own

    def check_process(self, party: str, headers: Headers) -> None:
        """Turn away the calls of a process if another one of its party has connected since."""
        process = headers.get(PROCESS.encode(), b"")
        if self._processes.get(party, process) != process:
            raise TurnedAway(409)

    def check_call(self, party: str, own: str, path: str, headers: Headers, body: bytes) -> None:
        """Turn away a call that was not signed as a whole, or came before."""
        said, process, call_key, signature = (_text(headers, name) for name in (TIME, PROCESS, CALL_KEY, SIGNED))
        signed = statement(path, said, f"{process} {call_key}".strip(), body)
        wrong = "is not signed with its path and body (another version, or changed on the way)"
        try:
            if signed_by(signed, bytes.fromhex(signature)) == own:
                wrong = "" if self._is_new(own, signed) else "came a second time"
            else:
                wrong = "is signed by another key"
        except (ValueError, PublicError):
            pass
        if wrong:
            self.tell(f"refused: a call of {party} to {path} {wrong}")
            raise TurnedAway(401, f"the call {wrong}")

    def connected(self, party: str, own: str, headers: Headers) -> None:
        """A process of a party has connected: from now on it speaks for the party."""
        self._processes[party] = headers.get(PROCESS.encode(), b"")
        self._call_keys[own] = _text(headers, CALL_KEY)

    def note(self, party: str, headers: Headers) -> None:
        """A party has called."""
        self.heard[party] = time.time(), line(_text(headers, VERSION), 40)

    def of_part(self, path: str, part: Part, headers: Headers) -> str:
        """The party of a call for a part. The path says what its body is, so all of the call is checked before it is
        read."""
        party, key, own = self._keys.get(headers.get(KEY, b""), ("", None, ""))
        self.check_process(party, headers)  # before the MAC, which cannot be checked any more
        if key is None or not _lately(headers.get(TIME, b"")):
            raise TurnedAway(401)
        said, process, call_key, code = (_text(headers, name) for name in (TIME, PROCESS, CALL_KEY, MAC))
        signed = statement(path, said, f"{process} {call_key}".strip(), b"", part.digest)
        known, wrong = self._call_keys.get(own), ""
        if not known or not code.isascii() or not hmac.compare_digest(mac(known, signed), code):
            wrong = "has no MAC with the key of its last connection"
        elif not self._is_new(own, signed):
            wrong = "came a second time"
        if wrong:
            self.tell(f"refused: a call with the key of {party} to {FLEET}part {wrong}")
            raise TurnedAway(401)
        self._check_taken(own)
        self.note(party, headers)
        return party

    def tell(self, text: str) -> None:
        """Say something, but not over and over."""
        now = time.monotonic()
        with self._lock:
            self._said = {said: until for said, until in self._said.items() if until > now}
            if text in self._said or len(self._said) >= 1000:
                return
            self._said[text] = now + SAY_AGAIN
        self._say(text)

    def _check_taken(self, own: str) -> None:
        if why := self._refusals.get(own):
            self.tell(f"refused: {why}")
            raise TurnedAway(403 if " was revoked " in why else 401, why)

    def _is_new(self, own: str, signed: bytes) -> bool:
        """Note what a call says; False if one said it before."""
        now = time.monotonic()
        said = hashlib.sha256(f"{own} ".encode() + signed).digest()  # a signature can be written in two ways
        with self._lock:
            while self._ages and self._ages[0][0] < now:
                self._seen.pop(self._ages.popleft()[1], None)
            if said in self._seen:
                return False
            self._seen[said] = None
            self._ages.append((now + REMEMBER, said))
        return True


def _text(headers: Headers, name: str | bytes) -> str:
    return headers.get(name.encode() if isinstance(name, str) else name, b"").decode("latin-1")


def _lately(said: bytes) -> bool:
    """Whether a call was signed a short time ago, as Flower has it."""
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(said.decode("ascii"))).total_seconds()
    except (ValueError, TypeError):
        return False
    return -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
