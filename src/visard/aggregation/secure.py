r"""Secure aggregation: the server sees the sum over all clients of the averaged fields, and no single reply.

    [aggregation]
    secure = true

Below `Network.reduce`, for every method: clients agree on masks (`crypto.secure_sum`) in three small steps around the
one that is asked for, and that step's reply leaves with its masks on. What is summed, as fixed-point numbers modulo
2^32, for a client whose public weight is $w_i \le 1$:

    w_i (theta_i - theta)   of each field, theta being what the clients were sent under that name
    w_i                     for each field, because a client may have no value for it
    w_i m_i, w_i            of each metric that the reply names

With `compress` (to = "int8") the updates of the trained entries are levels of 8 bits, rounded at random, and several of
them share one number of the vector, each with room for the sum over all clients (`layout`): these are what is masked.

The result is theta + sum / sum of weights. Its bits depend neither on the masks nor on the order of the replies. A
weight is public: what the operator states of a party (`parties.NAME.pictures`), or 1 for all. A client's own claim does
not count. Every reply gets the mean of the metrics.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from visard.aggregation.compression import Compress
from visard.aggregation.dp import Grid, bare, entries_of
from visard.aggregation.dp_shares import Shared
from visard.aggregation.layout import Layout
from visard.aggregation.people import Total
from visard.core import BoundStep, Client, ClientId, Disclosure, client_step, nothing
from visard.crypto.secure_sum import (
    Keys,
    Member,
    Opened,
    Sum,
    fraction_bits,
    member,
    neighbours,
    threshold,
)
from visard.disclosure import MASKED
from visard.errors import PublicError, VisardError

PHASES = 10_000  # asks of the three small steps are numbered from here on, so that those of methods keep theirs


# ---- the small steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Invitation:
    """A sum is about to begin."""

    context: str
    sign: bool = False


@dataclass(frozen=True)
class PublicKeys:
    """The keys of a client for one sum."""

    seal: Annotated[bytes, Disclosure.public_key]
    mask: Annotated[bytes, Disclosure.public_key]
    signature: Annotated[bytes, Disclosure.public_key] = b""  # by the key of the client's party


@dataclass(frozen=True)
class Circle:
    """The neighbours of a client with their keys, and how many holders of shares it takes to open a secret."""

    context: str
    keys: dict[str, bytes]
    needed: int
    signatures: dict[str, bytes] = field(default_factory=dict)  # of the neighbours, each of its keys


@dataclass(frozen=True)
class Shares:
    """Shares of a client's secrets, encrypted to its neighbours."""

    boxes: Annotated[dict[str, bytes], Disclosure.ciphertext]


@dataclass(frozen=True)
class Listed:
    """Whose vectors arrived."""

    plan: str  # what the client had when it masked its reply
    arrived: tuple[str, ...]


@dataclass(frozen=True)
class Agreed:
    """A client has seen this list and will open only its sum."""

    signature: Annotated[bytes, Disclosure.public_key]


@dataclass(frozen=True)
class Opening:
    """Whose vectors arrived; the boxes are those that this client's neighbours sent it."""

    plan: str  # what the client had when it masked its reply
    boxes: dict[str, bytes]
    arrived: tuple[str, ...]
    signatures: dict[str, bytes] = field(default_factory=dict)  # of neighbours that have seen the same list


@dataclass(frozen=True)
class OpenedShares:
    """One share of each neighbour: of its own mask if its vector arrived, of its key if not."""

    own: Annotated[dict[str, bytes], Disclosure.share]
    key: Annotated[dict[str, bytes], Disclosure.share]


@client_step(trains=nothing)
def secure_keys(_: Any, client: Client, message: Invitation) -> PublicKeys:
    """Two public keys for one sum."""
    keys = _member(client, message.context).keys
    return PublicKeys(keys.seal, keys.mask, _signed(client, of_keys(message.context, client.id, keys), message.sign))


@client_step(trains=nothing)
def secure_shares(_: Any, client: Client, message: Circle) -> Shares:
    """Shares of the client's secrets for its neighbours."""
    return Shares(_member(client, message.context).shares(_unpacked(message.keys), message.needed))


@client_step(trains=nothing)
def secure_agree(_: Any, client: Client, message: Listed) -> Agreed:
    """The client's signature that it has seen one list of replies."""
    return Agreed(_signed(client, of_list(Plan.parse(message.plan).context, message.arrived), True))


@client_step(trains=nothing)
def secure_open(_: Any, client: Client, message: Opening) -> OpenedShares:
    """One share of each neighbour, of one of its two secrets."""
    plan = Plan.parse(message.plan)
    if plan.private is not None:
        plan.private.check_opening(len(plan.members.keys() & set(message.arrived)))
    opened = _member(client, plan.context).opened(plan.around, message.boxes, message.arrived)
    return OpenedShares(opened.own, opened.key)


class SecureAggregation:
    """The class of the small steps."""

    name: ClassVar[str] = "secure aggregation"
    discloses: ClassVar[frozenset[Disclosure]] = frozenset(
        {Disclosure.public_key, Disclosure.ciphertext, Disclosure.share}
    )

    @classmethod
    def steps(cls) -> dict[str, BoundStep[Any, Any]]:
        """All that a client can be asked for in a sum, by name."""
        small = (secure_keys, secure_shares, secure_agree, secure_open)
        return {step.name: step for step in (s.__get__(cls, cls) for s in small)}


def of_keys(context: str, client: ClientId, keys: Keys) -> bytes:
    """The statement that a client signs about its keys: that they are its own, and of one sum."""
    return _statement("keys", context, client, (keys.seal + keys.mask).hex())


def of_list(context: str, arrived: Sequence[ClientId]) -> bytes:
    """The statement that a client signs about the list of clients whose vectors arrived."""
    return _statement("list", context, *sorted(arrived))


def _statement(*parts: str) -> bytes:
    return json.dumps(["visard secure sum", *parts]).encode()


def _signed(client: Client, statement: bytes, wanted: bool) -> bytes:
    if wanted and client.signer is None:
        raise PublicError("this client has no key to sign with")
    return client.signer()(statement) if wanted and client.signer is not None else b""


def _member(client: Client, context: str) -> Member:
    return member(client.id, client.secret, context.encode())


def _unpacked(keys: Mapping[str, bytes]) -> dict[str, Keys]:
    if any(len(both) != 64 for both in keys.values()):
        raise PublicError("a public key in a secure sum is malformed")
    return {name: Keys(both[:32], both[32:]) for name, both in keys.items()}


# ---- what a client adds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Everything beside the message that the masks of a client's reply depend on; it travels with the request."""

    context: str  # run, stage, round, ask, attempt
    around: dict[str, Keys]  # neighbours that have sent shares
    members: dict[str, str]  # all members of the sum: digest of their keys
    weights: dict[str, float]  # of all members, the largest is 1
    fields: tuple[str, ...]  # that are summed
    largest: float
    private: Shared | None = None  # the noise of a sum with differential privacy
    signatures: dict[str, bytes] = field(default_factory=dict)  # of the neighbours, each of its keys

    def text(self) -> str:
        """As JSON."""
        around = {name: (keys.seal + keys.mask).hex() for name, keys in self.around.items()}
        private = None if self.private is None else vars(self.private)
        signatures = {name: signature.hex() for name, signature in self.signatures.items()}
        plain = {"around": around, "private": private, "signatures": signatures}
        return json.dumps({**vars(self), **plain}, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that a server sent; one line if it makes no sense."""
        try:
            tree = json.loads(text)
            around = _unpacked({str(k): bytes.fromhex(v) for k, v in tree["around"].items()})
            weights = {str(k): float(v) for k, v in tree["weights"].items()}
            members = {str(k): str(v) for k, v in tree["members"].items()}
            private = None if tree.get("private") is None else Shared.parse(tree["private"])
            plan = cls(
                str(tree["context"]), around, members, weights, tuple(str(f) for f in tree["fields"]),
                float(tree["largest"]), private, {str(k): bytes.fromhex(v) for k, v in tree["signatures"].items()},
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise PublicError("the plan of a secure sum is malformed") from None
        digests = {name: digest_of_keys(keys) for name, keys in around.items()}
        if weights.keys() != members.keys() or any(members.get(n) != d for n, d in digests.items()):
            raise PublicError("the plan of a secure sum contradicts itself")
        if not all(0 < w <= 1 for w in weights.values()) or not 0 < plan.largest <= 1e6:
            raise PublicError("a weight or the range of a secure sum is out of bounds")
        return plan

    def asked(self, message: Any, settings: Mapping[str, Any]) -> bytes:
        """A digest of what must be the same in the requests to all members.

        The members and their weights, the settings of the run, the fields that are summed, and the numbers of the
        message beside these, such as the learning rate. Other fields may be a client's own.
        """
        numbers = {name: value for name, value in vars(message).items() if isinstance(value, float)}
        alike = [self.context, self.members, self.weights, self.fields, self.largest, numbers, dict(settings)]
        alike += [] if self.private is None else [vars(self.private)]
        total = hashlib.sha256(json.dumps(alike, sort_keys=True).encode())
        for name in self.fields:
            for key, value in (entries_of(getattr(message, name, None)) or {}).items():
                total.update(f"\0{name}\0{key}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
                total.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        return total.digest()


def digest_of_keys(keys: Keys) -> str:
    return hashlib.sha256(keys.seal + keys.mask).hexdigest()[:32]


def masked(
    client: Client,
    plan: Plan,
    message: Any,
    reply: Any,
    statistics: Collection[str],
    settings: Mapping[str, Any],
    compress: Compress | None = None,
    people: Total | None = None,
) -> Any:
    """A reply with the summed fields behind masks, and no other data of the client; `total` is the sum over its people,
    if the client sums over them."""
    if client.id not in plan.members:
        raise PublicError("this client is not among the members of the secure sum")
    layout = Layout.of(plan.fields, message, type(reply), statistics, compress)
    if plan.private is not None:
        if plan.private.members != len(plan.members):
            raise PublicError("the noise of a secure sum is for another number of members")
        if people is None:
            vector = plan.private.vector(client.secret, plan.fields, message, reply, statistics)
        else:
            within = people.within - people.people / 2
            vector = plan.private.noisy(client.secret, plan.fields, message, people.integers, within)
        reply = bare(reply, plan.fields)
    else:
        bits, weight = fraction_bits(len(plan.members), plan.largest), plan.weights[client.id]
        vector = layout.vector(message, reply, weight, bits, plan.largest)
        if layout.levels is not None:
            vector = np.concatenate([vector, layout.levels.packed(client, message, reply, weight, len(plan.members))])
    total = _member(client, plan.context).masked(vector, plan.around, plan.asked(message, settings))
    return layout.without(reply, torch.from_numpy(total.view(np.int32)))


# ---- the server's side ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """What a server keeps of a sum before it is opened, so that a resumed run can open the same one.

    Clients open one sum for each place in a run. As long as none has opened it, a resumed run makes another attempt,
    with other masks and the clients that are there; afterwards only the same sum can be opened.
    """

    place: str  # run, stage, round, ask
    attempt: int
    keys: dict[str, bytes] = field(default_factory=dict)
    signatures: dict[str, bytes] = field(default_factory=dict)
    boxes: dict[str, dict[str, bytes]] = field(default_factory=dict)
    arrived: tuple[str, ...] = ()  # empty: it was not opened

    @property
    def context(self) -> str:
        """The one sum that keys and masks are for."""
        return f"{self.place} {self.attempt}"


class SecureReduction:
    """One sum at the server, with the interface of `Reduction` and the phases before and after."""

    def __init__(
        self,
        names: tuple[str, ...],
        context: str,
        rule: Any,
        weights: Mapping[ClientId, float],
        private: Callable[[int], Shared] | None = None,
        compress: Compress | None = None,
    ) -> None:
        """`private` gives the noise for so many members, where the run has differential privacy."""
        self.fields, self.context, self.rule, self._compress = names, context, rule, compress
        self.within = 0.0  # the share of the clients within the bound of their updates, where that adapts
        self._make, self._private, self._grid = private, cast(Shared | None, None), cast(Grid | None, None)
        self.remarks: list[Any] = []
        self.left_out: dict[ClientId, tuple[str, str]] = {}
        most = max(weights.values(), default=1.0)
        self._weights = {client: w / most for client, w in weights.items()}
        self._keys: dict[ClientId, Keys] = {}
        self._boxes: dict[ClientId, Mapping[ClientId, bytes]] = {}
        self._plans: dict[ClientId, Plan] = {}
        self._signatures: dict[ClientId, bytes] = {}
        self._sum: Sum | None = None
        self._layout: Layout | None = None
        self._message: Any = None

    # phase by phase: messages to send, replies to take
    def invitations(self, clients: Collection[ClientId]) -> dict[ClientId, Invitation]:
        return {client: Invitation(self.context, self.rule.signed) for client in clients}

    def circles(self, keys: Mapping[ClientId, PublicKeys]) -> dict[ClientId, Circle]:
        self._signatures = {client: k.signature for client, k in keys.items() if k.signature}
        self._keys = {client: Keys(k.seal, k.mask) for client, k in keys.items()}
        self._around = neighbours(list(keys), self.rule.neighbours, self.context.encode())
        self._needed = {c: threshold(len(around) + 1, self.rule.threshold) for c, around in self._around.items()}
        packed = {client: k.seal + k.mask for client, k in keys.items()}
        return {
            c: Circle(
                self.context, {other: packed[other] for other in around}, self._needed[c], self._signatures_of(around)
            )
            for c, around in ((c, self._around[c]) for c in keys)
        }

    def _signatures_of(self, clients: Collection[ClientId]) -> dict[str, bytes]:
        return {client: self._signatures[client] for client in clients if client in self._signatures}

    def begin(
        self,
        shares: Mapping[ClientId, Shares],
        message: Any,
        reply: type,
        statistics: Collection[str],
        settings: Mapping[str, Any],
    ) -> None:
        """All members are known: those that have sent shares."""
        self._boxes = {client: s.boxes for client, s in shares.items()}
        members = {client: digest_of_keys(self._keys[client]) for client in sorted(shares)}
        weights = {client: self._weights[client] for client in members}
        largest = float(self.rule.range)
        if self._make is not None and members:
            self._private = self._make(len(members))
            self._grid = self._private.grid(self.fields, message, statistics)
        for client in members:
            around = {o: self._keys[o] for o in self._around[client] if o in members}
            signatures = self._signatures_of(around)
            self._plans[client] = Plan(
                self.context, around, members, weights, self.fields, largest, self._private, signatures
            )
        self._message, self._bits = message, fraction_bits(len(members), largest)
        self._layout = Layout.of(self.fields, message, reply, statistics, self._compress)
        asked = next(iter(self._plans.values())).asked(message, settings) if self._plans else b""
        sharing = {c: {o: self._keys[o] for o in self._around[c]} for c in members}
        self._sum = Sum(sharing, self._keys, asked)

    def begun(self, begun: Begun) -> Begun:
        """The record to keep before clients are asked to open the sum."""
        keys = {client: keys.seal + keys.mask for client, keys in self._keys.items()}
        boxes = {client: dict(boxes) for client, boxes in self._boxes.items()}
        return replace(begun, keys=keys, signatures=self._signatures, boxes=boxes, arrived=self.arrived)

    def again(self, begun: Begun) -> tuple[dict[ClientId, Circle], dict[ClientId, Shares]]:
        """The circles and the shares of a sum that clients may have opened already."""
        keys = {c: PublicKeys(k[:32], k[32:], begun.signatures.get(c, b"")) for c, k in begun.keys.items()}
        return self.circles(keys), {client: Shares(boxes) for client, boxes in begun.boxes.items()}

    def plan(self, client: ClientId) -> str:
        """The plan in the request to a client."""
        return self._plans[client].text()

    def wrong(self, reply: Any) -> tuple[str, str] | None:
        """(field, reason) of what is wrong with a masked reply."""
        assert self._layout is not None
        first = self.fields[0]
        found = getattr(reply, first)
        vector = found.get(MASKED) if isinstance(found, dict) and len(found) == 1 else None
        if not isinstance(vector, Tensor) or vector.dtype != torch.int32 or vector.shape != (self._size,):
            return first, "is not a masked vector of the length that was asked for"
        return None

    @property
    def _size(self) -> int:
        assert self._layout is not None
        if self._private is not None and self._grid is not None:
            return self._private.size(self._grid)
        levels = self._layout.levels
        return self._layout.size + (levels.size(self._message, len(self._plans)) if levels is not None else 0)

    def known(self, reply: Any) -> tuple[str, ...]:
        """Fields that need no other check: they are behind masks, or empty."""
        metrics = {name for name, _ in self._layout.metrics} if self._layout else set()
        return (*self.fields, *metrics)

    def take(self, client: ClientId, message: Any, reply: Any) -> Any:
        """Add a client's masked vector."""
        assert self._sum is not None
        vector = getattr(reply, self.fields[0])[MASKED].numpy().view(np.uint32)
        self._sum.add(client, vector)
        return replace(reply, **{name: {} if isinstance(getattr(reply, name), dict) else None for name in self.fields})

    @property
    def arrived(self) -> tuple[ClientId, ...]:
        """Whose vectors are in the sum."""
        assert self._sum is not None
        return tuple(sorted(self._sum.arrived))

    def lists(self) -> dict[ClientId, Listed]:
        """To every client whose vector arrived, where clients sign."""
        if len(self.arrived) < self.rule.fewest:
            few = f"{len(self.arrived)} clients are in a sum, {self.rule.fewest} are needed (aggregation.fewest)"
            raise VisardError(few)
        if self._private is not None:
            self._private.check_opening(len(self.arrived))
        return {c: Listed(self._plans[c].text(), self.arrived) for c in self.arrived if self.rule.signed}

    def openings(self, agreed: Mapping[ClientId, Agreed]) -> dict[ClientId, Opening]:
        """To every client whose vector arrived."""
        found = {}
        for c in self.arrived:
            near = (*self._plans[c].around, c)
            words = {o: agreed[o].signature for o in near if o in agreed}
            found[c] = Opening(self._plans[c].text(), {o: self._boxes[o][c] for o in near}, self.arrived, words)
        return found

    def result(self, opened: Mapping[ClientId, OpenedShares]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(fields, metrics): the means over all clients whose vectors arrived."""
        assert self._sum is not None
        assert self._layout is not None
        total = self._sum.result({c: Opened(o.own, o.key) for c, o in opened.items()}, self._needed)
        if self._private is not None and self._grid is not None:
            mean, self.within = self._private.opened(total, len(self._sum.arrived), self._grid)
            return self._grid.result(mean, self._message), {}
        weight = sum(self._weights[client] for client in self._sum.arrived)
        wide, rest, levels = total[: self._layout.size], total[self._layout.size :], self._layout.levels
        members, arrived = len(self._plans), len(self._sum.arrived)
        updates = levels.updates(rest, self._message, members, arrived) if levels is not None else {}
        return self._layout.means(wide, self._bits, self._message, weight, updates)

    def close(self) -> None:
        """Free the sum."""
        self._sum = None
