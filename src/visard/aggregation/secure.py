r"""Secure aggregation: of the fields that a method averages, the server sees the sum over all clients and no part.

    [aggregation]
    secure = true

Below `Network.reduce`, for every method: clients agree on masks (`crypto.secure_sum`) in three small steps around the
one that is asked for, and that step's reply leaves with its masks on. What is summed, as fixed-point numbers modulo
2^32, for a client whose public weight is $w_i \le 1$:

    w_i (theta_i - theta)   of each field, theta being what the clients were sent under that name
    w_i                     for each field, because a client may have nothing to say in it
    w_i m_i, w_i            of each metric that the reply names

The result is theta + sum / sum of weights. Its bits depend neither on the masks nor on the order of the replies. A
weight is public: what the operator states of a party (`parties.NAME.pictures`), or 1 for all. What a client claims of
itself does not count, and metrics come back as their mean: each reply has the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from visard.aggregation.dp import Grid, bare
from visard.aggregation.dp_shares import Shared
from visard.core import BoundStep, Client, ClientId, Disclosure, Weights, client_step, declared_kinds, nothing
from visard.crypto.secure_sum import (
    Keys,
    Member,
    Opened,
    Sum,
    decoded,
    encoded,
    fraction_bits,
    neighbours,
    threshold,
)
from visard.disclosure import MASKED, declared_names, is_statistic
from visard.errors import PublicError, VisardError

COARSE = 256.0  # running statistics and metrics are divided by this: they are larger, and need fewer digits
PHASES = 10_000  # asks of the three small steps are numbered from here on, so that those of methods keep theirs

Doubles = npt.NDArray[np.float64]


# ---- the small steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Invitation:
    """A sum is about to begin."""

    context: str


@dataclass(frozen=True)
class PublicKeys:
    """The keys of a client for one sum."""

    seal: Annotated[bytes, Disclosure.public_key]
    mask: Annotated[bytes, Disclosure.public_key]


@dataclass(frozen=True)
class Circle:
    """The neighbours of a client with their keys, and how many holders of shares it takes to open a secret."""

    context: str
    keys: dict[str, bytes]
    needed: int


@dataclass(frozen=True)
class Shares:
    """Shares of a client's secrets, encrypted to its neighbours."""

    boxes: Annotated[dict[str, bytes], Disclosure.ciphertext]


@dataclass(frozen=True)
class Opening:
    """Whose vectors arrived; the boxes are those that this client's neighbours sent it."""

    plan: str  # what the client had when it masked its reply
    boxes: dict[str, bytes]
    arrived: tuple[str, ...]


@dataclass(frozen=True)
class OpenedShares:
    """Of each neighbour one share: of its own mask if its vector arrived, of its key if not."""

    own: Annotated[dict[str, bytes], Disclosure.share]
    key: Annotated[dict[str, bytes], Disclosure.share]


@client_step(trains=nothing)
def secure_keys(_: Any, client: Client, message: Invitation) -> PublicKeys:
    """Two public keys for one sum."""
    keys = _member(client, message.context).keys
    return PublicKeys(keys.seal, keys.mask)


@client_step(trains=nothing)
def secure_shares(_: Any, client: Client, message: Circle) -> Shares:
    """Shares of the client's secrets for its neighbours."""
    return Shares(_member(client, message.context).shares(_unpacked(message.keys), message.needed))


@client_step(trains=nothing)
def secure_open(_: Any, client: Client, message: Opening) -> OpenedShares:
    """One share of each neighbour, of one of its two secrets."""
    plan = Plan.parse(message.plan)
    if plan.private is not None:
        plan.private.check_opening(len(plan.members.keys() & set(message.arrived)))
    opened = _member(client, plan.context).opened(plan.around, message.boxes, message.arrived)
    return OpenedShares(opened.own, opened.key)


class SecureAggregation:
    """The owner of the small steps."""

    name: ClassVar[str] = "secure aggregation"
    discloses: ClassVar[frozenset[Disclosure]] = frozenset(
        {Disclosure.public_key, Disclosure.ciphertext, Disclosure.share}
    )

    @classmethod
    def steps(cls) -> dict[str, BoundStep[Any, Any]]:
        """All that a client can be asked for in a sum, by name."""
        return {step.name: step for step in (s.__get__(cls, cls) for s in (secure_keys, secure_shares, secure_open))}


def _member(client: Client, context: str) -> Member:
    return Member(client.id, client.secret, context.encode())


def _unpacked(keys: Mapping[str, bytes]) -> dict[str, Keys]:
    if any(len(both) != 64 for both in keys.values()):
        raise PublicError("a public key in a secure sum is malformed")
    return {name: Keys(both[:32], both[32:]) for name, both in keys.items()}


# ---- what a client adds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """All that the masks of one client's reply depend on beside the message; it travels with the request."""

    context: str  # run, stage, round, ask
    around: dict[str, Keys]  # neighbours that have sent shares
    members: dict[str, str]  # all members of the sum: digest of their keys
    weights: dict[str, float]  # of all members, the largest is 1
    fields: tuple[str, ...]  # that are summed
    largest: float
    private: Shared | None = None  # the noise of a sum with differential privacy

    def text(self) -> str:
        """As JSON."""
        around = {name: (keys.seal + keys.mask).hex() for name, keys in self.around.items()}
        private = None if self.private is None else vars(self.private)
        return json.dumps({**vars(self), "around": around, "private": private}, sort_keys=True)

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
                float(tree["largest"]), private,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise PublicError("the plan of a secure sum is malformed") from None
        digests = {name: digest_of_keys(keys) for name, keys in around.items()}
        if weights.keys() != members.keys() or any(members.get(n) != d for n, d in digests.items()):
            raise PublicError("the plan of a secure sum contradicts itself")
        if not all(0 < w <= 1 for w in weights.values()) or not 0 < plan.largest <= 1e6:
            raise PublicError("a weight or the range of a secure sum is out of bounds")
        return plan

    def asked(self, message: Any) -> bytes:
        """A digest of what every member must have been asked alike: weights, members, settings."""
        alike = [self.context, self.members, self.weights, self.fields, self.largest]
        alike += [] if self.private is None else [vars(self.private)]
        total = hashlib.sha256(json.dumps(alike).encode())
        for name in self.fields:
            for key, value in (_entries(getattr(message, name, None)) or {}).items():
                total.update(f"\0{name}\0{key}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
                total.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        return total.digest()


def digest_of_keys(keys: Keys) -> str:
    return hashlib.sha256(keys.seal + keys.mask).hexdigest()[:32]


def masked(client: Client, plan: Plan, message: Any, reply: Any, statistics: Collection[str]) -> Any:
    """A reply with what is summed behind masks, and nothing else that is the client's own."""
    if client.id not in plan.members:
        raise PublicError("this client is not among the members of the secure sum")
    layout = Layout.of(plan.fields, message, type(reply), statistics)
    if plan.private is not None:
        if plan.private.members != len(plan.members):
            raise PublicError("the noise of a secure sum is for another number of members")
        vector = plan.private.vector(client.secret, plan.fields, message, reply, statistics)
        reply = bare(reply, plan.fields)
    else:
        bits = fraction_bits(len(plan.members), plan.largest)
        vector = encoded(plan.weights[client.id] * layout.flat(message, reply), bits, plan.largest)
    member = _member(client, plan.context)
    total = member.masked(vector, plan.around, plan.asked(message))
    return layout.without(reply, torch.from_numpy(total.view(np.int32)))


@dataclass(frozen=True)
class Layout:
    """Where each number of a reply stands in the vector: the same for all clients that were sent the same."""

    entries: dict[str, dict[str, tuple[torch.Size, float]]]  # by field: shape of an entry, and what it is divided by
    metrics: tuple[tuple[str, str], ...]  # field and name; a field that is one number has the name ""

    @classmethod
    def of(cls, names: Sequence[str], message: Any, reply: type, statistics: Collection[str]) -> Layout:
        entries: dict[str, dict[str, tuple[torch.Size, float]]] = {}
        for name in names:
            sent = _entries(getattr(message, name, None))
            entries[name] = {
                key: (value.shape, COARSE if is_statistic(key, statistics) else 1.0)
                for key, value in (sent or {}).items()
                if value.is_floating_point()
            }
        allowed = declared_names(reply)
        metrics = [
            (name, word)
            for name, kind in declared_kinds(reply).items()
            if kind is Disclosure.metric
            for word in sorted(allowed[name].words) or [""]
        ]
        return cls(entries, tuple(metrics))

    def flat(self, message: Any, reply: Any) -> Doubles:
        """The numbers of a reply: updates and metrics, each with a 1 before it; 0 for what is not there."""
        parts: list[Doubles] = []
        for name, entries in self.entries.items():
            sent, value = _entries(getattr(message, name, None)), _entries(getattr(reply, name))
            if value is not None and sent is None:
                raise PublicError(f"{name} cannot be summed securely: the clients are not sent it")
            parts.append(np.array([float(value is not None)]))
            for key, (shape, divisor) in entries.items():
                if value is None:
                    parts.append(np.zeros(shape.numel()))
                elif key not in value or value[key].shape != shape:
                    raise PublicError(f"{name} has other entries or shapes than what was sent")
                else:
                    update = value[key].detach().double() - cast(Weights, sent)[key].double()
                    parts.append(update.numpy().reshape(-1) / divisor)
        for name, word in self.metrics:
            found = getattr(reply, name)
            number = found.get(word) if isinstance(found, dict) else found
            there = isinstance(number, int | float) and math.isfinite(number)
            parts.append(np.array([float(there), cast(float, number) / COARSE if there else 0.0]))
        return np.concatenate(parts)

    @property
    def size(self) -> int:
        """Numbers of the vector."""
        numbers = sum(1 + sum(shape.numel() for shape, _ in entries.values()) for entries in self.entries.values())
        return numbers + 2 * len(self.metrics)

    def without(self, reply: Any, vector: Tensor) -> Any:
        """The reply with the vector in its first field, without the others and without what it says of itself."""
        empty: dict[str, Any] = {name: _nothing(getattr(reply, name)) for name in (*self.entries, *dict(self.metrics))}
        if declared_kinds(type(reply)).get("n") is Disclosure.count:
            empty["n"] = 1
        return replace(reply, **empty | {next(iter(self.entries)): {MASKED: vector}})

    def means(self, sums: Doubles, message: Any, weight: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """(fields, metrics): what was sent plus the mean update, and the mean of each metric.

        `weight` is that of all clients in the sum: no part can have more.
        """
        found: dict[str, Any] = {}
        place = 0
        for name, entries in self.entries.items():
            sent, total, place = getattr(message, name, None), _share(sums[place], weight), place + 1
            means: Weights = dict(_entries(sent) or {})
            for key, (shape, divisor) in entries.items():
                part, place = sums[place : place + shape.numel()], place + shape.numel()
                if total > 0:
                    update = torch.from_numpy(part * (divisor / total)).reshape(shape)
                    means[key] = (means[key].double() + update).to(means[key].dtype)
            found[name] = None if total <= 0 else means[""] if isinstance(sent, Tensor) else means
        metrics: dict[str, Any] = {}
        for name, word in self.metrics:
            total, value, place = _share(sums[place], weight), float(sums[place + 1]) * COARSE, place + 2
            if word:
                metrics.setdefault(name, {})
            if total > 0 and word:
                metrics[name][word] = value / total
            elif not word:
                metrics[name] = value / total if total > 0 else float("nan")
        return found, metrics


def _share(total: float, weight: float) -> float:
    """The weight of the clients that had something to say; 0 where rounding alone is left."""
    if not -1e-3 <= total <= weight + 1e-3:
        raise VisardError("the masks of a secure sum do not cancel: its clients were asked different things")
    return float(total) if total > 1e-3 else 0.0


def _nothing(value: Any) -> Any:
    """In the place of a value: of the same type, and empty."""
    return (
        {}
        if isinstance(value, dict)
        else torch.empty(0)
        if isinstance(value, Tensor)
        else None
        if value is None
        else 0.0
    )


def _entries(value: Any) -> Weights | None:
    if isinstance(value, Tensor):
        return {"": value}
    return value if isinstance(value, dict) else None


# ---- the server's side ---------------------------------------------------------------------------------------------


class SecureReduction:
    """One sum at the server, in the place of `Reduction`: the same calls, and the phases before and after."""

    def __init__(
        self,
        names: tuple[str, ...],
        context: str,
        rule: Any,
        weights: Mapping[ClientId, float],
        private: Callable[[int], Shared] | None = None,
    ) -> None:
        """`private` gives the noise for so many members, where the run has differential privacy."""
        self.fields, self.context, self.rule = names, context, rule
        self.within = 0.0  # the share of the clients within the bound of their updates, where that adapts
        self._make, self._private, self._grid = private, cast(Shared | None, None), cast(Grid | None, None)
        self.remarks: list[Any] = []
        self.left_out: dict[ClientId, tuple[str, str]] = {}
        most = max(weights.values(), default=1.0)
        self._weights = {client: w / most for client, w in weights.items()}
        self._keys: dict[ClientId, Keys] = {}
        self._boxes: dict[ClientId, Mapping[ClientId, bytes]] = {}
        self._plans: dict[ClientId, Plan] = {}
        self._sum: Sum | None = None
        self._layout: Layout | None = None
        self._message: Any = None

    # phase by phase: messages to send, replies to take
    def invitations(self, clients: Collection[ClientId]) -> dict[ClientId, Invitation]:
        return {client: Invitation(self.context) for client in clients}

    def circles(self, keys: Mapping[ClientId, PublicKeys]) -> dict[ClientId, Circle]:
        self._keys = {client: Keys(k.seal, k.mask) for client, k in keys.items()}
        self._around = neighbours(list(keys), self.rule.neighbours, self.context.encode())
        self._needed = {c: threshold(len(around) + 1, self.rule.threshold) for c, around in self._around.items()}
        packed = {client: k.seal + k.mask for client, k in keys.items()}
        return {
            c: Circle(self.context, {other: packed[other] for other in around}, self._needed[c])
            for c, around in self._around.items()
        }

    def begin(self, shares: Mapping[ClientId, Shares], message: Any, reply: type, statistics: Collection[str]) -> None:
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
            self._plans[client] = Plan(self.context, around, members, weights, self.fields, largest, self._private)
        self._message, self._bits = message, fraction_bits(len(members), largest)
        self._layout = Layout.of(self.fields, message, reply, statistics)
        asked = next(iter(self._plans.values())).asked(message) if self._plans else b""
        sharing = {c: {o: self._keys[o] for o in self._around[c]} for c in members}
        self._sum = Sum(sharing, self._keys, asked)

    def plan(self, client: ClientId) -> str:
        """What goes with the request to a client."""
        return self._plans[client].text()

    def wrong(self, reply: Any) -> tuple[str, str] | None:
        """(field, reason) of what is wrong with a masked reply."""
        assert self._layout is not None
        first = self.fields[0]
        found = getattr(reply, first)
        vector = found.get(MASKED) if isinstance(found, dict) and len(found) == 1 else None
        size = self._layout.size
        if self._private is not None and self._grid is not None:
            size = self._private.size(self._grid)
        if not isinstance(vector, Tensor) or vector.dtype != torch.int32 or vector.shape != (size,):
            return first, "is not a masked vector of the length that was asked for"
        return None

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

    def openings(self) -> dict[ClientId, Opening]:
        """To every client whose vector arrived."""
        assert self._sum is not None
        arrived = tuple(sorted(self._sum.arrived))
        if self._private is not None:
            self._private.check_opening(len(arrived))
        return {
            c: Opening(self._plans[c].text(), {o: self._boxes[o][c] for o in (*self._plans[c].around, c)}, arrived)
            for c in arrived
        }

    def result(self, opened: Mapping[ClientId, OpenedShares]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(fields, metrics): the means over all clients whose vectors arrived."""
        assert self._sum is not None
        assert self._layout is not None
        total = self._sum.result({c: Opened(o.own, o.key) for c, o in opened.items()}, self._needed)
        if self._private is not None and self._grid is not None:
            mean, self.within = self._private.opened(total, len(self._sum.arrived), self._grid)
            return self._grid.result(mean, self._message), {}
        weight = sum(self._weights[client] for client in self._sum.arrived)
        return self._layout.means(decoded(total, self._bits), self._message, weight)

    def close(self) -> None:
        """Let go of what is held."""
        self._sum = None
