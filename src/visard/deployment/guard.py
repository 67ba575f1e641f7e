"""Enforces a party's policy: checks every request before a step is done, and every reply before it leaves.

First the description of the run is checked (method, kinds, rounds, parties), then the content of the request: the
learning rate, steps and batch that the step takes from settings or message (`client_step(trains=...)`), rows of class
vectors, and weights, whose distance from those of the last request is bounded. Pinning the weights that a run begins
with does not restrict later rounds; `bounds.distance` does, one round at a time.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from visard.aggregation.accounting import epsilon_plain
from visard.aggregation.secure import Circle, Listed, Opening, Plan
from visard.core import BoundStep, Client, Disclosure, Method, Weights, declared_kinds
from visard.deployment.last_weights import Distance, LastWeights, Seen, any_nonzero, dicts, tensors
from visard.deployment.policy import Policy, digest_of
from visard.deployment.secure_sum_checks import SecureSumChecks, digest_of_text
from visard.deployment.state_folder import RunRecord, StateFolder
from visard.disclosure import carried_kinds, pieces
from visard.engines.codec import encode
from visard.engines.reply_checks import MODEL
from visard.engines.request import Request
from visard.engines.world import World
from visard.errors import PublicError


class NoPolicy(PublicError):
    """The party has no policy for the run: it must be agreed to first."""

    def __init__(self) -> None:
        super().__init__("this party has not agreed to the run")


class Guard:
    """Holds a party's policies and its records of runs."""

    def __init__(self, home: Path, policy: Policy | None, server: str = "") -> None:
        """`policy` None: those in the folder `consents`, each for one run. `server` is the fingerprint of its CA."""
        self.policy, self.server, self.folder = policy, server, StateFolder(home)
        self.last = LastWeights(self.folder)
        self.expire()

    def policy_of(self, request: Request) -> Policy:
        """The policy for a run; `NoPolicy` if the run must be agreed to first."""
        policy = self.policy or self._agreed(request.run)
        if policy is None:
            raise NoPolicy
        if policy.runs and request.run not in policy.runs:
            raise PublicError("this party's policy does not name the run (runs)")
        if policy.servers and self.server not in policy.servers:
            raise PublicError("this party's policy does not name the server (servers)")
        return policy

    def _agreed(self, run: str) -> Policy | None:
        path = self.folder.consents / f"{run}.toml"
        return Policy.load(path) if path.exists() else None

    def expire(self) -> None:
        """Forget runs that had no request for as long as their policy says."""
        for run in self.folder.runs():
            policy = self.policy or self._agreed(run)
            days = policy.retention.days if policy else None
            if days is not None and run in self.folder.quiet_for(days):
                self.folder.forget(run)

    def admit(self, request: Request, policy: Policy, world: World, method: Method[Any]) -> RequestCheck:
        """Check the description of the run against the policy, and count the request."""
        bounds = policy.bounds
        kinds = leaving(method, world)
        policy.check_kinds(kinds, f"{method.name} would send")
        rounds = sum(stage.rounds for stage in method.stages())
        if max(rounds, request.round) > bounds.rounds:
            raise PublicError(f"the run has {max(rounds, request.round)} rounds, this party allows {bounds.rounds}")
        if kinds & {Disclosure.weights, Disclosure.class_vectors} and averaged(request, world, method) < bounds.parties:
            raise PublicError(f"this party wants {bounds.parties} parties in an average, at least (bounds.parties)")
        if request.settings.get("own") and not policy.allows(
            Disclosure.count
        ):  # joining tells the number of identities
            raise PublicError("this party does not allow the kind count to leave")
        for client in [request.client] if request.client in world.clients else world.clients:
            if len(world.clients[client].train) < bounds.pictures:
                raise PublicError("this party has fewer training pictures than its policy asks for (bounds.pictures)")
        self.expire()
        record = self.folder.admit(request.run, method.name, request.settings, bounds.requests, bounds.runs)
        still = frozenset() if Disclosure.statistic in kinds and not world.frozen_norm else world.statistics
        return RequestCheck(self, policy, request, world, record, still)


@dataclass
class RequestCheck:
    """Checks one request against the policy."""

    guard: Guard
    policy: Policy
    request: Request
    world: World
    record: RunRecord
    still: frozenset[str]  # statistics of batch norm that no client sends, so they must not change
    serial: int = 0  # of the file that the message of the request came in; 0: it came in none

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
        sums = SecureSumChecks(self.policy, self.request, self.world, self.record, self.guard.folder)
        if isinstance(message, Circle):
            sums.shares(message, client)
        elif isinstance(message, Listed):
            sums.agrees(Plan.parse(message.plan), message, client)
        elif isinstance(message, Opening):
            sums.opens(Plan.parse(message.plan), message, client)
        elif self.request.secure:
            plan = Plan.parse(self.request.secure)
            if self.policy.protect.dp_epsilon is not None and plan.private is None:
                raise PublicError("this party requires differential privacy: it sends nothing into sums without noise")
            sums.masks(plan, message, client)
        elif self.policy.sums_only and MODEL & frozenset(declared_kinds(step.types[1]).values()):
            raise PublicError("this party requires secure aggregation: it sends no weights in the clear (protect)")

        if MODEL & frozenset(declared_kinds(step.types[1]).values()):
            self._spend(message)
        if Disclosure.noisy_vectors in declared_kinds(step.types[1]).values():
            self._show_once(message)

    def _show_once(self, message: Any) -> None:
        """Show class vectors with noise once in a run: the mean of many versions has none.

        That a client's state says so is not enough, because a server need not keep to the state after the first time.
        """
        request, shown = self.request, self.record.shown
        asked = digest_of_text(json.dumps(request.beside) + hashlib.sha256(encode(message)).hexdigest())
        if shown.setdefault(request.client, asked) != asked:
            raise PublicError("this party has shown its class vectors with noise in this run, and does so once")
        self.guard.folder.write(request.run, self.record)

    def _spend(self, message: Any) -> None:
        """Count the sum that the reply is for, before anything is computed; refuse it beyond the privacy budget.

        The server knows who takes part, so each time counts in full. The same request again, as after a restart, costs
        nothing: its reply is the same.
        """
        protect, request = self.policy.protect, self.request
        if protect.dp_epsilon is None:
            return
        if not 0 < request.noise < math.inf:
            raise PublicError("this party requires differential privacy: it sends nothing into sums without noise")
        place = [request.run, request.stage, request.round, request.ask, request.noise, *request.beside]
        asked = digest_of_text(json.dumps(place) + hashlib.sha256(encode(message)).hexdigest())
        spent = self.guard.folder.spent()
        total, last = spent.get(request.client, (0.0, ""))
        if last == asked:
            return
        total += request.noise**-2
        if (epsilon := epsilon_plain(total, protect.dp_delta)) > protect.dp_epsilon:
            raise PublicError(
                f"this round would make epsilon {epsilon:.3g} at delta {protect.dp_delta:g}, this party's budget is "
                f"{protect.dp_epsilon:g} (protect.dp_epsilon)"
            )
        self.guard.folder.spend(request.client, total, asked)

    def look(self, message: Any) -> None:
        """Refuse class vectors and weights that the policy does not allow."""
        if (where := self.guard.last.not_finite(message, self.serial)) is not None:
            raise PublicError(f"the request has values that are not finite in {where}")
        for path, value in tensors(message):
            if value.ndim == 2 and "." not in path and len(value) > self.policy.bounds.rows:
                raise PublicError(f"{path} has {len(value)} rows, this party allows {self.policy.bounds.rows}")
        names, before = set(self.world.network().state_dict()), self.guard.last.seen(self.request)
        found = {path: own for path, part in dicts(message) if (own := {k: v for k, v in part.items() if k in names})}
        if not found:
            return
        # fields that begin as zeros, such as control variates beside the weights, have no norm to measure against
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
        self.guard.last.remember(self.request, networks if before else found, self.serial)

    def _pinned(self, networks: Seen) -> None:
        """The first weights of a run must be those that the policy names, in one field of the message or in several.

        Where only a part of the network is sent, they are completed with the part that is here.
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
        """Entries that do not train in this run must be the same in every request."""
        patterns, known = self.policy.weights.frozen, self.record.frozen.setdefault(self.request.client, {})
        held = {k: v for k, v in weights.items() if k in self.still or any(fnmatch.fnmatchcase(k, p) for p in patterns)}
        digests = {k: digest_of({k: v}) for k, v in held.items()}
        for name, digest in digests.items():
            if known.get(name, digest) != digest:
                raise PublicError(f"{name} does not train in this run, and has changed")
        if digests.keys() - known.keys():
            known |= digests
            self.guard.folder.write(self.request.run, self.record)

    def _near(self, path: str, weights: Weights, before: Seen) -> None:
        """Later weights must be near those before: entry by entry, from the same field or from another."""
        others = [part for part in before.values() if any_nonzero(part)]
        known = {k: v for part in (*others, before.get(path, {})) for k, v in part.items() if k in weights}
        if any(v.shape != known[k].shape for k, v in weights.items() if k in known):
            raise PublicError("the weights have other shapes than before")
        if self.world.trunk is not None:  # factors are measured by the weights that they produce
            known, weights = (self.world.trunk.effective(part) for part in (known, weights))
        shared = [k for k in known if k in weights and k not in self.world.statistics and known[k].is_floating_point()]
        measured = self.guard.last.measured(self.request, self.serial)
        if path not in measured:
            measured[path] = Distance.of({k: weights[k] for k in shared}, known)
        moved, length, vanished = measured[path]
        if moved > self.policy.bounds.distance * length or vanished:
            raise PublicError(
                f"the weights are {moved / max(length, 1e-30):.3g} times their norm away from those before, "
                f"this party allows {self.policy.bounds.distance:g} (bounds.distance)"
            )

    def after(self, message: Any, reply: Any) -> None:
        """Refuse to send a reply with a kind of data that may not leave."""
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


def leaving(method: Method[Any], world: World) -> frozenset[Disclosure]:
    """The kinds that leave a client with these settings and this network."""
    return method.leaving(moving=bool(world.statistics) and not world.frozen_norm)


def averaged(request: Request, world: World, method: Method[Any]) -> int:
    """How many clients are in an average, according to the run; one where the next client gets a reply as it is."""
    if getattr(method, "in_turn", 1) != 1:
        return 1
    said = request.settings.get("settings")
    partition = said.get("partition") if request.settings.get("own") and isinstance(said, dict) else None
    count = partition.get("clients") if isinstance(partition, dict) else len(world.training)
    share = getattr(method, "participation", 1.0)
    return max(1, round(share * count)) if isinstance(count, int) and isinstance(share, float | int) else 0


def certain_kinds(reply: type) -> frozenset[Disclosure]:
    """Kinds of fields that cannot be empty: these leave in any case."""
    hints = get_type_hints(reply)
    return frozenset(k for name, k in declared_kinds(reply).items() if hints[name] in (Tensor, int, float, bytes))


def news(message: Any, reply: Any, statistics: frozenset[str]) -> bool:
    """Whether a reply has other statistics than the message."""
    for name, kind, value in pieces(reply, statistics):
        if kind is Disclosure.statistic:
            gathered = value if declared_kinds(type(reply))[name] is Disclosure.weights else None
            if gathered is None or changed(message, gathered):
                return True
    return False


def changed(message: Any, entries: Weights) -> bool:
    """Whether entries differ from those of the same name in a message; all-zero entries do not count."""
    sent = [part for _, part in dicts(message)]
    return any(
        bool(value.any()) and not any(k in part and torch.equal(part[k], value) for part in sent)
        for k, value in entries.items()
    )
