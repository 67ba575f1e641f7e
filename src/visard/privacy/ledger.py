"""The ledger: what left each client, field by field, in every round."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from visard.core import ClientId, Leaves, declared_kinds
from visard.engines.codec import size_of
from visard.files import write_json

COLUMNS = ["stage", "round", "client", "message", "field", "kind", "bytes", "encrypted"]
KINDS = {
    Leaves.weights: "network weights",
    Leaves.class_vectors: "class vectors: one feature-space direction for each identity",
    Leaves.statistic: "statistics over many pictures",
    Leaves.ciphertext: "encrypted numbers",
    Leaves.metric: "figures such as a loss or an accuracy",
    Leaves.count: "counts such as the number of pictures",
    Leaves.public_key: "public keys",
    Leaves.features: "features of single pictures",
    Leaves.labels: "identity labels of pictures",
    Leaves.pictures: "pictures of faces",
}


class Ledger:
    """Rows are appended to a file that the checkpoint truncates on resume, so that no round counts twice."""

    def __init__(self, path: Path, committed_bytes: int = 0) -> None:
        self._path = path
        self._lines: list[str] = []  # not yet in the file
        path.touch()
        os.truncate(path, committed_bytes)

    def record(self, stage: str, round: int, client: ClientId, reply: Any) -> int:
        """Write one row for each field of a reply; returns the bytes that left."""
        total = 0
        for name, kind in declared_kinds(type(reply)).items():
            total += (size := size_of(getattr(reply, name)))
            row = [
                stage,
                round,
                client,
                type(reply).__name__,
                name,
                kind.value,
                size,
                kind is Leaves.ciphertext,
            ]
            self._lines.append(json.dumps(row))
        return total

    def record_pooled(self, client: ClientId, sizes: dict[Leaves, int]) -> None:
        """A method that pools data: the whole of it left the client before the first round."""
        for kind, size in sizes.items():
            row = ["pool", 0, client, "Pooled", kind.value, kind.value, size, False]
            self._lines.append(json.dumps(row))

    def flush(self) -> int:
        """Make the rows durable; returns the length of the file for the checkpoint's manifest."""
        with self._path.open("ab") as file:
            file.write("".join(f"{line}\n" for line in self._lines).encode())
            file.flush()
            os.fsync(file.fileno())
            self._lines.clear()
            return file.tell()

    def save(self, path: Path, pooled: frozenset[Leaves]) -> None:
        """`ledger.json`: the rows with their column names, and totals by kind."""
        self.flush()
        rows = [json.loads(line) for line in self._path.read_text().splitlines()]
        totals: dict[str, dict[str, Any]] = {}
        for row in rows:
            total = totals.setdefault(row[5], {"bytes": 0, "encrypted": row[7]})
            total["bytes"] += row[6]
        write_json(
            path,
            {
                "columns": COLUMNS,
                "kinds": {k.value: text for k, text in KINDS.items()},
                "totals": totals,
                "pooled": sorted(k.value for k in pooled),
                "rows": rows,
            },
        )
