"""The in-process engine: one client after the other, each built anew for every step."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping

from visard.core import BoundStep, ClientId, M, R
from visard.engines.network import EngineNetwork, Outcome, cohorts, perform_together, with_mean
from visard.engines.world import Place, perform
from visard.errors import VisardError


class LocalNetwork(EngineNetwork):
    """Runs client steps in this process."""

    def outcomes(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float
    ) -> Iterator[Outcome]:
        for client, message in messages.items():
            try:
                done = perform(self.world, step, client, message, self.states.client_state(client), place)
                state = self.states.write_client_state(client, done.state)
            except Exception as error:  # one client's failure must not end the round
                yield failed(client, error)
                continue
            yield Outcome(client, done.reply, state, done.seconds)

    def outcomes_together(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float, mean: str
    ) -> Iterator[Outcome]:
        for group in cohorts(self.world, messages):
            part = {c: messages[c] for c in group}
            states = {c: self.states.client_state(c) for c in group}
            try:
                value, done = perform_together(self.world, step, part, states, place, mean)
            except Exception:
                yield from self.outcomes(step, part, place, timeout)
                continue
            for client, one in zip(group, done, strict=True):
                state = self.states.write_client_state(client, one.state)
                yield Outcome(client, with_mean(one.reply, mean, value), state, one.seconds)


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
