"""Keys of a deployment: a CA and a server certificate for TLS, and a key pair for each node."""

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

from visard.errors import UsageError, VisardError
from visard.files import PRIVATE, read_json, write_durably, write_json

# ----------
# Which node may play which role: a registered key lets a party in, but not into another party's place.

FILE = "roles.json"  # beside the public keys of the nodes: node -> its roles
NAME = re.compile(r"[\w.~-]{1,100}")  # of a role
ONLINE = "nodes.json"  # in the state folder of a running server: Flower's number of a node -> node


@dataclass(frozen=True)
class Roles:
    """Node -> the roles that belong to it. A node that is not here may take what belongs to nobody."""

    of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for node, roles in self.of.items():
            for role in roles:
                if owner.setdefault(role, node) != node:
                    raise UsageError(f"the role {role} belongs to {owner[role]} and to {node}: it can have one key")

    def refusal(self, node: str, role: str) -> str | None:
        """Why a node may not play a role, or None."""
        if role in self.of.get(node, ()):
            return None
        for owner, roles in self.of.items():
            if role in roles:
                return f"{node} claims to be {role}, which belongs to the key of {owner}"
        if node in self.of:
            return f"{node} claims to be {role}, but its key is for {', '.join(self.of[node])}"
        return None

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, {node: list(roles) for node, roles in self.of.items()})

    @classmethod
    def load(cls, folder: Path) -> Roles:
        """The roles in a key folder or a server's state folder; none if there is no file."""
        if not (folder / FILE).exists():
            return cls()
        found = read_json(folder / FILE)
        good = isinstance(found, dict) and all(
            isinstance(roles, list) and all(isinstance(r, str) for r in roles) for roles in found.values()
        )
        if not good:
            raise VisardError(f'{folder / FILE} must say which roles each node has: {{"node-1": ["house-1"]}}')
        return cls({node: tuple(roles) for node, roles in found.items()})


def parse_roles(texts: Iterable[str], nodes: int) -> Roles:
    """Roles from the words NODE=ROLE of the command line."""
    of: dict[str, tuple[str, ...]] = {}
    for text in texts:
        number, _, role = text.partition("=")
        if not number.isdigit() or not 1 <= int(number) <= nodes or not NAME.fullmatch(role):
            raise UsageError(f"--role {text}: must be NODE=ROLE with a node from 1 to {nodes}, for example 1=house-1")
        node = f"node-{int(number)}"
        of[node] = (*of.get(node, ()), role)
    return Roles(of)


def tell_nodes(state: Path, numbers: Mapping[int, str], roles: Roles) -> None:
    """A starting server leaves behind, for the runs on its machine, who its nodes are and what they may be."""
    roles.save(state)
    write_json(state / ONLINE, {str(number): node for number, node in numbers.items()})


def read_nodes(state: Path) -> tuple[dict[int, str], Roles]:
    """What `tell_nodes` left."""
    return {int(number): str(node) for number, node in read_json(state / ONLINE).items()}, Roles.load(state)


DAYS = 825  # some TLS libraries refuse server certificates that are valid for longer
CURVE = ec.SECP384R1()
NO_ROLES = Roles()
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a host's name


@dataclass(frozen=True)
class ServerKeys:
    """What the server holds: its certificate and key, and the public keys of the nodes."""

    ca: Path
    certificate: Path
    key: Path
    nodes: dict[str, ec.EllipticCurvePublicKey]
    roles: Roles = NO_ROLES

    @classmethod
    def load(cls, folder: Path) -> ServerKeys:
        """Read the `server` folder that `visard keys make` wrote."""
        folder = folder / "server" if (folder / "server").is_dir() else folder
        ca, certificate, key = (folder / n for n in ("ca.crt", "server.crt", "server.key"))
        for path in (ca, certificate, key):
            if not path.is_file():
                raise UsageError(f"{path} is missing: make keys with visard keys make")
        nodes = {}
        for path in sorted((folder / "nodes").glob("*.pub")):
            nodes[path.stem] = _public(path)
        if not nodes:
            raise UsageError(f"{folder / 'nodes'} holds no public keys of nodes (*.pub)")
        return cls(ca, certificate, key, nodes, Roles.load(folder))


@dataclass(frozen=True)
class NodeKeys:
    """What a node holds: the CA to know the server by, and its own key."""

    ca: Path
    private: ec.EllipticCurvePrivateKey

    @classmethod
    def load(cls, folder: Path, node: str) -> NodeKeys:
        """Read the folder of one node, or the folder of all keys."""
        folder = folder / f"node-{node}" if (folder / f"node-{node}").is_dir() else folder
        ca, key = folder / "ca.crt", folder / f"node-{node}.key"
        for path in (ca, key):
            if not path.is_file():
                raise UsageError(f"{path} is missing: it comes from visard keys make on the server's side")
        try:
            private = serialization.load_pem_private_key(key.read_bytes(), None)
            x509.load_pem_x509_certificate(ca.read_bytes())
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise UsageError(f"{key} or {ca} is not a key or certificate in PEM form") from None
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise UsageError(f"{key} is not an elliptic-curve key")
        return cls(ca, private)


def make_keys(out: Path, nodes: int, hosts: list[str], roles: Roles = NO_ROLES) -> dict[Path, str]:
    """Write all keys of a deployment below `out`; returns each folder with what it is for."""
    _check_new(out)
    ca_key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "visard deployment CA")])
    ca = _certificate(
        name, name, ca_key.public_key(), ca_key, [x509.BasicConstraints(ca=True, path_length=0)], [_USE_CA]
    )
    server_key = ec.generate_private_key(CURVE)
    names = [_alternative(n) for n in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    server = _certificate(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])]),
        name,
        server_key.public_key(),
        ca_key,
        [x509.BasicConstraints(ca=False, path_length=None)],
        [
            _USE_SERVER,
            x509.SubjectAlternativeName(names),
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        ],
    )
    _write(out / "ca" / "ca.key", _private_pem(ca_key), secret=True)
    _write(out / "ca" / "ca.crt", ca)
    _write(out / "server" / "ca.crt", ca)
    _write(out / "server" / "server.crt", server + ca)
    _write(out / "server" / "server.key", _private_pem(server_key), secret=True)
    told = {
        out / "server": "to the server's machine; visard server --keys",
        out / "ca": "offline, to a safe place: who has it can pose as the server",
    }
    for number in range(1, nodes + 1):
        folder = out / f"node-{number}"
        told[folder] = _make_node(folder, out / "server", number, ca, roles)
    roles.save(out / "server")
    return told


def add_node(server: Path, out: Path, roles: Iterable[str]) -> dict[Path, str]:
    """A key for one more party of a deployment, registered in the key folder of its server, which then restarts."""
    held = ServerKeys.load(server)
    _check_new(out)
    number = 1 + max((int(n[5:]) for n in {*held.nodes, *held.roles.of} if re.fullmatch(r"node-\d{1,9}", n)), default=0)
    bound = parse_roles([f"{number}={role}" for role in roles], number)
    all_roles = Roles({**held.roles.of, **bound.of})
    told = {out: _make_node(out, held.ca.parent, number, held.ca.read_bytes(), all_roles)}
    all_roles.save(held.ca.parent)
    return told


def _check_new(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a folder for keys")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: keys are never overwritten")


def _make_node(folder: Path, server: Path, number: int, ca: bytes, roles: Roles) -> str:
    """Write the key of a node into its folder and the server's; returns what to do with the former."""
    key, node = ec.generate_private_key(CURVE), f"node-{number}"
    _write(folder / "ca.crt", ca)
    _write(folder / f"{node}.key", _private_pem(key), secret=True)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    _write(server / "nodes" / f"{node}.pub", public)
    own = "".join(f" --role {role}" for role in roles.of.get(node, ()))
    return f"to party {number} alone, then delete it here; visard client --keys ... --node {number}{own}"


_USE_CA = x509.KeyUsage(
    digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
    key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
)  # fmt: skip
_USE_SERVER = x509.KeyUsage(
    digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
    key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
)  # fmt: skip


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    critical: list[x509.ExtensionType],
    other: list[x509.ExtensionType],
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension in critical:
        builder = builder.add_extension(extension, critical=True)
    for extension in other:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.KeyUsage))
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
    except (ValueError, UnsupportedAlgorithm):
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
