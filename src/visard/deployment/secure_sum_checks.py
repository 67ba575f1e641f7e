"""A party's checks of a secure sum: it masks one reply for each sum, and opens each sum once, for enough known parties.

The party notes what it has masked, agreed to and opened before anything leaves, so that a hostile server gains nothing
by asking again, after a restart either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from visard.aggregation.secure import Circle, Listed, Opening, Plan, of_keys, of_list
from visard.core import Client
from visard.crypto.secure_sum import Keys
from visard.crypto.signatures import signed_by
from visard.deployment.policy import Policy
from visard.deployment.state_folder import RunRecord, StateFolder
from visard.engines.codec import encode
from visard.engines.request import Request
from visard.engines.world import World
from visard.errors import PublicError

LIGHT = 0.1  # share of a client's own weight: clients with less in a sum do not count as parties


@dataclass
class SecureSumChecks:
    """Checks one request of a secure sum against the policy and the party's record of the run."""

    policy: Policy
    request: Request
    world: World
    record: RunRecord
    folder: StateFolder

    def shares(self, circle: Circle, client: Client) -> None:
        """Unknown holders of shares could be the server: refuse if they are enough to open both secrets.

        A hostile server asks some holders for one secret and the others for the other one. It gets both if the known
        ones, divided between the two, and the unknown ones, which reveal everything, are enough for each.
        """
        if self.policy.known:
            around = {name: Keys(both[:32], both[32:]) for name, both in circle.keys.items()}
            known = self._known(circle.context, around, circle.signatures)
            holders, unknown = len(around) + 1, len(around) - len(known)
            if 2 * circle.needed <= holders + unknown:
                raise PublicError(f"this party knows {len(known)} of {len(around)} neighbours in a secure sum: too few")
            self._enough(set(known.values()) | {fingerprint_of(client)})

    def masks(self, plan: Plan, message: Any, client: Client) -> None:
        """Mask only one reply for each sum: two replies behind the same masks would reveal their difference.

        The same message is not enough: from another state, or by another step, the reply to it is another one.
        """
        place = self.request
        if plan.context.rpartition(" ")[0] != f"{place.run} {place.stage} {place.round} {place.ask}":
            raise PublicError("the plan of a secure sum belongs to another place of the run")
        self._enough(self._parties(plan, plan.members, client))
        noise = place.noise if plan.private is None else plan.private.noise
        label = plan.context.rpartition(" ")[0] if plan.private is None else plan.private.label
        if (label, noise) != (plan.context.rpartition(" ")[0], place.noise):
            raise PublicError("the noise of a secure sum is not that of its request")
        known = self._attempt(plan, begins=True)
        beside = json.dumps(place.beside).encode()
        digest = hashlib.sha256(plan.asked(message, place.settings) + encode(message) + beside).hexdigest()
        self._once(known, "masked", digest, "this party has masked another reply for the same secure sum")
        self._once(known, "plan", digest_of_text(place.secure), "this secure sum had another plan")

    def agrees(self, plan: Plan, message: Listed, client: Client) -> None:
        """Agree to open one sum: enough such agreements show the others that all open the same one."""
        known = self._attempt(plan)
        if known.get("plan") != digest_of_text(message.plan):
            raise PublicError("this party has masked nothing for this secure sum")
        arrived = frozenset(message.arrived)
        if self.request.client not in arrived or not arrived <= plan.members.keys():
            raise PublicError("the clients of a secure sum are not those that it began with")
        self._enough(self._parties(plan, arrived, client))
        digest = digest_of_text(json.dumps(sorted(arrived)))
        self._once(known, "agreed", digest, "this party has agreed to open the same secure sum for other clients")

    def opens(self, plan: Plan, message: Opening, client: Client) -> None:
        """Open a sum once, for one set of clients: two sums that differ by one client would reveal its reply."""
        self.agrees(plan, Listed(message.plan, message.arrived), client)
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
        """The fingerprints of known parties, by the neighbours whose keys they signed."""
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
        """The parties that count: all that the server names or, if the policy names known keys, the known neighbours.

        A party with much less weight than this client does not hide its reply, and does not count.
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
        """The record of a sum. A sum that was not opened may start again with other masks; the old one is void."""
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
        """Record a digest durably before anything leaves; a different one for the same purpose is refused."""
        if known.get(what, digest) != digest:
            raise PublicError(refusal)
        if what not in known:
            known[what] = digest
            self.folder.write(self.request.run, self.record)


def fingerprint_of(client: Client) -> str:
    """The fingerprint of the key that a client's party signs with."""
    if client.signer is None:
        raise PublicError("this party has no key to sign with")
    return client.signer().fingerprint


def digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
