"""The in-process engine: one client after the other, each built anew for every step."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping

from visard.core import BoundStep, ClientId, M, R
from visard.engines.network import EngineNetwork, Outcome
from visard.engines.perform import Place, perform
from visard.errors import VisardError


class LocalNetwork(EngineNetwork):
    """Runs client steps in this process."""

    def outcomes(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float
    ) -> Iterator[Outcome]:
        for client, message in messages.items():
            try:
                done = perform(self.world, step, client, message, self.states.client_state(client), place)
            except Exception as error:  # one client's failure must not end the round
                yield failed(client, error)
                continue
            state = self.states.write_client_state(client, done.state)
            yield Outcome(client, done.reply, state, done.seconds)


def failed(client: ClientId, error: Exception) -> Outcome:
    """The outcome of a step that raised: one line, and the traceback for the event log if it is a bug."""
    if isinstance(error, VisardError):
        return Outcome(client, failure=" ".join(str(error).splitlines()))
    first = (str(error).splitlines() or [""])[0]
    return Outcome(
        client,
        failure=f"{type(error).__name__}: {first}",
        traceback="".join(traceback.format_exception(error)),
    )
