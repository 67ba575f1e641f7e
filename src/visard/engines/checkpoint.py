"""Checkpoints: server state and client states of one round, committed by a single rename.

checkpoint/
  manifest.json              the only truth: what it names is complete, everything else is debris
  server-000012.bin          server state after step 12
  clients/<id>-000009-1.bin  a client's state, rewritten only in rounds that changed it
  ledger.jsonl               rows of the ledger; the manifest says how many bytes of it count
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from visard.core import ClientId, State
from visard.engines.codec import decode, encode
from visard.errors import VisardError
from visard.files import fsync_folder, read_json, write_durably, write_json

T = TypeVar("T")
VERSION = 1


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` rounds are done, over all stages."""

    step: int = 0
    ledger_bytes: int = 0
    server: str = ""
    clients: dict[ClientId, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StateFile:
    """A client's state on disk."""

    name: str  # relative to the checkpoint folder
    digest: str


class Checkpoint:
    """The checkpoint folder of a run, and the only place where client states live."""

    def __init__(self, folder: Path, run_hash: str, remote: bool = False) -> None:
        self.folder = folder
        self.run_hash = run_hash
        self.remote = remote  # client states live at the parties: here are only their names and digests
        self.committed = Position()
        self._changed: dict[ClientId, StateFile] = {}
        self._names = 0
        (folder / "clients").mkdir(parents=True, exist_ok=True)

    @property
    def ledger(self) -> Path:
        """Rows of the ledger, one JSON list a line."""
        return self.folder / "ledger.jsonl"

    def resume(self) -> bool:
        """Read the manifest; False if there is no checkpoint yet."""
        if not (self.folder / "manifest.json").exists():
            return False
        manifest = read_json(self.folder / "manifest.json")
        try:
            version, run_hash = manifest["version"], manifest["run"]
            position = Position(**{k: manifest[k] for k in ("step", "ledger_bytes", "server", "clients", "digests")})
        except (KeyError, TypeError):
            raise VisardError(f"{self.folder / 'manifest.json'} is not a checkpoint of visard") from None
        if version != VERSION:
            raise VisardError(f"{self.folder} is of checkpoint format {version}, this visard reads {VERSION}")
        if run_hash != self.run_hash:
            raise VisardError(f"{self.folder} belongs to a run with other settings: resume with its own config.toml")
        if manifest.get("remote", False) is not self.remote:
            where = "at the parties" if manifest.get("remote", False) else "in this folder"
            raise VisardError(
                f"{self.folder}: the clients' states of this run are {where}: resume it with the same engine"
            )
        self.committed = position
        self._sweep()
        return True

    def server_state(self, kind: type[T]) -> T:
        """The server state of the last committed round."""
        name = self.committed.server
        return decode(read_checked(self.folder / name, self.committed.digests[name]), kind)

    def state_file(self, client: ClientId) -> StateFile | None:
        """Where a client's present state is; None before its first step."""
        if client in self._changed:
            return self._changed[client]
        name = self.committed.clients.get(client)
        return StateFile(name, self.committed.digests[name]) if name else None

    def client_state(self, client: ClientId) -> State:
        """A fresh copy of a client's state; empty before its first step."""
        if self.remote:
            raise VisardError(f"the state of {client} is at its party, not here")
        return read_state(self.folder, self.state_file(client))

    def new_state_name(self, client: ClientId) -> str:
        """A file that nothing refers to, for a client's state of the round at hand."""
        self._names += 1
        return f"clients/{quote(client, safe='')}-{self.committed.step + 1:06d}-{self._names}.bin"

    def write_client_state(self, client: ClientId, state: State) -> StateFile | None:
        """Write a new state of a client without adopting it; None if nothing changed."""
        return write_state(self.folder, self.new_state_name(client), state, self.state_file(client))

    def adopt(self, client: ClientId, state: StateFile) -> None:
        """Take a written state as the client's; it counts once the round is committed."""
        self._changed[client] = state

    def commit(self, server: Any, ledger_bytes: int) -> None:
        """Make this round the one that `resume` finds: states first, then one rename of the manifest."""
        step = self.committed.step + 1
        data = encode(server)
        name = f"server-{step:06d}.bin"
        write_durably(self.folder / name, data)
        if self._changed and not self.remote:
            for changed in self._changed.values():
                _fsync_file(self.folder / changed.name)
            fsync_folder(self.folder / "clients")
        clients = {**self.committed.clients, **{c: f.name for c, f in self._changed.items()}}
        kept = {*clients.values()}
        digests = {k: v for k, v in self.committed.digests.items() if k in kept}
        digests |= {f.name: f.digest for f in self._changed.values()}
        digests[name] = hashlib.sha256(data).hexdigest()
        position = Position(step, ledger_bytes, name, clients, digests)
        head = {"version": VERSION, "run": self.run_hash, "remote": self.remote}
        write_json(self.folder / "manifest.json", head | vars(position))
        self.committed = position
        self._changed.clear()
        self._names = 0
        self._sweep()

    def _sweep(self) -> None:
        """Remove what the manifest does not name: older rounds, refused states, debris of a kill."""
        named = {self.committed.server, *self.committed.clients.values()}
        for path in (*self.folder.glob("server-*.bin"), *(self.folder / "clients").iterdir()):
            if str(path.relative_to(self.folder)) not in named:
                path.unlink(missing_ok=True)


def read_checked(path: Path, digest: str) -> bytes:
    """The content of a checkpoint file, checked against its digest."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise VisardError(f"checkpoint file {path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise VisardError(f"checkpoint file {path} is damaged (its digest does not match the manifest)")
    return data


def read_state(folder: Path, file: StateFile | None) -> State:
    """A client's state; empty if there is no file."""
    if file is None:
        return {}
    state: State = decode(read_checked(folder / file.name, file.digest), dict)
    return state


def write_state(folder: Path, name: str, state: State, before: StateFile | None) -> StateFile | None:
    """Write a state to a file that nothing refers to yet; None if it equals the one before."""
    if not state and before is None:
        return None
    data = encode(state)
    digest = hashlib.sha256(data).hexdigest()
    if before is not None and digest == before.digest:
        return None
    (folder / name).write_bytes(data)
    return StateFile(name, digest)


def _fsync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
