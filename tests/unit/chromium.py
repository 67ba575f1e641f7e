"""Drives a headless Chromium over its debugging pipe: no network, no extra packages."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]


# Runs in the child: put the pipe where Chromium looks for it, then become Chromium.
MOVE = "import os, sys; a, b, *c = sys.argv[1:]; os.dup2(int(a), 3); os.dup2(int(b), 4); os.execv(c[0], c)"


def find() -> str | None:
    """The Chromium of this machine, if it has one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are 10 or more."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Browser:
    """One page of one Chromium. Console errors, exceptions and requests are collected."""

    def __init__(self, profile: Path) -> None:
        # It reads commands from descriptor 3 and answers on 4. Ours are high, so that moving them there is safe.
        theirs_in, self._to = _high_pipe()
        self._from, theirs_out = _high_pipe()
        args = [find() or "chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", MOVE, str(theirs_in), str(theirs_out), *args],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._id = b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and wait for it."""
        self._session = None
        try:
            self.call("Browser.close", timeout=10)
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, timeout: float = 60, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            answer = self._next(end - time.monotonic())
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise OSError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, timeout: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            waiting = select.poll()  # unlike select, it takes descriptors above 1023
            waiting.register(self._from, select.POLLIN)
            if timeout <= 0 or not waiting.poll(timeout * 1000):
                raise TimeoutError("the browser does not answer")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise OSError("the browser has ended")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"][:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"][:200])

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression (promises are awaited)."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise OSError(f"{script}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until all charts are drawn."""
        self.visit(page.resolve().as_uri(), "document.documentElement?.dataset.drawn == 'all'", width, height, dark)

    def visit(self, address: str, until: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load an address and wait until an expression is true there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait(until)

    def wait(self, until: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + 60
        while not self.evaluate(f"Boolean({until})"):
            if time.monotonic() > end:
                raise TimeoutError(f"not after 60 s: {until}; errors: {self.errors}")
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(data))
