"""A request to a client and the reply to it: the same two types in this process, to a worker and over a network.

Over a network both are a small JSON header, and the codec bytes of the message or of the value go beside it. A request
says how far the run is, so that a party that was restarted, and a run that was resumed, continue from the right state;
a reply repeats it, so that an old reply is never taken for a new one. This file imports no torch, because a party's
main process has none.
"""

from __future__ import annotations

import functools
import json
import re
import traceback
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from visard.errors import PublicError, VisardError, one_line

VERSION = 3
MAX_HEADER = 2**20
RUN_ID = re.compile(r"[0-9a-f]{16,64}")
DIGEST = re.compile(r"[0-9a-f]{64}")
SESSION = re.compile(r"([0-9a-f]{16})?")
STATE_NAME = re.compile(r"clients/([\w%.~-]{1,200})-(\d{6,})-\d{1,9}\.bin")
PACK_NAME = re.compile(r"clients/\d{6,}-[0-9a-f]{8}(-[0-9a-f]{8}\.pack)?")
MODEL_NAME = re.compile(r"[\w%.~-]{1,240}")
PLACE = {"run", "client", "stage", "round", "ask"}  # fields that every header has
BESIDE = ("message", "value")  # fields that are no part of a header

H = TypeVar("H")
LACKS = "it has not got the frozen part of the network"
DIED = "its worker process died"
LATE = "no reply before the time limit"


class WireError(PublicError):
    """A header that is not what it should be."""


class StateFile(NamedTuple):
    """A client's state on disk: `length` bytes of a pack, or a whole file of its party where `length` is 0."""

    name: str  # relative to the checkpoint folder
    digest: str
    offset: int = 0
    length: int = 0


@dataclass(frozen=True)
class Request:
    """Do this step from this state; or, without a client, say who you are.

    The random streams of a step depend on the run's seed, `stage`, `round`, `ask` and `client`, and on nothing else.
    """

    run: str = ""  # id of the run folder
    settings: dict[str, Any] = field(default_factory=dict)  # what a party needs to build the world of the run
    client: str = ""
    step: str = ""
    stage: str = ""
    round: int = 0
    ask: int = 0
    state: StateFile | None = None  # the client's present state
    committed: str = ""  # name of the state that the last committed round left
    new_state: str = ""  # where the state after this step goes: a file of the party, or how the pack's name begins
    timeout: float = 3600.0
    keep: str = ""  # instead of a step: keep your own model under this name (the message is the basis)
    trunk: str = ""  # instead of a step: keep the frozen part with this digest; a message without weights only asks
    secure: str = ""  # the plan of a secure sum: the reply leaves behind masks (`aggregation.secure`)
    noise: float = 0.0  # of the sum that the reply goes into, by the longest update in it (`aggregation.dp`)
    people: str = ""  # how a client sums over its people (`aggregation.people`)
    session: str = ""  # the process of the server that asks: the records of both sides name it
    version: int = VERSION
    message: Any = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> tuple[str, str, str, int, int]:
        """What a reply must repeat."""
        return self.run, self.client, self.stage, self.round, self.ask

    @property
    def beside(self) -> list[Any]:
        """What a reply depends on beside its place, the message and the settings."""
        return [self.step, self.state.digest if self.state else "", self.people]

    def reply(self, **fields: Any) -> Reply:
        """A reply to this request."""
        return Reply(*self.place, **fields)

    def failed(self, error: Exception) -> Reply:
        """The reply where the step raised: one line, and the traceback for the event log if it is a bug."""
        trace = None if isinstance(error, VisardError) else "".join(traceback.format_exception(error))
        return self.reply(failure=one_line(error), traceback=trace)


@dataclass(frozen=True)
class Reply:
    """The result of a step with the client's new state, or why it failed."""

    run: str = ""
    client: str = ""
    stage: str = ""
    round: int = 0
    ask: int = 0
    state: StateFile | None = None  # None: unchanged
    seconds: float = 0.0
    failure: str | None = None
    traceback: str | None = None
    roles: dict[str, dict[str, int]] = field(default_factory=dict)  # of a party: client -> counts of its data
    version: int = VERSION
    value: Any = field(default=None, repr=False, compare=False)  # of the step's reply type

    @property
    def place(self) -> tuple[str, str, str, int, int]:
        """Where in the run this reply belongs."""
        return self.run, self.client, self.stage, self.round, self.ask


def pack(header: Request | Reply) -> bytes:
    """JSON of a header."""
    return json.dumps({k: v for k, v in vars(header).items() if k not in BESIDE}, separators=(",", ":")).encode()


def unpack(data: bytes, kind: type[H]) -> H:
    """The header in `data`, with every field checked."""
    if len(data) > MAX_HEADER:
        raise WireError(f"header of {len(data)} bytes is over the limit of {MAX_HEADER}")
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict) or not fields.keys() >= PLACE:
            raise ValueError("it does not say where in a run it belongs")
        header: H = _adapter(cast(Hashable, kind)).validate_python({k: fields[k] for k in fields if k not in BESIDE})
    except (ValueError, RecursionError, ValidationError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise WireError(f"malformed {kind.__name__.lower()}: {first[:200]}") from None
    if fields.get("version") != VERSION:
        raise WireError(f"wire format {fields.get('version')} is not format {VERSION}: update the older side")
    if isinstance(header, Reply) and header.state is not None and not DIGEST.fullmatch(header.state.digest):
        raise WireError("malformed digest of a state")
    if isinstance(header, Reply) and pack(header) != data:  # bytes beside the fields would be in no ledger
        raise WireError("malformed reply: its header holds more than its fields")
    return header


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check_names(request: Request) -> None:
    """Refuse names that could reach outside the folder of the run."""
    if not RUN_ID.fullmatch(request.run):
        raise WireError("malformed run id")
    if not SESSION.fullmatch(request.session):
        raise WireError("malformed session id")
    for name in (request.committed, request.new_state, request.state.name if request.state else ""):
        if name and not STATE_NAME.fullmatch(name) and not PACK_NAME.fullmatch(name):
            raise WireError("malformed name of a state")
    if request.trunk and not DIGEST.fullmatch(request.trunk):
        raise WireError("malformed digest of a frozen part")
    if request.keep and not MODEL_NAME.fullmatch(request.keep):
        raise WireError("malformed name of a model")


def step_of(name: str) -> int:
    """The step number in a state's name; 0 for no name."""
    match = STATE_NAME.fullmatch(name)
    return int(match.group(2)) if match else 0


def owner_of(name: str) -> str:
    """The client in a state's name; empty for what is no state."""
    match = STATE_NAME.fullmatch(name)
    return match.group(1) if match else ""
