"""Checkpoints: server state and client states of one round, committed by a single rename.

checkpoint/
  manifest.json        the only truth: what it names is complete, everything else is debris
  server-000012.bin    server state after step 12
  clients/000009-*     packs of client states (see `packs`), each state written only when it changed
  ledger.jsonl         rows of the ledger; the manifest says how many bytes of it count
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from visard.core import ClientId, State
from visard.engines.codec import MAX_HEADER_OF_FILES, decode, encode
from visard.engines.packs import Packs, StateFile
from visard.errors import VisardError
from visard.files import fsync_folder, read_json, write_atomically, write_durably

T = TypeVar("T")
VERSION = 2


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` rounds are done, over all stages."""

    step: int = 0
    ledger_bytes: int = 0
    server: str = ""
    digest: str = ""  # of the server's file
    clients: dict[ClientId, StateFile] = field(default_factory=dict)


class Checkpoint:
    """The checkpoint folder of a run, and the only place where client states live."""

    def __init__(self, folder: Path, run_hash: str, remote: bool = False) -> None:
        self.folder = folder
        self.run_hash = run_hash
        self.remote = remote  # client states live at the parties: here are only their names and digests
        self.committed = Position()
        self.packs = Packs(folder)
        self._changed: dict[ClientId, StateFile] = {}
        self._names = 0
        self._token = secrets.token_hex(4)  # workers of a killed run may still be writing: their packs are not ours
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
            if version == VERSION:
                clients = {client: StateFile(*place) for client, place in manifest["clients"].items()}
                figures = {name: manifest[name] for name in ("step", "ledger_bytes", "server", "digest")}
                position = Position(**figures, clients=clients)
        except (KeyError, TypeError, AttributeError):
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
        return decode(read_checked(self.folder / name, self.committed.digest), kind, MAX_HEADER_OF_FILES)

    def state_file(self, client: ClientId) -> StateFile | None:
        """Where a client's present state is; None before its first step."""
        return self._changed.get(client) or self.committed.clients.get(client)

    def client_state(self, client: ClientId) -> State:
        """A fresh copy of a client's state; empty before its first step."""
        if self.remote:
            raise VisardError(f"the state of {client} is at its party, not here")
        return self.packs.read(self.state_file(client))

    @property
    def new_pack(self) -> str:
        """How the names of packs of the round at hand begin; nothing refers to them until they are adopted."""
        return f"clients/{self.committed.step + 1:06d}-{self._token}"

    def new_state_name(self, client: ClientId) -> str:
        """A file at a party that nothing refers to, for a client's state of the round at hand."""
        self._names += 1
        return f"clients/{quote(client, safe='')}-{self.committed.step + 1:06d}-{self._names}.bin"

    def write_client_state(self, client: ClientId, state: State) -> StateFile | None:
        """Write a new state of a client without adopting it; None if nothing changed."""
        return self.packs.write(self.new_pack, state, self.state_file(client))

    def adopt(self, client: ClientId, state: StateFile) -> None:
        """Take a written state as the client's; it counts once the round is committed."""
        self._changed[client] = state

    def commit(self, server: Any, ledger_bytes: int) -> None:
        """Make this round the one that `resume` finds: states first, then one rename of the manifest."""
        step = self.committed.step + 1
        data = encode(server)
        name = f"server-{step:06d}.bin"
        write_durably(self.folder / name, data)
        clients = {**self.committed.clients, **self._changed}
        if self._changed and not self.remote:
            clients = self.packs.compact(clients, self.new_pack)
            before = {file.name for file in self.committed.clients.values()}
            for pack in {file.name for file in clients.values()} - before:
                _fsync_file(self.folder / pack)
            fsync_folder(self.folder / "clients")
        position = Position(step, ledger_bytes, name, hashlib.sha256(data).hexdigest(), clients)
        self._write_manifest(position)
        self.committed = position
        self._changed.clear()
        self._names = 0
        self._sweep()

    def _write_manifest(self, position: Position) -> None:
        places = {client: file.place for client, file in position.clients.items()}
        fields = {"version": VERSION, "run": self.run_hash, "remote": self.remote, **vars(position), "clients": places}
        write_atomically(self.folder / "manifest.json", json.dumps(fields, separators=(",", ":")))

    def _sweep(self) -> None:
        """Remove what the manifest does not name: older rounds, refused states, debris of a kill."""
        self.packs.close()
        named = {self.committed.server, *(file.name for file in self.committed.clients.values())}
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


def _fsync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
