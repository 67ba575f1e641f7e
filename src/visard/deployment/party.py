"""A party's side of a run: it does the steps that requests name, on its own data, and keeps its own state."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import torch

from visard.core import Method, State
from visard.deployment.wire import Answer, Request, check_names, owner_of, pack, step_of, unpack
from visard.engines.checkpoint import Packs, StateFile
from visard.engines.codec import MAX_HEADER_OF_FILES, decode, encode
from visard.engines.world import Place, World, perform
from visard.errors import PublicError, VisardError
from visard.files import PRIVATE, flush_to_disk, write_atomically, write_durably
from visard.methods.scoring import steps_of
from visard.processes import receive, resolve, send

MakeWorld = Callable[[dict[str, Any]], tuple[World, Method[Any]]]


class States(Protocol):
    """Where the states of a party's clients live."""

    def read(self, request: Request) -> State: ...

    def write(self, request: Request, state: State) -> StateFile | None: ...


class SharedStates:
    """States in the checkpoint folder of the run itself, where server and clients share a file system.

    Packs are closed after every step: over a network file system others see what was written only then.
    """

    def __init__(self, folder: Path) -> None:
        self.packs = Packs(folder)

    def read(self, request: Request) -> State:
        return self.packs.read(StateFile(*request.state) if request.state else None)

    def write(self, request: Request, state: State) -> StateFile | None:
        try:
            return self.packs.write(request.new_state, state, StateFile(*request.state) if request.state else None)
        finally:
            self.packs.close()


class OwnStates:
    """States on the party's own disk: the server knows their names and a keyed digest, never their content.

    The request names the present state and the one of the last committed round. A state is written before the
    answer leaves and nothing names it until the server commits, so a lost or refused reply moves nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        key = folder / "digest.key"
        if not key.exists():
            write_atomically(key, secrets.token_bytes(32), PRIVATE)
        self._key = key.read_bytes()

    def home(self, run: str) -> Path:
        """The folder of a run."""
        return self.folder / run

    def digest(self, data: bytes) -> str:
        """Keyed, so that the server cannot guess small states by hashing guesses."""
        return hmac.new(self._key, data, hashlib.sha256).hexdigest()

    def read(self, request: Request) -> State:
        self.sweep(request)
        if request.state is None:
            return {}
        name, digest = request.state[:2]
        path = self.home(request.run) / name
        try:
            data = path.read_bytes()
        except OSError:
            raise PublicError(f"its state {name} of run {request.run[:8]} is not in the party's state folder") from None
        if not hmac.compare_digest(self.digest(data), digest):
            raise PublicError(f"its state {name} of run {request.run[:8]} is damaged")
        state: State = decode(data, dict, MAX_HEADER_OF_FILES)
        return state

    def write(self, request: Request, state: State) -> StateFile | None:
        if not state and request.state is None:
            return None
        data = encode(state)
        digest = self.digest(data)
        if request.state is not None and digest == request.state[1]:
            return None
        path = self.home(request.run) / request.new_state
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data, PRIVATE)
        flush_to_disk(path.parent)
        return StateFile(request.new_state, digest)

    def sweep(self, request: Request) -> None:
        """Keep the present state and the last two committed ones; the rest is debris of lost and refused replies."""
        folder = self.home(request.run) / "clients"
        if not folder.is_dir():
            return
        client = quote(request.client, safe="")
        mine = [name for p in folder.iterdir() if owner_of(name := f"clients/{p.name}") == client]
        kept = {request.committed, request.state[0] if request.state else ""}
        older = [n for n in mine if step_of(n) < step_of(request.committed)]
        kept |= set(sorted(older, key=step_of)[-1:])
        for name in set(mine) - kept:
            (self.home(request.run) / name).unlink(missing_ok=True)


@dataclass
class Party:
    """Answers requests; failures come back as one line, never as an exception."""

    make_world: MakeWorld
    states: States
    all_local: bool = False  # server and party share a machine, or at least an owner: errors may quote local paths
    models: Path | None = None  # where the party keeps its own finished models
    worlds: dict[str, tuple[World, Method[Any]]] = field(default_factory=dict)

    def do(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """Header and payload of the answer to a request."""
        request = unpack(header, Request)  # a malformed request has no place to answer to: it raises
        try:
            check_names(request)
            world, method = self.world(request.settings)
            if not request.client:
                return pack(Answer(*request.place, roles=presence(world, bool(request.settings.get("own"))))), b""
            if request.client not in world.clients:
                raise PublicError(f"{request.client!r} is not a role of this party")
            if request.keep:
                return pack(self.keep(request, method, payload)), b""
            answer, reply = self.step(request, world, method, payload)
            return pack(answer), reply
        except Exception as error:
            return pack(failed(request, error, self.all_local)), b""

    def world(self, settings: dict[str, Any]) -> tuple[World, Method[Any]]:
        """The world of a run; only the latest one is kept."""
        key = json.dumps(settings, sort_keys=True)
        if key not in self.worlds:
            self.worlds = {key: self.make_world(settings)}
            torch.set_num_threads(self.worlds[key][0].numerics.threads_per_step)
        return self.worlds[key]

    def step(self, request: Request, world: World, method: Method[Any], payload: bytes) -> tuple[Answer, bytes]:
        """Do a step and write the state that it leaves."""
        step = steps_of(method).get(request.step)
        if step is None:
            raise PublicError(f"{method.name} has no client step {request.step!r}")
        message = decode(payload, step.types[0])
        place = Place(request.stage, request.round, request.ask)
        done = perform(world, step, request.client, message, self.states.read(request), place)
        reply = encode(done.reply)
        after = self.states.write(request, done.state)
        return Answer(*request.place, state=after.place if after else None, seconds=done.seconds), reply

    def keep(self, request: Request, method: Method[Any], payload: bytes) -> Answer:
        """Save the client's own model at the party; only the fact leaves."""
        from visard.models.files import save_model

        if self.models is None:
            raise PublicError("this party keeps no models")
        theta = decode(payload, Basis).theta
        own = method.personal(self.states.read(request), theta)
        if own is not None:
            self.models.mkdir(parents=True, exist_ok=True)
            spec = {k: str(request.settings["spec"][k]) for k in ("model", "embedding", "size")}
            save_model(self.models / f"{request.keep}.safetensors", own, spec)
        return Answer(*request.place)


def presence(world: World, own: bool) -> dict[str, dict[str, int]]:
    """The roles of a party; what it says of its data only where the server cannot know it."""
    if not own:
        return {role: {} for role in world.clients}
    return {
        role: {"identities": data.n_classes, "pictures": len(data.train) + len(data.val) + len(data.test)}
        for role, data in world.clients.items()
    }


@dataclass(frozen=True)
class Basis:
    """What a party makes its own model from."""

    theta: dict[str, torch.Tensor] | None


def failed(request: Request, error: Exception, all_local: bool) -> Answer:
    """The answer of a step that raised: one line. What could name local files stays in the log of the party."""
    text = " ".join(str(error).splitlines()) or type(error).__name__
    kind = type(error).__name__
    if all_local and not isinstance(error, VisardError):
        return Answer(*request.place, failure=f"{kind}: {text}", traceback=traceback.format_exc())
    if all_local or isinstance(error, PublicError):
        return Answer(*request.place, failure=text)
    if isinstance(error, VisardError):
        print(f"{request.client or 'a new run'}: {text}", file=sys.stderr, flush=True)
    else:
        traceback.print_exc()
    return Answer(*request.place, failure=f"{kind}: the party's log says more")


# ----------
# The long-lived worker process of a party: it holds torch, the data and the client states.


def serve(channel: socket.socket, factory: str, arguments: dict[str, Any], state: str) -> None:
    """Answer requests until the other side is gone; each is two frames, header and payload, and so is the answer."""
    torch.set_num_threads(1)
    home = Path(state)
    party = Party(partial(resolve(factory), **arguments), OwnStates(home / "states"), models=home / "models")
    send(channel, b"{}")
    while (header := receive(channel)) is not None and (payload := receive(channel)) is not None:
        for part in party.do(header, payload):
            send(channel, part)
