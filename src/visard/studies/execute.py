"""The runs of a bench: their settings, folders and commands, and doing what is missing.

What is finished is kept, what is unfinished goes on, a failure does not end the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from visard.config import Settings, load, parse
from visard.engines.watchers import Watcher, Watchers
from visard.errors import Interrupted, UsageError, VisardError, one_line
from visard.files import read_json, write_json
from visard.processes import Child, ChildError, receive, send
from visard.report.compare import flat
from visard.studies.plan import PLACE, Plan, Row, in_order

Standing = Literal["new", "unfinished", "finished", "other"]
INTERRUPTED = "interrupted; the same command goes on where this one stopped"


@dataclass(frozen=True)
class Job:
    """One run of a bench."""

    row: Row
    seed: int
    runs: Path  # the folder of all runs
    sets: tuple[str, ...] = ()  # overrides for all rows

    @property
    def folder(self) -> Path:
        return self.runs / self.row.name / f"seed-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.row.name}, seed {self.seed}"

    @property
    def sources(self) -> dict[str, Path]:
        """The run folders that this run starts from, by row."""
        return {name: self.runs / name / f"seed-{self.seed}" for name in self.row.needs()}

    def overrides(self) -> list[str]:
        """All overrides, the last of each key. Run folders as absolute paths, so that a run works from anywhere."""
        folders = {k: str(p.absolute()) for k, p in self.sources.items()}
        own = [PLACE.sub(lambda m: folders[m[1]], text) for text in self.row.set]
        every = [*own, *self.sets, f"seed={self.seed}", f"name={self.row.name}-seed-{self.seed}"]
        last = {text.partition("=")[0].strip(): i for i, text in enumerate(every)}
        return [text for i, text in enumerate(every) if last[text.partition("=")[0].strip()] == i]

    def settings(self) -> Settings:
        """The settings of the run; what is wrong with them names the row."""
        try:
            return load(self.row.preset, self.overrides())
        except UsageError as error:
            raise UsageError(f"row {self.row.name}: {error}") from None

    def command(self) -> str:
        """How to make this run by hand."""
        words = ["visard", "run", self.row.preset]
        words += [part for text in self.overrides() for part in ("--set", text)]
        return shlex.join([*words, "--out", str(self.folder)])

    def portable_command(self) -> str:
        """The same with the runs in `runs/`, wherever they are: for pages that others read."""
        return replace(self, runs=Path("runs")).command().replace(f"{Path('runs').absolute()}/", "runs/")

    def note_sources(self) -> None:
        """Keep, beside the run, which results it starts from."""
        if self.sources:
            self._noted.parent.mkdir(parents=True, exist_ok=True)
            noted = {k: {"folder": str(p.absolute()), "figures": digest(p)} for k, p in self.sources.items()}
            write_json(self._noted, noted)

    @property
    def _noted(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.from.json")

    def standing(self, overwrite: bool = False) -> Standing:
        """What is there of this run; an error if it is another one, or "other" if that may be replaced."""
        if not self.folder.exists() or all(p.name.startswith(".") for p in self.folder.iterdir()):
            return "new"
        if not (self.folder / "config.toml").exists():
            raise UsageError(f"{self.folder} is not empty and is not a run")
        if not (problem := self._problem()):
            return "finished" if (self.folder / "metrics.json").exists() else "unfinished"
        if not overwrite:
            raise UsageError(f"{self.folder} {problem}: --overwrite does it again, or give another --out")
        return "other"

    def _problem(self) -> str:
        """Why the run in the folder is not the one that the bench means, if it is not."""
        noted = read_json(self._noted) if self.sources and self._noted.exists() else {}
        moved = {noted[k]["folder"]: str(p.absolute()) for k, p in self.sources.items() if k in noted}
        wanted = self.settings()
        try:
            there = parse(_moved(load(self.folder / "config.toml").to_dict(), moved))
        except UsageError as error:
            return f"holds a run that this visard cannot read: {error}"
        if there.fingerprint() != wanted.fingerprint():
            a, b = flat(there.to_dict()), flat(wanted.to_dict())
            key = next(k for k in b | a if k != "name" and not k.startswith("engine.") and a.get(k) != b.get(k))
            return f"was run with other settings ({key} = {a.get(key)} there, {b.get(key)} here)"
        for name, source in self.sources.items():
            if name in noted and (source / "metrics.json").exists() and noted[name]["figures"] != digest(source):
                return f"was made from an earlier run of {name}"
        return ""


def digest(folder: Path) -> str:
    """A hash of the metrics of a finished run: two runs with the same one gave the same result."""
    content = {k: v for k, v in read_json(folder / "metrics.json").items() if k != "name"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def jobs_of(
    plan: Plan, seeds: Sequence[int], runs: Path, sets: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Job]:
    """The runs, seed by seed, each after those that it starts from."""
    rows = in_order(plan, only)
    return [Job(row, seed, runs, tuple(sets)) for seed in seeds for row in rows]


def made_before(plan: Plan, jobs: Sequence[Job]) -> list[Outcome]:
    """Finished runs of other rows in the same folder, with the same seeds and settings: tables are made in parts."""
    found = []
    for first in {job.seed: job for job in jobs}.values():
        asked = {job.row.name for job in jobs if job.seed == first.seed}
        for row in (row for row in in_order(plan) if row.name not in asked):
            job = replace(first, row=row)
            with suppress(UsageError):  # another run is there
                if job.standing() == "finished":
                    found.append(Outcome(job, "finished", reused=True))
    return found


def _moved(value: Any, places: dict[str, str]) -> Any:
    """The settings with the run folders where they are now: a bench folder may be moved."""
    if isinstance(value, dict):
        return {k: _moved(v, places) for k, v in value.items()}
    if isinstance(value, list):
        return [_moved(v, places) for v in value]
    for old, new in places.items():
        if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
            return new + value[len(old) :]
    return value


@dataclass(frozen=True)
class Outcome:
    """How a run of a bench ended."""

    job: Job
    state: Literal["finished", "failed"]
    reason: str = ""  # of a failure, one line
    reused: bool = False  # it was there already

    @property
    def finished(self) -> bool:
        return self.state == "finished"


class Show(Protocol):
    """Shows how a bench goes on."""

    def begun(self, job: Job) -> Watcher: ...

    def ended(self, outcome: Outcome) -> None: ...


def execute(
    jobs: Sequence[Job], *, side_by_side: int = 1, overwrite: bool = False, show: Show | None = None
) -> list[Outcome]:
    """Run what is missing; the outcomes are in the order of the jobs. `jobs` come after those that they need."""
    if side_by_side < 1:
        raise UsageError(f"--jobs {side_by_side}: must be at least 1")
    for job in jobs:  # before anything is run: settings are right, and no folder holds another run
        job.settings()
        job.standing(overwrite)
    bench = _Bench(overwrite, show)
    if side_by_side == 1:
        for job in jobs:
            bench.done(bench.one(job, alone=True))
    else:
        _in_processes(bench, list(jobs), side_by_side)
    return [bench.outcomes[job.row.name, job.seed] for job in jobs]


class _Bench:
    """What is known so far."""

    def __init__(self, overwrite: bool, show: Show | None) -> None:
        self.overwrite, self.show = overwrite, show
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.children: set[Child] = set()
        self.stopping = False

    def done(self, outcome: Outcome) -> None:
        self.outcomes[outcome.job.row.name, outcome.job.seed] = outcome
        if self.show is not None:
            self.show.ended(outcome)

    def ready(self, job: Job) -> bool:
        """Whether all that the job starts from has ended."""
        return all((name, job.seed) in self.outcomes for name in job.row.needs())

    def one(self, job: Job, alone: bool) -> Outcome:
        """Run one job, here or in a process of its own."""
        failed = [n for n in job.row.needs() if not self.outcomes[n, job.seed].finished]
        if failed:
            return Outcome(job, "failed", f"needs {failed[0]}, which failed")
        try:
            standing = job.standing(self.overwrite)
            if standing == "finished":
                return Outcome(job, "finished", reused=True)
            job.note_sources()
            how: dict[str, Any] = {"resume": standing == "unfinished", "overwrite": standing == "other"}
            watcher = self.show.begun(job) if self.show else Watchers()
            if alone:
                from visard.runs.run import run

                run(job.row.preset, overrides=job.overrides(), out=job.folder, watcher=watcher, **how)
            else:
                self._apart(job, watcher, **how)
        except (Interrupted, KeyboardInterrupt):
            raise Interrupted(INTERRUPTED) from None
        except VisardError as error:
            return Outcome(job, "failed", str(error))
        except Exception as error:
            if os.environ.get("VISARD_DEBUG"):
                raise
            return Outcome(job, "failed", f"internal error: {one_line(error)}")
        return Outcome(job, "finished")

    def _apart(self, job: Job, watcher: Watcher, **how: Any) -> None:
        child = Child(
            "visard.studies.execute:run_one", quiet=True, preset=job.row.preset,
            overrides=[*job.overrides(), "engine.kind=local"], out=str(job.folder), **how,
        )  # fmt: skip
        self.children.add(child)
        try:
            if self.stopping:
                child.channel.shutdown(socket.SHUT_WR)
            while (event := json.loads(child.receive())) != ["finished"]:
                if event == ["interrupted"]:
                    raise Interrupted("")
                getattr(watcher, event[0])(*event[1:])
        except ChildError as error:
            raise VisardError(str(error)) from None
        finally:
            self.children.discard(child)
            child.kill()

    def stop(self) -> None:
        """Let the children end their rounds; the second time, end them at once."""
        for child in list(self.children):
            with suppress(OSError):  # it is ending anyway
                child.process.kill() if self.stopping else child.channel.shutdown(socket.SHUT_WR)
        self.stopping = True


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
        raise Interrupted(INTERRUPTED)


class Forward(Watchers):
    """A watcher that sends every event to the parent process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def notify(self, event: str, *values: Any) -> None:
        send(self._channel, json.dumps([event, *values]).encode())


def run_one(channel: socket.socket, preset: str, **how: Any) -> None:
    """One run in a child process, whose watcher tells the parent everything.

    When the parent is gone or has closed its side, the run stops after its round as after Ctrl-C.
    """
    from visard.runs.run import run

    def stop_at_the_end() -> None:
        receive(channel)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop_at_the_end, daemon=True).start()
    watcher = Forward(channel)
    try:
        run(preset, **how, watcher=watcher)
        watcher.notify("finished")
    except (KeyboardInterrupt, Interrupted):
        watcher.notify("interrupted")
