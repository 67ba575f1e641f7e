"""What the server does with sealed messages: hand them on, or add ciphertexts up. It can read none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from visard.crypto import envelope
from visard.crypto.envelope import Binding
from visard.crypto.paillier import PublicKey
from visard.crypto.session import EVERYONE, NONCE, SUM, Letters


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
    senders: Sequence[str], bits: int, count: int,
) -> bytes:  # fmt: skip
    """One message with the sums of what `senders` posted to `receiver`: it learns the sum and no part of it."""
    key = PublicKey(int.from_bytes(hellos[receiver][:-NONCE], "big"), bits)
    place = Binding(envelope.session_of(hellos), exchange, kind, SUM, key.fingerprint())
    total = [1] * count
    for sender in senders:
        expected = Binding(place.session, exchange, kind, sender, place.key)
        total = [
            key.add(c, d)
            for c, d in zip(total, envelope.unseal(sent[sender][0][receiver], expected, key, count), strict=True)
        ]
    return envelope.seal(place, key, total)
