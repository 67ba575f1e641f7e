"""Keys that stay where they were made: requests, signed entries, renewal, revocation, and one line for each forgery."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from visard.cli import main
from visard.deployment import key_lifecycle
from visard.deployment.certificates import Asked, Ca, make_request, read_entry, read_request
from visard.deployment.keys import Assignment, PartyKeys, ServerKeys, make_keys
from visard.errors import UsageError, VisardError


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", 0, ["server.example"])
    return tmp_path / "keys"


def signed(keys: Path, home: Path, node: str = "1", days: float = 90.0, roles: tuple[str, ...] = ("house-1",)) -> Asked:
    """A party's key with its entry, in its own folder."""
    asked = key_lifecycle.request(home, node, roles)
    accept(keys, home, asked, days)
    return asked


def accept(keys: Path, home: Path, asked: Asked, days: float = 90.0) -> None:
    key_lifecycle.sign(asked, key_lifecycle.load_ca(keys / "ca"), ServerKeys.load(keys), home, None, days)


def test_a_key_stays_where_it_was_made(keys: Path, tmp_path: Path) -> None:
    home = tmp_path / "party"
    asked = signed(keys, home)
    assert stat.S_IMODE((home / "node-1.key").stat().st_mode) == 0o600
    own, server = PartyKeys.load(home, "1"), ServerKeys.load(keys)
    assert server.parties == {"node-1": own.private.public_key()}
    assert server.assignment.of == {"node-1": ("house-1",)}
    assert server.problems == ()
    assert own.ends == pytest.approx(time.time() + 90 * 86400, abs=60)
    secret = own.private.private_numbers().private_value.to_bytes(48, "big")
    elsewhere = [p for p in tmp_path.rglob("*") if p.is_file() and p != home / "node-1.key"]
    assert elsewhere
    for path in elsewhere:
        data = path.read_bytes()
        if b"PRIVATE KEY" in data:
            other = serialization.load_pem_private_key(data, None)
            assert isinstance(other, ec.EllipticCurvePrivateKey)
            assert other.private_numbers().private_value != own.private.private_numbers().private_value
        assert secret not in data
    assert asked.fingerprint in [e.fingerprint for e in server.entries]
    with pytest.raises(UsageError, match="exists already: a key is never overwritten"):
        key_lifecycle.request(home, "1", [])


def test_an_entry_is_no_certificate_of_a_server_and_the_other_way_round(keys: Path, tmp_path: Path) -> None:
    signed(keys, tmp_path / "party")
    ca = key_lifecycle.load_ca(keys / "ca")
    with pytest.raises(UsageError, match="is no entry of a party"):
        read_entry((keys / "server" / "server.crt").read_bytes(), "it", ca.certificate)
    entry = x509.load_pem_x509_certificate((tmp_path / "party" / "node-1.crt").read_bytes())
    usage = list(entry.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert [u._name for u in usage] == ["clientAuth"]
    assert not entry.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_an_entry_of_another_ca_or_without_a_signature_is_refused_and_named(keys: Path, tmp_path: Path) -> None:
    asked = signed(keys, tmp_path / "good")
    other = Ca.make()
    nodes = keys / "server" / "nodes"
    (nodes / "node-2.crt").write_bytes(other.entry("node-2", ["house-2"], asked.key, 9))
    genuine = key_lifecycle.load_ca(keys / "ca")
    posing = Ca(genuine.certificate, other.key)  # the right names, the wrong key
    forged = posing.entry("node-3", ["house-3"], asked.key, 9)
    (nodes / "node-3.crt").write_bytes(forged)
    good = next(nodes.glob("node-1.*.crt")).read_bytes()
    text = bytearray(x509.load_pem_x509_certificate(good).public_bytes(serialization.Encoding.DER))
    at = text.index(b"node-1")
    text[at : at + 6] = b"node-4"
    changed = x509.load_der_x509_certificate(bytes(text)).public_bytes(serialization.Encoding.PEM)
    (nodes / "node-4.crt").write_bytes(changed)
    (nodes / "node-5.crt").write_text("no certificate")
    (nodes / "node-6.pub").write_text("no key")
    server = ServerKeys.load(keys)
    assert list(server.parties) == ["node-1"], "a bad entry costs no other"
    for number, says in {
        2: "node-2.crt is an entry of another deployment: another CA has signed it",
        3: "node-3.crt is an entry of another deployment",
        4: "node-4.crt is forged or damaged: the signature is not that of this deployment's CA",
        5: "node-5.crt is not a certificate in PEM form",
        6: "node-6.pub is not a public key in PEM form",
    }.items():
        assert [says in problem for problem in server.problems].count(True) == 1, (number, server.problems)


def test_a_forged_signature_with_the_names_of_the_ca_is_refused(keys: Path) -> None:
    """As the one before, but the forger also copies the key identifier of the CA."""
    genuine, key = key_lifecycle.load_ca(keys / "ca"), ec.generate_private_key(ec.SECP384R1())
    model = x509.load_pem_x509_certificate(genuine.entry("node-9", [], key.public_key(), 9))
    builder = x509.CertificateBuilder(
        model.issuer, model.subject, key.public_key(), model.serial_number, model.not_valid_before_utc,
        model.not_valid_after_utc, list(model.extensions),
    )  # fmt: skip
    forged = builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(UsageError, match="is forged or damaged: the signature is not that of this deployment's CA"):
        read_entry(forged, "node-9.crt", genuine.certificate)


def test_an_entry_ends(keys: Path, tmp_path: Path) -> None:
    signed(keys, tmp_path / "party", days=1)
    server, now = ServerKeys.load(keys), time.time()
    assert len(server.live(now)) == 1
    assert server.live(now + 86401) == []
    assert "the entry of node-1 ended" in server.refusal(server.entries[0], now + 86401)
    assert "is valid from" in server.refusal(server.entries[0], now - 7200)


def test_a_request_is_signed_by_its_key_and_names_a_party(tmp_path: Path) -> None:
    key, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    good = make_request("node-1", ["house-1", "größe"], key)
    assert read_request(good, "it").clients == ("house-1", "größe")
    text = bytearray(x509.load_pem_x509_csr(good).public_bytes(serialization.Encoding.DER))
    at = text.index(b"node-1")
    text[at : at + 6] = b"node-2"
    forged = x509.load_der_x509_csr(bytes(text)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(UsageError, match="it is not signed by the key that it is for"):
        read_request(forged, "it")
    with pytest.raises(UsageError, match="it is not a signing request"):
        read_request(b"nothing", "it")
    weak = x509.CertificateSigningRequestBuilder().subject_name(x509.load_pem_x509_csr(good).subject)
    data = weak.sign(ec.generate_private_key(ec.SECP192R1()), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(UsageError, match="its key is not one of visard keys request"):
        read_request(data, "it")
    renewal = x509.load_pem_x509_csr(make_request("node-1", [], key, other))
    stolen = x509.CertificateSigningRequestBuilder().subject_name(renewal.subject)
    attribute = renewal.attributes[0]
    thief = ec.generate_private_key(ec.SECP384R1())
    replayed = stolen.add_attribute(attribute.oid, attribute.value).sign(thief, hashes.SHA384())
    with pytest.raises(UsageError, match="the signature of the old key is not one of the new"):
        read_request(replayed.public_bytes(serialization.Encoding.PEM), "it")
    for party, roles in (("node-", []), ("node-a b", []), ("node-../x", []), ("node-1", ["a/b"])):
        with pytest.raises(UsageError, match="letters, digits"):
            make_request(party, roles, key)


def test_a_role_has_one_key(keys: Path, tmp_path: Path) -> None:
    signed(keys, tmp_path / "one")
    with pytest.raises(UsageError, match="the role house-1 belongs to node-1 and to node-2"):
        signed(keys, tmp_path / "two", "2")
    assert not (tmp_path / "two" / "node-2.crt").exists()
    ca = key_lifecycle.load_ca(keys / "ca")
    late = ca.entry("node-3", ["house-1"], ec.generate_private_key(ec.SECP384R1()).public_key(), 9)
    (keys / "server" / "nodes" / "node-3.crt").write_bytes(late)
    server = ServerKeys.load(keys)
    assert len(server.problems) == 1
    assert set(server.parties) in ({"node-1"}, {"node-3"}), "one of the two, and the other is named"


def test_a_renewed_key_takes_the_place_of_the_old_one_when_its_entry_has_come(keys: Path, tmp_path: Path) -> None:
    home = tmp_path / "party"
    first = signed(keys, home)
    asked = key_lifecycle.renew_party(home, "1")
    assert (asked.party, asked.clients, asked.renews) == ("node-1", ("house-1",), first.fingerprint)
    assert PartyKeys.load(home, "1").private.public_key() == first.key, "not yet"
    assert key_lifecycle.check_request(asked, ServerKeys.load(keys)), "no questions: its present key asks"
    before = PartyKeys.load(home, "1").stamp()
    accept(keys, home, asked)
    own = PartyKeys.load(home, "1")
    assert own.private.public_key() == asked.key
    assert own.stamp() != before
    assert not (home / "node-1.next.key").exists()
    server = ServerKeys.load(keys)
    assert {e.fingerprint for e in server.live(time.time())} == {first.fingerprint, asked.fingerprint}, "for a while"
    key_lifecycle.revoke(keys, "node-1", first.fingerprint[:12], "")
    assert [e.fingerprint for e in ServerKeys.load(keys).live(time.time())] == [asked.fingerprint]


def test_a_revoked_key_never_counts_again(keys: Path, tmp_path: Path) -> None:
    home = tmp_path / "party"
    asked = signed(keys, home)
    copy = next((keys / "server" / "nodes").glob("*.crt")).read_bytes()
    late = key_lifecycle.renew_party(home, "1")
    key_lifecycle.revoke(keys, "node-1", "", "stolen")
    (keys / "server" / "nodes" / "node-1.again.crt").write_bytes(copy)
    server = ServerKeys.load(keys)
    assert server.parties == {}
    assert server.refusal(server.entries[0], time.time()).endswith("UTC: stolen")
    for request, says in ((asked, "its key was revoked on"), (late, "is not one that node-1 has now")):
        with pytest.raises(UsageError, match=says):
            accept(keys, home, request)
    fresh = key_lifecycle.request(tmp_path / "new", "1", ["house-1"])
    accept(keys, tmp_path / "new", fresh)
    assert ServerKeys.load(keys).parties == {"node-1": fresh.key}, "a new key of the same party does"
    with pytest.raises(UsageError, match="there is no key of node-7 in"):
        key_lifecycle.revoke(keys, "node-7", "", "")


def test_keys_of_a_trial_are_revoked_too(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 2, ["localhost"], Assignment({"node-1": ("house-1",)}))
    key_lifecycle.revoke(tmp_path / "keys", "node-1", "", "")
    assert list(ServerKeys.load(tmp_path / "keys").parties) == ["node-2"]


def test_the_servers_certificate_is_renewed_for_the_same_names(keys: Path, tmp_path: Path) -> None:
    before = x509.load_pem_x509_certificate((keys / "server" / "server.crt").read_bytes())
    stamp, key = ServerKeys.load(keys).stamp(), (keys / "server" / "server.key").read_bytes()
    key_lifecycle.renew_server(keys, key_lifecycle.load_ca(keys / "ca"), [], new_key=False)
    after = x509.load_pem_x509_certificate((keys / "server" / "server.crt").read_bytes())
    kind = x509.SubjectAlternativeName
    assert after.serial_number != before.serial_number
    assert {*after.extensions.get_extension_for_class(kind).value} == {
        *before.extensions.get_extension_for_class(kind).value
    }
    assert ServerKeys.load(keys).stamp() != stamp
    assert (keys / "server" / "server.key").read_bytes() == key
    key_lifecycle.renew_server(keys, key_lifecycle.load_ca(keys / "ca"), ["other.example"], new_key=True)
    assert (keys / "server" / "server.key").read_bytes() != key
    make_keys(tmp_path / "other", 0, ["a"])
    with pytest.raises(UsageError, match="it is of another deployment"):
        key_lifecycle.renew_server(keys, key_lifecycle.load_ca(tmp_path / "other" / "ca"), [], new_key=False)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["visard", "keys", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_commands(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, out, there = (
        tmp_path / "node-1",
        str(tmp_path / "out"),
        ("--ca", str(keys / "ca"), "--keys", str(keys / "server")),
    )
    assert run(monkeypatch, "request", "--out", str(home), "--node", "1", "--role", "house-1") == 0
    fingerprint = capsys.readouterr().out.split()[-1]
    csr = str(home / "node-1.csr")
    assert run(monkeypatch, "sign", csr, *there, "--out", out) == 2
    assert "there is no terminal to ask at" in capsys.readouterr().err
    assert run(monkeypatch, "sign", csr, *there, "--out", out, "--fingerprint", "0" * 64) == 1
    assert "is refused: its key is not the one with the fingerprint 000" in capsys.readouterr().err
    assert run(monkeypatch, "sign", csr, *there, "--out", out, "--fingerprint", fingerprint[:16]) == 2
    assert "give the whole of it, 64 characters" in capsys.readouterr().err
    assert not list((keys / "server" / "nodes").iterdir())
    read = " ".join(fingerprint[i : i + 4] for i in range(0, 64, 4)).upper()
    assert run(monkeypatch, "sign", csr, *there, "--out", out, "--fingerprint", read, "--days", "30") == 0
    for name in ("ca.crt", "node-1.crt"):
        (home / name).write_bytes((Path(out) / name).read_bytes())
    assert run(monkeypatch, "renew", "--keys", str(home), "--node", "1") == 0
    assert run(monkeypatch, "sign", csr, *there, "--out", out, "--role", "house-9") == 2, "more than it had"
    assert run(monkeypatch, "sign", csr, *there, "--out", out) == 0, "its present key asks"
    assert run(monkeypatch, "renew", "--keys", str(keys / "server"), "--ca", str(keys / "ca")) == 0
    assert run(monkeypatch, "renew", "--keys", str(keys / "server")) == 2
    assert run(monkeypatch, "revoke", "--keys", str(keys / "server"), "--node", "1", "--reason", "a test") == 0
    capsys.readouterr()
    monkeypatch.setattr("visard.cli.console.console._width", 80)
    assert run(monkeypatch, "show", "--keys", str(keys / "server")) == 0
    shown = capsys.readouterr().out
    assert f"node-1: {fingerprint}\n" in shown, "whole in a narrow terminal, to be copied"
    assert shown.count("revoked on") == 2


def test_only_the_party_itself_gets_another_key(keys: Path, tmp_path: Path) -> None:
    """A request in the name of another party, whose roles it would get: the fingerprint of its own key is right."""
    signed(keys, tmp_path / "one")
    other = key_lifecycle.request(tmp_path / "other", "1", ["house-1"])
    ca = key_lifecycle.load_ca(keys / "ca")
    with pytest.raises(UsageError, match=r"node-1 has a key, .*, which did not sign it"):
        key_lifecycle.sign(other, ca, ServerKeys.load(keys), tmp_path / "out", None, 90)
    assert len(ServerKeys.load(keys).entries) == 1
    key_lifecycle.revoke(keys / "server", "node-1", "", "lost")
    key_lifecycle.sign(other, ca, ServerKeys.load(keys), tmp_path / "out", None, 90)
    assert [e.fingerprint for e in ServerKeys.load(keys).live(time.time())] == [other.fingerprint]


def test_the_entry_of_a_renewed_key_is_prolonged_when_the_old_key_is_gone(keys: Path, tmp_path: Path) -> None:
    signed(keys, tmp_path / "one")
    old = ServerKeys.load(keys).entries[0].fingerprint
    asked, ca = key_lifecycle.renew_party(tmp_path / "one", "1"), key_lifecycle.load_ca(keys / "ca")
    key_lifecycle.sign(asked, ca, ServerKeys.load(keys), tmp_path / "out", None, 30)
    key_lifecycle.revoke(keys / "server", "node-1", old, "")
    assert not key_lifecycle.check_request(asked, ServerKeys.load(keys)), "not without its fingerprint"
    longer = key_lifecycle.sign(asked, ca, ServerKeys.load(keys), tmp_path / "out", None, 90)
    assert longer.ends > time.time() + 89 * 86400


def test_an_operator_at_a_terminal_can_refuse(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_lifecycle.request(tmp_path, "1", ["house-1"])
    words = [str(tmp_path / "node-1.csr"), "--ca", str(keys / "ca"), "--keys", str(keys / "server")]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["perhaps", "no", "yes"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert run(monkeypatch, "sign", *words, "--out", str(tmp_path / "out")) == 1
    assert not list((keys / "server" / "nodes").iterdir())
    assert run(monkeypatch, "sign", *words, "--out", str(tmp_path / "out")) == 0
    assert list(ServerKeys.load(keys).parties) == ["node-1"]


def test_an_entry_of_another_key_is_said_at_the_party(keys: Path, tmp_path: Path) -> None:
    signed(keys, tmp_path / "one")
    signed(keys, tmp_path / "two", "2", roles=())
    (tmp_path / "two" / "node-2.crt").write_bytes((tmp_path / "one" / "node-1.crt").read_bytes())
    with pytest.raises(VisardError, match="is an entry of another key than"):
        PartyKeys.load(tmp_path / "two", "2")
