"""A party's ledger: a record of every reply that it sent, with its fields, its exact size and its digest.

It is a chain of lines in the party's state folder, `ledger-000001.jsonl` and so on (see `engines.records`), which only
the party's account can read. A record is durable before the reply leaves. The next record says what became
of the reply, as `before`: `delivered` (the server's machine has received it), `not taken` (it was turned away before
its content was sent), or `unknown` (the connection broke, or this process was stopped in between).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from visard.engines.records import Records, digest_of
from visard.engines.request import Reply, Request, WireError, unpack
from visard.processes import Data, Filed

NAME = "ledger"  # of the files
DELIVERED, NOT_TAKEN, UNKNOWN = "delivered", "not taken", "unknown"
LONGEST = 300  # characters of text from a request: a server must not fill the party's disk


class PartyLedger:
    """Writes the ledger; `carried` gives the worker's description of the current reply: its type and its parts."""

    def __init__(self, state: Path, server: str, node: str, carried: Callable[[], bytes]) -> None:
        self._records, self._carried = Records(state, NAME), carried
        self._before = UNKNOWN
        self._records.append("begin", time=_now(), server=server, node=node, before=self._before)

    def record(self, request: bytes, header: bytes, payload: Data | Filed, names: Sequence[str] = ()) -> None:
        """Put the reply to a request on record, durably; it may leave when this returns. `names` are of its parts."""
        try:
            asked = unpack(request, Request)
        except WireError:
            asked = Request()
        reply, carried = unpack(header, Reply), self._carried()
        what: dict[str, Any] = {"message": "", "parts": []} | (json.loads(carried) if carried and payload else {})
        if not asked.client:
            what["clients"] = list(reply.roles)
        if reply.failure is not None:
            what["reason"] = reply.failure[:LONGEST]
        place = {name: getattr(asked, name)[:LONGEST] for name in ("run", "session", "client", "stage")}
        self._records.append(
            "reply", time=_now(), before=self._before, **place, round=asked.round, ask=asked.ask, header=len(header),
            payload=len(payload), digest=digest_of(header, payload, names), **what,
        )  # fmt: skip
        self._before = UNKNOWN

    def after(self, taken: bool) -> None:
        """Note whether the server received the last reply or turned it away."""
        self._before = DELIVERED if taken else NOT_TAKEN

    def close(self) -> None:
        """This process ends in order."""
        self._records.append("end", time=_now(), before=self._before)
        self._records.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
