"""A party's front: it watches over the worker process, its deaths and its time limits."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visard.deployment.wire import Answer, Request, pack, unpack
from visard.engines.process import receive, send
from visard.errors import VisardError

START_SECONDS = 120.0
LONGEST = 1e6  # seconds: much more than the requests of a run ask for, and less than a socket can count
DIED = "its worker process died"
LATE = "no reply before the time limit"


@dataclass(frozen=True)
class Plan:
    """How a worker builds its worlds, and where it keeps its states."""

    factory: str  # "module:function" -> (World, Method), called with the run's settings and the arguments
    arguments: dict[str, Any]
    state: Path


class Gone(Exception):
    """The worker is no more."""


class Front:
    """Hands requests to the worker; a dead worker costs one retry, a late one its step."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.plan, self.say = plan, say
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._hire()

    def _hire(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "visard.deployment.party", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the front alone
        )
        theirs.close()
        plan = {"factory": self.plan.factory, "arguments": self.plan.arguments, "state": str(self.plan.state)}
        try:
            send(self._channel, json.dumps(plan).encode())
            self._receive(time.monotonic() + START_SECONDS)
        except (Gone, TimeoutError, OSError):
            code = self._process.poll()
            self.close()
            raise VisardError(f"the worker process did not start (exit code {code})") from None

    def stop(self) -> None:
        """Give up the step at hand; safe in a signal handler. The state of the client does not move."""
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the worker, whatever it does."""
        with self._lock:
            channel, process = self._channel, self._process
            self._channel = self._process = None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()

    def do(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """The answer to a request, from the worker or, if that fails, from here."""
        request = unpack(header, Request)
        deadline = time.monotonic() + request.timeout
        for _ in range(2):
            if self._stopped:
                return pack(Answer(*request.place, failure="the party was stopped")), b""
            try:
                if self._channel is None:
                    self._hire()
                assert self._channel is not None
                send(self._channel, header)
                send(self._channel, payload)
                return self._receive(deadline), self._receive(deadline)
            except TimeoutError:
                self.close()
                self.say(f"{request.client}: {LATE}")
                return pack(Answer(*request.place, failure=LATE)), b""
            except (Gone, OSError):
                self.close()
                if not self._stopped:
                    self.say(f"{request.client}: {DIED}")
            except VisardError as error:  # it does not even start
                return pack(Answer(*request.place, failure=str(error))), b""
        return pack(Answer(*request.place, failure="the party was stopped" if self._stopped else DIED)), b""

    def _receive(self, deadline: float) -> bytes:
        if self._channel is None:
            raise Gone
        self._channel.settimeout(min(max(0.001, deadline - time.monotonic()), LONGEST))
        try:
            frame = receive(self._channel)
        finally:
            if self._channel is not None:
                self._channel.settimeout(None)
        if frame is None:
            raise Gone
        return frame
