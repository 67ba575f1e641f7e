"""Keys of a deployment: a CA and a server certificate for TLS, a key pair for each party, and which clients it may be.

On disk and on the command line a party is a numbered node, and the clients that belong to its key are its roles.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import TypeAdapter, ValidationError

from visard.crypto.signatures import CURVE, fingerprint
from visard.errors import UsageError, VisardError
from visard.files import PRIVATE, mapping, read_json, write_durably, write_json

FILE = "roles.json"  # beside the public keys of the parties: party -> its clients
ONLINE = "nodes.json"  # in the state folder of a running server: Flower's number of a node -> party
NAME = re.compile(r"[\w.~-]{1,100}")  # of a client
DAYS = 825  # some TLS libraries refuse server certificates that are valid for longer
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a host's name


@dataclass(frozen=True)
class Assignment:
    """Party -> the clients that belong to its key. A party speaks for these and no others, one without any for none."""

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
        return f"{party} claims to be {client}, but its key has no role: visard keys bind, and restart the server"

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, dict(self.of))

    @classmethod
    def load(cls, folder: Path) -> Assignment:
        """The one in a key folder or a server's state folder; empty if there is no file."""
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


def write_parties(state: Path, numbers: Mapping[int, str], assignment: Assignment) -> None:
    """A starting server tells the runs on its machine who its parties are, and which clients they may be."""
    assignment.save(state)
    write_json(state / ONLINE, {str(number): party for number, party in numbers.items()})


def read_parties(state: Path) -> tuple[dict[int, str], Assignment]:
    """What `write_parties` left."""
    numbers = mapping(read_json(state / ONLINE))
    if not all(number.isdecimal() and len(number) < 40 for number in numbers):
        raise VisardError(f"{state / ONLINE} does not say who the nodes of the server are")
    return {int(number): str(party) for number, party in numbers.items()}, Assignment.load(state)


@dataclass(frozen=True)
class ServerKeys:
    """What the server holds: its certificate and key, and the public keys of the parties."""

    ca: Path
    certificate: Path
    key: Path
    parties: dict[str, ec.EllipticCurvePublicKey]
    assignment: Assignment = field(default_factory=Assignment)

    @classmethod
    def load(cls, folder: Path) -> ServerKeys:
        """Read the `server` folder that `visard keys make` wrote."""
        folder = folder / "server" if (folder / "server").is_dir() else folder
        ca, certificate, key = (folder / n for n in ("ca.crt", "server.crt", "server.key"))
        _check_there(ca, certificate, key, why="make keys with visard keys make")
        parties = {path.stem: _public(path) for path in sorted((folder / "nodes").glob("*.pub"))}
        if not parties:
            raise UsageError(f"{folder / 'nodes'} holds no public keys of nodes (*.pub)")
        return cls(ca, certificate, key, parties, Assignment.load(folder))


@dataclass(frozen=True)
class PartyKeys:
    """What a party holds: the CA to know the server by, and its own key."""

    ca: Path
    private: ec.EllipticCurvePrivateKey
    fingerprint: str  # of the CA's certificate: SHA-256 in hexadecimal digits
    file: Path  # of the private key

    @classmethod
    def load(cls, folder: Path, node: str) -> PartyKeys:
        """Read the folder of one party, or the folder of all keys."""
        folder = folder / f"node-{node}" if (folder / f"node-{node}").is_dir() else folder
        ca, key = folder / "ca.crt", folder / f"node-{node}.key"
        _check_there(ca, key, why="it comes from visard keys make on the server's side")
        try:
            fingerprint = x509.load_pem_x509_certificate(ca.read_bytes()).fingerprint(hashes.SHA256()).hex()
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise UsageError(f"{key} or {ca} is not a key or certificate in PEM form") from None
        return cls(ca, private_key(key), fingerprint, key)


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key of a party."""
    try:
        private = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm, OSError):
        raise UsageError(f"{path} is not a key in PEM form") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} is not an elliptic-curve key")
    return private


def fingerprints(folder: Path) -> dict[str, str]:
    """Node -> fingerprint of its key, of all public and private keys of nodes in a key folder."""
    files = [*folder.glob("nodes/*.pub"), *folder.glob("server/nodes/*.pub"), *folder.glob("node-*.key")]
    if not files:
        raise UsageError(f"{folder} holds no key of a node (node-N.key, nodes/node-N.pub)")
    found = {path.stem: _public(path) if path.suffix == ".pub" else private_key(path).public_key() for path in files}
    return {node: fingerprint(key) for node, key in sorted(found.items())}


def make_keys(out: Path, parties: int, hosts: list[str], assignment: Assignment | None = None) -> dict[Path, str]:
    """Write all keys of a deployment below `out`; returns each folder with what it is for."""
    _check_new(out)
    assignment = assignment or Assignment()
    ca_key, server_key = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    issuer = "visard deployment CA"
    ca = _certificate(issuer, ca_key, issuer, ca_key, [x509.BasicConstraints(ca=True, path_length=0), _usage(ca=True)])
    names = [_alternative(n) for n in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    extensions = [
        x509.BasicConstraints(ca=False, path_length=None),
        _usage(ca=False),
        x509.SubjectAlternativeName(names),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
    ]
    server = _certificate(hosts[0][:64], server_key, issuer, ca_key, extensions)
    _write(out / "ca" / "ca.key", _private_pem(ca_key), secret=True)
    _write(out / "ca" / "ca.crt", ca)
    _write(out / "server" / "ca.crt", ca)
    _write(out / "server" / "server.crt", server + ca)
    _write(out / "server" / "server.key", _private_pem(server_key), secret=True)
    purposes = {
        out / "server": "to the server's machine; visard server --keys",
        out / "ca": "offline, to a safe place: who has it can pose as the server",
    }
    for number in range(1, parties + 1):
        folder = out / f"node-{number}"
        purposes[folder] = _make_party(folder, out / "server", number, ca, assignment)
    assignment.save(out / "server")
    return purposes


def add_party(server: Path, out: Path, clients: Iterable[str]) -> dict[Path, str]:
    """A key for one more party of a deployment, registered in the key folder of its server, which then restarts."""
    held = ServerKeys.load(server)
    _check_new(out)
    known = {*held.parties, *held.assignment.of}
    number = 1 + max((int(n[5:]) for n in known if re.fullmatch(r"node-\d{1,9}", n)), default=0)
    added = Assignment.parse([f"{number}={client}" for client in clients], number)
    assignment = Assignment({**held.assignment.of, **added.of})
    purposes = {out: _make_party(out, held.ca.parent, number, held.ca.read_bytes(), assignment)}
    assignment.save(held.ca.parent)
    return purposes


def bind_roles(server: Path, texts: Iterable[str]) -> Assignment:
    """Bind more roles to keys that exist, by the words NODE=ROLE; the server reads them when it starts."""
    held = ServerKeys.load(server)
    added = Assignment.parse(texts, 10**9).of
    if unknown := [party for party in added if party not in held.parties]:
        raise UsageError(f"--role: there is no key of {unknown[0]} in {held.ca.parent / 'nodes'}")
    of = dict(held.assignment.of)
    for party, clients in added.items():
        of[party] = tuple(dict.fromkeys((*of.get(party, ()), *clients)))
    assignment = Assignment(of)
    assignment.save(held.ca.parent)
    return assignment


def _check_there(*paths: Path, why: str) -> None:
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path} is missing: {why}")


def _check_new(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a folder for keys")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: keys are never overwritten")


def _make_party(folder: Path, server: Path, number: int, ca: bytes, assignment: Assignment) -> str:
    """Write the key of a party into its folder and the server's; returns what to do with the former."""
    key, party = ec.generate_private_key(CURVE), f"node-{number}"
    _write(folder / "ca.crt", ca)
    _write(folder / f"{party}.key", _private_pem(key), secret=True)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    _write(server / "nodes" / f"{party}.pub", public)
    own = "".join(f" --role {client}" for client in assignment.of.get(party, ()))
    own = own or " --role ... (it has none yet: visard keys bind)"
    return f"to party {number} alone, then delete it here; visard client --keys ... --node {number}{own}"


def _usage(ca: bool) -> x509.KeyUsage:
    """A CA signs certificates, a server signs handshakes."""
    return x509.KeyUsage(
        digital_signature=not ca, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=ca, crl_sign=ca, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    extensions: list[x509.ExtensionType],
) -> bytes:
    now, public = datetime.datetime.now(datetime.UTC), key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not re.fullmatch(rf"{LABEL}(\.{LABEL})*", host):
        raise UsageError(f"--host {host!r}: neither a name nor an address (the port is not part of it)")
    return x509.DNSName(host)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public(path: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm, OSError):
        raise UsageError(f"{path} is not a public key in PEM form") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UsageError(f"{path} is not an elliptic-curve key")
    return key


def _write(path: Path, data: bytes, secret: bool = False) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(path, data, PRIVATE if secret else 0o644, new=True)
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror}") from None
