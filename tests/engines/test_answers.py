"""A hostile server's answers to a party: endless, packed, or a redirect to somewhere else."""

from __future__ import annotations

import gzip
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

import httpx

from visard.deployment.flower.answers import MOST, BadAnswer
from visard.deployment.flower.client import Fleet
from visard.deployment.flower.part import Part
from visard.deployment.keys import PartyKeys, make_keys

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr


@contextmanager
def listening(answer: type[BaseHTTPRequestHandler], keys: Path | None = None) -> Iterator[int]:
    """A server on loopback with the server's certificate of `keys`, or without TLS: its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), answer)
    if keys is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.crt", keys / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


class Endless(Quiet):
    sent = 0

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # the party hangs up
            for _ in range(1024):
                Endless.sent += self.wfile.write(bytes(2**20))


class Packed(Quiet):
    def do_POST(self) -> None:
        body = gzip.compress(bytes(2**28), 1)
        self.send_response(200)
        self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)


class Cut(Quiet):
    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "100")
        self.end_headers()
        self.wfile.write(b"x" * 99)


def connect(keys: Path, port: int, way: str = "connects") -> None:
    """Make a call that Flower's client makes, or one for a part of a message."""
    own = PartyKeys.load(keys, "1")
    fleet = Fleet(f"127.0.0.1:{port}", own.ca, own.private, lambda _: None)
    try:
        if way == "fetches a part":
            fleet._part(Part(1, "", "0" * 64))
        else:
            fleet._activate(first=False)
    finally:
        fleet._close()


WAYS = pytest.mark.parametrize("way", ["connects", "fetches a part"])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment") / "keys"
    make_keys(folder, 1, ["127.0.0.1"])
    return folder


@WAYS
def test_an_endless_answer_is_cut_off(keys: Path, way: str) -> None:
    Endless.sent = 0
    with listening(Endless, keys / "server") as port, pytest.raises(BadAnswer, match=f"longer than {MOST} bytes"):
        connect(keys, port, way)
    assert Endless.sent < 2 * MOST


@WAYS
def test_a_packed_answer_is_not_unpacked(keys: Path, way: str) -> None:
    with listening(Packed, keys / "server") as port, pytest.raises(BadAnswer, match="packed"):
        connect(keys, port, way)


@WAYS
def test_half_an_answer_is_none(keys: Path, way: str) -> None:
    with listening(Cut, keys / "server") as port, pytest.raises(httpx.TransportError):
        connect(keys, port, way)


def test_a_part_comes_from_the_server_that_the_ca_vouches_for_alone(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1, ["127.0.0.1"])
    with (
        listening(Cut, tmp_path / "keys" / "server") as port,
        pytest.raises(httpx.TransportError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        connect(keys, port, "fetches a part")


@WAYS
def test_a_party_is_not_sent_elsewhere(keys: Path, way: str) -> None:
    asked = []

    class Elsewhere(Quiet):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    with listening(Elsewhere) as other:

        class Redirect(Quiet):
            def do_POST(self) -> None:
                self.send_response(307)
                self.send_header("location", f"http://127.0.0.1:{other}/inside")
                self.end_headers()

        with listening(Redirect, keys / "server") as port, pytest.raises(httpx.HTTPStatusError, match="307"):
            connect(keys, port, way)
    assert asked == []
