"""The run loop: stages, rounds, evaluation, events, and a checkpoint after every round."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import nlargest
from operator import itemgetter
from types import FrameType
from typing import Any, Protocol, TypeVar, get_type_hints

from visard.aggregation.dp import BudgetSpent
from visard.core import Method, Network, Stage
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.network import EngineNetwork
from visard.engines.watchers import Watcher
from visard.text import at_round, plural

S = TypeVar("S")
START = "start"  # the stage before the first round


class Events(Protocol):
    """Where events go; see `visard.report.run_folder.EventLog`."""

    def write(self, event: str, **fields: Any) -> None: ...


SLOWEST = 100  # clients of a round whose seconds are in its event


class Stop:
    """Whether the user asked for the run to end after this round."""

    wanted = False

    def check(self) -> None:
        """Stop here if asked to: the round is safe on disk."""
        if self.wanted:
            raise KeyboardInterrupt


@contextmanager
def stop_on_interrupt(say: Callable[[str], None]) -> Iterator[Stop]:
    """Catch Ctrl-C during a run: the first one stops after the current round is saved, the second one stops at once,
    and so does SIGTERM. Outside the main thread signals are not handled."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop.wanted or number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise KeyboardInterrupt
        stop.wanted = True
        say("interrupted: this round is finished and saved first (Ctrl-C again stops at once)")

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rounds_of(method: Method[S]) -> list[tuple[Stage[S], int]]:
    """Every round of every stage, in order."""
    return [(stage, r) for stage in method.stages() for r in range(stage.rounds)]


def run_rounds(
    method: Method[S],
    network: EngineNetwork,
    states: Checkpoint,
    ledger: Ledger,
    events: Events,
    evaluate: Callable[[S, Network], dict[str, Any]],
    evaluate_every: int,
    watcher: Watcher,
    stop: Stop | None = None,
    before: Callable[[S, Network], dict[str, Any]] | None = None,
) -> S:
    """Run the remaining rounds of a method, from the last committed round on; returns the final server state.

    `before` tests the weights that the run starts from; its evaluation is that of round 0.
    """
    plan = rounds_of(method)
    if states.committed.step:
        server: S = states.server_state(get_type_hints(type(method).start)["return"])
        network.remembered = states.memory()
    else:
        server = method.start(network.world.setup())
    once = 0
    if before is not None and not states.committed.step:
        begun = time.perf_counter()
        with asking(network, START, 0, events, watcher):
            found = before(server, network)
        once = network.traffic.once  # tests do not count as traffic of the rounds, except what would be sent anyway
        seconds = time.perf_counter() - begun
        events.write("evaluation", stage=START, round=0, step=-1, seconds=seconds, **found)
        watcher.evaluation(found)
    for step in range(states.committed.step, len(plan)):
        stage, round = plan[step]
        if round == 0:
            events.write("stage_started", stage=stage.name, rounds=stage.rounds)
        begun = time.perf_counter()
        try:
            with asking(network, stage.name, round, events, watcher):
                server = stage.run(server, network)
        except BudgetSpent as spent:
            if not step:
                raise
            events.write("warning", text=f"after {plural(step, 'round')}: {spent}")
            watcher.problem(f"{at_round(stage.name, round)}: {spent}; the run ends here")
            break
        traffic = network.traffic
        events.write(
            "round", stage=stage.name, round=round, step=step, seconds=time.perf_counter() - begun,
            bytes_up=traffic.bytes_up, bytes_down=traffic.bytes_down + once,
            asked=traffic.asked, replied=traffic.replied, figures=traffic.figures,
            clients={c: f | {"seconds": traffic.seconds.get(c, 0.0)} for c, f in traffic.clients.items()},
            slowest=dict(nlargest(SLOWEST, traffic.seconds.items(), key=itemgetter(1))),
        )  # fmt: skip
        once = 0
        watcher.round(stage.name, step + 1, len(plan), traffic.figures)
        if step + 1 < len(plan) and evaluate_every and (step + 1) % evaluate_every == 0:
            begun = time.perf_counter()
            with asking(network, f"{stage.name}/evaluation", round, events, watcher):
                found = evaluate(server, network)
            seconds = time.perf_counter() - begun
            events.write("evaluation", stage=stage.name, round=round, step=step, seconds=seconds, **found)
            watcher.evaluation(found)
        states.commit(server, ledger.flush(), network.remembered)
        if stop is not None:
            stop.check()
    return server


@contextmanager
def asking(network: EngineNetwork, stage: str, round: int, events: Events, watcher: Watcher) -> Iterator[None]:
    """Begin a round, and report which clients failed, even if the round fails."""
    network.begin(stage, round)
    try:
        yield
    finally:
        for problem in network.traffic.problems:
            fields = {k: v for k, v in problem.items() if k not in ("event", "again")}
            events.write(problem["event"], stage=stage, round=round, **fields)
            if not problem.get("again"):
                watcher.problem(f"{at_round(stage, round)}: {problem['client']}: {_in_words(problem)}")


def _in_words(problem: dict[str, Any]) -> str:
    match problem["event"]:
        case "refused":
            return f"reply refused ({problem['field']}): {problem['reason']}"
        case "far":
            return f"the update of {problem['field']} {problem['reason']}"
    return f"no reply: {problem['reason']}"
