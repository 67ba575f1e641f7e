"""Does the runs of a bench: what is finished is kept, what is unfinished goes on, a failure does not end the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from visard.bench.jobs import Job, OtherSettings
from visard.engines.loop import Silent, Watcher
from visard.errors import Interrupted, UsageError, VisardError


@dataclass(frozen=True)
class Outcome:
    """How a run of a bench ended."""

    job: Job
    state: Literal["finished", "failed"]
    reason: str = ""  # of a failure, one line
    reused: bool = False  # it was there already


class Show(Protocol):
    """Who wants to see a bench go by."""

    def begun(self, job: Job) -> Watcher: ...

    def ended(self, outcome: Outcome) -> None: ...


class Quiet:
    """Shows nothing."""

    def begun(self, job: Job) -> Watcher:
        return Silent()

    def ended(self, outcome: Outcome) -> None: ...


def check_settings(jobs: Sequence[Job], overwrite: bool = False) -> None:
    """Before anything is run: every setting is right, and no folder holds another run (unless it may be replaced)."""
    for job in jobs:
        job.settings()
        try:
            job.standing()
        except OtherSettings as error:
            if not overwrite:
                raise OtherSettings(f"{error}: --overwrite does it again, or give another --out") from None


def execute(
    jobs: Sequence[Job], *, side_by_side: int = 1, overwrite: bool = False, show: Show | None = None
) -> list[Outcome]:
    """Run what is missing; the outcomes are in the order of the jobs. `jobs` come after those that they need."""
    if side_by_side < 1:
        raise UsageError(f"--jobs {side_by_side}: must be at least 1")
    check_settings(jobs, overwrite)
    bench = _Bench(overwrite, show or Quiet())
    if side_by_side == 1:
        for job in jobs:
            bench.done(bench.one(job, alone=True))
    else:
        _in_processes(bench, list(jobs), side_by_side)
    return [bench.outcomes[job.row.name, job.seed] for job in jobs]


class _Bench:
    """What is known so far."""

    def __init__(self, overwrite: bool, show: Show) -> None:
        self.overwrite, self.show = overwrite, show
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.children: set[subprocess.Popen[str]] = set()
        self.stopping = False

    def done(self, outcome: Outcome) -> None:
        self.outcomes[outcome.job.row.name, outcome.job.seed] = outcome
        self.show.ended(outcome)

    def ready(self, job: Job) -> bool:
        """Whether all that the job starts from has ended."""
        return all((name, job.seed) in self.outcomes for name in job.row.needs())

    def one(self, job: Job, alone: bool) -> Outcome:
        """Run one job, here or in a process of its own."""
        failed = [n for n in job.row.needs() if self.outcomes[n, job.seed].state != "finished"]
        if failed:
            return Outcome(job, "failed", f"needs {failed[0]}, which failed")
        try:
            replace, standing = False, "new"
            try:
                standing = job.standing()
            except OtherSettings as error:
                if not self.overwrite:
                    raise OtherSettings(f"{error}: --overwrite does it again") from None
                replace = True
            if standing == "finished":
                return Outcome(job, "finished", reused=True)
            job.note_sources()
            (self._here if alone else self._apart)(job, standing == "unfinished", replace)
        except (Interrupted, KeyboardInterrupt):
            raise Interrupted("interrupted; the same command goes on where this one stopped") from None
        except VisardError as error:
            return Outcome(job, "failed", str(error))
        except Exception as error:
            if os.environ.get("VISARD_DEBUG"):
                raise
            text = (str(error).splitlines() or [""])[0]
            return Outcome(job, "failed", f"internal error: {type(error).__name__}: {text}")
        return Outcome(job, "finished")

    def _here(self, job: Job, resume: bool, overwrite: bool) -> None:
        from visard.runs import run

        run(job.row.preset, overrides=job.overrides(), out=job.folder, resume=resume, overwrite=overwrite,
            watcher=self.show.begun(job))  # fmt: skip

    def _apart(self, job: Job, resume: bool, overwrite: bool) -> None:
        watcher = self.show.begun(job)
        order = {
            "preset": job.row.preset,
            "overrides": [*job.overrides(), "engine.kind=local"],
            "out": str(job.folder),
            "resume": resume,
            "overwrite": overwrite,
        }
        child = subprocess.Popen(
            [sys.executable, "-m", "visard.bench.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C comes to us alone; we tell the children by closing their input
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        self.children.add(child)
        with child.stdout:
            with suppress(BrokenPipeError):  # it has ended already; what it said tells why
                child.stdin.write(json.dumps(order) + "\n")
                child.stdin.flush()
            if self.stopping:
                child.stdin.close()
            last, ending = "", None
            for line in child.stdout:
                told = _parse(line)
                if told is None:
                    last = line.strip() or last
                elif told[0] in ("finished", "failed", "interrupted"):
                    ending = told
                else:
                    getattr(watcher, told[0])(*told[1:])
        code = child.wait()
        self.children.discard(child)
        child.stdin.close()
        if ending is None:
            raise VisardError(f"its process ended with code {code}{f': {last}' if last else ''}")
        if ending[0] == "interrupted":
            raise Interrupted("")
        if ending[0] == "failed":
            raise VisardError(ending[1])

    def stop(self) -> None:
        """Let the children end their rounds; the second time, end them at once."""
        for child in list(self.children):
            if self.stopping:
                child.kill()
            elif child.stdin is not None:
                child.stdin.close()
        self.stopping = True


def _parse(line: str) -> list[Any] | None:
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, list) and told and isinstance(told[0], str) else None


def _in_processes(bench: _Bench, jobs: list[Job], side_by_side: int) -> None:
    waiting, running = jobs, set[Future[Outcome]]()
    interrupted = False
    with ThreadPoolExecutor(side_by_side) as threads:
        while (waiting and not bench.stopping) or running:
            try:
                ready = [] if bench.stopping else [j for j in waiting if bench.ready(j)]
                for job in ready[: side_by_side - len(running)]:
                    waiting.remove(job)
                    running.add(threads.submit(bench.one, job, False))
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    try:
                        bench.done(future.result())
                    except Interrupted:
                        raise KeyboardInterrupt from None
            except KeyboardInterrupt:
                interrupted = True
                bench.stop()
    if interrupted:
        raise Interrupted("interrupted; the same command goes on where this one stopped")
