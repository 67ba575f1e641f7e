"""What the server does with sealed messages: hand them on, or add ciphertexts up. It can read none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from visard.crypto import envelope, residues
from visard.crypto.envelope import Binding
from visard.crypto.paillier import PublicKey
from visard.crypto.session import EVERYONE, SUM, Letters, Scheme


def deliver(sent: Mapping[str, tuple[Letters, Letters]]) -> dict[str, Letters]:
    """receiver -> sender -> message with its tag, from what each sender posted (messages, tags)."""
    post: dict[str, Letters] = {}
    for sender, (letters, tags) in sent.items():
        for receiver, tag in tags.items():
            body = letters.get(receiver, letters.get(EVERYONE, b""))
            post.setdefault(receiver, {})[sender] = body + tag
    return post


def add_up(
    sent: Mapping[str, tuple[Letters, Letters]], hellos: Mapping[str, bytes], receiver: str, exchange: int, kind: str,
    senders: Sequence[str], bits: int, count: int, scheme: Scheme = "paillier",
) -> bytes:  # fmt: skip
    """One message with the sums of what `senders` posted to `receiver`: it learns the sum and no part of it."""
    key = PublicKey(int.from_bytes(hellos[receiver][: bits // 8], "big"), bits)
    place = Binding(envelope.session_of(hellos), exchange, kind, SUM, key.fingerprint())
    if scheme == "ckks":
        length = residues.size(2, residues.ANSWER)
        opened = [envelope.unseal_parts(sent[s][0][receiver], replace(place, sender=s), length, count) for s in senders]
        what = f"{kind} to {receiver}"
        parts = [residues.add(group, 2, residues.ANSWER, what) for group in zip(*opened, strict=True)]
        return envelope.seal_parts(place, parts, length)
    total = [1] * count
    for sender in senders:
        received = envelope.unseal(sent[sender][0][receiver], replace(place, sender=sender), key, count)
        total = [key.add(c, d) for c, d in zip(total, received, strict=True)]
    return envelope.seal(place, key, total)
