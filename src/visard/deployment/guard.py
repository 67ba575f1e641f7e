"""A party's policy at work: every request is held against it before a step is done, every reply before it leaves.

What a run says of itself (method, kinds, rounds, parties) is checked first. Then what the request really carries: the
learning rate, steps and batch that the step takes from settings or message (`client_step(trains=...)`), rows of class
vectors, and weights, which may not be farther from those of the request before than the policy says. Pinning the
weights that a run begins with does not bind later rounds; `bounds.distance` does, one round at a time.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints
from urllib.parse import quote

import torch
from torch import Tensor

from visard.aggregation.accounting import epsilon_plain
from visard.aggregation.secure import Circle, Listed, Opening, Plan, of_keys, of_list
from visard.core import BoundStep, Client, Disclosure, Method, Weights, declared_kinds
from visard.crypto.secure_sum import Keys
from visard.crypto.signatures import signed_by
from visard.deployment.memory import Memory, Record
from visard.deployment.policy import Policy, digest_of
from visard.disclosure import carried_kinds, pieces
from visard.engines.codec import MAX_HEADER_OF_FILES, decode, encode, encoded
from visard.engines.refusal import MODEL
from visard.engines.request import Request
from visard.engines.world import World
from visard.errors import PublicError, VisardError
from visard.files import PRIVATE, replacing
from visard.processes import Data, Filed

LIGHT = 0.1  # of a client's own weight in a sum: who has less does not count as another party
PIECE = 2**18  # numbers of a network in float64 at once
LARGE = 2**26  # bytes of networks that are not kept in memory between two requests, only on disk
Seen = dict[str, Weights]  # by the field of a message: entries of the network


class NoPolicy(PublicError):
    """Nobody at this party has agreed to the run."""

    def __init__(self) -> None:
        super().__init__("this party has not agreed to the run")


class Guard:
    """The policies of a party, and what it remembers of runs."""

    def __init__(self, home: Path, policy: Policy | None, server: str = "") -> None:
        """`policy` None: those in the folder `consents`, each for one run. `server` is the fingerprint of its CA."""
        self.policy, self.server, self.memory = policy, server, Memory(home)
        self._seen: tuple[tuple[str, str], Seen] | None = None
        self._written: tuple[tuple[str, str], Path] | None = None  # what was last written, and where
        self._measured: tuple[Filed, int, dict[str, Distance]] | None = None
        self.expire()

    def policy_of(self, request: Request) -> Policy:
        """The policy for a run; `NoPolicy` where somebody must be asked first."""
        policy = self.policy or self._agreed(request.run)
        if policy is None:
            raise NoPolicy
        if policy.runs and request.run not in policy.runs:
            raise PublicError("this party's policy does not name the run (runs)")
        if policy.servers and self.server not in policy.servers:
            raise PublicError("this party's policy does not name the server (servers)")
        return policy

    def _agreed(self, run: str) -> Policy | None:
        path = self.memory.consents / f"{run}.toml"
        return Policy.load(path) if path.exists() else None

    def expire(self) -> None:
        """Forget runs that have been quiet for as long as their policy says."""
        for run in self.memory.runs():
            policy = self.policy or self._agreed(run)
            days = policy.retention.days if policy else None
            if days is not None and run in self.memory.quiet_for(days):
                self.memory.forget(run)

    def admit(self, request: Request, policy: Policy, world: World, method: Method[Any]) -> Watch:
        """Hold what the run says of itself against the policy, and count the request."""
        bounds = policy.bounds
        kinds = leaving(method, world)
        policy.check_kinds(kinds, f"{method.name} would send")
        rounds = sum(stage.rounds for stage in method.stages())
        if max(rounds, request.round) > bounds.rounds:
            raise PublicError(f"the run has {max(rounds, request.round)} rounds, this party allows {bounds.rounds}")
        if kinds & {Disclosure.weights, Disclosure.class_vectors} and averaged(request, world, method) < bounds.parties:
            raise PublicError(f"this party wants {bounds.parties} parties in an average, at least (bounds.parties)")
        if request.settings.get("own") and not policy.allows(Disclosure.count):  # it says how many people it has
            raise PublicError("this party does not allow the kind count to leave")
        for client in [request.client] if request.client in world.clients else world.clients:
            if len(world.clients[client].train) < bounds.pictures:
                raise PublicError("this party has fewer training pictures than its policy asks for (bounds.pictures)")
        self.expire()
        record = self.memory.admit(request.run, method.name, request.settings, bounds.requests, bounds.runs)
        still = frozenset() if Disclosure.statistic in kinds and not world.frozen_norm else world.statistics
        return Watch(self, policy, request, world, record, still)

    def seen(self, request: Request) -> Seen:
        """The networks in the last requests to this client in this run; empty before the first."""
        key, path = (request.run, request.client), self._path(request)
        if self._seen is None or self._seen[0] != key:
            self._seen = key, decode(_content(path), dict, MAX_HEADER_OF_FILES) if path.exists() else {}
        return self._seen[1]

    def measured(self, request: Request, serial: int) -> dict[str, Distance]:
        """How far the networks of the message with this serial are from those in the file of a client, as far as that
        is known: the clients of a party often have the same file and get the same message."""
        path = self._path(request)
        if not serial or not path.exists():
            return {}
        handle = os.open(path, os.O_RDONLY)
        held = Filed(handle, os.fstat(handle).st_size)  # held: so long no other file is the same
        if (
            self._measured is None
            or self._measured[1] != serial
            or not os.path.sameopenfile(self._measured[0].handle, held.handle)
        ):
            self._measured = held, serial, {}
        return self._measured[2]

    def remember(self, request: Request, networks: Seen, serial: int = 0) -> None:
        """Keep the networks of a request, to measure the next ones by; of a message with a `serial`, if it has one."""
        before = self.seen(request)
        large = sum(v.nbytes for part in networks.values() for v in part.values()) > LARGE
        if any(_news(before.get(path, {}), part) for path, part in networks.items()):
            # entries that a request leaves out stay known: leaving them out is no way to send others next time
            known = before | {path: before.get(path, {}) | part for path, part in networks.items()}
            self._write(request, known, networks, serial)
            if not large:
                known = {path: {k: v.clone() for k, v in part.items()} for path, part in known.items()}
                self._seen = (request.run, request.client), known
        if large:
            self._seen = None

    def _write(self, request: Request, known: Seen, networks: Seen, serial: int) -> None:
        """Keep networks on disk; those of several clients of this party that are the same are one file."""
        path, what = self._path(request), (request.run, "")
        for field, part in known.items():
            sent = serial and part.keys() == networks.get(field, {}).keys()
            what = request.run, f"{what[1]}{field} {f'{serial} {sorted(part)}' if sent else digest_of(part)}\n"
        if self._written is not None and self._written[0] == what and self._written[1] != path:
            with suppress(VisardError), replacing(path, parents=True) as beside:  # else it is written as any other
                beside.unlink()
                os.link(self._written[1], beside)
                return
        with replacing(path, parents=True, mode=PRIVATE) as beside, beside.open("wb", buffering=0) as file:
            for piece in encoded(known):
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
        self._written = what, path

    def _path(self, request: Request) -> Path:
        return self.memory.states / request.run / f"seen-{quote(request.client, safe='')}.bin"


@dataclass
class Watch:
    """The policy over one request."""

    guard: Guard
    policy: Policy
    request: Request
    world: World
    record: Record
    still: frozenset[str]  # statistics of batch norm that no client sends, so that the run cannot have new ones
    serial: int = 0  # of the file that the message of the request came in; 0: of none

    def before(self, step: BoundStep[Any, Any], client: Client, message: Any) -> None:
        """Refuse a step that the policy does not allow; called with the client's state, before anything is computed."""
        if step.trains is None:
            raise PublicError(f"the step {step.name} does not say what it trains: no party does it")
        bounds, work = self.policy.bounds, step.trains(step.owner, client, message)
        if work is not None:
            for name, value, allowed in (("lr", work.lr, bounds.lr), ("steps", work.steps, bounds.steps)):
                if not allowed.at_least <= value <= allowed.at_most:
                    raise PublicError(
                        f"{step.name} has {name} = {value:g}, this party allows {allowed.at_least:g} to "
                        f"{allowed.at_most:g} (bounds.{name})"
                    )
            if work.batch < bounds.batch:
                raise PublicError(f"{step.name} has batches of fewer than {bounds.batch} pictures (bounds.batch)")
        self.policy.check_kinds(certain_kinds(step.types[1]), f"{step.name} would send")
        self.look(message)
        if isinstance(message, Circle):
            self._shares(message, client)
        elif isinstance(message, Listed):
            self._agrees(Plan.parse(message.plan), message, client)
        elif isinstance(message, Opening):
            self._opens(Plan.parse(message.plan), message, client)
        elif self.request.secure:
            plan = Plan.parse(self.request.secure)
            if self.policy.protect.dp_epsilon is not None and plan.private is None:
                raise PublicError("this party requires differential privacy: it sends nothing into sums without noise")
            self._masks(plan, message, client)
        elif self.policy.sums_only and MODEL & frozenset(declared_kinds(step.types[1]).values()):
            raise PublicError("this party requires secure aggregation: it sends no weights in the clear (protect)")

        if MODEL & frozenset(declared_kinds(step.types[1]).values()):
            self._spend(message)

    def _spend(self, message: Any) -> None:
        """Count the sum that the reply is for, for good, before anything is computed; refuse one beyond the budget.

        The server knows who takes part, so the party counts each time in full. The same request again, as after a
        restart, costs nothing: its reply is the same.
        """
        protect, request = self.policy.protect, self.request
        if protect.dp_epsilon is None:
            return
        if not 0 < request.noise < math.inf:
            raise PublicError("this party requires differential privacy: it sends nothing into sums without noise")
        place = [request.run, request.stage, request.round, request.ask, request.noise]
        asked = digest_of_text(json.dumps(place) + hashlib.sha256(encode(message)).hexdigest())
        spent = self.guard.memory.spent()
        total, last = spent.get(request.client, (0.0, ""))
        if last == asked:
            return
        total += request.noise**-2
        if (epsilon := epsilon_plain(total, protect.dp_delta)) > protect.dp_epsilon:
            raise PublicError(
                f"this round would make epsilon {epsilon:.3g} at delta {protect.dp_delta:g}, this party's budget is "
                f"{protect.dp_epsilon:g} (protect.dp_epsilon)"
            )
        self.guard.memory.spend(request.client, total, asked)

    def look(self, message: Any) -> None:
        """Refuse class vectors and weights that the policy does not allow."""
        for path, value in tensors(message):
            if value.is_floating_point() and not math.isfinite(value.sum()) and not bool(torch.isfinite(value).all()):
                raise PublicError(f"the request has values that are not finite in {path}")
            if value.ndim == 2 and "." not in path and len(value) > self.policy.bounds.rows:
                raise PublicError(f"{path} has {len(value)} rows, this party allows {self.policy.bounds.rows}")
        names, before = set(self.world.network().state_dict()), self.guard.seen(self.request)
        found = {path: own for path, part in dicts(message) if (own := {k: v for k, v in part.items() if k in names})}
        if not found:
            return
        # what a run began with as zeros, such as control variates beside the weights, has no norm to measure by
        networks = {path: part for path, part in found.items() if any_nonzero(before.get(path, part))}
        measured = {k for part in networks.values() for k in part}
        if zeros := next((path for path, part in found.items() if path not in networks and part.keys() - measured), ""):
            raise PublicError(f"{zeros} of the request is or was all zeros, by which no later weights can be measured")
        if not before:
            self._pinned(networks)
        for path, part in networks.items():
            self._frozen(part)
            if before:
                self._near(path, part, before)
        self.guard.remember(self.request, networks if before else found, self.serial)

    def _shares(self, circle: Circle, client: Client) -> None:
        """Holders of shares that this party does not know could be the server: too few to open both secrets.

        A hostile server asks some holders for one secret and the others for the other one. It has both if the known
        ones, divided between the two, and the unknown ones, which give it everything, are enough for each.
        """
        if self.policy.known:
            around = {name: Keys(both[:32], both[32:]) for name, both in circle.keys.items()}
            known = self._known(circle.context, around, circle.signatures)
            holders, unknown = len(around) + 1, len(around) - len(known)
            if 2 * circle.needed <= holders + unknown:
                raise PublicError(f"this party knows {len(known)} of {len(around)} neighbours in a secure sum: too few")
            self._enough(set(known.values()) | {fingerprint_of(client)})

    def _masks(self, plan: Plan, message: Any, client: Client) -> None:
        """One sum, one reply: two different ones behind the same masks would give away their difference."""
        place = self.request
        if plan.context.rpartition(" ")[0] != f"{place.run} {place.stage} {place.round} {place.ask}":
            raise PublicError("the plan of a secure sum belongs to another place of the run")
        self._enough(self._parties(plan, plan.members, client))
        noise = place.noise if plan.private is None else plan.private.noise
        label = plan.context.rpartition(" ")[0] if plan.private is None else plan.private.label
        if (label, noise) != (plan.context.rpartition(" ")[0], place.noise):
            raise PublicError("the noise of a secure sum is not that of its request")
        known = self._attempt(plan, begins=True)
        digest = hashlib.sha256(plan.asked(message, place.settings) + encode(message)).hexdigest()
        self._once(known, "masked", digest, "this party has masked another reply for the same secure sum")
        self._once(known, "plan", digest_of_text(place.secure), "this secure sum had another plan")

    def _agrees(self, plan: Plan, message: Listed, client: Client) -> None:
        """A party gives its word to open one sum: from enough of these the others know that all open the same."""
        known = self._attempt(plan)
        if known.get("plan") != digest_of_text(message.plan):
            raise PublicError("this party has masked nothing for this secure sum")
        arrived = frozenset(message.arrived)
        if self.request.client not in arrived or not arrived <= plan.members.keys():
            raise PublicError("the clients of a secure sum are not those that it began with")
        self._enough(self._parties(plan, arrived, client))
        digest = digest_of_text(json.dumps(sorted(arrived)))
        self._once(known, "agreed", digest, "this party has agreed to open the same secure sum for other clients")

    def _opens(self, plan: Plan, message: Opening, client: Client) -> None:
        """A sum is opened once, for one set of clients: two sums that differ by one client would give it away."""
        self._agrees(plan, Listed(message.plan, message.arrived), client)
        if self.policy.known:
            known = self._known(plan.context, plan.around, plan.signatures)
            statement = of_list(plan.context, message.arrived)
            words = [n for n, s in message.signatures.items() if n in known and signed_by(statement, s) == known[n]]
            if 2 * (len(words) + 1) <= len(plan.around) + 1:
                raise PublicError(f"{len(words)} known neighbours have agreed to open this secure sum: too few")
        digest = digest_of_text(json.dumps(sorted(message.arrived)))
        refusal = "this party has opened the same secure sum for other clients"
        self._once(self._attempt(plan), "opened", digest, refusal)

    def _known(self, context: str, around: Mapping[str, Keys], signatures: Mapping[str, bytes]) -> dict[str, str]:
        """Of the neighbours whose keys are signed by a party that this one knows: the fingerprint of that party."""
        found = {}
        for name in around.keys() & signatures.keys():
            try:
                who = signed_by(of_keys(context, name, around[name]), signatures[name])
            except PublicError:
                raise PublicError(f"the keys of {name} in a secure sum are not the ones that it signed") from None
            if who in self.policy.known:
                found[name] = who
        return found

    def _parties(self, plan: Plan, among: Collection[str], client: Client) -> set[str]:
        """The parties that count: all that the server names or, where a policy knows some, those of the neighbours.

        One with much less weight than this client hides nothing of it, and does not count.
        """
        least = LIGHT * plan.weights.get(client.id, 0.0)
        heavy = {name for name in among if plan.weights[name] >= least}
        if not self.policy.known:
            return heavy
        known = self._known(plan.context, plan.around, plan.signatures)
        return {who for name, who in known.items() if name in heavy} | {fingerprint_of(client)}

    def _enough(self, parties: Collection[str]) -> None:
        fewest = max(self.policy.bounds.parties, getattr(self.world.aggregation, "fewest", 0))
        if len(parties) < fewest:
            what = f"has {len(parties)} that it knows" if self.policy.known else "has fewer"
            raise PublicError(
                f"this party wants {fewest} parties in a sum, at least, and {what} (bounds.parties, aggregation.fewest)"
            )

    def _attempt(self, plan: Plan, begins: bool = False) -> dict[str, str]:
        """The record of a sum. One that was not opened may begin anew, with other masks; then the old one is over."""
        place, _, number = plan.context.rpartition(" ")
        known = self.record.sums.setdefault(f"{place} {self.request.client}", {})
        last = int(known.get("attempt", "0"))
        if not number.isdecimal() or len(number) > 9 or int(number) < last:
            raise PublicError("this secure sum has begun anew since")
        if int(number) > last:
            if not begins or "opened" in known or "agreed" in known:
                raise PublicError("this party has opened this secure sum for good, or has not begun it")
            known.clear()
            known["attempt"] = number
        return known

    def _once(self, known: dict[str, str], what: str, digest: str, refusal: str) -> None:
        """Note a digest for good, before anything leaves; another one for the same thing is refused."""
        if known.get(what, digest) != digest:
            raise PublicError(refusal)
        if what not in known:
            known[what] = digest
            self.guard.memory.write(self.request.run, self.record)

    def _pinned(self, networks: Seen) -> None:
        """The first weights of a run are those that the policy names, in one field of the message or in several.

        Where only a part of the network travels, they are with the part that is here.
        """
        merged: Weights = {}
        for part in networks.values():
            if any(not torch.equal(merged[k], v) for k, v in part.items() if k in merged):
                raise PublicError("the run begins with two networks in one request")
            merged |= part
        pinned = self.policy.weights.start
        if pinned and (digest := digest_of(self.world.whole(merged))) not in pinned:
            raise PublicError(f"the run begins with weights of digest {digest}, which this party has not pinned")

    def _frozen(self, weights: Weights) -> None:
        """What does not train in this run is the same at every request."""
        patterns, known = self.policy.weights.frozen, self.record.frozen.setdefault(self.request.client, {})
        held = {k: v for k, v in weights.items() if k in self.still or any(fnmatch.fnmatchcase(k, p) for p in patterns)}
        digests = {k: digest_of({k: v}) for k, v in held.items()}
        for name, digest in digests.items():
            if known.get(name, digest) != digest:
                raise PublicError(f"{name} does not train in this run, and has changed")
        if digests.keys() - known.keys():
            known |= digests
            self.guard.memory.write(self.request.run, self.record)

    def _near(self, path: str, weights: Weights, before: Seen) -> None:
        """Later weights are near those before: entry by entry, of the same field or else of another."""
        others = [part for part in before.values() if any_nonzero(part)]
        known = {k: v for part in (*others, before.get(path, {})) for k, v in part.items() if k in weights}
        if any(v.shape != known[k].shape for k, v in weights.items() if k in known):
            raise PublicError("the weights have other shapes than before")
        if self.world.trunk is not None:  # factors are measured by what they make of the network
            known, weights = (self.world.trunk.effective(part) for part in (known, weights))
        shared = [k for k in known if k in weights and k not in self.world.statistics and known[k].is_floating_point()]
        measured = self.guard.measured(self.request, self.serial)
        if path not in measured:
            measured[path] = Distance.of({k: weights[k] for k in shared}, known)
        moved, length, vanished = measured[path]
        if moved > self.policy.bounds.distance * length or vanished:
            raise PublicError(
                f"the weights are {moved / max(length, 1e-30):.3g} times their norm away from those before, "
                f"this party allows {self.policy.bounds.distance:g} (bounds.distance)"
            )

    def after(self, message: Any, reply: Any) -> None:
        """Refuse to send a reply that carries a kind which may not leave."""
        kinds = set(carried_kinds(reply, self.world.statistics))
        if Disclosure.statistic in kinds and not news(message, reply, self.world.statistics):
            kinds.discard(Disclosure.statistic)
        self.policy.check_kinds(frozenset(kinds), "the reply holds")
        if self.policy.protect.batch_norm_at_home:
            layers = {name.rpartition(".")[0] for name in self.world.statistics}
            for _, kind, value in pieces(reply, ()):
                if kind is Disclosure.weights and isinstance(value, dict):
                    norm = {k: v for k, v in value.items() if k.rpartition(".")[0] in layers}
                    if changed(message, norm):
                        raise PublicError("the reply holds batch norm, which this party keeps at home (protect)")


class Distance(NamedTuple):
    """How far weights are from others."""

    moved: float  # L2 norm of the difference
    length: float  # L2 norm of the others
    vanished: bool  # nothing but zeros is left, by which nothing could be measured

    @classmethod
    def of(cls, weights: Weights, known: Weights) -> Distance:
        """In float64, but not all of it at once."""
        moved = length = 0.0
        for key, value in weights.items():
            new, old = value.reshape(-1), known[key].reshape(-1)
            for start in range(0, len(new), PIECE):
                before = old[start : start + PIECE].double()
                moved += float((new[start : start + PIECE].double() - before).square().sum())
                length += float(before.square().sum())
        return cls(math.sqrt(moved), math.sqrt(length), bool(weights) and not any_nonzero(weights))


def _content(path: Path) -> Data:
    """Of a file, so that it is decoded without another copy of all of it; a large one is mapped."""
    if (size := path.stat().st_size) > LARGE:
        return Filed(os.open(path, os.O_RDONLY), size).map()
    data = bytearray(size)
    with path.open("rb") as file:
        del data[file.readinto(data) :]
    return data


def fingerprint_of(client: Client) -> str:
    """Of the key that a client's party signs with."""
    if client.signer is None:
        raise PublicError("this party has no key to sign with")
    return client.signer().fingerprint


def digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def leaving(method: Method[Any], world: World) -> frozenset[Disclosure]:
    """The kinds that leave a client with these settings and this network."""
    return method.leaving(moving=bool(world.statistics) and not world.frozen_norm)


def averaged(request: Request, world: World, method: Method[Any]) -> int:
    """How many clients are in an average, as the run says."""
    said = request.settings.get("settings")
    partition = said.get("partition") if request.settings.get("own") and isinstance(said, dict) else None
    count = partition.get("clients") if isinstance(partition, dict) else len(world.training)
    share = getattr(method, "participation", 1.0)
    return max(1, round(share * count)) if isinstance(count, int) and isinstance(share, float | int) else 0


def certain_kinds(reply: type) -> frozenset[Disclosure]:
    """Kinds of fields that cannot be empty: these leave whatever the step computes."""
    hints = get_type_hints(reply)
    return frozenset(k for name, k in declared_kinds(reply).items() if hints[name] in (Tensor, int, float, bytes))


def news(message: Any, reply: Any, statistics: frozenset[str]) -> bool:
    """Whether statistics in a reply are anything but those that came with the message."""
    for name, kind, value in pieces(reply, statistics):
        if kind is Disclosure.statistic:
            gathered = value if declared_kinds(type(reply))[name] is Disclosure.weights else None
            if gathered is None or changed(message, gathered):
                return True
    return False


def changed(message: Any, entries: Weights) -> bool:
    """Whether entries differ from those of the same name in a message; differences of zero are no news."""
    sent = [part for _, part in dicts(message)]
    return any(
        bool(value.any()) and not any(k in part and torch.equal(part[k], value) for part in sent)
        for k, value in entries.items()
    )


def any_nonzero(entries: Weights) -> bool:
    """Whether any entry holds anything but zeros."""
    return any(bool(value.any()) for value in entries.values())


def _news(known: Weights, part: Weights) -> bool:
    return any(k not in known or not torch.equal(known[k], v) for k, v in part.items())


def dicts(value: Any, path: str = "") -> Iterator[tuple[str, Weights]]:
    """(path, entries) of every dictionary of tensors in a message."""
    if isinstance(value, dict) and value and all(isinstance(v, Tensor) for v in value.values()):
        yield path, value
    elif not isinstance(value, Tensor | str | bytes):
        for name, part in _parts(value):
            yield from dicts(part, f"{path}.{name}".lstrip("."))


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in a message."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for name, part in _parts(value):
            yield from tensors(part, f"{path}.{name}".lstrip("."))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in fields(value))
    elif isinstance(value, dict):
        yield from ((str(k), v) for k, v in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(i), v) for i, v in enumerate(value))
