"""What the server holds of messages: in memory up to a bound, and beyond it in a file that has no name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO

from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

IN_MEMORY = 2**29  # bytes
SMALL = 2**16  # bytes of a part that always stays in memory
ELSEWHERE = b"\0"  # the content of a part that is in the file


class Store(InMemoryObjectStore):
    """Flower's parts of messages. The file is in `folder`, goes with the process, and is emptied when nothing is in it.

    A request to many clients is here once; a reply comes in parts and stays until the run has fetched it, so without a
    bound the memory of the server would grow with the number of parties that send at the same time.
    """

    def __init__(self, folder: Path, most: int = IN_MEMORY) -> None:
        super().__init__()
        self._folder, self.most = folder, most
        self.held = 0  # bytes in memory
        self._file: IO[bytes] | None = None
        self._places: dict[str, tuple[int, int]] = {}  # in the file: part -> where it begins, and its length
        self._free: dict[int, list[int]] = {}  # places for parts of a length: nearly all have the same
        self._end = 0

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    @property
    def in_file(self) -> int:
        """Bytes in the file."""
        return sum(length for _, length in self._places.values())

    def put(self, object_id: str, object_content: bytes) -> None:
        super().put(object_id, object_content)
        with self.lock_store:
            entry, length = self.store.get(object_id), len(object_content)
            if entry is None or entry.content is not object_content:  # it was there before
                return
            if length < SMALL or self.held + length <= self.most:
                self.held += length
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (as long as this is)
            places = self._free.get(length)
            place = places.pop() if places else self._end
            self._end = max(self._end, place + length)
            rest = memoryview(object_content)
            while rest:
                rest = rest[os.pwrite(self._file.fileno(), rest, place + length - len(rest)) :]
            self._places[object_id], entry.content = (place, length), ELSEWHERE

    def get(self, object_id: str) -> bytes | None:
        with self.lock_store:
            if object_id not in self._places or self._file is None:
                return super().get(object_id)
            place, length = self._places[object_id]
            return os.pread(self._file.fileno(), length, place)

    def delete(self, object_id: str) -> None:
        with self.lock_store:
            entry = self.store.get(object_id)
            super().delete(object_id)
            if entry is None or object_id in self.store:
                return
            if object_id not in self._places:
                self.held -= len(entry.content)
                return
            place, length = self._places.pop(object_id)
            self._free.setdefault(length, []).append(place)
            if not self._places and self._file is not None:
                self._file.truncate(0)
                self._free, self._end = {}, 0
