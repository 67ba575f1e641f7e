"""Sealed messages between two clients that a server relays, and one client's end of a run: its key, the others' keys,
a secret with each of them, and what it expects next.

    header length u32 | header (JSON) | ciphertexts of fixed length | tag of 32 bytes

The header binds ciphertexts to a session, an exchange, a direction and a key. The receiver states what it expects and
refuses anything else, so a message of another batch, direction or run is not accepted again. The tag is an HMAC with a
secret of the two clients, so that the server can neither alter nor mix messages.

What only one other client may read, such as a classifier, is encrypted for it too (`conceal`): ChaCha20-Poly1305 under
a key that HKDF derives from the secret of the two.

How clients meet: each sends a hello (public keys, the certificate of its modulus, a nonce); each checks all hellos and
sends every peer a random part of their common secret under the peer's key (`introduce`); each puts the parts together
(`settle`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from visard.crypto import ckks, packed
from visard.crypto.modulus import certificate_bytes, certify, check_certificate
from visard.crypto.packed import Seeds
from visard.crypto.paillier import PrivateKey, PublicKey, generate, key_from_bytes, key_to_bytes, load_key, load_or_make
from visard.errors import VisardError
from visard.files import safe_name

TAG = 32
NONCE = 16
PART = 31  # bytes of each client's part of a common secret
AEAD_NONCE, AEAD_TAG = 12, 16  # bytes around the concealed data
EVERYONE = "*"
Letters = dict[str, bytes]  # receiver, or EVERYONE, -> message; or sender -> received message
SealedMail = tuple[Letters, Letters]  # messages, and tags by receiver
Scheme = Literal["paillier", "ckks"]
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Binding:
    """The identity of a message: run, exchange of batches, content, sender and key."""

    session: str
    exchange: int
    kind: str
    sender: str
    key: str  # fingerprint of the public key


def seal(binding: Binding, parts: Sequence[bytes], length: int) -> bytes:
    """A message without its tag, of ciphertexts or numbers of `length` bytes each."""
    header = json.dumps(asdict(binding) | {"count": len(parts), "length": length}, sort_keys=True).encode()
    return _LENGTH.pack(len(header)) + header + b"".join(parts)


def unseal(data: bytes, expected: Binding, length: int, count: int) -> list[bytes]:
    """The parts of a message without its tag, if it is the expected one; what is in them is not checked here."""
    where = f"{expected.kind} from {expected.sender}"
    try:
        (size,) = _LENGTH.unpack_from(data)
        header, body = json.loads(data[_LENGTH.size : _LENGTH.size + size]), data[_LENGTH.size + size :]
        if not isinstance(header, dict):
            raise ValueError
    except (struct.error, ValueError, RecursionError):
        raise VisardError(f"{where}: is not a sealed message") from None
    for name, value in (asdict(expected) | {"count": count, "length": length}).items():
        if header.get(name) != value:
            raise VisardError(f"{where}: its {name} is {header.get(name)!r}, expected {value!r}")
    if len(body) != count * length:
        raise VisardError(f"{where}: {len(body)} bytes, expected {count * length}")
    return [body[i : i + length] for i in range(0, len(body), length)]


def make_tag(secret: bytes, data: bytes) -> bytes:
    """The seal of a message between two clients."""
    return hmac.new(secret, data, hashlib.sha256).digest()


def check_tag(secret: bytes, data: bytes, where: str) -> bytes:
    """The message without its tag, if the tag is right."""
    body, end = data[:-TAG], data[-TAG:]
    if not hmac.compare_digest(make_tag(secret, body), end):
        raise VisardError(f"{where}: its seal is broken")
    return body


def deliver(sent: Mapping[str, SealedMail]) -> dict[str, Letters]:
    """receiver -> sender -> message with its tag: all that the server does with what each sender posted."""
    post: dict[str, Letters] = {}
    for sender, (letters, tags) in sent.items():
        for receiver, tag in tags.items():
            body = letters.get(receiver, letters.get(EVERYONE, b""))
            post.setdefault(receiver, {})[sender] = body + tag
    return post


@dataclass(frozen=True)
class Lattice:
    """A client's CKKS keys and everyone's public ones; they came with the hellos, so the session's name binds them."""

    private: ckks.PrivateKey
    keys: dict[str, ckks.PublicKey]

    def to_state(self) -> dict[str, Any]:
        block = next(iter(self.keys.values())).block
        return {"private": self.private.data, "keys": {w: k.data for w, k in self.keys.items()}, "block": block}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Lattice:
        keys = {who: ckks.PublicKey(state["block"], data) for who, data in state["keys"].items()}
        return cls(ckks.PrivateKey(state["private"]), keys)


@dataclass(frozen=True)
class Session:
    """One client's end of a run; lives in its state between steps."""

    me: str
    private: PrivateKey
    keys: dict[str, PublicKey]  # of everyone
    name: str  # the same at all clients
    secrets: dict[str, bytes]
    exchange: int = 0
    lattice: Lattice | None = None  # keys for CKKS, where it carries the features
    file: str = ""  # of the private key; "" = it is in the client's state

    def seal(self, kind: str, owner: str, parts: Sequence[bytes], length: int, to: Sequence[str]) -> SealedMail:
        """One message under `owner`'s key for one or more receivers, and the tag for each."""
        body = seal(self._binding(kind, self.me, owner), parts, length)
        letters = {to[0]: body} if len(to) == 1 else {EVERYONE: body}
        return letters, {other: make_tag(self.secrets[other], body) for other in to}

    def open(self, kind: str, sender: str, owner: str, data: bytes, length: int, count: int) -> list[bytes]:
        """The parts of a received message under `owner`'s key, if it is the expected one."""
        if sender not in self.secrets:
            raise VisardError(f"{kind} from {sender}, who is not in this session")
        body = check_tag(self.secrets[sender], data, f"{kind} from {sender}")
        return unseal(body, self._binding(kind, sender, owner), length, count)

    def conceal(self, kind: str, data: bytes, to: str) -> SealedMail:
        """A message that `to` alone can read."""
        nonce = secrets.token_bytes(AEAD_NONCE)
        place = self._place(kind, self.me, to)
        box = nonce + _aead(self.secrets[to], place).encrypt(nonce, data, place)
        return self.seal(kind, to, [box], len(box), [to])

    def reveal(self, kind: str, sender: str, data: bytes, size: int) -> bytes:
        """The `size` bytes that `sender` concealed for this client."""
        (box,) = self.open(kind, sender, self.me, data, AEAD_NONCE + size + AEAD_TAG, 1)
        place = self._place(kind, sender, self.me)
        try:
            return bytes(_aead(self.secrets[sender], place).decrypt(box[:AEAD_NONCE], box[AEAD_NONCE:], place))
        except InvalidTag:
            raise VisardError(f"{kind} from {sender}: was not encrypted for this client") from None

    def masks(self, owner: str, fellows: Sequence[str], about: bytes) -> Seeds:
        """For an answer to `owner` in this exchange, which the fellows answer too; `about` is what they all answer."""
        if unknown := sorted(set(fellows) - set(self.secrets)):
            raise VisardError(f"answer to {owner}: {unknown[0]} is not in this session")
        return packed.mask_seeds(self.me, {f: self.secrets[f] for f in fellows}, self._place("mask", "", owner) + about)

    def noise_key(self, batch: int, features: Tensor) -> bytes:
        """For the noise on an answer about these features: a secret of this client, the same when asked again."""
        digest = hashlib.sha256(features.detach().contiguous().numpy().tobytes()).digest()
        about = f"visard noise {self.name} {self.exchange} {batch} ".encode() + digest
        return hmac.new(key_to_bytes(self.private), about, hashlib.sha256).digest()

    def next(self) -> Session:
        """The next exchange: messages of this one are not accepted again."""
        return replace(self, exchange=self.exchange + 1)

    def _binding(self, kind: str, sender: str, owner: str) -> Binding:
        return Binding(self.name, self.exchange, kind, sender, self.keys[owner].fingerprint())

    def _place(self, kind: str, sender: str, owner: str) -> bytes:
        """A binding as bytes."""
        return json.dumps(asdict(self._binding(kind, sender, owner)), sort_keys=True).encode()

    def to_state(self) -> dict[str, Any]:
        keys = {who: k.to_bytes() for who, k in self.keys.items()}
        state = {"me": self.me, "private": self.file or key_to_bytes(self.private), "keys": keys, "name": self.name,
                 "secrets": self.secrets, "exchange": self.exchange, "bits": self.private.public.bits}  # fmt: skip
        return state | ({"lattice": self.lattice.to_state()} if self.lattice else {})

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Session:
        private, file = _private(state, state["bits"])
        keys = _public(state, state["bits"])
        if keys[state["me"]] != private.public:
            raise VisardError("the key file of this client is not the one that the session began with")
        lattice = Lattice.from_state(state["lattice"]) if "lattice" in state else None
        return cls(state["me"], private, keys, state["name"], state["secrets"], state["exchange"], lattice, file)


def _aead(secret: bytes, place: bytes) -> ChaCha20Poly1305:
    """The cipher between two clients for one place of one message."""
    key = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"visard concealed " + place).derive(secret)
    return ChaCha20Poly1305(key)


def hello(me: str, folder: str, bits: int, insecure: bool, block: int = 0) -> tuple[bytes, dict[str, Any]]:
    """A client's hello, and its state for the next step.

    The hello is its public key with the certificate of its modulus, with a block of slots also a new key for CKKS, and
    a nonce.
    """
    if folder:
        path = Path(folder).expanduser().absolute() / f"{safe_name(me)}.key"
        private = load_or_make(path, bits, insecure=insecure)
        kept: dict[str, Any] = {"private": str(path)}
    else:
        private = generate(bits, insecure=insecure)
        kept = {"private": key_to_bytes(private)}
    words = private.public.to_bytes() + certify(private)
    if block:
        secret, public = ckks.generate(block)
        words, kept = words + public.data, kept | {"lattice": secret.data, "words": public.data}
    return words + secrets.token_bytes(NONCE), kept


def introduce(
    me: str,
    kept: Mapping[str, Any],
    hellos: Mapping[str, bytes],
    bits: int,
    peers: Sequence[str],
    pins: Mapping[str, str],
    block: int = 0,
) -> tuple[Letters, dict[str, Any]]:
    """Check everyone's key and send each peer a random part of the common secret under its key."""
    size = bits // 8
    certified = size + certificate_bytes(bits)
    rests = {who: data[certified:-NONCE] for who, data in hellos.items()}
    keys = {who: PublicKey.from_bytes(data[:size], bits) for who, data in hellos.items()}
    private, _ = _private(kept, bits)
    if me not in keys or keys[me] != private.public or rests[me] != kept.get("words", b""):
        raise VisardError("the server relayed another key as this client's own")
    if len({int(k.n) for k in keys.values()}) != len(keys):
        raise VisardError("two clients have the same public key")
    for who, pin in pins.items():
        if who in keys and keys[who].fingerprint() != pin:
            raise VisardError(f"the key of {who} has the fingerprint {keys[who].fingerprint()}, pinned is {pin}")
    for who, key in keys.items():
        if who != me:
            check_certificate(key, hellos[who][size:certified], f"the key of {who}")
    for who, rest in rests.items():
        if block:
            ckks.PublicKey(block, rest).check(f"the CKKS key of {who}")
        elif rest:
            raise VisardError(f"the hello of {who} is {len(rest)} bytes too long")
    parts, name = {peer: secrets.token_bytes(PART) for peer in peers}, session_of(hellos)
    letters = {p: _part(keys[p], name, me, p, part).to_bytes(keys[p].cipher_bytes, "big") for p, part in parts.items()}
    more = {"keys": {w: k.to_bytes() for w, k in keys.items()}, "rests": rests, "block": block}
    return letters, dict(kept) | {"parts": parts, "name": name} | more


def settle(me: str, kept: Mapping[str, Any], received: Mapping[str, bytes], bits: int) -> Session:
    """The session, once each peer's part has come."""
    private, file = _private(kept, bits)
    common = {}
    for peer, part in kept["parts"].items():
        if len(received.get(peer, b"")) != private.public.cipher_bytes:
            raise VisardError(f"no secret came from {peer}")
        cipher = int.from_bytes(received[peer], "big")
        private.public.check([cipher])
        number = private.decrypt(cipher)
        theirs = (number if 0 <= number < 1 << 8 * PART else 0).to_bytes(PART, "big")
        if _part(private.public, kept["name"], peer, me, theirs) != cipher:
            raise VisardError(f"the secret of {peer} is not one that it sent")
        common[peer] = pair_secret(kept["name"], {me: part, peer: theirs})
    lattice = None
    if kept.get("block"):
        lattice = Lattice.from_state({"private": kept["lattice"], "keys": kept["rests"], "block": kept["block"]})
    return Session(me, private, _public(kept, bits), kept["name"], common, lattice=lattice, file=file)


def session_of(hellos: Mapping[str, bytes]) -> str:
    """The name of a session, which all clients compute from all keys and nonces."""
    digest = hashlib.sha256()
    for who in sorted(hellos):
        for part in (who.encode(), hellos[who]):
            digest.update(_LENGTH.pack(len(part)) + part)
    return digest.hexdigest()[:32]


def pair_secret(session: str, parts: Mapping[str, bytes]) -> bytes:
    """The secret of two clients from the random part that each sent to the other under encryption."""
    digest = hashlib.sha256(b"visard pair " + session.encode())
    for who in sorted(parts):
        digest.update(hashlib.sha256(who.encode()).digest() + parts[who])
    return digest.digest()


def _part(key: PublicKey, name: str, sender: str, receiver: str, part: bytes) -> int:
    """A part of a common secret under the receiver's key, with randomness that follows from it.

    The receiver makes it again (Fujisaki and Okamoto 1999): a ciphertext that was computed from others is refused
    whatever is in it, so that this first decryption, before anything is sealed, answers no questions.
    """
    seed = json.dumps([name, sender, receiver, part.hex()]).encode()
    return key.encrypt_from(int.from_bytes(part, "big"), seed)


def _private(kept: Mapping[str, Any], bits: int) -> tuple[PrivateKey, str]:
    """The own key and, where the state names its file instead of holding it, that file."""
    if isinstance(kept["private"], str):
        return load_key(Path(kept["private"]), bits, trusted=True), kept["private"]
    return key_from_bytes(kept["private"], bits, trusted=True), ""


def _public(kept: Mapping[str, Any], bits: int) -> dict[str, PublicKey]:
    """Everyone's keys, which were checked when they came."""
    return {who: PublicKey(int.from_bytes(k, "big"), bits) for who, k in kept["keys"].items()}
