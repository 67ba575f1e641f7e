"""Append-only records: files of JSON lines in which each line names the digest of the line before it.

    {"n": 17, "previous": "<SHA-256 of line 16>", "event": "reply", ...}

A line that was changed, removed or inserted breaks the chain there. A chain alone cannot show that lines are missing at
its end, or that all of it was rewritten: a comparison with the record of the other side shows that. This file imports
no torch, because a party's main process has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from visard.errors import UsageError, VisardError
from visard.files import APPENDING, flush_to_disk, open_file, open_handle
from visard.processes import Data, Filed

SEGMENT = 1 << 26  # bytes of a file; then the chain continues in the next one
LONGEST_LINE = 1 << 24
PART = int(os.environ.get("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 5 * 2**20))  # bytes of a part, as Flower cuts payloads
NAME = re.compile(r"(.+)-(\d{6})\.jsonl")


class Records:
    """A chain to which only this process appends, in files `<name>-000001.jsonl`, ... of a folder.

    A record is durable when `append` or `flush` returns. Half a line at the end was left by a process that was killed
    while writing it: it is cut off, and a record says so.
    """

    def __init__(self, folder: Path, name: str, segment: int = SEGMENT) -> None:
        self.folder, self.name, self._segment = folder, name, segment
        self._handle: int | None = None
        self._number, self._last, self._file = 0, "", 1  # of lines so far, digest of the last, and where it is
        self._waiting: list[bytes] = []

    def append(self, event: str, **fields: Any) -> None:
        """Write a record and make it durable."""
        self.add(event, **fields)
        self.flush()

    def add(self, event: str, **fields: Any) -> None:
        """Write a record that the next `flush` makes durable."""
        if self._handle is None:
            self._open()
        line = _line({"n": self._number + 1, "previous": self._last, "event": event, **fields})
        self._number, self._last = self._number + 1, _digest(line)
        self._waiting.append(line + b"\n")

    def flush(self) -> None:
        """Make all records durable; on failure none of them counts."""
        if not self._waiting or self._handle is None:
            return
        data = b"".join(self._waiting)
        self._waiting.clear()
        try:
            size = os.fstat(self._handle).st_size
            if size and size + len(data) > self._segment:
                self.close()
                self._file += 1
                self._handle, size = self._open_file(self._file), 0
                flush_to_disk(self.folder)
            _write(self._handle, data, size)
        except OSError as error:
            self.close()  # the next record is chained to what is in the file
            raise VisardError(f"cannot write {self._path(self._file)}: {error.strerror}") from None

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files = files_of(self.folder, self.name)
            self._file = len(files) or 1
            self._handle = self._open_file(self._file)
            flush_to_disk(self.folder)
        except OSError as error:
            raise VisardError(f"cannot write {self._path(self._file)}: {error.strerror}") from None
        self._number, self._last = 0, ""
        for path in reversed(files):  # the last one may be new and empty
            torn, line = _tail(path)
            if line is not None:
                record = _parse(line, path)
                self._number, self._last = int(record["n"]), _digest(line)
            if torn:
                os.truncate(path, path.stat().st_size - torn)
                self.append("repaired", bytes=torn)
            if line is not None:
                return

    def _open_file(self, number: int) -> int:
        return open_handle(self._path(number), APPENDING)

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:06d}.jsonl"


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of a chain, in their order; one that is missing in between is an error."""
    found = sorted(p for p in folder.glob(f"{name}-*.jsonl") if (m := NAME.fullmatch(p.name)) and m[1] == name)
    for number, path in enumerate(found, 1):
        if path.name != f"{name}-{number:06d}.jsonl":
            raise VisardError(f"{folder / f'{name}-{number:06d}.jsonl'} is missing")
    return found


class Line(NamedTuple):
    """A record, and where it stands."""

    path: Path
    place: int  # from 1
    record: dict[str, Any]
    digest: str


def read_records(files: list[Path]) -> Iterator[Line]:
    """The records of a chain, each checked against the one before; one clear line where it breaks.

    Half a line at the very end is ignored: its writer was stopped, or is still writing.
    """
    number, last = 0, ""
    for position, path in enumerate(files):
        try:
            with open_file(path) as lines:
                for place, raw in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), 1):
                    if not raw.endswith(b"\n"):
                        if position + 1 == len(files) and not lines.read(1):
                            return
                        raise VisardError(f"{path}, line {place}: is cut off or too long")
                    record = _parse(line := raw[:-1], path, place)
                    if position + place == 1 and not path.name.endswith("-000001.jsonl"):  # a part of a longer chain
                        number, last = record["n"] - 1, record["previous"]
                    if record["n"] != number + 1:
                        raise VisardError(f"{path}, line {place}: is record {record['n']}, expected {number + 1}")
                    if record["previous"] != last:
                        raise VisardError(
                            f"{path}, line {place}: does not follow from the line before it: one of the two was changed"
                        )
                    number, last = number + 1, _digest(line)
                    yield Line(path, place, record, last)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _write(handle: int, data: bytes, size: int) -> None:
    """Append durably to a file of this length; a full disk leaves it unchanged."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    except OSError:
        with suppress(OSError):
            os.ftruncate(handle, size)
        raise


def digest_of(header: bytes, payload: Data | Filed, names: Sequence[str] = ()) -> str:
    """The digest of a reply as it went over the wire: of its header and of the names of the parts of its payload.

    A name is the digest of a part, so all of it is in the digest, and who has the names need not hash it once more.
    """
    digest = hashlib.sha256(len(header).to_bytes(8, "little") + header)
    digest.update("".join(names or names_of(payload)).encode())
    return digest.hexdigest()


def names_of(payload: Data | Filed) -> list[str]:
    """The names of the parts of a payload."""
    return [
        name_of(payload.read(start, stop) if isinstance(payload, Filed) else memoryview(payload)[start:stop])
        for start, stop in cuts(len(payload))
    ]


def cuts(size: int) -> list[tuple[int, int]]:
    """Where the parts of so many bytes begin and end."""
    return [(start, min(start + PART, size)) for start in range(0, size, PART)]


def name_of(part: Data) -> str:
    """The name of a part: the digest of what Flower calls an object, which is a line of text before the bytes."""
    return name_of_pieces((head_of(len(part)), part))


def name_of_pieces(content: Sequence[Data]) -> str:
    """The same of a part with its line of text, in pieces. BLAKE3 takes a third of the time of SHA-256, which was a
    fifth of a round with a large network."""
    from blake3 import blake3

    digest = blake3()
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()


def head_of(size: int) -> bytes:
    """What stands before the bytes of a part."""
    return b"ArrayChunk  %d\0" % size


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _parse(line: bytes, path: Path, place: int = 0) -> dict[str, Any]:
    where = f"{path}{(place and f', line {place}') or ', last line'}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise VisardError(f"{where}: is not a record") from None
    if (
        not isinstance(record, dict)
        or type(record.get("n")) is not int
        or not isinstance(record.get("previous"), str)
        or not isinstance(record.get("event"), str)
    ):
        raise VisardError(f"{where}: is not a record")
    return record


def _tail(path: Path) -> tuple[int, bytes | None]:
    """Bytes after the last line break of a file, and its last whole line."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        length = 1 << 13
        while True:
            file.seek(max(0, size - length))
            data = file.read()
            whole, _, torn = data.rpartition(b"\n")
            if b"\n" in whole or length >= size:
                line = whole.rpartition(b"\n")[2] if b"\n" in data else b""
                return len(torn), line or None
            length *= 4
