"""Asks at the terminal of a party before it takes part in a run, where it was started without a policy file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from visard.deployment.supervisor import Do
from visard.engines.request import Reply, Request, pack, unpack
from visard.files import PRIVATE, mapping, write_atomically
from visard.processes import Data, Filed

REFUSED = "the party does not take part in this run"
HOW = "allow it in a file (visard client policy) and start with --policy FILE, or start at a terminal to be asked"


class Consent:
    """Passes requests on to the supervisor, once a run has been agreed to.

    The worker writes the question (`consent_question`), which is shown at the terminal. A yes is kept as a policy for
    that run and that server, in the folder `consents` of the party; a no holds as long as this process runs. Without
    a terminal the answer is no.
    """

    def __init__(
        self, do: Do, home: Path, server: str, say: Callable[[str], None], ask: Callable[[str], bool] | None
    ) -> None:
        """`ask` shows a question and waits for yes or no; None: there is no terminal."""
        self._do, self._home, self._server, self._say, self._ask = do, home, server, say, ask
        self._refused: set[str] = set()

    def do(self, header: bytes, payload: Data | Filed) -> tuple[bytes, Data | Filed]:
        """The party's reply; before the first one of a run the question is asked."""
        answer = self._do(header, payload)
        if unpack(answer[0], Reply).failure is None or not answer[1]:
            return answer
        text = answer[1].map() if isinstance(answer[1], Filed) else answer[1]
        request, asked = unpack(header, Request), mapping(json.loads(bytes(text)))
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
