"""The front process of a party, without torch: it watches over the worker process, and asks before a run is joined."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visard.engines.request import DIED, LATE, Reply, Request, pack, unpack
from visard.errors import VisardError
from visard.files import PRIVATE, mapping, write_atomically
from visard.processes import LARGE_PAGES, Child, ChildError, Data, Filed, Recipe, send

START_SECONDS = 120.0
LONGEST = 1e6  # seconds: much more than the requests of a run ask for, and less than a socket can count
STOPPED = "the party was stopped"
NO_START = "the worker process did not start"
REFUSED = "the party does not take part in this run"
HOW = "allow it in a file (visard client policy) and start with --policy FILE, or start at a terminal to be asked"
Do = Callable[[bytes, Data | Filed], tuple[bytes, Data | Filed]]


class Front:
    """Hands requests to the worker; a dead worker costs one retry, a late one its step.

    The recipe makes (World, Method) of the settings of a run; states are kept in the folder `state`, encrypted
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
        self.carried = b""  # what the worker says of its last reply, for the party's record
        self._hire()

    def _hire(self) -> Child:
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
        """Give up the step at hand; safe in a signal handler. The state of the client does not move."""
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
                worker = self._worker or self._hire()
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


def _bytes(payload: Data | Filed) -> bytes:
    return bytes(payload.map() if isinstance(payload, Filed) else payload)


class Consent:
    """Stands before the front of a party that was started without a policy: asks the people there.

    The worker's question (`deployment.question`) is shown at the terminal. A yes is kept as a policy for that run and
    that server, in the folder `consents` of the party; a no holds as long as this process runs. Without a terminal it
    is no.
    """

    def __init__(
        self, do: Do, home: Path, server: str, say: Callable[[str], None], ask: Callable[[str], bool] | None
    ) -> None:
        """`ask` shows a question and waits for yes or no; None: there is no terminal."""
        self._do, self._home, self._server, self._say, self._ask = do, home, server, say, ask
        self._refused: set[str] = set()

    def do(self, header: bytes, payload: Data | Filed) -> tuple[bytes, Data | Filed]:
        """The party's reply, once somebody here has agreed to the run."""
        answer = self._do(header, payload)
        if unpack(answer[0], Reply).failure is None or not answer[1]:
            return answer
        request, asked = unpack(header, Request), mapping(json.loads(_bytes(answer[1])))
        if "refused" in asked:  # it cannot begin, agreed to or not
            return pack(request.reply(failure=str(asked["refused"]))), b""
        if request.run not in self._refused:
            if self._ask is None:
                self._say(f"refused run {request.run[:8]}: {HOW}")
            elif self._ask(str(asked["text"]).replace("{server}", self._server)):
                path = self._home / "consents" / f"{request.run}.toml"
                write_atomically(path, str(asked["policy"]), PRIVATE, parents=True)
                self._say(f"agreed to run {request.run[:8]}; what it may do is in {path}")
                return self._do(header, payload)
            else:
                self._say(f"refused run {request.run[:8]}")
            self._refused.add(request.run)
        return pack(request.reply(failure=REFUSED)), b""
