"""Who is next in a pool: tasks waiting for a worker, and how many of them one hand-over takes.

A hand-over costs two context switches, so light tasks go out several at a time. Heavy ones go out one by one, of the
next in line the largest first, so that the workers finish together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice

from visard.engines.tasks import Task

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
