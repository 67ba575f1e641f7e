"""The pool engine: every core of one machine, persistent worker processes, the same bits as `local`.

Of the next clients in line the largest goes first, to whichever worker is free. Replies are handed over in the
order asked, so a bounded number of them waits: memory grows with the workers, not with the clients.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visard.core import BoundStep, ClientId, M, R
from visard.engines.checkpoint import Checkpoint, StateFile
from visard.engines.codec import CodecError
from visard.engines.network import EngineNetwork, Outcome
from visard.engines.perform import Place
from visard.engines.shared import Bundle, memory_folder, read, receive, send
from visard.engines.world import World
from visard.errors import VisardError
from visard.privacy.ledger import Ledger

AHEAD = 8  # clients in line for each worker
START_SECONDS = 120.0


@dataclass(frozen=True)
class Recipe:
    """How a worker builds its own world: a function by name, and plain arguments."""

    factory: str  # "module:function" -> (World, Method)
    arguments: dict[str, Any]


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, recipe: Recipe) -> None:
        self.channel, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "visard.engines.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the coordinator alone
        )
        theirs.close()
        send(self.channel, json.dumps({"factory": recipe.factory, "arguments": recipe.arguments}).encode())
        self.ready = False
        self.task: Task | None = None
        self.deadline = time.monotonic() + START_SECONDS

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.channel.close()
        self.process.kill()
        self.process.wait()


@dataclass
class Task:
    """A client's step on its way."""

    client: ClientId
    position: int
    size: int
    request: dict[str, Any] = field(repr=False)
    tries: int = 0


class PoolNetwork(EngineNetwork):
    """Runs client steps in worker processes."""

    def __init__(self, world: World, states: Checkpoint, ledger: Ledger | None, recipe: Recipe, workers: int) -> None:
        super().__init__(world, states, ledger)
        self.recipe = recipe
        self.memory = memory_folder()
        self.workers: list[Worker] = []
        self.selector = selectors.DefaultSelector()
        for _ in range(min(workers, len(world.training))):
            self._hire()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        self.selector.close()
        shutil.rmtree(self.memory, ignore_errors=True)

    def _hire(self) -> None:
        worker = Worker(self.recipe)
        self.workers.append(worker)
        self.selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _fire(self, worker: Worker) -> None:
        self.selector.unregister(worker.channel)
        self.workers.remove(worker)
        worker.kill()

    def outcomes(
        self, step: BoundStep[M, R], messages: Mapping[ClientId, M], place: Place, timeout: float
    ) -> Iterator[Outcome]:
        bundle = Bundle(self.memory / f"ask-{place.ask}.safetensors")
        trees = {client: bundle.tree(message) for client, message in messages.items()}
        bundle.write()
        line = [self._task(c, i, step, trees[c], bundle.path, place) for i, c in enumerate(messages)]
        finished: dict[int, Outcome] = {}
        given, retries = 0, list[Task]()
        try:
            while given < len(line):
                self._hand_out(line, given, retries, timeout)
                for worker, outcome in self._wait(step, retries):
                    finished[outcome[0]] = outcome[1]
                    worker.task = None
                while given in finished:
                    yield finished.pop(given)
                    given += 1
        finally:
            bundle.path.unlink(missing_ok=True)
            for worker in [w for w in self.workers if w.task]:  # the method stopped listening
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
            "reply": str(self.memory / f"reply-{position}.safetensors"),
            "place": [place.stage, place.round, place.ask],
            "states": str(self.states.folder),
            "state": [before.name, before.digest] if before else None,
            "new_state": self.states.new_state_name(client),
        }
        return Task(client, position, len(self.world.clients[client].train), request)

    def _hand_out(self, line: list[Task], given: int, retries: list[Task], timeout: float) -> None:
        """Give every free worker the largest client among the next in line."""
        near = line[given : given + AHEAD * max(1, len(self.workers))]
        waiting = [t for t in near if t.tries == 0]
        for worker in self.workers:
            if not worker.ready or worker.task is not None:
                continue
            if not (retries or waiting):
                return
            if retries:
                task = retries.pop()
            else:
                task = max(waiting, key=lambda t: t.size)
                waiting.remove(task)
            task.tries += 1
            worker.task, worker.deadline = task, time.monotonic() + timeout
            try:
                send(worker.channel, json.dumps(task.request).encode())
            except OSError:
                continue  # it is dead: noticed when its channel is read

    def _wait(self, step: BoundStep[M, R], retries: list[Task]) -> list[tuple[Worker, tuple[int, Outcome]]]:
        """Answers that have come in; dead and late workers are replaced."""
        soonest = min(w.deadline for w in self.workers)
        ready = self.selector.select(max(0.0, min(soonest - time.monotonic(), 1.0)))
        results = []
        for key, _ in ready:
            worker: Worker = key.data
            frame = receive(worker.channel)
            if frame is None:
                results += self._lost(worker, retries, "its worker process died")
            elif not worker.ready:
                worker.ready, worker.deadline = True, float("inf")
            elif worker.task is not None:
                results.append((worker, self._read(step, worker.task, json.loads(frame))))
                worker.deadline = float("inf")
        for worker in [w for w in self.workers if time.monotonic() > w.deadline]:
            if not worker.ready:
                raise VisardError(f"a worker process did not start within {START_SECONDS:g} s")
            results += self._lost(worker, [], "no reply before the time limit")
        return results

    def _lost(self, worker: Worker, retries: list[Task], why: str) -> list[tuple[Worker, tuple[int, Outcome]]]:
        """Replace a worker; its step is tried once more if it just died."""
        if not worker.ready:
            code = worker.process.wait()
            raise VisardError(f"a worker process ended while starting (exit code {code})")
        task, worker.task = worker.task, None
        self._fire(worker)
        self._hire()
        if task is None:
            return []
        if task.tries == 1 and why == "its worker process died":
            retries.append(task)
            return []
        return [(worker, (task.position, Outcome(task.client, failure=why)))]

    def _read(self, step: BoundStep[M, R], task: Task, answer: dict[str, Any]) -> tuple[int, Outcome]:
        if "failure" in answer:
            return task.position, Outcome(task.client, failure=answer["failure"], traceback=answer.get("traceback"))
        path = Path(task.request["reply"])
        try:
            reply = read(answer["reply"], step.types[1], path)
        except CodecError as error:
            return task.position, Outcome(task.client, failure=f"reply refused: {error}")
        finally:
            path.unlink(missing_ok=True)
        state = StateFile(*answer["state"]) if answer["state"] else None
        return task.position, Outcome(task.client, reply, state, answer["seconds"])
