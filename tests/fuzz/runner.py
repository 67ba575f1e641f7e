"""Reads mutated files in child processes that are reused, and says what each did: read, refused, or how it failed.

An input passes if it is read or ends in one of visard's own errors. It fails with any other exception, more than a
gigabyte, more than ten seconds, a dead process, code that runs, or a file that is written outside its scratch folder.
An input follows from (seed, format, number) alone.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import every as mutations
from tests.fuzz.mutate import mutate
from visard.processes import Child, ChildError, receive, send

SECONDS, MEMORY = 10.0, 2**30
WAITS = 3  # how many times longer an input may take whose process waits for the processor
OFTEN = 5000  # files between two lines of progress
PATIENCE = 40.0  # seconds until a child that does not even hear its alarm is killed
WRITES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate",
    "shutil.rmtree",
          "shutil.move", "shutil.copyfile", "os.chown", "os.utime"}  # fmt: skip
BESIDE = {"os.remove", "os.rmdir"}  # names beside an open folder
RUNS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn", "subprocess.Popen",
    "socket.connect",
        "socket.bind", "webbrowser.open", "ctypes.dlopen", "os.startfile"}  # fmt: skip
SOURCE = str(Path(__file__).resolve().parents[2])
IN_PLACE: dict[str, Callable[[Path], object]] = {  # of a file
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "named pipe": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
}
CHILD = "visard.onnx_process:serve"  # the one process that reading may start


def seeds(folder: Path, names: list[str] | None = None) -> None:
    """Write the valid files of all formats, each into its own folder."""
    from tests.fuzz.formats import FORMATS

    for name in names or FORMATS:
        (folder / name).mkdir(parents=True)
        FORMATS[name].make(folder / name)


class Inputs:
    """The mutated folders of one format."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        from tests.fuzz.formats import FORMATS

        self.folder, self.name, self.seed, self.format = folder / name, name, seed, FORMATS[name]
        paths = sorted(p for p in self.folder.rglob("*") if p.is_file() and p.name != ".lock")
        names = [p.relative_to(self.folder) for p in paths]
        self.names = [
            n for n in names if not any(str(n).startswith(f) or str(n).endswith(f) for f in self.format.fixed)
        ]

    @functools.cached_property
    def every(self) -> list[tuple[Path, bytes | str]]:
        """Changes that are tried one by one: a file and its new content, or what is in its place."""
        found: list[tuple[Path, bytes | str]] = []
        for name in self.names:
            data = (self.folder / name).read_bytes()
            if not self.format.there:
                found += [(name, what) for what in IN_PLACE]
            found += [(name, content) for content in (b"", data[:1], data[: len(data) // 2])]
            found += [(name, (self.folder / other).read_bytes()) for other in self.names[:8] if other != name]
            with suppress(ValueError):  # not what its ending says
                found += [(name, content) for content in mutations(data, self.format.kind(str(name)))]
        return found

    def write(self, number: int, out: Path) -> str:
        """Input `number`, in `out`; returns which file was changed. Those below 0 are of `every`, from its end."""
        if number < 0:
            shutil.copytree(self.folder, out)
            name, content = self.every[number]
            (out / name).unlink()
            if isinstance(content, bytes):
                (out / name).write_bytes(content)
            else:
                IN_PLACE[content](out / name)
            return str(name)
        rng = Random(f"{self.seed} {self.name} {number}")
        shutil.copytree(self.folder, out)
        name = rng.choice(self.names)
        how = rng.random()
        if self.format.there:
            how = 1.0
        if how < 0.02:
            (out / name).unlink()
        elif how < 0.04:
            (out / name).unlink()
            (out / name).mkdir()
        elif how < 0.06:
            other = rng.choice(self.names)
            (out / name).write_bytes((self.folder / other).read_bytes())
        else:
            data = (self.folder / name).read_bytes()
            (out / name).write_bytes(mutate(data, self.format.kind(str(name)), rng))
        return str(name)


class Hang(BaseException):
    """The alarm rang."""


class Sentinel:
    """Hears what the interpreter does, while it is on."""

    def __init__(self) -> None:
        self.on, self.inside, self.seen = False, "", list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _mode, flags = arguments
            if isinstance(path, str | bytes) and (flags or 0) & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            ):
                self._place(event, path)
        elif event in WRITES:
            at = next((n for n in arguments if isinstance(n, int) and event in BESIDE and n >= 0), None)
            base = os.readlink(f"/proc/self/fd/{at}") if at is not None else ""
            for path in arguments[:2]:
                if isinstance(path, str | bytes):
                    self._place(event, os.path.join(base, os.fsdecode(path)))
        elif event in RUNS:
            if not (event == "subprocess.Popen" and CHILD in list(arguments[1])):
                self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event in ("exec", "compile") and not self._is_own(event, arguments):
            self.seen.append(f"{event} {arguments!r:.200}")

    def _is_own(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Modules that are imported, types that are looked up by their text, and literals that are parsed."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.startswith(("inspect", "typing", "dataclasses", "collections", "ast", "importlib._", "pydantic")):
            return True
        name = arguments[0].co_filename if event == "exec" else arguments[1]
        return str(name).startswith((sys.prefix, sys.base_prefix, SOURCE, "<frozen"))

    def _place(self, event: str, path: str | bytes) -> None:
        where = os.path.realpath(os.fsdecode(path))
        if not where.startswith((self.inside, "/dev/null", "/proc/self/", f"/proc/{os.getpid()}/")):
            self.seen.append(f"{event} {where}")


def status() -> dict[str, int]:
    """Bytes that this process takes: now and at most, of memory and of addresses."""
    with open("/proc/self/status") as file:
        rows = dict(row.split(":", 1) for row in file)
    return {key: int(rows[key].split()[0]) * 1024 for key in ("VmPeak", "VmSize", "VmHWM", "VmRSS")}


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from, also where that is not shown."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def serve(channel: socket.socket, folder: str, seed: int, seconds: float) -> None:
    """A child: reads the inputs that its parent names, and says what happened."""
    os.environ["VISARD_DEBUG"] = "1"
    import torch

    from tests.fuzz.formats import FORMATS, Format
    from visard.errors import VisardError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    home = Path(tempfile.mkdtemp(prefix="visard-fuzz-"))
    os.environ |= {"VISARD_CACHE": str(home / "cache"), "VISARD_DATA": str(home / "data"), "TMPDIR": str(home)}
    tempfile.tempdir = str(home)
    limit = status()["VmSize"] + 8 * MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sentinel, inputs = Sentinel(), dict[str, Inputs]()

    def ring(*_: object) -> None:
        wall, own = time.monotonic() - begun[0], time.process_time() - begun[1]
        if own > 0.5 * wall or wall > (WAITS - 0.5) * seconds:
            raise Hang
        signal.setitimer(signal.ITIMER_REAL, seconds)

    begun = [0.0, 0.0]  # clock and processor time
    signal.signal(signal.SIGALRM, ring)

    def attempt(read: Callable[[Path, Path], object], given: Path, scratch: Path, timed: bool = True) -> dict[str, Any]:
        Path("/proc/self/clear_refs").write_text("5")
        before, children = status(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        sentinel.seen.clear()
        sentinel.inside = os.path.realpath(given.parent)
        outcome, detail, kept = "read", "", None
        begun[:] = time.monotonic(), time.process_time()
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds if timed else 0)
            sentinel.on = True
            read(given, scratch)
        except VisardError as error:
            outcome, kept = "refused", error
        except Hang:
            outcome, detail = "hang", "".join(traceback.format_exc()[-1500:])
        except BaseException as error:
            outcome, kept, detail = (
                "error",
                error,
                f"{type(error).__name__}: {str(error)[:200]}\n{traceback.format_exc()[-1500:]}",
            )
        finally:
            sentinel.on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        took, after = time.monotonic() - begun[0], status()
        memory = after["VmHWM"] - before["VmRSS"]
        if after["VmPeak"] > before["VmPeak"]:
            memory = max(memory, after["VmPeak"] - before["VmSize"])
        grown = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        if grown > children:
            memory = max(memory, grown * 1024 - 2**28)  # what a process of a graph takes without one
        if memory > MEMORY or any(
            isinstance(e, MemoryError) or "bad_alloc" in str(e) or "can't allocate" in str(e) for e in chain(kept)
        ):
            outcome, detail = "memory", f"{memory} bytes; {detail or kept}"
        if sentinel.seen:
            outcome, detail = "sentinel", "; ".join(sentinel.seen[:5])
        return {"outcome": outcome, "detail": detail, "seconds": took, "memory": max(0, memory)}

    def canary(name: str) -> Format:
        from tests.fuzz.canary import CANARIES

        return CANARIES[name]

    try:
        for name in sorted({*FORMATS} & {p.name for p in Path(folder).iterdir()}):
            inputs[name] = Inputs(Path(folder), name, seed)
            for check in (False, True):  # the first time modules are imported, which is code
                shutil.copytree(Path(folder) / name, home / "warm" / "in")
                (home / "warm" / "out").mkdir()
                result = attempt(FORMATS[name].read, home / "warm" / "in", home / "warm" / "out", timed=check)
                shutil.rmtree(home / "warm")
                if check and result["outcome"] != "read":
                    raise VisardError(f"the valid {name} is not read: {result}")
        send(channel, b"[]")
        while (frame := receive(channel)) is not None:
            name, number = json.loads(frame)
            place = home / "input"
            shutil.rmtree(place, ignore_errors=True)
            (place / "out").mkdir(parents=True)
            changed = inputs[name].write(number, place / "in") if name in inputs else ""
            read = inputs[name].format.read if name in inputs else canary(name).read
            result = attempt(read, place / "in", place / "out")
            send(channel, json.dumps(result | {"file": changed}).encode())
            if number % 50 == 0:
                gc.collect()
    finally:
        shutil.rmtree(home, ignore_errors=True)


@dataclass
class Tally:
    """What came of the inputs of one format."""

    files: int = 0
    read: int = 0
    refused: int = 0
    seconds: float = 0.0  # the longest
    memory: int = 0  # the most
    failures: list[dict[str, Any]] = field(default_factory=list)


def print_at_once(text: str) -> None:
    """Print a line that a log file shows at once."""
    print(text, flush=True)


def fuzz(
    jobs: list[tuple[str, int]],
    folder: Path,
    seed: int,
    workers: int,
    keep: Path | None = None,
    say: Callable[[str], None] = print_at_once,
    seconds: float = SECONDS,
) -> dict[str, Tally]:
    """Read all inputs; those that fail are kept in `keep`."""
    tallies: dict[str, Tally] = {}
    waiting, children = iter(jobs), dict[Child, tuple[tuple[str, int], float] | None]()

    def start() -> None:
        child = Child("tests.fuzz.runner:serve", quiet=True, folder=str(folder), seed=seed, seconds=seconds)
        child.channel.settimeout(300)
        child.receive()
        children[child] = None

    def give(child: Child) -> None:
        job = next(waiting, None)
        children[child] = None if job is None else (job, time.monotonic())
        if job is not None:
            send(child.channel, json.dumps(job).encode())

    def note(job: tuple[str, int], result: dict[str, Any]) -> None:
        tally = tallies.setdefault(job[0], Tally())
        tally.files += 1
        if not (done := sum(each.files for each in tallies.values())) % OFTEN:
            say(f"{done:,} of {len(jobs):,} files, {sum(len(each.failures) for each in tallies.values())} failed")
        tally.seconds, tally.memory = max(tally.seconds, result["seconds"]), max(tally.memory, result["memory"])
        if result["outcome"] in ("read", "refused"):
            setattr(tally, result["outcome"], getattr(tally, result["outcome"]) + 1)
            return
        tally.failures.append(result | {"format": job[0], "number": job[1], "seed": seed})
        say(f"FAILED {job[0]} {job[1]} ({result.get('file')}): {result['outcome']}: {result['detail'][:1200]}")
        if keep is not None and (folder / job[0]).is_dir():
            place = keep / f"{job[0].replace(' ', '-')}-{seed}-{job[1]}"
            shutil.rmtree(place, ignore_errors=True)
            Inputs(folder, job[0], seed).write(job[1], place)
            (place / "result.json").write_text(json.dumps(result, indent=1))

    try:
        for _ in range(workers):
            start()
        for child in list(children):
            give(child)
        while any(children.values()):
            for child, at in list(children.items()):
                if at is None:
                    continue
                job, begun = at
                child.channel.settimeout(0.02 if workers > 1 else 1.0)
                try:
                    peeked = child.channel.recv(1, socket.MSG_PEEK)
                except TimeoutError:
                    if time.monotonic() - begun < PATIENCE:
                        continue
                    peeked = None
                except OSError:
                    peeked = b""
                result: dict[str, Any]
                if peeked:
                    child.channel.settimeout(60)
                    try:
                        result = json.loads(child.receive())
                    except ChildError as error:
                        result, peeked = {"outcome": "died", "detail": str(error), "seconds": 0.0, "memory": 0}, b""
                else:
                    code = child.process.poll()
                    what = ("hang", "it does not hear its alarm") if peeked is None else ("died", f"code {code}")
                    result = {"outcome": what[0], "detail": what[1], "seconds": time.monotonic() - begun, "memory": 0}
                note(job, result)
                if not peeked or result["outcome"] == "memory":  # the most that it ever took is remembered
                    child.kill()
                    del children[child]
                    start()
                    child = list(children)[-1]
                give(child)
    finally:
        for child in children:
            child.kill()
    return tallies


def plan(files: int, only: list[str] | None = None, first: int = 0) -> list[tuple[str, int]]:
    """Which inputs to read: of every format its share, the formats in turns."""
    from tests.fuzz.formats import FORMATS

    chosen = {name: f for name, f in FORMATS.items() if not only or name in only}
    total = sum(f.weight for f in chosen.values())
    counts = {name: max(1, round(files * f.weight / total)) for name, f in chosen.items()}
    jobs = [(k / n, name, first + k) for name, n in counts.items() for k in range(n)]
    return [(name, k) for _, name, k in sorted(jobs)]


def plan_every(folder: Path, only: list[str] | None = None, place: str | None = None) -> list[tuple[str, int]]:
    """The inputs that are tried one by one, of the valid files in `folder`; or those with this in a file's place."""
    from tests.fuzz.formats import FORMATS

    found = []
    for name in (name for name in FORMATS if not only or name in only):
        every = Inputs(folder, name, 0).every
        found += [(name, k - len(every)) for k, (_, what) in enumerate(every) if place in (None, what)]
    return found
