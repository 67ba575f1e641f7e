"""Client states in pack files: every process that does steps appends the states of a round to one file of its own.

clients/<step>-<run of the coordinator>-<writer>.pack is encoded states back to back, nothing else; where a state
lies, and its digest, stand in the checkpoint's manifest. A pack is never changed after its round, only copied from
and removed, so that a kill at any moment leaves every state that a manifest names. States may hold keys: packs have
mode 600.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from visard.core import ClientId, State
from visard.engines.codec import MAX_HEADER_OF_FILES, decode, encode
from visard.errors import VisardError
from visard.files import PRIVATE

MOST_PACKS = 64  # more than this many are merged, so that rounds with few clients do not leave thousands of files
CHUNK = 1 << 24


@dataclass(frozen=True)
class StateFile:
    """A client's state on disk: `length` bytes of a pack, or a whole file of its party where `length` is 0."""

    name: str  # relative to the checkpoint folder
    digest: str
    offset: int = 0
    length: int = 0

    @property
    def place(self) -> tuple[str, str, int, int]:
        """For manifests and messages."""
        return self.name, self.digest, self.offset, self.length


class Packs:
    """Reads states from any pack of a folder and appends to one of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = secrets.token_hex(4)  # two writers never share a pack, on whatever machines they are
        self._reading: dict[str, int] = {}
        self._writing: tuple[str, int, int] | None = None  # name, handle, length so far

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()

    def read(self, file: StateFile | None) -> State:
        """A client's state; empty if there is none."""
        if file is None:
            return {}
        data = self._bytes(file)
        if len(data) != file.length or hashlib.sha256(data).hexdigest() != file.digest:
            raise VisardError(
                f"checkpoint file {self.folder / file.name} is damaged (a state's digest does not match the manifest)"
            )
        state: State = decode(data, dict, MAX_HEADER_OF_FILES)
        return state

    def write(self, prefix: str, state: State, before: StateFile | None) -> StateFile | None:
        """Append a state to this writer's pack `prefix`-...; None if it equals the one before."""
        if not state and before is None:
            return None
        data = encode(state)
        digest = hashlib.sha256(data).hexdigest()
        if before is not None and digest == before.digest:
            return None
        name = f"{prefix}-{self._own}.pack"
        try:
            return StateFile(name, digest, self._append(name, data), len(data))
        except OSError as error:
            raise VisardError(f"cannot write {self.folder / name}: {error.strerror}") from None

    def _bytes(self, file: StateFile) -> bytes:
        try:
            if file.name not in self._reading:
                if len(self._reading) >= MOST_PACKS:
                    self.let_go()
                self._reading[file.name] = os.open(self.folder / file.name, os.O_RDONLY)
            return os.pread(self._reading[file.name], file.length, file.offset)
        except OSError as error:
            raise self._unreadable(file.name, error) from None

    def _unreadable(self, name: str, error: OSError) -> VisardError:
        return VisardError(f"checkpoint file {self.folder / name} cannot be read: {error.strerror}")

    def _append(self, name: str, data: bytes) -> int:
        if self._writing is None or self._writing[0] != name:
            self.close()
            handle = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
            self._writing = name, handle, os.fstat(handle).st_size
        name, handle, offset = self._writing
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(handle, rest) :]
        except OSError:  # a full disk: what was written of this state is cut off again
            os.ftruncate(handle, offset)
            raise
        self._writing = name, handle, offset + len(data)
        return offset

    def _size(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except OSError as error:
            raise self._unreadable(name, error) from None

    def let_go(self) -> None:
        """Close what is open for reading: a removed pack takes room until the last one lets go of it."""
        for handle in self._reading.values():
            os.close(handle)
        self._reading.clear()

    def close(self) -> None:
        """Close everything; the next read or write opens again."""
        self.let_go()
        if self._writing is not None:
            os.close(self._writing[1])
            self._writing = None

    def compact(self, clients: Mapping[ClientId, StateFile], prefix: str) -> dict[ClientId, StateFile]:
        """Where the states are after those of mostly dead packs were copied to a new one.

        A pack goes when less than half of it is alive, so that all packs together take at most twice what is alive
        and each byte is copied only when as much is freed. Old packs stay until a manifest no longer names them.
        """
        alive: dict[str, int] = {}
        for file in clients.values():
            alive[file.name] = alive.get(file.name, 0) + file.length
        sizes = {name: self._size(name) for name in alive}
        going = {name for name in alive if 2 * alive[name] < sizes[name]}
        if len(alive) - len(going) > MOST_PACKS:
            going |= set(sorted(alive, key=lambda name: sizes[name])[: len(alive) // 2])
        if not going:
            return dict(clients)
        moving = sorted((file.name, file.offset, client) for client, file in clients.items() if file.name in going)
        name, moved, at = f"{prefix}-{secrets.token_hex(4)}.pack", dict(clients), 0
        handle = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
        with os.fdopen(handle, "wb") as out:
            for _, _, client in moving:
                file = clients[client]
                for start in range(0, file.length, CHUNK):
                    part = StateFile(file.name, "", file.offset + start, min(CHUNK, file.length - start))
                    out.write(self._bytes(part))
                moved[client] = StateFile(name, file.digest, at, file.length)
                at += file.length
                if out.tell() != at:
                    raise VisardError(f"checkpoint file {self.folder / file.name} is damaged (it is too short)")
        return moved
