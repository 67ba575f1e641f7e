"""What the server does with sealed messages: hand them on. It can neither read nor alter them."""

from __future__ import annotations

from collections.abc import Mapping

from visard.crypto.session import EVERYONE, Letters


def deliver(sent: Mapping[str, tuple[Letters, Letters]]) -> dict[str, Letters]:
    """receiver -> sender -> message with its tag, from what each sender posted (messages, tags)."""
    post: dict[str, Letters] = {}
    for sender, (letters, tags) in sent.items():
        for receiver, tag in tags.items():
            body = letters.get(receiver, letters.get(EVERYONE, b""))
            post.setdefault(receiver, {})[sender] = body + tag
    return post
