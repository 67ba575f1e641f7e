"""A party's main process, which imports no torch, starts the worker process and hands it the requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visard.engines.request import DIED, LATE, Request, pack, unpack
from visard.errors import VisardError
from visard.processes import LARGE_PAGES, Child, ChildError, Data, Filed, Recipe, send

START_SECONDS = 120.0
LONGEST = 1e6  # seconds: longer than any request, and less than the largest timeout of a socket
STOPPED = "the party was stopped"
NO_START = "the worker process did not start"
Do = Callable[[bytes, Data | Filed], tuple[bytes, Data | Filed]]


class Supervisor:
    """Hands requests to the worker; if it dies the step is tried once more, if it is late the step fails.

    The recipe makes (World, Method) from the settings of a run; states are kept in the folder `state`, encrypted
    if a key is named. `policy` is what the party allows, `server` the fingerprint of the server's CA, `key` the file
    of the party's own key.
    """

    def __init__(
        self,
        recipe: Recipe,
        state: Path,
        say: Callable[[str], None],
        policy: dict[str, Any] | None,
        server: str = "",
        encrypt_with: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self.recipe, self.state, self.say, self.policy, self.server = recipe, state, say, policy, server
        self._encrypt_with, self._key = (str(path) if path else None for path in (encrypt_with, key))
        self._worker: Child | None = None
        self._stopped = False
        self.carried = b""  # the worker's description of its last reply, for the party's ledger
        self._start_worker()

    def _start_worker(self) -> Child:
        given = {"recipe": vars(self.recipe), "state": str(self.state), "encrypt_with": self._encrypt_with}
        given |= {"policy": self.policy, "server": self.server, "key": self._key}
        self._worker = worker = Child("visard.deployment.party:serve", False, LARGE_PAGES, **given)
        try:
            _receive(worker, time.monotonic() + START_SECONDS)
        except (ChildError, OSError) as error:
            self.close()
            raise VisardError(f"{NO_START}: {error}") from None
        return worker

    def stop(self) -> None:
        """Abort the current step; safe in a signal handler. The state of the client does not change."""
        self._stopped = True
        if (worker := self._worker) is not None:
            worker.process.kill()

    def close(self) -> None:
        """End the worker, whatever it does."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def do(self, header: bytes, payload: Data | Filed) -> tuple[bytes, Data | Filed]:
        """Header and payload of the reply to a request, from the worker or, if that fails, from here."""
        self.carried = b""
        request = unpack(header, Request)
        deadline = time.monotonic() + request.timeout
        failure = DIED
        for _ in range(2):
            if self._stopped:
                break
            try:
                worker = self._worker or self._start_worker()
                worker.channel.settimeout(None)
                send(worker.channel, header)
                send(worker.channel, payload)
                answer, payload_of_answer = bytes(_receive(worker, deadline)), _receive_any(worker, deadline)
                self.carried = bytes(_receive(worker, deadline))
                return answer, payload_of_answer
            except TimeoutError:
                failure = LATE
            except (ChildError, OSError):
                failure = DIED
            except VisardError as error:  # the line may name files of this machine: it stays here
                self.say(str(error))
                failure = NO_START
                break
            self.close()
            if not self._stopped:
                self.say(f"{request.client}: {failure}")
            if failure == LATE:
                break
        return pack(request.reply(failure=STOPPED if self._stopped else failure)), b""


def _receive(worker: Child, deadline: float) -> Data:
    worker.channel.settimeout(min(max(0.001, deadline - time.monotonic()), LONGEST))
    return worker.receive()


def _receive_any(worker: Child, deadline: float) -> Data | Filed:
    worker.channel.settimeout(min(max(0.001, deadline - time.monotonic()), LONGEST))
    return worker.receive_any()
