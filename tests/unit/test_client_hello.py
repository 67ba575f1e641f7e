"""The proof of a party's key in the first message of TLS."""

from __future__ import annotations

import contextlib
import ssl
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

if find_spec("cryptography") is None:
    pytest.skip("needs the package cryptography: pip install 'visard[flower]'", allow_module_level=True)

from cryptography.hazmat.primitives.asymmetric import ec

from visard.deployment import client_hello as module
from visard.deployment.client_hello import MARK, Proofs, alpn_names, bytes_needed, party_context, proof
from visard.deployment.keys import make_keys

pytestmark = pytest.mark.flower  # run by make flower, which installs the package

KEY, OTHER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
NOW = 1_800_000_000.0


def hello(*names: str, context: ssl.SSLContext | None = None) -> bytes:
    """What a client of Python's ssl sends first."""
    context = context or ssl.create_default_context()
    if names:
        context.set_alpn_protocols(list(names))
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="server.example").do_handshake()
    return outgoing.read()


def proofs() -> Proofs:
    return Proofs([("node-1", KEY.public_key()), ("node-2", ec.generate_private_key(ec.SECP256R1()).public_key())])


def test_protocols_are_read_as_openssl_writes_them() -> None:
    assert alpn_names(hello("http/1.1", "h2", "x" * 255)) == [b"http/1.1", b"h2", b"x" * 255]
    assert alpn_names(hello()) == []


def test_a_hello_is_awaited_whole_and_no_longer() -> None:
    whole = hello("http/1.1")
    assert bytes_needed(b"") == bytes_needed(whole[:1]) == bytes_needed(whole[:4]) == 5
    assert bytes_needed(whole[:5]) == bytes_needed(whole) == len(whole)
    for other in (b"G", b"GET / HTTP/1.1", b"\x16\x02\x00\x00\x10", b"\x16\x03\x01\x00\x00", b"\x16\x03\x01\xff\xff"):
        assert bytes_needed(other) is None


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_can_break_the_reader(junk: bytes, at: int, byte: int) -> None:
    assert isinstance(alpn_names(junk), list)
    broken = bytearray(hello("http/1.1", proof(KEY, NOW)))
    broken[at % len(broken)] = byte
    assert isinstance(alpn_names(bytes(broken[: at + 1])), list)
    proofs().party(bytes(broken), NOW)


@given(st.lists(st.text("abcXYZ019", min_size=1, max_size=255), min_size=1, max_size=20))
def test_every_list_of_protocols_comes_back(names: list[str]) -> None:
    assert alpn_names(hello(*names)) == [name.encode() for name in names]


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_a_proof_fits_into_a_name_of_a_protocol(curve: ec.EllipticCurve) -> None:
    key = ec.generate_private_key(curve)
    assert Proofs([("node-1", key.public_key())]).party(hello("http/1.1", proof(key, NOW)), NOW) == "node-1"


def test_a_proof_counts_a_few_times_and_for_a_short_time() -> None:
    known = proofs()
    one, two = (hello("http/1.1", proof(KEY, NOW + ahead)) for ahead in (0.0, 0.5))
    assert [known.party(one, NOW) for _ in range(6)] == ["node-1"] * module.USES + [None, None]
    assert known.party(two, NOW) == "node-1"
    assert known.party(hello(proof(KEY, NOW)), NOW) is None, "signed anew, but with the same time"
    for late in (-10.0, 400.0):
        assert proofs().party(one, NOW + late) is None
    assert known.party(one, NOW + 1000) is None
    assert known.party(hello(proof(KEY, NOW + 1000)), NOW + 1000) == "node-1"
    assert len(known._seen) == 1, "what would not count any more is forgotten"


def test_who_has_no_registered_key_has_no_proof() -> None:
    assert proofs().party(hello("http/1.1"), NOW) is None
    assert proofs().party(hello(proof(OTHER, NOW)), NOW) is None
    named, other = (module.urlsafe_b64decode(proof(k, NOW)[len(MARK) :]) for k in (KEY, OTHER))
    for forged in (named[:16] + other[16:], named[:-1], named[:16], b"", named[:20]):
        text = MARK.decode() + module.urlsafe_b64encode(forged).decode()
        assert proofs().party(hello(text), NOW) is None, "the name of a key is no secret"
    assert proofs().party(hello(MARK.decode() + "=!"), NOW) is None


def test_a_partys_connections_have_a_proof_each(tmp_path: Path) -> None:
    make_keys(tmp_path, 1, ["server.example"])
    context, known = party_context(tmp_path / "node-1" / "ca.crt", KEY), proofs()
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    for _ in range(2):
        context.set_alpn_protocols(["http/1.1"])  # as httpx does before each connection
        assert known.party(hello(context=context), time.time()) == "node-1"
        time.sleep(0.002)
