"""How the keys of a deployment change: requested and renewed by parties, signed and revoked by the server's operator.

Every change is a file that is written atomically; a running server watches its folder and needs no restart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from visard.crypto.signatures import CURVE
from visard.deployment.certificates import (
    Asked,
    Ca,
    Entry,
    hosts_of,
    make_request,
    read_certificate,
    read_entry,
    read_request,
)
from visard.deployment.keys import (
    REVOKED,
    PartyKeys,
    ServerKeys,
    bytes_of,
    check_there,
    day,
    private_key,
    private_pem,
    write_key,
)
from visard.errors import UsageError
from visard.files import mapping, read_bytes, read_json, write_atomically, write_json


def request(out: Path, node: str, clients: Iterable[str]) -> Asked:
    """A party makes its own key, and a request to sign it."""
    key, party = ec.generate_private_key(CURVE), f"node-{node}"
    asked = make_request(party, list(clients), key)  # says what is wrong before anything is written
    if (out / f"{party}.key").exists():
        raise UsageError(f"{out / f'{party}.key'} exists already: a key is never overwritten (visard keys renew)")
    write_key(out / f"{party}.key", private_pem(key), secret=True)
    write_key(out / f"{party}.csr", asked)
    return read_request(asked, out / f"{party}.csr")


def renew_party(folder: Path, node: str) -> Asked:
    """A party makes a new key, and a request that its present key has signed too; the new entry activates it."""
    own, party = PartyKeys.load(folder, node), f"node-{node}"
    folder = own.file.parent
    entry, key = folder / f"{party}.crt", ec.generate_private_key(CURVE)
    clients: tuple[str, ...] = ()
    if entry.exists():
        clients = read_entry(bytes_of(entry), entry, read_certificate(read_bytes(own.ca), own.ca)).clients
    asked = make_request(party, clients, key, own.private)
    write_atomically(folder / f"{party}.next.key", private_pem(key))
    write_atomically(folder / f"{party}.csr", asked, 0o644)
    return read_request(asked, folder / f"{party}.csr")


def load_ca(folder: Path) -> Ca:
    """The CA with its key, to sign."""
    certificate, key = folder / "ca.crt", folder / "ca.key"
    check_there(certificate, key, why="it is the folder `ca` that visard keys make wrote")
    found = Ca(read_certificate(read_bytes(certificate), certificate), private_key(key))
    if found.key.public_key() != found.certificate.public_key():
        raise UsageError(f"{certificate} and {key} are not a certificate and its key")
    return found


def check_request(asked: Asked, held: ServerKeys) -> bool:
    """Refuse a request that this deployment cannot sign; True if a valid key of the party has signed it."""
    if why := held.revoked.get(asked.fingerprint):
        raise UsageError(f"the request of {asked.party} is refused: its key was revoked {why}")
    if other := [e.party for e in held.entries if e.fingerprint == asked.fingerprint and e.party != asked.party]:
        raise UsageError(f"the request of {asked.party} is refused: its key is that of {other[0]}")
    present = {e.fingerprint for e in held.live(time.time()) if e.party == asked.party}
    if asked.fingerprint in present:  # its entry is prolonged
        return asked.renews in present
    if not asked.renews and present:
        raise UsageError(
            f"the request of {asked.party} is refused: {asked.party} has a key, {min(present)[:16]}..., which did not "
            "sign it, so it may be of somebody else (visard keys renew at the party; visard keys revoke if it is lost)"
        )
    if not asked.renews:
        return False
    if asked.renews not in present:
        raise UsageError(
            f"the request of {asked.party} is refused: the key {asked.renews[:16]}..., which signed it too, is not one "
            f"that {asked.party} has now"
        )
    return True


def sign(asked: Asked, ca: Ca, held: ServerKeys, out: Path, clients: Iterable[str] | None, days: float) -> Entry:
    """Sign a request: the entry is written to the server's folder and, with ca.crt, to `out`."""
    if ca.certificate != read_certificate(read_bytes(held.ca), held.ca):
        raise UsageError(f"the CA is not that of {held.folder}: it is of another deployment")
    check_request(asked, held)
    roles = tuple(dict.fromkeys(asked.clients if clients is None else clients))
    held.assignment.with_(asked.party, roles)  # refuses roles of another key
    data = ca.entry(asked.party, roles, asked.key, days)
    entry = read_entry(data, "the entry", ca.certificate)
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(out / f"{asked.party}.crt", data, 0o644)
    write_atomically(out / "ca.crt", ca.pem, 0o644)
    write_atomically(held.folder / "nodes" / f"{asked.party}.{entry.fingerprint[:16]}.crt", data, 0o644)
    return entry


def revoke(server: Path, party: str, key: str, reason: str) -> list[Entry]:
    """Revoke keys of a party for ever: all of them, or the one whose fingerprint begins so."""
    held = ServerKeys.load(server)
    gone = [e for e in held.entries if e.party == party and e.fingerprint.startswith(key.lower())]
    if not gone:
        which = f"{party} that begins with {key}" if key else party
        raise UsageError(f"there is no key of {which} in {held.folder / 'nodes'}")
    if key and len({e.fingerprint for e in gone}) > 1:
        raise UsageError(f"--key {key}: more than one key of {party} begins so")
    path, since = held.folder / REVOKED, f"on {day(time.time())}{f': {reason}' if reason else ''}"
    listed = mapping(read_json(path)) if path.exists() else {}
    write_json(path, {**{e.fingerprint: {"node": party, "why": since} for e in gone}, **listed})
    return gone


def renew_server(server: Path, ca: Ca, hosts: list[str], new_key: bool) -> float:
    """Make a new certificate for the server, for the same names unless others are given; returns when it expires."""
    held = ServerKeys.load(server)
    if ca.certificate != read_certificate(read_bytes(held.ca), held.ca):
        raise UsageError(f"the CA is not that of {held.folder}: it is of another deployment")
    key = ec.generate_private_key(CURVE) if new_key else private_key(held.key)
    before = read_certificate(read_bytes(held.certificate), held.certificate)
    data = ca.server(hosts or hosts_of(before), key.public_key())
    if new_key:
        write_atomically(held.key, private_pem(key))
    write_atomically(held.certificate, data, 0o644)
    return read_certificate(data, held.certificate).not_valid_after_utc.timestamp()
