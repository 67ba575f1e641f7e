"""The pool engine: every core of one machine, persistent worker processes, the same bits as `local`.

Who goes next is decided in `line`. Replies are handed over in the order asked, so a bounded number of them waits:
memory grows with the workers, not with the clients.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visard.core import BoundStep, ClientId, M, R
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import size_of
from visard.engines.cohort import cohorts
from visard.engines.line import Line, Pace
from visard.engines.network import EngineNetwork, Outcome
from visard.engines.perform import Place
from visard.engines.shared import Bundle, Mapped, memory_folder, receive, remove_folder, send
from visard.engines.tasks import Task, pack_tasks, read_outcomes, together
from visard.engines.turns import wait_in_turn
from visard.engines.world import World
from visard.errors import VisardError
from visard.privacy.ledger import Ledger

DIED = "its worker process died"
LATE = "no reply before the time limit"
AGAIN = 2  # workers in a row that may end while starting, where one has started before
START_SECONDS = 120.0
SMALL = 1 << 15  # bytes that a busy worker's socket takes for certain: sending more could wait for it, and it for us


@dataclass(frozen=True)
class Recipe:
    """How a worker builds its own world: a function by name, and plain arguments."""

    factory: str  # "module:function" -> (World, Method)
    arguments: dict[str, Any]


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, recipe: Recipe, states: Path, areas: list[Path]) -> None:
        self.channel, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "visard.engines.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the coordinator alone
        )
        theirs.close()
        first = {
            "factory": recipe.factory,
            "arguments": recipe.arguments,
            "states": str(states),
            "replies": [str(area) for area in areas],
        }
        send(self.channel, json.dumps(first).encode())
        self.areas, self.replies = areas, [Mapped(area, copied=True) for area in areas]
        self.area = 0  # of the last hand-over
        self.ready = False
        self.tasks: deque[Task] = deque()  # in the order in which it does them
        self.deadline = time.monotonic() + START_SECONDS

    def takes_more(self, batch: int) -> bool:
        """Whether it has nothing to do, or the last half of a hand-over of `batch` light tasks; never two at once.

        The hand-over after that writes its replies where those of the one before were, which have been read by then.
        """
        return not self.tasks or (len(self.tasks) <= batch // 2 and self.tasks[0].area == self.area)

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.channel.close()
        self.process.kill()
        self.process.wait()


class PoolNetwork(EngineNetwork):
    """Runs client steps in worker processes."""

    def __init__(self, world: World, states: Checkpoint, ledger: Ledger | None, recipe: Recipe, workers: int) -> None:
        super().__init__(world, states, ledger)
        self.recipe = recipe
        self.memory = memory_folder()
        self.workers: list[Worker] = []
        self._hired = self._asks = 0
        self._begun, self._failed = False, 0  # whether a worker ever started, and how many in a row did not
        self._paces: dict[str, Pace] = {}  # by step
        self.selector = selectors.DefaultSelector()
        for _ in range(min(workers, len(world.training))):
            self._hire()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        self.selector.close()
        remove_folder(self.memory)

    def _hire(self) -> None:
        self._hired += 1
        areas = [self.memory / f"replies-{self._hired}-{i}" for i in range(2)]
        worker = Worker(self.recipe, self.states.folder.absolute(), areas)
        self.workers.append(worker)
        self.selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _fire(self, worker: Worker) -> None:
        self.selector.unregister(worker.channel)
        self.workers.remove(worker)
        worker.kill()
        for area in worker.areas:
            area.unlink(missing_ok=True)

    def outcomes(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float
    ) -> Iterator[Outcome]:
        bundle, line = self._line(step, messages, place)
        for outcomes in self._work(step, line, bundle, timeout):
            yield from outcomes

    def outcomes_together(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float, mean: str
    ) -> Iterator[Outcome]:
        bundle, alone = self._line(step, messages, place)
        by_client = {task.clients[0]: task for task in alone}
        line = [
            together([by_client[c] for c in group], position, mean)
            for position, group in enumerate(cohorts(self.world, messages))
        ]
        for outcomes in self._work(step, line, bundle, timeout):
            yield from outcomes

    def _line(self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place) -> tuple[Path, list[Task]]:
        """The messages in shared memory, and a task for each."""
        self._asks += 1
        bundle = Bundle(self.memory / f"ask-{self._asks}")
        trees = {client: bundle.tree(message) for client, message in messages.items()}
        bundle.close()
        return bundle.path, [self._task(c, i, step, trees[c], bundle.path, place) for i, c in enumerate(messages)]

    def _work(self, step: BoundStep[M, R], tasks: list[Task], bundle: Path, timeout: float) -> Iterator[list[Outcome]]:
        """The outcomes of each task, in their order."""
        line = Line(tasks, self._paces.setdefault(step.name, Pace()), len(self.workers))
        finished: dict[int, list[Outcome]] = {}
        given = 0
        before = wait_in_turn()
        try:
            while given < len(tasks):
                self._hand_out(line, given, timeout)
                finished.update(self._wait(step, line, timeout))
                self._hand_out(line, given, timeout)  # workers go on while the method takes the replies
                while given in finished:
                    yield finished.pop(given)
                    given += 1
        finally:
            wait_in_turn(before)
            bundle.unlink(missing_ok=True)
            for worker in [w for w in self.workers if w.tasks]:  # the method stopped listening
                self._fire(worker)
                self._hire()

    def _task(
        self, client: ClientId, position: int, step: BoundStep[M, R], tree: Any, bundle: Path, place: Place
    ) -> Task:
        before = self.states.state_file(client)
        request = {
            "step": step.name,
            "client": client,
            "message": tree,
            "bundle": str(bundle),
            "place": [place.stage, place.round, place.ask],
            "state": before.place if before else None,
            "pack": self.states.new_pack,
        }
        return Task([client], position, len(self.world.clients[client].train), request)

    def _hand_out(self, line: Line, given: int, timeout: float) -> None:
        """Give something to do to every worker that is free, or through with most of a hand-over of light tasks."""
        for worker in self.workers:
            if not worker.ready or not worker.takes_more(line.pace.batch()):
                continue
            if not (tasks := line.next(given)):
                return
            area = 1 - worker.area if worker.tasks else 0
            frame = pack_tasks(tasks, area)
            if worker.tasks and len(frame) > SMALL:
                line.back(tasks)
                continue
            if not worker.tasks:
                worker.deadline = time.monotonic() + timeout
            for task in tasks:
                task.tries, task.area = task.tries + 1, area
            worker.tasks.extend(tasks)
            worker.area = area
            try:
                send(worker.channel, frame)
            except OSError:
                continue  # it is dead: noticed when its channel is read

    def _wait(self, step: BoundStep[M, R], line: Line, timeout: float) -> Iterator[tuple[int, list[Outcome]]]:
        """Answers that have come in, by the position of their task; dead and late workers are replaced."""
        soonest = min(w.deadline for w in self.workers)
        for key, _ in self.selector.select(max(0.0, min(soonest - time.monotonic(), 1.0))):
            worker: Worker = key.data
            frame = receive(worker.channel)
            if frame is None:
                yield from self._lost(worker, line, DIED)
            elif not worker.ready:
                worker.ready, worker.deadline = True, float("inf")
                self._begun, self._failed = True, 0
            elif worker.tasks:
                task = worker.tasks.popleft()
                worker.deadline = time.monotonic() + timeout if worker.tasks else float("inf")
                outcomes = read_outcomes(step, task, json.loads(frame), worker.replies[task.area])
                line.pace.heard(sum(o.seconds for o in outcomes))
                line.pace.bytes = line.pace.bytes or size_of(outcomes[0].reply)
                yield task.position, outcomes
        for worker in [w for w in self.workers if time.monotonic() > w.deadline]:
            if not worker.ready:
                raise VisardError(f"a worker process did not start within {START_SECONDS:g} s")
            yield from self._lost(worker, line, LATE)

    def _lost(self, worker: Worker, line: Line, why: str) -> Iterator[tuple[int, list[Outcome]]]:
        """Replace a worker; the task that it was at is tried once more if the worker just died."""
        if not worker.ready:
            self._failed += 1
            if not self._begun or self._failed > AGAIN:
                code = worker.process.wait()
                raise VisardError(f"a worker process ended while starting (exit code {code})")
        tasks = list(worker.tasks)
        worker.tasks.clear()
        self._fire(worker)
        self._hire()
        for task in tasks[1:]:
            task.tries -= 1
        line.back(tasks[1:])
        if tasks and tasks[0].tries == 1 and why == DIED:
            line.once_more(tasks[0])
        elif tasks:
            yield tasks[0].position, [Outcome(c, failure=why) for c in tasks[0].clients]
