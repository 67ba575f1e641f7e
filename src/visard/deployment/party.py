"""A party's side of a run: it does the requested steps on its own data, and keeps its clients' states."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from visard.aggregation.secure import SecureAggregation
from visard.at_rest import Key, decrypt, refuse_encrypted
from visard.core import ClientId, Method, State
from visard.crypto.signatures import Signer
from visard.deployment.consent_question import ANY, preview_policy, question
from visard.deployment.guard import Guard, NoPolicy, RequestCheck
from visard.deployment.keys import private_key
from visard.deployment.last_weights import LARGE
from visard.deployment.policy import Policy
from visard.engines.codec import MAX_HEADER_OF_FILES, CodecError, decode, encode, encoded
from visard.engines.ledger import parts_of
from visard.engines.local import States, perform
from visard.engines.reply_checks import undeclared
from visard.engines.request import LACKS, Reply, Request, StateFile, check_names, owner_of, pack, step_of, unpack
from visard.engines.world import World
from visard.errors import PublicError, VisardError, one_line
from visard.files import (
    PRIVATE,
    PRIVATE_FOLDER,
    flush_to_disk,
    mapping,
    read_bytes,
    read_json,
    safe_name,
    write_atomically,
    write_durably,
    write_json,
)
from visard.methods.scoring import steps_of
from visard.models.cut import digest_of
from visard.numerics import give_back_memory
from visard.processes import SHORT, Data, Filed, Outbox, Recipe, let_go, receive, receive_any, send
from visard.text import line, visible

KEPT = "kept.json"  # a party's record of the states of a run
SECRET = 32  # bytes
MOST_MODELS = 10  # of one client in one run: a run that is resumed after its end asks for its model again
MakeWorld = Callable[[dict[str, Any], Policy], tuple[World, Method[Any]]]  # from the spec of a run, under a policy


class OwnStates:
    """States on the party's own disk: the server knows their names and a keyed digest, never their content.

    The request names the present state and the one of the last committed round. A state is written before the
    reply leaves and nothing names it until the server commits, so a lost or refused reply changes nothing. The party
    keeps its own record (`kept.json`) of the states that were ever called committed: no request removes or replaces
    the last two of them, and a request that leaves out the state of a client that has one is refused.
    """

    def __init__(self, folder: Path, encrypt_with: Key | None = None) -> None:
        self.folder, self._at_rest = folder, encrypt_with
        folder.mkdir(parents=True, exist_ok=True)
        key = folder / "digest.key"
        if not key.exists():
            write_atomically(key, secrets.token_bytes(32), PRIVATE)
        self._key = read_bytes(key)

    def digest(self, data: bytes) -> str:
        """A keyed digest, so that the server cannot find small states by hashing guesses."""
        return hmac.new(self._key, data, hashlib.sha256).hexdigest()

    def read(self, request: Request) -> State:
        self._sweep(request)
        if request.state is None:
            return {}
        path = self.folder / request.run / request.state.name
        data = read_bytes(path)
        if self._at_rest is not None:
            data = decrypt(self._at_rest, data, _what(request, request.state.name), path)
        else:
            refuse_encrypted(path)
        if not hmac.compare_digest(self.digest(data).encode(), request.state.digest.encode()):
            raise PublicError(f"its state {request.state.name} of run {request.run[:8]} is damaged")
        state: State = decode(data, dict, MAX_HEADER_OF_FILES)
        return state

    def write(self, request: Request, state: State) -> StateFile | None:
        if not state and request.state is None:
            return None
        data = encode(state)
        digest = self.digest(data)
        if request.state is not None and digest == request.state.digest:
            return None
        path = self.folder / request.run / request.new_state
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._at_rest is not None:
            data = self._at_rest.encrypt(data, _what(request, request.new_state))
        write_durably(path, data, PRIVATE)
        flush_to_disk(path.parent)
        return StateFile(request.new_state, digest)

    def _sweep(self, request: Request) -> None:
        """Note the state that the request calls committed; remove only states of lost and refused replies."""
        folder = self.folder / request.run / "clients"
        client = safe_name(request.client)
        mine = [n for p in folder.glob("*") if owner_of(n := f"clients/{p.name}") == client]
        record, before = self._record(request), self._record(request)
        present = request.state.name if request.state else ""
        if any(owner_of(n) != client for n in (present, request.committed, request.new_state) if n):
            raise PublicError("the run names a state that is not one of this client")
        if request.new_state in record["committed"]:
            raise PublicError(f"the run would replace {request.new_state}, a state that it has committed")
        for name in filter(None, (present, request.committed)):
            if not (self.folder / request.run / name).is_file():
                raise PublicError(f"its state {name} of run {request.run[:8]} is not in the party's state folder")
        step = step_of(request.new_state)  # the same for everything between two committed rounds, including tests
        if present:
            record["step"] = step
        elif mine and (record["committed"] or record["step"] not in (0, step)):
            raise PublicError("the run goes on without the state that this party keeps of it")
        if request.committed:
            record["committed"] = sorted({*record["committed"], request.committed}, key=step_of)[-2:]
        if record != before:
            path = self.folder / request.run / KEPT
            write_json(path, self._records(request) | {request.client: record})
        for name in set(mine) - {present, *record["committed"]}:
            (self.folder / request.run / name).unlink(missing_ok=True)

    def _records(self, request: Request) -> dict[str, Any]:
        path = self.folder / request.run / KEPT
        return mapping(read_json(path)) if path.exists() else {}

    def _record(self, request: Request) -> dict[str, Any]:
        """A client's committed states, oldest first, and the step of the run in which a state was last named."""
        return {"committed": [], "step": 0} | mapping(self._records(request).get(request.client))


def _what(request: Request, name: str) -> str:
    """The name that an encrypted state is bound to, so that no state can replace that of another run or client."""
    return f"state {name} of run {request.run}"


@dataclass
class Party:
    """Answers requests; failures come back as one line, never as an exception."""

    make_world: MakeWorld
    states: States
    guard: Guard | None  # what the party allows; None: server and party are one, as in a simulation
    all_local: bool = False  # server and party share a machine, or at least an owner: errors may quote local paths
    models: Path | None = None  # where the party keeps its own finished models
    trunks: Path | None = None  # where it keeps frozen parts of networks, by digest
    secret: bytes | None = None  # of the party, for masks and noise; None: a simulation
    signer: Signer | None = None  # with the key of the party
    worlds: dict[str, tuple[World, Method[Any]]] = field(default_factory=dict)
    outbox: Outbox | None = None  # for long replies
    carried: dict[str, Any] = field(default_factory=dict)  # type and parts of the last step's reply, for the record

    def do(self, header: bytes, payload: Data | Filed) -> tuple[bytes, Data | Filed]:
        """Header and payload of the reply to a request."""
        request = unpack(header, Request)  # raises if it is malformed: there is no place to reply to
        try:
            try:
                return self._answer(request, payload)
            finally:  # even of a step that failed: the next request may be written over the file of this one
                if self.guard is not None:
                    self.guard.last.wait()
        except NoPolicy as error:
            return pack(request.failed(error)), self.question(request)
        except Exception as error:
            return pack(failed(request, error, self.all_local)), b""

    def _answer(self, request: Request, payload: Data | Filed) -> tuple[bytes, Data | Filed]:
        """The reply to a request that this party agrees to; raises where there is none."""
        check_names(request)
        policy = self.guard.policy_of(request) if self.guard is not None else ANY
        world, method = self.world(request.settings, policy)
        watch = self.guard.admit(request, policy, world, method) if self.guard is not None else None
        if not request.client:
            return pack(request.reply(roles=presence(world, bool(request.settings.get("own"))))), b""
        if request.client not in world.clients:
            raise PublicError(f"{request.client!r} is not a role of this party")
        if request.trunk:
            return pack(self.take_trunk(request, world, _opened(payload))), b""
        if request.keep:
            return pack(self.keep(request, world, method, _opened(payload), watch)), b""
        return self.step(request, world, method, payload, watch)

    def question(self, request: Request) -> bytes:
        """The question to ask at this party before the run may begin, or why it cannot begin."""
        assert self.guard is not None
        try:
            policy = preview_policy(request.settings)
            return question(request, *self.world(request.settings, policy), self.guard.server).encode()
        except Exception as error:
            return json.dumps({"refused": failed(request, error, self.all_local).failure}).encode()

    def world(self, settings: dict[str, Any], policy: Policy) -> tuple[World, Method[Any]]:
        """The world of a run; only the latest one is kept."""
        key = json.dumps([settings, policy.model_dump(mode="json")], sort_keys=True)
        if key not in self.worlds:
            self.worlds = {key: self.make_world(settings, policy)}
            trunk = self.worlds[key][0].trunk
            if trunk is not None and self.trunks is not None:
                trunk.load = partial(self.trunk, trunk.digest, trunk.load)
            self.worlds[key][0].secret, self.worlds[key][0].signer = self.secret, self.signer
            torch.set_num_threads(self.worlds[key][0].numerics.threads_per_step)
        return self.worlds[key]

    def step(
        self, request: Request, world: World, method: Method[Any], payload: Data | Filed, watch: RequestCheck | None
    ) -> tuple[bytes, Data | Filed]:
        """Do a step and write the state that it leaves.

        A message in a file is mapped twice: to look at, and for the step, which may write on its own. Neither takes
        memory but for what is being read, or was written.
        """
        step = (steps_of(method) | SecureAggregation.steps()).get(request.step)
        if step is None:
            raise PublicError(f"{method.name} has no client step {request.step!r}")
        message, given = decode(seen := _opened(payload), step.types[0]), None
        if isinstance(payload, bytearray):  # it was received for this step alone: free it, as the message is a copy
            payload.clear()
        elif isinstance(payload, Filed):
            given = partial(_another, payload, step.types[0], seen)
            if watch is not None:
                watch.serial = payload.serial
            if len(payload) > LARGE:
                give_back_memory(len(payload) + LARGE // 4)
        reply = perform(world, step, replace(request, message=message), self.states, True, watch, given)
        if wrong := undeclared(step, message, reply.value, world.statistics):
            name, reason = wrong  # the reason may quote data that must not leave
            print(line(f"{request.client}: {name or 'reply'} {reason}"), file=sys.stderr, flush=True)
            what = f"{step.types[1].__name__}{name and '.' + name}"
            raise PublicError(f"its reply is not sent: {what} is not what the method declares (see the party's log)")
        if watch is not None:
            watch.guard.last.wait()
        del message  # as large as the network: free it before the reply is encoded
        self.carried = {"message": type(reply.value).__name__, "parts": parts_of(reply.value, world.statistics)}
        return pack(reply), self._written(encoded(reply.value))

    def _written(self, pieces: list[Data]) -> Data | Filed:
        """The payload of a reply, in a file if it is long: so it is nowhere in memory beside the network."""
        if self.outbox is None or sum(map(len, pieces)) <= SHORT:
            return b"".join(pieces)
        return self.outbox.write(pieces)

    def trunk(self, digest: str, own: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The frozen part with this digest, as a server sent it before or from the party's `own` file.

        Raises `LACKS`, which the server understands, if it is missing or damaged.
        """
        assert self.trunks is not None
        try:
            held = decode(read_bytes(self.trunks / f"{digest}.bin"), Basis, MAX_HEADER_OF_FILES).theta
        except (OSError, CodecError):
            held = None
        if held is None or digest_of(held) != digest:
            held = own()
        if digest_of(held) != digest:
            raise PublicError(LACKS)
        return held

    def take_trunk(self, request: Request, world: World, payload: Data) -> Reply:
        """Keep the frozen part of the run's network, for this and later runs."""
        if world.trunk is None or world.trunk.digest != request.trunk or self.trunks is None:
            raise PublicError("this run has no such frozen part")
        sent = decode(payload, Basis).theta
        if sent is None:
            world.trunk.load()  # raises where it is not here
            return request.reply()
        # refuses another digest, and weights that do not fit the network
        replace(world.trunk, load=lambda: sent, _weights=None).network()
        self.trunks.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        write_atomically(self.trunks / f"{request.trunk}.bin", encode(Basis(sent)), PRIVATE)
        return request.reply()

    def keep(
        self, request: Request, world: World, method: Method[Any], payload: Data, watch: RequestCheck | None
    ) -> Reply:
        """Save the client's own model at the party; the reply only confirms it."""
        from visard.models.files import DESCRIBES, save_model

        if self.models is None:
            raise PublicError("this party keeps no models")
        basis = decode(payload, Basis)
        if watch is not None:
            watch.look(basis)
            watch.guard.last.wait()
        theta = basis.theta
        own = method.personal(self.states.read(request), theta)
        if own is not None:
            self.models.mkdir(parents=True, exist_ok=True)
            given = request.settings["spec"]
            spec = {key: str(given[key]) for key in DESCRIBES if key in given}
            if world.trunk is not None:
                spec["trained"] = world.trunk.trained
            path, earlier = self._new_model(request)
            save_model(path, world.whole(own), spec)
            if any(read_bytes(path) == read_bytes(other) for other in earlier):  # resumed after its end
                path.unlink()
        return request.reply()

    def _new_model(self, request: Request) -> tuple[Path, list[Path]]:
        """A new file for a model of this run, and the existing ones, which are never overwritten."""
        assert self.models is not None
        name = f"{request.keep[:100]}-{request.run}-{safe_name(request.client)[:50]}"
        numbers = ["", *(f"-{number}" for number in range(2, MOST_MODELS + 1))]
        paths = [self.models / f"{name}{number}.safetensors" for number in numbers]
        for i, path in enumerate(paths):
            if not path.exists():
                return path, paths[:i]
        raise PublicError(f"this party keeps at most {MOST_MODELS} models of a run")


def _opened(payload: Data | Filed) -> Data:
    return payload.map() if isinstance(payload, Filed) else payload


def _another(payload: Filed, kind: type[Any], seen: Data) -> Any:
    """The message in a payload once more; what was `seen` of it so far leaves memory."""
    let_go(seen)
    return decode(payload.map(), kind)


def presence(world: World, own: bool) -> dict[ClientId, dict[str, int]]:
    """The clients at a party, with counts of their data where the server does not know them."""
    if not own:
        return {client: {} for client in world.clients}
    return {
        client: {"identities": data.n_classes, "pictures": len(data.train) + len(data.val) + len(data.test)}
        for client, data in world.clients.items()
    }


@dataclass(frozen=True)
class Basis:
    """The weights from which a party makes its own model."""

    theta: dict[str, torch.Tensor] | None


def failed(request: Request, error: Exception, all_local: bool) -> Reply:
    """The reply of a step that raised: one line. Details that could name local files stay in the party's log."""
    if all_local or isinstance(error, PublicError):
        return request.failed(error)
    if isinstance(error, VisardError):
        print(f"{line(request.client) or 'a new run'}: {one_line(error)}", file=sys.stderr, flush=True)
    else:
        print(visible(traceback.format_exc()), file=sys.stderr, flush=True)
    return request.reply(failure=f"{type(error).__name__}: the party's log says more")


def own_secret(path: Path) -> bytes:
    """The secret of a party: 32 random bytes, made once, that never leave it."""
    if not path.exists():
        write_atomically(path, secrets.token_bytes(SECRET), PRIVATE, parents=True)
    found = read_bytes(path)
    if len(found) != SECRET:
        raise VisardError(f"{path} is damaged: it has {len(found)} bytes, not {SECRET}")
    return found


def _outbox(home: Path, encrypted: bool) -> Outbox | None:
    """Where long replies are written; a party that keeps its states encrypted has nothing of them on its disk."""
    return Outbox(home, memory=encrypted) if not encrypted or hasattr(os, "memfd_create") else None


def serve(
    channel: socket.socket,
    recipe: dict[str, Any],
    state: str,
    policy: dict[str, Any] | None,
    server: str,
    encrypt_with: str | None = None,
    key: str | None = None,
) -> None:
    """The long-lived worker process of a party: it holds torch, the data and the client states.

    It answers until its main process is gone. A request is two frames, header and payload, and so is the reply;
    a third frame describes its content for the party's own ledger, and does not leave the machine. Without a
    `policy` it only does what was agreed to before; `server` is the fingerprint of the server's CA, `key` the
    file of the party's own key.
    """
    torch.set_num_threads(1)
    home = Path(state)
    guard = Guard(home, None if policy is None else Policy.parse(policy, "the policy"), server)
    states = OwnStates(home / "states", Key.load(encrypt_with))
    party = Party(
        Recipe(**recipe).function(), states, guard,
        models=home / "models", trunks=home / "trunks", secret=own_secret(home / "secret.key"),
        signer=Signer(private_key(Path(key))) if key else None,
        outbox=_outbox(home, bool(encrypt_with)),
    )  # fmt: skip
    send(channel, b"{}")
    while (header := receive(channel)) is not None and (payload := receive_any(channel)) is not None:
        party.carried = {}
        answer = party.do(bytes(header), payload)
        for part in (*answer, json.dumps(party.carried).encode()):
            send(channel, part)
        del answer, part, payload
