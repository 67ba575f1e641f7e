"""The pool engine: persistent worker processes on all cores of one machine, with the same bits as `local`.

Handing a batch of jobs to a worker costs two context switches, so light jobs are sent several at a time. Heavy ones are
sent one by one, the largest of the next few first, so that the workers finish together. Replies are returned in the
order asked, and a bounded number of them waits: memory grows with the workers, not with the clients.
"""

from __future__ import annotations

import math
import os
import selectors
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from visard.core import BoundStep
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import size_of
from visard.engines.ledger import Ledger
from visard.engines.local import cohorts
from visard.engines.network import EngineNetwork
from visard.engines.request import DIED, LATE, Reply, Request
from visard.engines.shared_memory import Bundle, Mapped, memory_folder, remove_folder
from visard.engines.worker import Job, pack_jobs, read_replies
from visard.engines.world import World
from visard.errors import VisardError
from visard.processes import Child, ChildError, Recipe, receive, send

AHEAD = 8  # jobs for each worker that may overtake one another: this bounds the replies that wait for their turn
SECONDS = 0.1  # of work in one batch
BYTES = 1 << 24  # of replies of one batch
MOST = 64  # jobs of one batch
AGAIN = 2  # workers in a row that may end while starting, where one has started before
START_SECONDS = 120.0
SMALL = 1 << 15  # bytes that a busy worker's socket takes for certain: sending more could wait for it, and it for us


class Pace:
    """How long the jobs of one step take and how large their replies are, so far."""

    def __init__(self) -> None:
        self.seconds = math.inf
        self.bytes = 0

    def heard(self, seconds: float) -> None:
        """Note the time of a job and the size of its reply."""
        self.seconds = seconds if math.isinf(self.seconds) else 0.8 * self.seconds + 0.2 * seconds

    def batch(self) -> int:
        """How many jobs to send in one batch."""
        fits = min(SECONDS / max(self.seconds, 1e-6), BYTES / max(self.bytes, 1), MOST)
        return max(1, int(fits))


class JobQueue:
    """The jobs of one ask that no worker has at the moment."""

    def __init__(self, jobs: Iterable[Job], pace: Pace, workers: int) -> None:
        self._waiting = deque(jobs)
        self._again: list[Job] = []
        self.pace, self._workers = pace, max(1, workers)

    def next(self, given: int) -> list[Job]:
        """The batch for a free worker, when `given` replies have been returned; empty if it has to wait."""
        if self._again:
            return [self._again.pop()]
        # towards the end batches get smaller, so that no worker has much left when others are done
        batch = max(1, min(self.pace.batch(), len(self._waiting) // (2 * self._workers)))
        reach = given + max(AHEAD, 4 * batch) * self._workers
        near = [t for t in islice(self._waiting, max(AHEAD * self._workers, batch)) if t.position < reach]
        if batch == 1 and near:
            largest = max(near, key=lambda t: t.size)
            self._waiting.remove(largest)
            return [largest]
        return [self._waiting.popleft() for _ in near[:batch]]

    def back(self, jobs: list[Job]) -> None:
        """Jobs that a lost worker had not begun."""
        self._waiting.extendleft(reversed(jobs))

    def retry(self, job: Job) -> None:
        """Try a job whose worker died at another worker, alone."""
        self._again.append(job)


class Worker(Child):
    """One worker process and its jobs."""

    def __init__(self, recipe: Recipe, states: Checkpoint, areas: list[Path], device: str) -> None:
        if device != "cpu":
            recipe = replace(recipe, arguments=recipe.arguments | {"device": device})
        super().__init__(
            "visard.engines.worker:serve",
            recipe=vars(recipe), states=str(states.folder.absolute()), replies=[str(a) for a in areas],
            encrypt_with=str(states.key.path) if states.key else None,
        )  # fmt: skip
        self.areas, self.replies = areas, [Mapped(area, copied=True) for area in areas]
        self.device = device
        self.area = 0  # of the last batch
        self.ready = False
        self.jobs: deque[Job] = deque()  # in the order in which it does them
        self.deadline = time.monotonic() + START_SECONDS

    def takes_more(self, batch: int) -> bool:
        """Whether it is idle, or half through a batch of `batch` light jobs; it never has two batches waiting.

        The next batch but one reuses the shared memory of this one for its replies, which have been read by then.
        """
        return not self.jobs or (len(self.jobs) <= batch // 2 and self.jobs[0].area == self.area)


class PoolNetwork(EngineNetwork):
    """Runs client steps in worker processes."""

    def __init__(
        self, world: World, states: Checkpoint, ledger: Ledger | None, recipe: Recipe, workers: int,
        devices: Sequence[str] = ("cpu",),
    ) -> None:  # fmt: skip
        super().__init__(world, states, ledger)
        self.recipe, self.devices = recipe, devices
        self.memory = memory_folder()
        self.workers: list[Worker] = []
        self._started = self._asks = 0
        self._begun, self._failed = False, 0  # whether a worker ever started, and how many in a row did not
        self._paces: dict[str, Pace] = {}  # by step
        self.selector = selectors.DefaultSelector()
        for _ in range(min(workers, len(world.training))):
            self._start_worker()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        self.selector.close()
        remove_folder(self.memory)

    def _start_worker(self) -> None:
        self._started += 1
        areas = [self.memory / f"replies-{self._started}-{i}" for i in range(2)]
        taken = [worker.device for worker in self.workers]
        worker = Worker(self.recipe, self.states, areas, min(self.devices, key=taken.count))  # the least used
        self.workers.append(worker)
        self.selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _stop_worker(self, worker: Worker) -> None:
        self.selector.unregister(worker.channel)
        self.workers.remove(worker)
        worker.kill()
        for area in worker.areas:
            area.unlink(missing_ok=True)

    def replies(self, step: BoundStep[Any, Any], requests: Sequence[Request]) -> Iterator[Reply]:
        return self._run(step, [[request] for request in requests])

    def replies_together(self, step: BoundStep[Any, Any], requests: Sequence[Request], mean: str) -> Iterator[Reply]:
        return self._run(step, list(cohorts(self.world, requests)), mean)

    def _shared(self, groups: list[list[Request]], mean: str) -> tuple[Path, list[Job]]:
        """The messages in shared memory, and the jobs."""
        self._asks += 1
        bundle = Bundle(self.memory / f"ask-{self._asks}")
        jobs = []
        for position, group in enumerate(groups):
            size = sum(len(self.world.clients[request.client].train) for request in group)
            there = [replace(request, message=bundle.tree(request.message)) for request in group]
            jobs.append(Job(there, position, size, mean))
        bundle.close()
        return bundle.path, jobs

    def _run(self, step: BoundStep[Any, Any], groups: list[list[Request]], mean: str = "") -> Iterator[Reply]:
        """The replies of each group, in their order."""
        if not groups:
            return
        bundle, jobs = self._shared(groups, mean)
        line = JobQueue(jobs, self._paces.setdefault(step.name, Pace()), len(self.workers))
        finished: dict[int, list[Reply]] = {}
        given, timeout = 0, groups[0][0].timeout
        before = wait_in_turn()
        try:
            while given < len(jobs):
                self._hand_out(line, bundle, given, timeout)
                finished.update(self._wait(step, line, timeout))
                self._hand_out(line, bundle, given, timeout)  # workers continue while the method takes the replies
                while given in finished:
                    yield from finished.pop(given)
                    given += 1
        finally:
            wait_in_turn(before)
            bundle.unlink(missing_ok=True)
            for worker in [w for w in self.workers if w.jobs]:  # the method stopped listening
                self._stop_worker(worker)
                self._start_worker()

    def _hand_out(self, line: JobQueue, bundle: Path, given: int, timeout: float) -> None:
        """Give jobs to every worker that is idle, or nearly done with a batch of light jobs."""
        for worker in self.workers:
            if not worker.ready or not worker.takes_more(line.pace.batch()):
                continue
            if not (jobs := line.next(given)):
                return
            area = 1 - worker.area if worker.jobs else 0
            frame = pack_jobs(jobs, bundle, area)
            if worker.jobs and len(frame) > SMALL:
                line.back(jobs)
                continue
            if not worker.jobs:
                worker.deadline = time.monotonic() + timeout
            for job in jobs:
                job.tries, job.area = job.tries + 1, area
            worker.jobs.extend(jobs)
            worker.area = area
            try:
                send(worker.channel, frame)
            except OSError:
                continue  # it is dead, which is noticed when its channel is read

    def _wait(self, step: BoundStep[Any, Any], line: JobQueue, timeout: float) -> Iterator[tuple[int, list[Reply]]]:
        """Replies that have come in, by the position of their job; dead and late workers are replaced."""
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
            elif worker.jobs:
                job = worker.jobs.popleft()
                worker.deadline = time.monotonic() + timeout if worker.jobs else float("inf")
                replies = read_replies(step, job, frame, worker.replies[job.area])
                line.pace.heard(sum(reply.seconds for reply in replies))
                line.pace.bytes = line.pace.bytes or size_of(replies[0].value)
                yield job.position, replies
        for worker in [w for w in self.workers if time.monotonic() > w.deadline]:
            if not worker.ready:
                raise VisardError(f"a worker process did not start within {START_SECONDS:g} s")
            yield from self._lost(worker, line, LATE)

    def _lost(self, worker: Worker, line: JobQueue, why: str) -> Iterator[tuple[int, list[Reply]]]:
        """Replace a worker; the job that it was at is tried once more if the worker just died."""
        if not worker.ready:
            self._failed += 1
            if not self._begun or self._failed > AGAIN:
                code = worker.process.wait()
                raise VisardError(f"a worker process ended while starting (exit code {code})")
        jobs = list(worker.jobs)
        worker.jobs.clear()
        self._stop_worker(worker)
        self._start_worker()
        for job in jobs[1:]:
            job.tries -= 1
        line.back(jobs[1:])
        if jobs and jobs[0].tries == 1 and why == DIED:
            line.retry(jobs[0])
        elif jobs:
            yield jobs[0].position, [request.reply(failure=why) for request in jobs[0].requests]


def wait_in_turn(policy: int | None = None) -> int | None:
    """Make this thread not interrupt others when it wakes up; returns the policy before, which the next call restores.

    If every reply woke the coordinator, it would take a core from a worker each time and clear its cache. This way it
    runs when a core is free or its turn has come, and finds several replies. It works on Linux only; a thread with
    another scheduling policy is not changed. A worker that is started meanwhile inherits the policy, which does no
    harm: it computes, and hardly ever wakes up.
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
