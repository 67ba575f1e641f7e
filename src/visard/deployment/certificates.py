"""Certificates of a deployment (X.509): its CA, the server's certificate, and the signed entries of the parties.

A party's entry states that a key belongs to a party, for which clients and until when. It is a certificate of the
party's own key, which never leaves the party: the party sends a signing request (PKCS #10), and the CA signs. A request
that renews a key is signed by the old key as well. Why entries instead of TLS client certificates:
docs/decisions/015-entries.md.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import AttributeOID, ExtendedKeyUsageOID, NameOID

from visard.crypto.signatures import CURVE, Signer, fingerprint, signed_by
from visard.errors import PublicError, UsageError

ISSUER = "visard deployment CA"
DAYS = 825  # some TLS libraries refuse server certificates that are valid for longer
CA_DAYS = 3650
NAME = re.compile(r"[\w.~-]{1,100}")  # of a client
PARTY = re.compile(r"node-[A-Za-z0-9_-]{1,50}")
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a host's name
ROLE = "urn:visard:role:"  # a client in a certificate
RENEWAL = b"visard: this key follows mine\n"  # signed by the old key, followed by the new key
MOST_CLIENTS = 1000  # of one entry
LONGEST = 2**20  # bytes of a certificate or a request
MALFORMED = (
    ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType, x509.ExtensionNotFound,
)  # fmt: skip


@dataclass(frozen=True)
class Ca:
    """The CA of a deployment; with its key it can sign."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls) -> Ca:
        key = ec.generate_private_key(CURVE)
        return cls(_certificate(ISSUER, key.public_key(), None, key, CA_DAYS, _for_ca()), key)

    @property
    def pem(self) -> bytes:
        return pem(self.certificate)

    def server(self, hosts: Sequence[str], key: ec.EllipticCurvePublicKey, days: float = DAYS) -> bytes:
        """The certificate of a server that parties reach by these names, and the CA's after it."""
        names = [_alternative(n) for n in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
        extensions = [*_for_leaf(ExtendedKeyUsageOID.SERVER_AUTH), x509.SubjectAlternativeName(names)]
        return pem(_certificate(hosts[0][:64], key, self.certificate, self.key, days, extensions)) + self.pem

    def entry(self, party: str, clients: Sequence[str], key: ec.EllipticCurvePublicKey, days: float) -> bytes:
        """The signed entry of a party."""
        names = [x509.UniformResourceIdentifier(ROLE + quote(client, safe="")) for client in clients]
        extensions: list[x509.ExtensionType] = _for_leaf(ExtendedKeyUsageOID.CLIENT_AUTH)
        if names:
            extensions.append(x509.SubjectAlternativeName(names))
        return pem(_certificate(party, key, self.certificate, self.key, days, extensions))


@dataclass(frozen=True)
class Entry:
    """What a server knows of a party's key."""

    party: str
    key: ec.EllipticCurvePublicKey
    clients: tuple[str, ...] = ()
    begins: float = 0.0  # seconds since 1970
    ends: float = float("inf")  # a bare public key, as in a trial, does not expire

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)


@contextmanager
def _sound(what: str) -> Iterator[None]:
    """One line for any error that malformed bytes cause: parts of a certificate are parsed when they are accessed."""
    try:
        yield
    except MALFORMED:
        raise UsageError(what) from None


def read_entry(data: bytes, where: object, ca: x509.Certificate) -> Entry:
    """A party's entry, if this deployment's CA has signed it. The caller checks whether it has expired."""
    with _sound(f"{where} is damaged: it cannot be read as an entry"):
        return _entry(data, where, ca)


def _entry(data: bytes, where: object, ca: x509.Certificate) -> Entry:
    found = read_certificate(data, where)
    if _key_id(found) != _key_id(ca):
        raise UsageError(f"{where} is an entry of another deployment: another CA has signed it")
    try:
        found.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise UsageError(f"{where} is forged or damaged: the signature is not that of this deployment's CA") from None
    try:
        usage = list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except (x509.ExtensionNotFound, ValueError):
        usage = []
    key = found.public_key()
    if usage != [ExtendedKeyUsageOID.CLIENT_AUTH] or not isinstance(key, ec.EllipticCurvePublicKey):
        raise UsageError(f"{where} is no entry of a party")
    begins, ends = (t.timestamp() for t in (found.not_valid_before_utc, found.not_valid_after_utc))
    return Entry(_party(found.subject, where), key, _clients(found.extensions, where), begins, ends)


@dataclass(frozen=True)
class Asked:
    """What a signing request asks for."""

    party: str
    clients: tuple[str, ...]
    key: ec.EllipticCurvePublicKey
    renews: str = ""  # fingerprint of the old key that has signed this request too

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)


def make_request(
    party: str, clients: Sequence[str], key: ec.EllipticCurvePrivateKey, old: ec.EllipticCurvePrivateKey | None = None
) -> bytes:
    """A signing request for a party's key; one that renews is signed by the `old` key as well."""
    if not PARTY.fullmatch(party):
        raise UsageError(f"--node {party.removeprefix('node-')!r}: letters, digits, - and _ alone, at most 50")
    for client in clients:
        if not NAME.fullmatch(client):
            raise UsageError(f"--role {client!r}: letters, digits and . ~ - _ alone, at most 100")
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(party))
    if clients:
        names = [x509.UniformResourceIdentifier(ROLE + quote(client, safe="")) for client in dict.fromkeys(clients)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if old is not None:
        signature = Signer(old)(_renewal(party, key.public_key()))
        builder = builder.add_attribute(AttributeOID.UNSTRUCTURED_NAME, signature.hex().encode())
    return builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def read_request(data: bytes, where: object) -> Asked:
    """The content of a request, after checking that its sender has the key, and the old key where it claims so."""
    with _sound(f"{where} is not a signing request (visard keys request)"):
        return _asked(x509.load_pem_x509_csr(data[:LONGEST]), where)


def _asked(found: x509.CertificateSigningRequest, where: object) -> Asked:
    key, valid, extensions = found.public_key(), found.is_signature_valid, found.extensions
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != CURVE.name:
        raise UsageError(f"{where}: its key is not one of visard keys request")
    if not valid:
        raise UsageError(f"{where} is forged or damaged: it is not signed by the key that it is for")
    party = _party(found.subject, where)
    try:
        signature = bytes.fromhex(found.attributes.get_attribute_for_oid(AttributeOID.UNSTRUCTURED_NAME).value.decode())
        renews = signed_by(_renewal(party, key), signature)
    except x509.AttributeNotFound:
        renews = ""
    except (ValueError, PublicError):
        raise UsageError(f"{where} is forged or damaged: the signature of the old key is not one of the new") from None
    return Asked(party, _clients(extensions, where), key, renews)


def read_certificate(data: bytes, where: object) -> x509.Certificate:
    """The first certificate in PEM form."""
    with _sound(f"{where} is not a certificate in PEM form"):
        return x509.load_pem_x509_certificate(data[:LONGEST])


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses in a server's certificate."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _renewal(party: str, key: ec.EllipticCurvePublicKey) -> bytes:
    return RENEWAL + f"{party} {fingerprint(key)}".encode()


def _party(name: x509.Name, where: object) -> str:
    said = [str(a.value) for a in name.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if len(said) != 1 or not PARTY.fullmatch(said[0]):
        raise UsageError(f"{where} does not say which node it is for")
    return said[0]


def _clients(extensions: x509.Extensions, where: object) -> tuple[str, ...]:
    try:
        names = list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return ()
    said = [str(n.value) for n in names if isinstance(n, x509.UniformResourceIdentifier)]
    clients = [unquote(text.removeprefix(ROLE)) for text in said if text.startswith(ROLE)]
    if len(clients) != len(names) or len(names) > MOST_CLIENTS or not all(map(NAME.fullmatch, clients)):
        raise UsageError(f"{where} names roles that no client can have")
    return tuple(dict.fromkeys(clients))


def _key_id(certificate: x509.Certificate) -> bytes | None:
    """The id of the CA key that signed a certificate; for a CA itself that is its own."""
    try:
        return certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    except (x509.ExtensionNotFound, ValueError):
        return None


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _for_ca() -> list[x509.ExtensionType]:
    return [x509.BasicConstraints(ca=True, path_length=0), _usage(ca=True)]


def _for_leaf(purpose: x509.ObjectIdentifier) -> list[x509.ExtensionType]:
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    return [constraints, _usage(ca=False), x509.ExtendedKeyUsage([purpose])]


def _usage(ca: bool) -> x509.KeyUsage:
    """Key usage: a CA signs certificates, a server signs handshakes."""
    return x509.KeyUsage(
        digital_signature=not ca, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=ca, crl_sign=ca, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _certificate(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    days: float,
    extensions: Sequence[x509.ExtensionType],
) -> x509.Certificate:
    """A certificate signed by an issuer, valid no longer than the issuer, or self-signed."""
    now = datetime.datetime.now(datetime.UTC)
    ends = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(subject) if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(ends if issuer is None else min(ends, issuer.not_valid_after_utc))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384())


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not re.fullmatch(rf"{LABEL}(\.{LABEL})*", host):
        raise UsageError(f"--host {host!r}: neither a name nor an address (the port is not part of it)")
    return x509.DNSName(host)
