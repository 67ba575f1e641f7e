"""Who may connect to a running server: what its key folder says now, for the listener, for Flower and for runs."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from visard.deployment.keys import SITES, SOON, ServerKeys, day, read_gone, write_parties
from visard.deployment.listener import Listener
from visard.errors import UsageError, VisardError
from visard.files import read_bytes, write_json

LOOK_EVERY = 1.0  # seconds between looks at the key folder
SITES_EVERY = 4.0  # seconds between writing down who is connected
STUCK = 30.0  # seconds without a look after which something is wrong
Admit = Callable[[Iterable[tuple[str, ec.EllipticCurvePublicKey]], Mapping[str, str]], None]


class Register:
    """Keeps the listener, Flower and the runs on this machine in step with the key folder, while the server runs.

    A party is one node of Flower whatever its keys, so one that comes with a renewed key goes on where it was, like a
    process that was started again. One without a key that is taken is offline: runs go on without it at once.
    """

    def __init__(
        self,
        keys: ServerKeys,
        state: Path,
        link: InMemoryLinkState,
        admit: Admit,
        listener: Listener,
        say: Callable[[str], None],
        heard: Mapping[str, tuple[float, str]],
    ) -> None:
        """`heard` says when each party last called, and its version."""
        self.keys, self.state, self.link, self.admit, self.listener, self.say = keys, state, link, admit, listener, say
        self._heard, self._looked, self._told_sites = heard, time.monotonic(), 0.0
        self._stamp, self._applied, self._certificate = keys.stamp(), keys, read_bytes(keys.certificate)
        self._numbers: dict[str, int] = {}  # party -> Flower's number of its node
        self._taken: dict[str, tuple[str, bytes]] = {}  # fingerprint -> party and key, as Flower knows it
        self._next = 0.0  # when to look again
        self._said: set[str] = set()
        self._apply(first=True)

    def look(self) -> None:
        """Take what has changed in the folder, and what time has ended."""
        if (now := time.monotonic()) < self._next:
            return
        self._next, self._looked = now + LOOK_EVERY, now
        if (stamp := self.keys.stamp()) != self._stamp:
            self._stamp = stamp
            try:
                before = self._certificate
                self.keys = ServerKeys.load(self.keys.folder)
                self._apply()
                self.listener.context = tls_context(self.keys)  # for connections from now on
                self._certificate = read_bytes(self.keys.certificate)
                if self._certificate != before:
                    self.say("the server's new certificate is in use for new connections")
            except VisardError as error:  # half of a change, or a damaged file: what it is about stays as it was
                self._tell(f"a change in the key folder is not taken: {error}")
        self._apply()
        if now > self._told_sites:
            self._told_sites = now + SITES_EVERY
            with suppress(VisardError):  # a full disk costs the view, not the server
                write_json(self.state / SITES, self.sites())

    def sites(self) -> dict[str, dict[str, Any]]:
        """Party -> what an operator wants to see of it."""
        online = {node.node_id for node in self.link.get_node_info(statuses=[NodeStatus.ONLINE])}
        taken, gone = {party for party, _ in self._taken.values()}, read_gone(self.state)
        ends = {entry.party: entry.ends for entry in self.keys.live(time.time())}
        found = {}
        for party, number in sorted(self._numbers.items()):
            seen, version = self._heard.get(party, (0.0, ""))
            found[party] = {
                "roles": list(self.keys.assignment.of.get(party, ())),
                "connected": number in online and party in taken,
                "seen": round(seen),
                "version": version,
                "ends": round(ends[party]) if ends.get(party, float("inf")) < float("inf") else None,
                "refused": gone.get(party, ""),
            }
        return found

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the server goes round, and how many parties are connected."""
        well = time.monotonic() - self._looked < STUCK
        return well, {"connected": len(self.link.get_node_info(statuses=[NodeStatus.ONLINE]))}

    def _apply(self, first: bool = False) -> None:
        now = time.time()
        live = {entry.fingerprint: entry for entry in self.keys.live(now)}
        if not first and live.keys() == self._taken.keys() and self._applied is self.keys:
            return
        self._applied = self.keys
        why = {e.fingerprint: self.keys.refusal(e, now) for e in self.keys.entries if e.fingerprint not in live}
        for own, (party, key) in list(self._taken.items()):
            if own not in live:
                del self._taken[own]
                with self.link.lock:
                    self.link.node_public_key_to_node_id.pop(key, None)
                self.listener.expel(party)
                self.say(f"{why.get(own, f'the key {own[:16]}... of {party} is no longer in the folder')}")
        for own, entry in live.items():
            if own not in self._taken:
                key = public_key_to_bytes(entry.key)
                self._taken[own] = entry.party, key
                if entry.party in self._numbers:
                    with self.link.lock:
                        self.link.node_public_key_to_node_id[key] = self._numbers[entry.party]
                else:
                    self._numbers[entry.party] = _register(self.link, entry.party, key)
                if not first:
                    self.say(f"{entry.party} may connect with the key {own[:16]}..., until {day(entry.ends)}")
        for party in self._numbers.keys() - {entry.party for entry in live.values()}:
            self.link.deactivate_node(self._numbers[party])
        pairs = [(entry.party, entry.key) for entry in live.values()]
        self.listener.proofs.admit(pairs)
        self.admit([*pairs, *((e.party, e.key) for e in self.keys.entries if e.fingerprint in why)], why)
        gone = {e.party: why[e.fingerprint] for e in self.keys.entries if e.fingerprint in why}
        gone = {party: text for party, text in gone.items() if party not in {entry.party for entry in live.values()}}
        write_parties(self.state, {n: party for party, n in self._numbers.items()}, self.keys.assignment, gone)
        for problem in self.keys.problems:
            self._tell(f"refused: {problem}")
        for entry in live.values():
            if entry.ends - now < SOON and entry.ends == max(e.ends for e in live.values() if e.party == entry.party):
                self._tell(f"the entry of {entry.party} ends {day(entry.ends)}: visard keys renew, at the party")

    def _tell(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)


def tls_context(keys: ServerKeys) -> ssl.SSLContext:
    """For TLS with the server's certificate; one line where that is none, or not of its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # parties resume no sessions
    try:
        context.load_cert_chain(keys.certificate, keys.key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        what = getattr(error, "reason", None) or error
        raise UsageError(f"{keys.certificate} and {keys.key} are not a certificate and its key ({what})") from None
    return context


def _register(link: InMemoryLinkState, node: str, key: bytes) -> int:
    return link.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_MIN_INTERVAL, name=node)
