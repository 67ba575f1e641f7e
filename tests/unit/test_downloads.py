"""Files that are fetched once: checked by digest, kept in the cache, taken from a path where there is no network."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from visard import downloads
from visard.cli import main
from visard.errors import UsageError, VisardError

CONTENT = b"a small network" * 100


class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        Handler.asked += 1
        if self.path == "/gone":
            self.send_error(404)
            return
        body = CONTENT if self.path == "/net.onnx" else CONTENT[:-1] + b"x" if self.path == "/other" else CONTENT * 9
        self.send_response(200)
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            return

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server on loopback, as the official place of a file."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    known = downloads.Download(f"{place}/net.onnx", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "MIT")
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(downloads.DOWNLOADS, "net", known)
    Handler.asked = 0
    yield place
    server.shutdown()
    server.server_close()


def test_a_file_is_fetched_once(address: str) -> None:
    assert downloads.kept("net") is None
    path = downloads.get("net")
    assert path.read_bytes() == CONTENT
    assert downloads.get("net") == path == downloads.kept("net")
    assert Handler.asked == 1


def test_a_changed_file_is_fetched_again(address: str) -> None:
    path = downloads.get("net")
    path.write_bytes(CONTENT[:-1])
    assert downloads.kept("net") is None
    assert downloads.get("net").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "says"), [("/other", "its sha256 is"), ("/long", "is longer than"), ("/gone", "Not Found")]
)
def test_anything_else_is_never_kept(address: str, monkeypatch: pytest.MonkeyPatch, path: str, says: str) -> None:
    monkeypatch.setitem(downloads.DOWNLOADS, "net", replace(downloads.DOWNLOADS["net"], address=address + path))
    with pytest.raises(VisardError, match=says):
        downloads.get("net")
    assert [p for p in downloads.cache_folder().rglob("*") if p.is_file()] == []


HEAD = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "no HTTP": b"garbage\r\n\r\n",
    "a torn part": HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\nabc",
    "too many headers": HEAD + b"X: y\r\n" * 300 + b"\r\n",
    "a file of this machine": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/hosts\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_is_none_is_one_line(address: str, case: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(ANSWERS[case])

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(VisardError, match="cannot be fetched from .*: fetch it elsewhere") as caught:
            downloads.get("net", f"http://127.0.0.1:{server.getsockname()[1]}/net.onnx")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["http://", "http://[", "http://a b/c"])
def test_an_address_that_is_none_is_one_line(address: str, source: str) -> None:
    with pytest.raises(VisardError, match="cannot be fetched from"):
        downloads.get("net", source)


def test_in_a_folder_the_digest_counts_and_not_the_name(address: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.onnx").write_bytes(CONTENT[:-1])
    with pytest.raises(UsageError, match=r"no such file: .*net\.onnx"):
        downloads.get("net", tmp_path / "there")
    (tmp_path / "there" / "renamed.onnx").write_bytes(CONTENT)
    assert downloads.get("net", tmp_path / "there").read_bytes() == CONTENT


def test_another_release_is_as_good(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "newer.onnx").write_bytes(CONTENT[1:])
    also = (hashlib.sha256(CONTENT[1:]).hexdigest(),)
    monkeypatch.setitem(downloads.DOWNLOADS, "net", replace(downloads.DOWNLOADS["net"], also=also))
    assert downloads.get("net", tmp_path / "newer.onnx") == downloads.kept("net")
    assert Handler.asked == 0


def test_without_a_network_a_path_will_do(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = replace(downloads.DOWNLOADS["net"], address="http://127.0.0.1:9/net.onnx")
    monkeypatch.setitem(downloads.DOWNLOADS, "net", nowhere)
    with pytest.raises(VisardError, match="give its path with --from"):
        downloads.get("net")
    with pytest.raises(UsageError, match="no such file"):
        downloads.get("net", tmp_path / "net.onnx")
    (tmp_path / "net.onnx").write_bytes(CONTENT)
    assert downloads.get("net", tmp_path).read_bytes() == CONTENT, "a folder that holds it"
    (tmp_path / "mine.onnx").write_bytes(CONTENT[1:])
    with pytest.raises(VisardError, match="its sha256 is"):
        downloads.get("net", tmp_path / "mine.onnx")
    assert downloads.kept("net") is not None, "the good one is still there"


def test_the_command(address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, says in ((["net"], 0, "MIT"), (["nets"], 2, "did you mean 'net'")):
        monkeypatch.setattr(sys, "argv", ["visard", "models", "get", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        assert (stop.value.code or 0) == code
        assert says in "".join(capsys.readouterr())
