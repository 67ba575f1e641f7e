"""The key folders of a deployment: the keys of its server and its parties, who may take part, and until when.

On disk and on the command line a party is a node, and the clients that belong to its key are its roles. A party makes
its key on its own machine and gets a signed entry (`key_lifecycle`). For trials `make_keys` makes all keys in one
place; the server then has bare public keys, which do not expire.

    FOLDER of a server: ca.crt, server.crt, server.key, roles.json, revoked.json, nodes/NODE.pub, nodes/NODE.NUMBER.crt
    FOLDER of a party:  ca.crt, NODE.key, NODE.crt, NODE.csr; NODE.next.key until its entry has come
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import TypeAdapter, ValidationError

from visard.crypto.signatures import CURVE, fingerprint
from visard.deployment.certificates import NAME, Ca, Entry, read_certificate, read_entry
from visard.errors import UsageError, VisardError
from visard.files import PRIVATE, mapping, read_bytes, read_json, write_durably, write_json

FILE = "roles.json"  # beside the public keys of the parties: party -> its clients
REVOKED = "revoked.json"  # there too: fingerprint of a key -> whose it was, since when, why
ONLINE = "nodes.json"  # in the state folder of a running server: Flower's number of a node -> party
SITES = "sites.json"  # there too: party -> connected, last seen, version, for visard watch
GONE = "gone.json"  # there too: party -> why none of its keys is valid
SOON = 14 * 86400.0  # seconds before its end at which an entry should be renewed


@dataclass(frozen=True)
class Assignment:
    """Party -> the clients that belong to its key. A party may be these clients and no others."""

    of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for party, clients in self.of.items():
            for client in clients:
                if owner.setdefault(client, party) != party:
                    raise UsageError(
                        f"the role {client} belongs to {owner[client]} and to {party}: it can have one key"
                    )

    def refusal(self, party: str, client: str) -> str | None:
        """Why a party may not be a client, or None."""
        if client in self.of.get(party, ()):
            return None
        for owner, clients in self.of.items():
            if client in clients:
                return f"{party} claims to be {client}, which belongs to the key of {owner}"
        if self.of.get(party):
            return f"{party} claims to be {client}, but its key is for {', '.join(self.of[party])}"
        return f"{party} claims to be {client}, but its key has no role: visard keys bind"

    def with_(self, party: str, clients: Iterable[str]) -> Assignment:
        """With more clients of a party."""
        more = tuple(dict.fromkeys((*self.of.get(party, ()), *clients)))
        return Assignment({**self.of, party: more}) if more else self

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, dict(self.of))

    @classmethod
    def load(cls, folder: Path) -> Assignment:
        """Read the assignment in a key folder or a server's state folder; empty if there is no file."""
        if not (folder / FILE).exists():
            return cls()
        try:
            return cls(TypeAdapter(dict[str, tuple[str, ...]]).validate_python(read_json(folder / FILE)))
        except ValidationError:
            raise VisardError(
                f'{folder / FILE} must say which roles each node has: {{"node-1": ["house-1"]}}'
            ) from None

    @classmethod
    def parse(cls, texts: Iterable[str], parties: int) -> Assignment:
        """From the words NODE=ROLE of the command line."""
        of: dict[str, tuple[str, ...]] = {}
        for text in texts:
            number, _, client = text.partition("=")
            if not number.isdigit() or not 1 <= int(number) <= parties or not NAME.fullmatch(client):
                raise UsageError(
                    f"--role {text}: must be NODE=ROLE with a node from 1 to {parties}, for example 1=house-1"
                )
            party = f"node-{int(number)}"
            of[party] = (*of.get(party, ()), client)
        return cls(of)


def write_parties(
    state: Path, numbers: Mapping[int, str], assignment: Assignment, gone: Mapping[str, str] | None = None
) -> None:
    """Write, for the runs on the server's machine, its parties, their clients, and the refused parties."""
    assignment.save(state)
    write_json(state / GONE, dict(gone or {}))
    write_json(state / ONLINE, {str(number): party for number, party in numbers.items()})


def read_parties(state: Path) -> tuple[dict[int, str], Assignment]:
    """What `write_parties` left."""
    numbers = mapping(read_json(state / ONLINE))
    if not all(number.isdecimal() and len(number) < 40 for number in numbers):
        raise VisardError(f"{state / ONLINE} does not say who the nodes of the server are")
    return {int(number): str(party) for number, party in numbers.items()}, Assignment.load(state)


def read_gone(state: Path) -> dict[str, str]:
    """Party -> why none of its keys is valid."""
    found = mapping(read_json(state / GONE)) if (state / GONE).exists() else {}
    return {party: str(why) for party, why in found.items()}


@dataclass(frozen=True)
class ServerKeys:
    """The server's certificate and key, and the keys of the parties."""

    ca: Path
    certificate: Path
    key: Path
    entries: tuple[Entry, ...]  # in order of their start; including expired and revoked ones
    revoked: Mapping[str, str]  # fingerprint of a key -> since when, and why
    assignment: Assignment
    problems: tuple[str, ...]  # invalid entries, a line each

    @property
    def folder(self) -> Path:
        return self.ca.parent

    @classmethod
    def load(cls, folder: Path) -> ServerKeys:
        """Read the folder `server` of a deployment. An invalid entry is a problem and does not affect the others."""
        folder = folder / "server" if (folder / "server").is_dir() else folder
        ca, certificate, key = (folder / n for n in ("ca.crt", "server.crt", "server.key"))
        check_there(ca, certificate, key, why="make keys with visard keys make")
        revoked = _revoked(folder)
        authority = read_certificate(read_bytes(ca), ca)
        assignment, entries, problems = Assignment.load(folder), list[Entry](), list[str]()
        found = []
        for path in sorted([*(folder / "nodes").glob("*.pub"), *(folder / "nodes").glob("*.crt")]):
            try:
                if path.suffix == ".pub":
                    found.append(Entry(path.stem, _public(path), assignment.of.get(path.stem, ())))
                else:
                    found.append(read_entry(bytes_of(path), path, authority))
            except UsageError as error:
                problems.append(str(error))
        for entry in sorted(found, key=lambda e: e.begins):
            try:
                if entry.fingerprint not in revoked:
                    assignment = assignment.with_(entry.party, entry.clients)
                entries.append(entry)
            except UsageError as error:
                problems.append(f"the entry of {entry.party} is not taken: {error}")
        return cls(ca, certificate, key, tuple(entries), revoked, assignment, tuple(problems))

    def refusal(self, entry: Entry, now: float) -> str:
        """Why a key is not valid now; empty if it is."""
        if why := self.revoked.get(entry.fingerprint):
            return f"the key of {entry.party} was revoked {why}"
        if now < entry.begins:
            return f"the entry of {entry.party} is valid from {day(entry.begins)} on: look at the clocks"
        return "" if now < entry.ends else f"the entry of {entry.party} ended {day(entry.ends)}: visard keys renew"

    def live(self, now: float) -> list[Entry]:
        """The entries that are valid now; of several for one key the one that expires last."""
        best: dict[str, Entry] = {}
        for entry in sorted(self.entries, key=lambda e: e.ends):
            if not self.refusal(entry, now):
                best[entry.fingerprint] = entry
        return list(best.values())

    @property
    def parties(self) -> dict[str, ec.EllipticCurvePublicKey]:
        """Party -> its latest valid key."""
        live = sorted(self.live(time.time()), key=lambda e: (e.party, e.begins))
        return {entry.party: entry.key for entry in live}

    def stamp(self) -> tuple[object, ...]:
        """A value that changes when a file that `load` reads changes."""
        paths = [self.certificate, self.key, self.folder / FILE, self.folder / REVOKED]
        paths += sorted((self.folder / "nodes").glob("*"))
        return tuple((path.name, about.st_mtime_ns, about.st_size) for path in paths if (about := _stat(path)))


@dataclass(frozen=True)
class PartyKeys:
    """A party's own key, and the CA that proves the server's identity."""

    ca: Path
    private: ec.EllipticCurvePrivateKey
    fingerprint: str  # of the CA's certificate: SHA-256 in hexadecimal digits
    file: Path  # of the private key
    ends: float = float("inf")  # of its entry, in seconds since 1970

    @classmethod
    def load(cls, folder: Path, node: str) -> PartyKeys:
        """Read the folder of one party, or of all keys. A new key whose entry has come replaces the old one."""
        folder = folder / f"node-{node}" if (folder / f"node-{node}").is_dir() else folder
        ca, key, entry = folder / "ca.crt", folder / f"node-{node}.key", folder / f"node-{node}.crt"
        why = "visard keys request makes a key, and the operator of the server sends ca.crt and the signed entry"
        check_there(key, ca, why=why)
        authority = read_certificate(bytes_of(ca), ca)
        private, ends = private_key(key), float("inf")
        if entry.exists():
            signed = read_entry(bytes_of(entry), entry, authority)
            coming = folder / f"node-{node}.next.key"
            if coming.exists() and (next_ := private_key(coming)).public_key() == signed.key:
                os.replace(coming, key)
                private = next_
            if private.public_key() != signed.key or signed.party != f"node-{node}":
                raise UsageError(f"{entry} is an entry of another key than {key}")
            ends = signed.ends
        return cls(ca, private, authority.fingerprint(hashes.SHA256()).hex(), key, ends)

    def stamp(self) -> tuple[object, ...]:
        """A value that changes when the files of the key or its entry change."""
        found = (_stat(path) for path in (self.file, self.file.with_suffix(".crt")))
        return tuple((about.st_mtime_ns, about.st_size) for about in found if about)


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key of a party."""
    try:
        private = serialization.load_pem_private_key(read_bytes(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm, OSError):
        raise UsageError(f"{path} is not a key in PEM form") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} is not an elliptic-curve key")
    return private


def fingerprints(folder: Path) -> dict[str, str]:
    """Node -> fingerprint of its key, of all keys of nodes in a key folder."""
    files = [*folder.glob("nodes/*.pub"), *folder.glob("server/nodes/*.pub"), *folder.glob("node-*.key")]
    found = {path.stem: _public(path) if path.suffix == ".pub" else private_key(path).public_key() for path in files}
    if (folder / "ca.crt").exists() or (folder / "server" / "ca.crt").exists():
        found |= ServerKeys.load(folder).parties if list(folder.rglob("server.crt")) else {}
    if not found:
        raise UsageError(f"{folder} holds no key of a node (node-N.key, nodes/node-N.pub)")
    return {node: fingerprint(key) for node, key in sorted(found.items())}


def make_keys(out: Path, parties: int, hosts: list[str], assignment: Assignment | None = None) -> dict[Path, str]:
    """Write the keys of a deployment below `out`, with those of `parties` if any; returns what each folder is for."""
    _check_new(out)
    assignment = assignment or Assignment()
    ca, key = Ca.make(), ec.generate_private_key(CURVE)
    server = ca.server(hosts, key.public_key())
    write_key(out / "ca" / "ca.key", private_pem(ca.key), secret=True)
    write_key(out / "ca" / "ca.crt", ca.pem)
    write_key(out / "server" / "ca.crt", ca.pem)
    write_key(out / "server" / "server.crt", server)
    write_key(out / "server" / "server.key", private_pem(key), secret=True)
    (out / "server" / "nodes").mkdir(mode=0o700)
    purposes = {
        out / "server": "to the server's machine; visard server --keys",
        out / "ca": "offline, to a safe place: anyone who has it can pose as the server; visard keys sign needs it",
    }
    for number in range(1, parties + 1):
        folder = out / f"node-{number}"
        purposes[folder] = _make_party(folder, out / "server", number, ca.pem, assignment)
    assignment.save(out / "server")
    return purposes


def add_party(server: Path, out: Path, clients: Iterable[str]) -> dict[Path, str]:
    """A key for one more party of a trial, registered in the key folder of its server."""
    held = ServerKeys.load(server)
    _check_new(out)
    known = {*(entry.party for entry in held.entries), *held.assignment.of}
    numbers = (party[5:] for party in known)
    number = 1 + max((int(n) for n in numbers if n.isdecimal() and len(n) < 10), default=0)
    added = Assignment.parse([f"{number}={client}" for client in clients], number)
    of = held.assignment.with_(f"node-{number}", added.of.get(f"node-{number}", ())).of
    own = Assignment.load(held.folder)
    purposes = {out: _make_party(out, held.folder, number, read_bytes(held.ca), Assignment(of))}
    Assignment({**own.of, **added.of}).save(held.folder)
    return purposes


def bind_roles(server: Path, texts: Iterable[str]) -> Assignment:
    """Bind more roles to keys that exist, by the words NODE=ROLE."""
    held = ServerKeys.load(server)
    added = Assignment.parse(texts, 10**9).of
    if unknown := [party for party in added if party not in {entry.party for entry in held.entries}]:
        raise UsageError(f"--role: there is no key of {unknown[0]} in {held.folder / 'nodes'}")
    bound, own = held.assignment, Assignment.load(held.folder)
    for party, clients in added.items():
        bound, own = bound.with_(party, clients), own.with_(party, clients)
    own.save(held.folder)
    return bound


def day(seconds: float) -> str:
    """A moment, in UTC."""
    if seconds == float("inf"):
        return "never"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _revoked(folder: Path) -> dict[str, str]:
    path = folder / REVOKED
    if not path.exists():
        return {}
    listed = mapping(read_json(path))
    return {key: str(mapping(about).get("why", "")) or "for good" for key, about in listed.items()}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def bytes_of(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def check_there(*paths: Path, why: str) -> None:
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path} is missing: {why}")


def _check_new(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a folder for keys")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: keys are never overwritten")


def _make_party(folder: Path, server: Path, number: int, ca: bytes, assignment: Assignment) -> str:
    """Write the key of a party into its folder and the server's; returns what to do with its folder."""
    key, party = ec.generate_private_key(CURVE), f"node-{number}"
    write_key(folder / "ca.crt", ca)
    write_key(folder / f"{party}.key", private_pem(key), secret=True)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_key(server / "nodes" / f"{party}.pub", public)
    own = "".join(f" --role {client}" for client in assignment.of.get(party, ()))
    own = own or " --role ... (it has none yet: visard keys bind)"
    return f"to party {number} alone, then delete it here; visard client --keys ... --node {number}{own}"


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public(path: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_pem_public_key(read_bytes(path))
    except (ValueError, UnsupportedAlgorithm, OSError):
        raise UsageError(f"{path} is not a public key in PEM form") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UsageError(f"{path} is not an elliptic-curve key")
    return key


def write_key(path: Path, data: bytes, secret: bool = False) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(path, data, PRIVATE if secret else 0o644, new=True)
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror}") from None
