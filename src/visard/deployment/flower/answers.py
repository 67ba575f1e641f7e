"""What a party takes of a server's answers: so many bytes, not packed, and from that server alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import httpx

MOST = 2**26  # bytes of an answer; a part of a message has 5 MB


class BadAnswer(httpx.HTTPError):
    """An answer that no server of ours gives."""


class _Counted(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        taken = 0
        for piece in self._stream:
            taken += len(piece)
            if taken > MOST:
                raise BadAnswer(f"an answer of the server is longer than {MOST} bytes")
            yield piece

    def close(self) -> None:
        self._stream.close()


class _Bounded(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._inner.handle_request(request)
        packed = answer.headers.get("content-encoding", "identity")
        if packed != "identity":  # a few bytes could become any number
            answer.close()
            raise BadAnswer("an answer of the server is packed")
        answer.stream = _Counted(cast(httpx.SyncByteStream, answer.stream))
        return answer

    def close(self) -> None:
        self._inner.close()


def bound(client: httpx.Client) -> None:
    """Bound what a client takes. It follows no redirect: a server could send a party's calls anywhere."""
    client.follow_redirects = False
    client._transport = _Bounded(client._transport)
    client._mounts = {pattern: inner and _Bounded(inner) for pattern, inner in client._mounts.items()}
