"""The pool engine: every core of one machine, persistent worker processes, the same bits as `local`.

Who goes next is decided in `line`. Replies are handed over in the order asked, so a bounded number of them waits:
memory grows with the workers, not with the clients.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from visard.core import BoundStep, ClientId, M, R
from visard.engines.checkpoint import Checkpoint, StateFile
from visard.engines.codec import CodecError, build, size_of
from visard.engines.ledger import Ledger
from visard.engines.network import EngineNetwork, Outcome, cohorts, with_mean
from visard.engines.shared_memory import Bundle, Mapped, memory_folder, remove_folder
from visard.engines.world import Place, World
from visard.errors import VisardError
from visard.processes import Child, ChildError, receive, send

# ----------
# The pool's tasks: a client's step or that of a cohort on its way to a worker, and the answer on its way back.


@dataclass
class Task:
    """A client's step on its way, or that of a whole cohort."""

    clients: list[ClientId]
    position: int
    size: int
    request: dict[str, Any] = field(repr=False)
    tries: int = 0
    area: int = 0  # of its worker's two areas for replies


def together(tasks: list[Task], position: int, mean: str) -> Task:
    """One task for a cohort, whose replies have the average of the field `mean`."""
    request = {"cohort": [task.request for task in tasks], "mean": mean}
    return Task([c for task in tasks for c in task.clients], position, sum(task.size for task in tasks), request)


def pack_tasks(tasks: list[Task], area: int) -> bytes:
    """A hand-over: the tasks, with each message's header once however many of them share it."""
    numbers: dict[int, int] = {}
    trees: list[Any] = []

    def numbered(request: dict[str, Any]) -> dict[str, Any]:
        if "cohort" in request:
            return {**request, "cohort": [numbered(one) for one in request["cohort"]]}
        if id(tree := request["message"]) not in numbers:
            numbers[id(tree)] = len(trees)
            trees.append(tree)
        return {**request, "message": numbers[id(tree)]}

    requests = [numbered(task.request) for task in tasks]
    return json.dumps({"tasks": requests, "messages": trees, "area": area}, separators=(",", ":")).encode()


def read_outcomes(step: BoundStep[Any, Any], task: Task, answer: dict[str, Any], tensors: Mapped) -> list[Outcome]:
    """What came back for a task, one outcome for each of its clients."""
    tensors.forget()
    if "mean" in answer:
        return _together(step, task, answer, tensors)
    if "alone" in answer:  # something was wrong with one of a cohort: each has its own answer
        each = zip(task.clients, answer["alone"], strict=True)
        return [_alone(step, client, one, tensors) for client, one in each]
    return [_alone(step, task.clients[0], answer, tensors)]


def _alone(step: BoundStep[Any, Any], client: ClientId, answer: dict[str, Any], tensors: Mapped) -> Outcome:
    if "failure" in answer:
        return Outcome(client, failure=answer["failure"], traceback=answer.get("traceback"))
    try:
        reply = build(answer["reply"], step.types[1], tensors)
    except CodecError as error:
        return Outcome(client, failure=f"reply refused: {error}")
    return Outcome(client, reply, _state(answer), answer["seconds"])


def _together(step: BoundStep[Any, Any], task: Task, answer: dict[str, Any], tensors: Mapped) -> list[Outcome]:
    try:
        value = build(answer["mean"], dict, tensors)
        replies = [build(one["reply"], step.types[1], tensors) for one in answer["replies"]]
    except CodecError as error:
        return [Outcome(c, failure=f"reply refused: {error}") for c in task.clients]
    each = zip(task.clients, replies, answer["replies"], strict=True)
    mean = task.request["mean"]
    return [Outcome(c, with_mean(reply, mean, value), _state(a), a["seconds"]) for c, reply, a in each]


def _state(answer: dict[str, Any]) -> StateFile | None:
    return StateFile(*answer["state"]) if answer["state"] else None


# ----------
# Who is next in a pool: tasks waiting for a worker, and how many of them one hand-over takes.
#
# A hand-over costs two context switches, so light tasks go out several at a time. Heavy ones go out one by one, of the
# next in line the largest first, so that the workers finish together.

AHEAD = 8  # tasks for each worker that may overtake one another: this bounds the replies that wait for their turn
SECONDS = 0.1  # of work in one hand-over
BYTES = 1 << 24  # of replies of one hand-over
MOST = 64


class Pace:
    """How long a task of one kind takes and how much it replies, from those seen."""

    def __init__(self) -> None:
        self.seconds = math.inf
        self.bytes = 0

    def heard(self, seconds: float) -> None:
        """A task took so long."""
        self.seconds = seconds if math.isinf(self.seconds) else 0.8 * self.seconds + 0.2 * seconds

    def batch(self) -> int:
        """Tasks for one hand-over."""
        fits = min(SECONDS / max(self.seconds, 1e-6), BYTES / max(self.bytes, 1), MOST)
        return max(1, int(fits))


class Line:
    """The tasks of one ask that no worker has at the moment."""

    def __init__(self, tasks: Iterable[Task], pace: Pace, workers: int) -> None:
        self._waiting = deque(tasks)
        self._again: list[Task] = []
        self.pace, self._workers = pace, max(1, workers)

    def next(self, given: int) -> list[Task]:
        """What a free worker gets, when `given` tasks have been handed on in order; nothing if it has to wait."""
        if self._again:
            return [self._again.pop()]
        # towards the end hand-overs get smaller, so that no worker sits on much while others are done
        batch = max(1, min(self.pace.batch(), len(self._waiting) // (2 * self._workers)))
        reach = given + max(AHEAD, 4 * batch) * self._workers
        near = [t for t in islice(self._waiting, max(AHEAD * self._workers, batch)) if t.position < reach]
        if batch == 1 and near:
            largest = max(near, key=lambda t: t.size)
            self._waiting.remove(largest)
            return [largest]
        return [self._waiting.popleft() for _ in near[:batch]]

    def back(self, tasks: list[Task]) -> None:
        """Tasks that a lost worker had not begun."""
        self._waiting.extendleft(reversed(tasks))

    def once_more(self, task: Task) -> None:
        """A task whose worker died gets another worker, and that one nothing else."""
        self._again.append(task)


# ----------
# How the coordinator of a pool shares the cores with its workers.


def wait_in_turn(policy: int | None = None) -> int | None:
    """Let this thread no longer interrupt others when it wakes up; returns how it was, which the next call restores.

    Woken by every reply, the coordinator would take a core from a worker each time and clear its cache; like this it
    runs when a core is free or its turn has come, and finds several replies. Only Linux has this, elsewhere nothing
    happens; a thread that is scheduled in a special way is left alone. A worker that is replaced meanwhile inherits
    it, which does no harm: it computes, and hardly ever wakes up.
    """
    if sys.platform != "linux":
        return None
    try:
        now = os.sched_getscheduler(0)
        if policy is not None:
            os.sched_setscheduler(0, policy, os.sched_param(0))
        elif now == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return None
    return now if now == os.SCHED_OTHER else None


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


class Worker(Child):
    """One worker process and what it has to do."""

    def __init__(self, recipe: Recipe, states: Path, areas: list[Path]) -> None:
        super().__init__(
            "visard.engines.worker:serve",
            factory=recipe.factory, arguments=recipe.arguments, states=str(states), replies=[str(a) for a in areas],
        )  # fmt: skip
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
            try:
                frame = receive(worker.channel)
            except ChildError as error:
                if not worker.ready:
                    raise VisardError(f"a worker process ended while starting: {error}") from None
                frame = None
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
