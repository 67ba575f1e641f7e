"""What travels between a run and a party beside the codec bytes of a message: a request, and the answer to it.

Both are small JSON objects. A request says where the run stands, so that a party that was restarted, and a run
that was resumed, continue from the right state; an answer repeats it, so that an old one is never taken for new.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from visard.errors import PublicError

VERSION = 2
MAX_HEADER = 2**20
RUN_ID = re.compile(r"[0-9a-f]{16,64}")
STATE_NAME = re.compile(r"clients/([\w%.~-]{1,200})-(\d{6,})-\d{1,9}\.bin")
MODEL_NAME = re.compile(r"[\w%.~-]{1,240}")

PACK_NAME = re.compile(r"clients/\d{6,}-[0-9a-f]{8}(-[0-9a-f]{8}\.pack)?")

H = TypeVar("H")
Where = tuple[str, str, int, int]  # name, digest, offset, length; the last two are 0 for a file of a party


class WireError(PublicError):
    """A header that is not what it should be."""


@dataclass(frozen=True)
class Request:
    """Do this step from this state; or, without a step, say who you are."""

    run: str  # id of the run folder
    settings: dict[str, Any]  # what a party needs to build the world of the run
    client: str = ""
    step: str = ""
    stage: str = ""
    round: int = 0
    ask: int = 0
    state: Where | None = None  # the client's present state
    committed: str = ""  # name of the state that the last committed round left
    new_state: str = ""  # where the state after this step goes: a file of the party, or how packs are to begin
    timeout: float = 3600.0
    keep: str = ""  # instead of a step: keep your own model under this name (the message is the basis)
    version: int = VERSION

    @property
    def place(self) -> tuple[str, str, str, int, int]:
        """What an answer must repeat."""
        return self.run, self.client, self.stage, self.round, self.ask


@dataclass(frozen=True)
class Answer:
    """A reply comes as payload next to this; a failure has none."""

    run: str
    client: str
    stage: str
    round: int
    ask: int
    state: Where | None = None  # the new state; None: unchanged
    seconds: float = 0.0
    failure: str | None = None
    traceback: str | None = None
    roles: dict[str, dict[str, int]] = field(default_factory=dict)  # of a node: client -> counts of its data
    version: int = VERSION

    @property
    def place(self) -> tuple[str, str, str, int, int]:
        """Where in the run this answer belongs."""
        return self.run, self.client, self.stage, self.round, self.ask


def pack(header: Request | Answer) -> bytes:
    """JSON of a header."""
    return json.dumps(asdict(header), separators=(",", ":")).encode()


def unpack(data: bytes, kind: type[H]) -> H:
    """The header in `data`, with every field checked."""
    if len(data) > MAX_HEADER:
        raise WireError(f"header of {len(data)} bytes is over the limit of {MAX_HEADER}")
    try:
        fields = json.loads(data)
        header = TypeAdapter(kind).validate_python(fields)
    except (ValueError, RecursionError, ValidationError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise WireError(f"malformed {kind.__name__.lower()}: {first[:200]}") from None
    if fields.get("version") != VERSION:
        raise WireError(f"wire format {fields.get('version')} is not format {VERSION}: update the older side")
    return header


def check_names(request: Request) -> None:
    """Refuse names that could reach outside the folder of the run."""
    if not RUN_ID.fullmatch(request.run):
        raise WireError("malformed run id")
    for name in (request.committed, request.new_state, request.state[0] if request.state else ""):
        if name and not STATE_NAME.fullmatch(name) and not PACK_NAME.fullmatch(name):
            raise WireError("malformed name of a state")
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
