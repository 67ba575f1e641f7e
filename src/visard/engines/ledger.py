"""The ledger: what left each client, field by field, in every round."""

from __future__ import annotations

import functools
import json
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from visard.core import ClientId, Disclosure
from visard.disclosure import pieces
from visard.engines.codec import size_of
from visard.engines.records import Records
from visard.files import APPENDING, SHARED, open_handle, open_text, replacing

COLUMNS = ["stage", "round", "client", "message", "field", "kind", "bytes", "encrypted"]


Part = tuple[str, str, int]  # field, kind, bytes
Place = tuple[str, str, int, int]  # client, stage, round, ask


def parts_of(reply: Any, statistics: Collection[str]) -> list[Part]:
    """What a reply carries: field, kind and bytes of each piece; empty for anything but a reply."""
    try:
        return [(name, kind.value, size_of(value)) for name, kind, value in pieces(reply, statistics)]
    except Exception:  # a reply that was refused may be anything
        return []


class Received:
    """The record of replies, which a resume does not truncate: every reply of a party, and those of simulated clients
    that were not accepted. A chain of lines (see `Records`); each process of the run is a session."""

    def __init__(self, folder: Path) -> None:
        self.records = Records(folder, "received")
        self.session = secrets.token_hex(8)
        self._begun = False

    def add(self, event: str, place: Place, **fields: Any) -> None:
        """Write a record about the reply that belongs to a place in the run; `flush` makes it durable."""
        if not self._begun:
            self._begun = True
            self.records.add("begin", session=self.session)
        client, stage, round, ask = place
        self.records.add(
            event, session=self.session, client=client, stage=stage, round=round, ask=ask, **fields
        )  # fmt: skip

    def flush(self) -> None:
        """Make the records durable."""
        self.records.flush()

    def end(self, open_requests: Sequence[Place]) -> None:
        """End the session in order; these requests have no reply yet, and later ones will not be accepted."""
        if self._begun:
            self.records.append("end", session=self.session, open=open_requests)
        self.records.close()


class Ledger:
    """Rows are appended to a file that the checkpoint truncates on resume, so that no round counts twice.

    `received` also has the replies that were not accepted, and is never truncated.
    """

    def __init__(self, path: Path, committed_bytes: int = 0) -> None:
        self.received = Received(path.parent)
        self._path = path
        self._lines: list[str] = []  # not yet in the file
        with os.fdopen(open_handle(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.truncate(committed_bytes)

    def record(self, stage: str, round: int, client: ClientId, reply: Any, statistics: Collection[str] = ()) -> int:
        """Write a row for each field of a reply, and one for running statistics in it; returns the bytes that left.

        `statistics` are the entries of weights that are such (`World.statistics`).
        """
        total = 0
        start = json.dumps([stage, round, client, type(reply).__name__])[:-1]
        for name, kind, value in pieces(reply, statistics):
            total += (size := size_of(value))
            self._lines.append(start + _end(name, kind) % size)
        return total

    def record_pooled(self, client: ClientId, sizes: dict[Disclosure, int]) -> None:
        """Record data that a centralising method took from a client before the first round."""
        for kind, size in sizes.items():
            row = ["pool", 0, client, "Pooled", kind.value, kind.value, size, False]
            self._lines.append(json.dumps(row))

    def flush(self) -> int:
        """Make the rows durable; returns the length of the file for the checkpoint's manifest."""
        self.received.flush()
        with os.fdopen(open_handle(self._path, APPENDING), "ab") as file:
            file.write("".join(f"{line}\n" for line in self._lines).encode())
            file.flush()
            os.fsync(file.fileno())
            self._lines.clear()
            return file.tell()

    def save(self, path: Path, pooled: frozenset[Disclosure], outgoing: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write `ledger.json`: the rows with their column names, totals by kind, and the postprocessors of replies."""
        self.flush()
        totals: dict[str, dict[str, Any]] = {}
        with open_text(self._path) as rows:
            for line in rows:
                row = json.loads(line)
                total = totals.setdefault(row[5], {"bytes": 0, "encrypted": row[7]})
                total["bytes"] += row[6]
        head = {
            "columns": COLUMNS,
            "kinds": {k.value: k.what for k in Disclosure},
            "totals": totals,
            "pooled": sorted(k.value for k in pooled),
        }
        if outgoing:
            head["outgoing"] = list(outgoing)
        text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        # one row at a time: there may be millions
        with replacing(path, mode=SHARED) as beside, beside.open("w") as out, open_text(self._path) as rows:
            out.write(f'{text},\n "rows": [')
            for number, line in enumerate(rows):
                out.write(f"{',' if number else ''}\n  {line.rstrip()}")
            out.write("\n ]\n}\n" if self._path.stat().st_size else "]\n}\n")


@functools.cache
def _end(field: str, kind: Disclosure) -> str:
    """The end of a row, with a placeholder for the bytes: rows of thousands of clients differ in little else."""
    return f', "{field}", "{kind.value}", %d, {json.dumps(kind is Disclosure.ciphertext)}]'
