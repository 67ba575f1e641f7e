"""The health of a server or a party: one line of JSON at /health, on this machine unless another address is given.

It names no client, no key and no run. The status is 200 if all is well, 503 if not.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from visard.errors import UsageError

State = Callable[[], tuple[bool, dict[str, Any]]]  # whether all is well, and more entries of the answer


class Health:
    """Answers in a thread until `close`; `where` is [HOST:]PORT."""

    def __init__(self, where: str, state: State) -> None:
        host, _, port = where.rpartition(":")
        if not port.isdigit():
            raise UsageError(f"--health {where}: must look like PORT or HOST:PORT")
        try:
            self._server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), _handler(state))
        except (OSError, OverflowError) as error:
            raise UsageError(f"--health {where}: {getattr(error, 'strerror', None) or error}") from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@functools.cache  # reading it takes longer than a call
def own_version() -> str:
    """The version of visard on this machine."""
    try:
        return version("visard")
    except PackageNotFoundError:
        return ""


def _handler(state: State) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # seconds for a whole request
        server_version, sys_version = "visard", ""

        def do_GET(self) -> None:
            if self.path != "/health":
                return self._answer(404, {})
            well, more = state()
            said = {"status": "ok" if well else "unwell", "version": own_version(), **more}
            return self._answer(200 if well else 503, said)

        def _answer(self, status: int, said: dict[str, Any]) -> None:
            body = json.dumps(said).encode() + b"\n"
            with suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent: the log belongs to the server or the party."""

    return Handler
