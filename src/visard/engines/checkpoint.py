"""Checkpoints: server state and client states of one round, committed by a single rename.

checkpoint/
  manifest.json              the only truth: what it names is complete, everything else is debris
  server-000012.bin          server state after step 12
  clients/<id>-000009.bin    a client's state, rewritten only in rounds that changed it
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


class Checkpoint:
    """The checkpoint folder of a run, and the only place where client states live."""

    def __init__(self, folder: Path, run_hash: str) -> None:
        self.folder = folder
        self.run_hash = run_hash
        self.committed = Position()
        self._changed: dict[ClientId, str] = {}
        self._digests: dict[str, str] = {}
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
        self.committed = position
        return True

    def server_state(self, kind: type[T]) -> T:
        """The server state of the last committed round."""
        return decode(self._read(self.committed.server), kind)

    def client_state(self, client: ClientId) -> State:
        """A fresh copy of a client's state; empty before its first step."""
        name = self._changed.get(client) or self.committed.clients.get(client)
        if name is None:
            return {}
        state: State = decode(self._read(name), dict)
        return state

    def put_client_state(self, client: ClientId, state: State) -> None:
        """Keep a client's state for this round; it counts once the round is committed."""
        if not state and client not in self.committed.clients and client not in self._changed:
            return
        name = f"clients/{quote(client, safe='')}-{self.committed.step + 1:06d}.bin"
        data = encode(state)
        (self.folder / name).write_bytes(data)
        self._changed[client] = name
        self._digests[name] = hashlib.sha256(data).hexdigest()

    def discard(self) -> None:
        """Forget client states of a round that did not end."""
        self._changed.clear()
        self._digests.clear()

    def commit(self, server: Any, ledger_bytes: int) -> None:
        """Make this round the one that `resume` finds: states first, then one rename of the manifest."""
        step = self.committed.step + 1
        data = encode(server)
        name = f"server-{step:06d}.bin"
        write_durably(self.folder / name, data)
        for changed in self._changed.values():
            _fsync_file(self.folder / changed)
        if self._changed:
            fsync_folder(self.folder / "clients")
        clients = {**self.committed.clients, **self._changed}
        kept = {*clients.values()}
        digests = {k: v for k, v in {**self.committed.digests, **self._digests}.items() if k in kept}
        digests[name] = hashlib.sha256(data).hexdigest()
        position = Position(step, ledger_bytes, name, clients, digests)
        write_json(self.folder / "manifest.json", {"version": VERSION, "run": self.run_hash, **vars(position)})
        stale = {self.committed.server, *self.committed.clients.values()} - {name, *kept}
        for old in stale - {""}:
            (self.folder / old).unlink(missing_ok=True)
        self.committed = position
        self.discard()

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise VisardError(f"checkpoint file {path} cannot be read: {error.strerror}") from None
        digest = self._digests.get(name) or self.committed.digests.get(name)
        if hashlib.sha256(data).hexdigest() != digest:
            raise VisardError(f"checkpoint file {path} is damaged (its digest does not match the manifest)")
        return data


def _fsync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
