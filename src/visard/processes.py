"""Child Python processes: one program for all of them, which exchanges frames with the parent over a socket.

A child calls a function that its parent names ("module:function") with its end of the socket. It ends when the function
returns or when the parent is gone. An error of the function arrives at the parent as one line.

Not `multiprocessing`: its children import the caller's main module again, which fails in a script without a main guard,
and its messages are pickles. A child here works from a script, a notebook or a test alike, and imports only what its
function needs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from visard.errors import VisardError, one_line

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
ARENAS = -8  # of mallopt(3)
Data = bytes | bytearray | memoryview
LONG = 1 << 20  # bytes: frames from here on are not copied
_LENGTH = struct.Struct("<Q")
_ERROR = 1 << 63  # in the length of a frame that says why its sender has ended


class ChildError(VisardError):
    """Why a child process has ended, in one line."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_memory_of_threads() -> None:
    """Make all threads allocate from one arena, where the C library allows it: otherwise each thread keeps its own
    freed memory, and a process with many threads that handle megabytes holds much more than it uses."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "gnu_get_libc_version"):
        library.mallopt(ARENAS, 1)


def resolve(name: str) -> Any:
    """The object that "package.module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Recipe:
    """How a child makes what it works on: a function by name, and plain arguments."""

    factory: str  # "module:function"
    arguments: dict[str, Any]

    def function(self) -> Callable[..., Any]:
        """The function with its arguments."""
        return partial(resolve(self.factory), **self.arguments)


def send(channel: socket.socket, frame: Data, flag: int = 0) -> None:
    """Send one frame: its length, then so many bytes."""
    length = _LENGTH.pack(len(frame) | flag)
    if len(frame) < LONG:
        channel.sendall(b"".join((length, frame)))
    else:  # without a copy
        channel.sendall(length)
        channel.sendall(frame)


def receive(channel: socket.socket) -> bytes | bytearray | None:
    """The next frame, or None when the other side is gone; `ChildError` if it says why. A long one is a bytearray."""
    head = _exactly(channel, _LENGTH.size)
    if head is None:
        return None
    length = _LENGTH.unpack(head)[0]
    frame = _exactly(channel, length & ~_ERROR)
    if length & _ERROR and frame is not None:
        raise ChildError(frame.decode())
    return frame


def _exactly(channel: socket.socket, count: int) -> bytes | bytearray | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = channel.recv(min(count - len(parts), LONG))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return parts if count >= LONG else bytes(parts)


class Child:
    """A process that calls `function(channel, **arguments)`; `channel` is this side of the socket to it.

    Ctrl-C reaches the parent alone. What a `quiet` child prints is lost.
    """

    def __init__(self, function: str, /, quiet: bool = False, **arguments: Any) -> None:
        self.channel, theirs = socket.socketpair()
        path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        out = subprocess.DEVNULL if quiet else None
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "visard.processes", str(theirs.fileno()), function],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(p for p in path if p)},
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self.channel.close()
                raise VisardError(f"cannot start a process: {error.strerror}") from None
        with suppress(OSError):  # it has ended already: noticed when its answer is read
            send(self.channel, json.dumps(arguments).encode())

    def receive(self) -> bytes | bytearray:
        """The next frame; `ChildError` if the process has ended."""
        frame = receive(self.channel)
        if frame is None:
            raise ChildError(f"the process ended with code {self.process.wait()}")
        return frame

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.channel.close()
        self.process.kill()
        self.process.wait()


def compute(function: str, jobs: Sequence[Any], workers: int) -> Iterator[tuple[int, bytes]]:
    """(number, `function(job)`) of each job in the order in which they get ready; jobs are JSON, answers bytes."""
    children = [Child("visard.processes:answer_jobs", function=function) for _ in range(min(workers, len(jobs)))]
    waiting, at = iter(enumerate(jobs)), dict[Child, int]()

    def give(child: Child) -> None:
        if (item := next(waiting, None)) is not None:
            at[child], job = item
            with suppress(OSError):  # it has ended: noticed when its answer is read
                send(child.channel, json.dumps(job).encode())

    with selectors.DefaultSelector() as selector:
        try:
            for child in children:
                selector.register(child.channel, selectors.EVENT_READ, child)
                give(child)
            for _ in jobs:
                child = selector.select()[0][0].data
                number, answer = at[child], child.receive()
                give(child)  # it goes on while the caller takes the answer
                yield number, answer
        finally:
            for child in children:
                child.kill()


def answer_jobs(channel: socket.socket, function: str) -> None:
    """A child of `compute`."""
    answer = resolve(function)
    while (job := receive(channel)) is not None:
        send(channel, answer(json.loads(job)))


def main() -> None:
    """The program of every child: `python -m visard.processes FD module:function`, arguments in the first frame."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            if (arguments := receive(channel)) is not None:
                resolve(sys.argv[2])(channel, **json.loads(arguments))
        except (BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            return  # the parent is gone, or wants no more
        except Exception as error:
            if os.environ.get("VISARD_DEBUG"):
                traceback.print_exc()
            bug = "" if isinstance(error, VisardError) else "internal error: "
            with suppress(OSError):
                send(channel, (bug + one_line(error)).encode(), _ERROR)
            sys.exit(1)


if __name__ == "__main__":
    main()
