"""Checkpoints: server state and client states of one round, committed by a single rename.

checkpoint/
  manifest.json        names the files of the last committed round; everything else in the folder is leftovers
  chain.jsonl          a digest for each round, of the round's states, ledger and the digest before: a manifest that was
                       changed, or replaced by an older one, does not match it and is refused
  server-000012.bin    server state after step 12
  memory-000012.bin    state of the aggregation, such as the momentum of a server optimiser, if there is any
  clients/000009-*     packs of client states (see `Packs`), each state written only when it changed
  ledger.jsonl         rows of the ledger; the manifest says how many of its bytes are committed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from visard.at_rest import Key, check_key, decrypt
from visard.core import ClientId, State
from visard.engines.codec import MAX_HEADER_OF_FILES, decode, encode
from visard.engines.request import PACK_NAME, STATE_NAME, Request, StateFile
from visard.errors import VisardError
from visard.files import (
    APPENDING,
    PRIVATE,
    PRIVATE_FOLDER,
    flush_to_disk,
    mapping,
    open_file,
    open_handle,
    private,
    read_bytes,
    read_json,
    read_text,
    safe_name,
    whole,
    write_atomically,
    write_durably,
)

VERSION = 3
UNCHAINED = 2  # of visard 0.1, whose checkpoints have no chain
MOST_PACKS = 64  # more than this many are merged, so that rounds with few clients do not leave thousands of files
CHUNK = 1 << 24
T = TypeVar("T")


class Packs:
    """Client states in pack files: reads from any pack of a folder, and appends the states of a round to one file.

    clients/<step>-<run of the coordinator>-<writer>.pack is encoded states one after the other; the checkpoint's
    manifest has the place and the digest of each. A pack is never changed after its round, only copied
    from and removed, so that a kill at any moment leaves every state that a manifest names. States may hold keys:
    packs have mode 600. With a `key` each state is encrypted, and bound to its client.
    """

    def __init__(self, folder: Path, key: Key | None = None) -> None:
        self.folder = folder
        self.key = key
        self._own = secrets.token_hex(4)  # two writers never share a pack, on whatever machines they are
        self._reading: dict[str, int] = {}
        self._writing: tuple[str, int, int] | None = None  # name, handle, length so far

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()

    def read(self, file: StateFile | None, client: ClientId = "") -> State:
        """A client's state; empty if there is none."""
        if file is None:
            return {}
        data = self._bytes(file)
        if self.key is not None:
            data = decrypt(self.key, data, _state_of(client), f"the state of {client} in {self.folder / file.name}")
        if digest_of(data, self.key) != file.digest:
            raise VisardError(
                f"checkpoint file {self.folder / file.name} is damaged (a state's digest does not match the manifest)"
            )
        state: State = decode(data, dict, MAX_HEADER_OF_FILES)
        return state

    def write(self, prefix: str, state: State, before: StateFile | None, client: ClientId = "") -> StateFile | None:
        """Append a state to this writer's pack `prefix`-...; None if it equals the one before."""
        if not state and before is None:
            return None
        data = encode(state)
        digest = digest_of(data, self.key)
        if before is not None and digest == before.digest:
            return None
        if self.key is not None:
            data = self.key.encrypt(data, _state_of(client))
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
                self._reading[file.name] = open_handle(self.folder / file.name)
            handle = self._reading[file.name]
            # memory for what is really there, whatever a manifest says
            return os.pread(handle, min(file.length, max(0, os.fstat(handle).st_size - file.offset)), file.offset)
        except OSError as error:
            raise self._unreadable(file.name, error) from None

    def _unreadable(self, name: str, error: OSError) -> VisardError:
        return VisardError(f"checkpoint file {self.folder / name} cannot be read: {error.strerror}")

    def _append(self, name: str, data: bytes) -> int:
        if self._writing is None or self._writing[0] != name:
            self.close()
            handle = open_handle(self.folder / name, APPENDING)
            self._writing = name, handle, os.fstat(handle).st_size
        name, handle, offset = self._writing
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(handle, rest) :]
        except OSError:  # a full disk: cut off what was written of this state
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
        """Close the packs that are open for reading: a removed file takes disk space until it is closed."""
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
        """Copy the states of packs that are mostly unused to a new pack; returns where all states are then.

        A pack is replaced when less than half of it is in use, so that all packs together take at most twice the space
        of the states in use, and each byte is copied only when as much is freed. Old packs stay until no manifest names
        them.
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
        handle = open_handle(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
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


class PackStates:
    """The states that requests name, in packs.

    If they are `shared` over a network file system, packs are closed after every step, because only then others see
    what was written.
    """

    def __init__(self, packs: Packs, shared: bool = False) -> None:
        self.packs, self._shared = packs, shared

    def read(self, request: Request) -> State:
        return self.packs.read(request.state, request.client)

    def write(self, request: Request, state: State) -> StateFile | None:
        try:
            return self.packs.write(request.new_state, state, request.state, request.client)
        finally:
            if self._shared:
                self.packs.close()


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` rounds are done, over all stages."""

    step: int = 0
    ledger_bytes: int = 0
    server: str = ""
    digest: str = ""  # of the server's file
    ledger_digest: str = ""  # of as many bytes of the ledger
    clients: dict[ClientId, StateFile] = field(default_factory=dict)
    memory: str = ""  # the file of what the aggregation remembers
    memory_digest: str = ""


class Checkpoint:
    """The checkpoint folder of a run, with all client states."""

    def __init__(
        self, folder: Path, run_hash: str, remote: bool = False, unchained_hash: str = "", key: Key | None = None
    ) -> None:
        self.folder = folder
        self.key = key  # for server and client states; the chain is keyed then too
        self.run_hash = run_hash
        self._unchained_hash = unchained_hash or run_hash  # the hash in a checkpoint without a chain
        self.remote = remote  # client states are at the parties: here are only their names and digests
        self.committed = Position()
        self.chain = Chain(folder / "chain.jsonl", key)
        self.packs = Packs(folder, key)
        self._rows = hashlib.sha256()  # of the ledger so far
        self._changed: dict[ClientId, StateFile] = {}
        self._names = 0
        self._token = secrets.token_hex(4)  # workers of a killed run may still be writing packs, under another name
        folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        (folder / "clients").mkdir(PRIVATE_FOLDER, exist_ok=True)

    @property
    def ledger(self) -> Path:
        """Rows of the ledger, one JSON list a line."""
        return self.folder / "ledger.jsonl"

    def resume(self) -> bool:
        """Read the manifest; False if there is no checkpoint yet."""
        if not (self.folder / "manifest.json").exists():
            self.chain.begin()
            return False
        manifest = read_json(self.folder / "manifest.json")
        try:
            version, run_hash = manifest["version"], manifest["run"]
            if version in (VERSION, UNCHAINED):
                clients = {client: StateFile(*place) for client, place in manifest["clients"].items()}
                values = {name: manifest[name] for name in ("step", "ledger_bytes", "server", "digest")}
                values |= {name: manifest.get(name, "") for name in ("ledger_digest", "memory", "memory_digest")}
                position = Position(**values, clients=clients)
                _check(position)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise VisardError(f"{self.folder / 'manifest.json'} is not a checkpoint of visard") from None
        if version not in (VERSION, UNCHAINED):
            raise VisardError(f"{self.folder} is of checkpoint format {version}, this visard reads {VERSION}")
        if run_hash != (self.run_hash if version == VERSION else self._unchained_hash):
            raise VisardError(f"{self.folder} belongs to a run with other settings: resume with its own config.toml")
        if manifest.get("remote", False) is not self.remote:
            where = "at the parties" if manifest.get("remote", False) else "in this folder"
            raise VisardError(
                f"{self.folder}: the clients' states of this run are {where}: resume it with the same engine"
            )
        check_key(self.key, str(manifest.get("encrypted", "")), self.folder)
        if version == VERSION or self.chain.path.exists():
            self.chain.check(position.step, self._content(position))
        self._rows = self._read_ledger(position)
        self.committed = position
        self._sweep()
        return True

    def _content(self, position: Position) -> str:
        """The content that a round's digest in the chain covers."""
        states = sorted((client, file.digest) for client, file in position.clients.items())
        ledger = [position.ledger_bytes, position.ledger_digest]
        memory = [position.memory_digest] if position.memory else []
        return json.dumps([self.run_hash, self.remote, position.step, ledger, position.digest, states, *memory])

    def _read_ledger(self, position: Position) -> Any:
        """The digest of the committed rows, which must be unchanged."""
        rows = hashlib.sha256(read_start(self.ledger, position.ledger_bytes))
        if position.ledger_digest not in ("", rows.hexdigest()):
            raise VisardError(f"{self.ledger} was changed: its digest does not match the manifest")
        return rows

    def server_state(self, kind: type[T]) -> T:
        """The server state of the last committed round."""
        data = read_checked(self.folder / self.committed.server, self.committed.digest, self.key)
        return decode(data, kind, MAX_HEADER_OF_FILES)

    def memory(self) -> State:
        """The state of the aggregation after the last committed round."""
        position = self.committed
        if not position.memory:
            return {}
        data = read_checked(self.folder / position.memory, position.memory_digest, self.key)
        found: State = decode(data, dict, MAX_HEADER_OF_FILES)
        return found

    def secret(self) -> bytes:
        """The secret behind the server's noise: 32 random bytes, made once, that never leave the server."""
        path = self.folder / "secret.key"
        if not path.exists():
            made = secrets.token_bytes(32)
            write_durably(path, made if self.key is None else self.key.encrypt(made, _server_state(path.name)), PRIVATE)
        data = read_bytes(path)
        return data if self.key is None else decrypt(self.key, data, _server_state(path.name), path)

    def state_file(self, client: ClientId) -> StateFile | None:
        """Where a client's present state is; None before its first step."""
        return self._changed.get(client) or self.committed.clients.get(client)

    def client_state(self, client: ClientId) -> State:
        """A fresh copy of a client's state; empty before its first step."""
        if self.remote:
            raise VisardError(f"the state of {client} is at its party, not here")
        return self.packs.read(self.state_file(client), client)

    @property
    def new_pack(self) -> str:
        """How the names of this round's packs begin; nothing refers to them until they are adopted."""
        return f"clients/{self.committed.step + 1:06d}-{self._token}"

    def new_state(self, client: ClientId) -> str:
        """Where a client's state of this round goes: how the name of its pack begins, or a new file at its party."""
        if not self.remote:
            return self.new_pack
        self._names += 1
        return f"clients/{safe_name(client)}-{self.committed.step + 1:06d}-{self._names}.bin"

    def adopt(self, client: ClientId, state: StateFile) -> None:
        """Make a written state the client's; it counts once the round is committed."""
        self._changed[client] = state

    def commit(self, server: Any, ledger_bytes: int, memory: State | None = None) -> None:
        """Commit this round, so that `resume` finds it: states first, then one rename of the manifest."""
        step = self.committed.step + 1
        name, digest = self._write(f"server-{step:06d}.bin", server)
        kept = self._write(f"memory-{step:06d}.bin", memory) if memory else ("", "")
        clients = {**self.committed.clients, **self._changed}
        if self._changed and not self.remote:
            clients = self.packs.compact(clients, self.new_pack)
            before = {file.name for file in self.committed.clients.values()}
            for pack in {file.name for file in clients.values()} - before:
                flush_to_disk(self.folder / pack)
            flush_to_disk(self.folder / "clients")
        self._rows.update(read_start(self.ledger, ledger_bytes, self.committed.ledger_bytes))
        position = Position(step, ledger_bytes, name, digest, self._rows.hexdigest(), clients, *kept)
        self.chain.append(step, self._content(position))
        self._write_manifest(position)
        self.committed = position
        self._changed.clear()
        self._names = 0
        self._sweep()

    def _write(self, name: str, state: Any) -> tuple[str, str]:
        """Write a state of the server durably; returns name and digest."""
        data = encode(state)
        write_durably(self.folder / name, data if self.key is None else self.key.encrypt(data, _server_state(name)))
        return name, digest_of(data, self.key)

    def _write_manifest(self, position: Position) -> None:
        fields = {"version": VERSION, "run": self.run_hash, "remote": self.remote, **vars(position)}
        if not position.memory:  # without it, older versions of visard can resume the run
            del fields["memory"], fields["memory_digest"]
        if self.key is not None:
            fields["encrypted"] = self.key.id.hex()
        write_atomically(self.folder / "manifest.json", json.dumps(fields, separators=(",", ":")))

    def _sweep(self) -> None:
        """Remove files that the manifest does not name: older rounds, refused states, leftovers of a kill."""
        self.packs.close()
        named = {self.committed.server, self.committed.memory, *(file.name for file in self.committed.clients.values())}
        written = [path for kind in ("server", "memory") for path in self.folder.glob(f"{kind}-*.bin")]
        for path in (*written, *(self.folder / "clients").glob("*.pack")):
            if str(path.relative_to(self.folder)) not in named:
                path.unlink(missing_ok=True)


def _check(position: Position) -> None:
    """Refuse a malformed manifest with a ValueError: paths outside the folder, numbers that are none."""
    server, clients = re.fullmatch(r"server-\d{6,9}\.bin", position.server), position.clients.values()
    memory = re.fullmatch(r"(memory-\d{6,9}\.bin)?", position.memory)
    named = all(PACK_NAME.fullmatch(file.name) or STATE_NAME.fullmatch(file.name) for file in clients)
    numbers = [position.step, position.ledger_bytes, *(n for file in clients for n in (file.offset, file.length))]
    texts = [position.digest, position.ledger_digest, position.memory_digest, *(file.digest for file in clients)]
    if not server or not memory or not named or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError("not a checkpoint")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("not a checkpoint")


class Chain:
    """One line for each committed round: its number, and a digest of its content and of the line before.

    A line is durable before the manifest names its round, so that a kill leaves at most one line too many. The name of
    the file is made durable together with that of the manifest. Without the key such a line cannot be made.
    """

    def __init__(self, path: Path, key: Key | None = None) -> None:
        self.path, self._key = path, key
        self._last = ""

    def begin(self) -> None:
        """Start without a manifest: remove the line of a first round that was never committed."""
        if not self.path.exists():
            return
        if len(links := self._read()) > 1:
            manifest = self.path.with_name("manifest.json")
            raise VisardError(f"{manifest} is missing, but round {links[-2][0]} was committed")
        self.path.unlink()

    def append(self, step: int, content: str) -> None:
        self._last = self._digest(self._last, content)
        with open(self.path, "ab", opener=private) as file:
            file.write(f'[{step}, "{self._last}"]\n'.encode())
            file.flush()
            os.fsync(file.fileno())

    def check(self, step: int, content: str) -> None:
        """Refuse a manifest that does not match the chain; the line of a round that was never committed is cut off."""
        links = self._read()
        steps = [number for number, _ in links]
        wrong = f"{self.path.with_name('manifest.json')} was changed or replaced"
        if step not in steps:
            raise VisardError(f"{wrong}: it is of round {step}, which {self.path.name} does not know")
        at = steps.index(step)
        if len(links) - at > 2:
            raise VisardError(f"{wrong}: it is of round {step}, but round {steps[-2]} was committed")
        self._last = self._digest(links[at - 1][1] if at else "", content)
        if self._last != links[at][1]:
            raise VisardError(f"{wrong}: round {step} does not match the digest in {self.path.name}")
        with open_file(self.path) as file:
            os.truncate(self.path, sum(len(file.readline()) for _ in range(at + 1)))

    def _read(self) -> list[tuple[int, str]]:
        try:
            *lines, _ = read_text(self.path).split("\n")  # after the last line break is nothing, or half a line
            return [(int(step), str(digest)) for step, digest in map(json.loads, lines)]
        except (OSError, ValueError, TypeError, OverflowError, RecursionError):
            raise VisardError(f"{self.path} is missing or damaged: the checkpoint cannot be checked") from None

    def _digest(self, before: str, content: str) -> str:
        return digest_of(f"{before}\n{content}".encode(), self._key)


def rounds_done(folder: Path) -> int:
    """How many rounds are committed in a checkpoint folder; 0 where it is unreadable, which `resume` refuses."""
    with suppress(OSError, VisardError):
        return whole(mapping(read_json(folder / "manifest.json")).get("step")) or 0
    return 0


def read_start(path: Path, stop: int, start: int = 0) -> bytes:
    """Bytes `start` to `stop` of a file; one clear line if it is shorter."""
    if start == stop:
        return b""
    try:
        with open_file(path) as file:
            file.seek(start)  # memory for what is really there, whatever a manifest says
            data = file.read(min(stop - start, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise VisardError(f"checkpoint file {path} cannot be read: {error.strerror}") from None
    if len(data) != stop - start:
        raise VisardError(f"checkpoint file {path} is damaged (it is too short)")
    return data


def digest_of(data: bytes, key: Key | None) -> str:
    """The digest of a state in a manifest; keyed where states are encrypted, because the manifest is not."""
    return hashlib.sha256(data).hexdigest() if key is None else key.digest(data)


def _state_of(client: ClientId) -> str:
    return f"state of client {client}"


def _server_state(name: str) -> str:
    return f"server state {name}"


def read_checked(path: Path, digest: str, key: Key | None = None) -> bytes:
    """The content of a checkpoint file, decrypted and checked against its digest."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise VisardError(f"checkpoint file {path} cannot be read: {error.strerror}") from None
    if key is not None:
        data = decrypt(key, data, _server_state(path.name), path)
    if digest_of(data, key) != digest:
        raise VisardError(f"checkpoint file {path} is damaged (its digest does not match the manifest)")
    return data
