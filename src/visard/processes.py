"""Child Python processes: one program for all of them, which exchanges frames with the parent over a socket.

A child calls a function that its parent names ("module:function") with its end of the socket. It ends when the function
returns or when the parent is gone. An error of the function arrives at the parent as one line.

Not `multiprocessing`: its children import the caller's main module again, which fails in a script without a main guard,
and its messages are pickles. A child here works from a script, a notebook or a test alike, and imports only what its
function needs.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import json
import mmap
import os
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from visard.errors import VisardError, one_line

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
ARENAS, MMAP_THRESHOLD, TRIM_THRESHOLD = -8, -3, -1  # of mallopt(3)
KEPT = 1 << 25, 1 << 26  # bytes of one allocation, and of all together, whose memory stays with a process that is done
# torch reads this when it first allocates: the memory of large tensors comes in large pages, with a fourth of the work
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
Data = bytes | bytearray | memoryview
LONG = 1 << 20  # bytes: frames from here on are not copied
SHORT = 1 << 22  # bytes that stay in memory; more of them go through a file
_LENGTH = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")
_ERROR = 1 << 63  # in the length of a frame that says why its sender has ended
_FILED = 1 << 62  # in the length of a frame that is a file


class ChildError(VisardError):
    """Why a child process has ended, in one line."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settle() -> None:
    """What is here by now stays: it is not looked at again and again for what could be let go."""
    gc.collect()
    gc.freeze()


def share_memory_of_threads() -> None:
    """Make all threads allocate from one arena, where the C library allows it: otherwise each thread keeps its own
    freed memory, and a process with many threads that handle megabytes holds much more than it uses."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "gnu_get_libc_version"):
        library.mallopt(ARENAS, 1)
        library.mallopt(MMAP_THRESHOLD, KEPT[0])  # else the system hands out new pages for every few megabytes
        library.mallopt(TRIM_THRESHOLD, KEPT[1])


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


class Filed:
    """Bytes in a file that has no name, from `start` on. Another process gets the file, not the bytes.

    `serial` is the same for two of them only if one process has made both of the same bytes; 0: nothing is known.
    """

    _serials = itertools.count(1)

    def __init__(self, handle: int, size: int, start: int = 0, serial: int | None = None) -> None:
        """Takes the open file over."""
        self.handle, self.size, self.start = handle, size, start
        self.serial = next(self._serials) if serial is None else serial

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.handle)

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> bytes:
        """Some of the bytes."""
        found = os.pread(self.handle, min(stop, self.size) - start, self.start + start)
        if len(found) != min(stop, self.size) - start:
            raise OSError("a file has become shorter")
        return found

    def map(self) -> memoryview:
        """All of them as memory: who writes on it does so on a copy of its own."""
        if not self.size:
            return memoryview(bytearray())
        mapped = mmap.mmap(self.handle, self.start + self.size, access=mmap.ACCESS_COPY)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        _maps[address] = weakref.ref(mapped, lambda _: _maps.pop(address, None))
        return memoryview(mapped)[self.start :]


_maps: dict[int, weakref.ref[mmap.mmap]] = {}  # by their addresses


def let_go(data: Data) -> None:
    """Of mapped memory: it is not needed for a while, and is read again where it is."""
    if isinstance(data, memoryview) and isinstance(data.obj, mmap.mmap):
        data.obj.madvise(mmap.MADV_DONTNEED)


def mapped_at(address: int, size: int) -> Callable[[], None] | None:
    """If memory is mapped from a file: what lets go of it, to be read again where it is. None: it is not."""
    for start, held in list(_maps.items()):
        whole = held()
        if whole is not None and start <= address and address + size <= start + len(whole):
            first = -(-(address - start) // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE - first
            return partial(whole.madvise, mmap.MADV_DONTNEED, first, length) if length > 0 else lambda: None
    return None


class Outbox:
    """One file for the long answers of a process: each is read before the next one is written over it.

    It has no name, and goes with the process. In `memory` it touches no disk.
    """

    def __init__(self, folder: Path, memory: bool = False) -> None:
        self._file = os.memfd_create("visard") if memory else None
        if self._file is None:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                self._file = os.dup(file.fileno())

    def write(self, pieces: Sequence[Data]) -> Filed:
        """Bytes, one piece after the other, as one answer."""
        assert self._file is not None
        place = 0
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                count = os.pwrite(self._file, rest, place)
                place, rest = place + count, rest[count:]
        os.ftruncate(self._file, place)
        return Filed(os.dup(self._file), place)


def send(channel: socket.socket, frame: Data | Filed, flag: int = 0) -> None:
    """Send one frame: its length, then so many bytes, or the file that they are in."""
    length = _LENGTH.pack(len(frame) | (_FILED if isinstance(frame, Filed) else flag))
    if isinstance(frame, Filed):
        channel.sendall(length)
        socket.send_fds(channel, [_PLACE.pack(frame.start, frame.serial)], [frame.handle])
        return
    if len(frame) < LONG:
        channel.sendall(b"".join((length, frame)))
    else:  # without a copy
        channel.sendall(length)
        channel.sendall(frame)


def receive(channel: socket.socket) -> bytes | bytearray | None:
    """The next frame, or None when the other side is gone; `ChildError` if it says why. A long one is a bytearray."""
    frame = receive_any(channel)
    return bytes(frame.map()) if isinstance(frame, Filed) else frame


def receive_any(channel: socket.socket) -> bytes | bytearray | Filed | None:
    """The same; a frame that is a file stays one."""
    head = _exactly(channel, _LENGTH.size)
    if head is None:
        return None
    length = _LENGTH.unpack(head)[0]
    if length & _FILED and not length & _ERROR:
        place, handles, _, _ = socket.recv_fds(channel, _PLACE.size, 1)
        if len(place) != _PLACE.size or len(handles) != 1:
            return None
        return Filed(handles[0], length & ~_FILED, *_PLACE.unpack(place))
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

    def __init__(
        self, function: str, /, quiet: bool = False, variables: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        """`variables` are of its environment, where they are not set already."""
        self.channel, theirs = socket.socketpair()
        path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        variables = {**(variables or {}), **os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        out = subprocess.DEVNULL if quiet else None
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "visard.processes", str(theirs.fileno()), function],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    env=variables, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self.channel.close()
                raise VisardError(f"cannot start a process: {error.strerror}") from None
        with suppress(OSError):  # it has ended already: noticed when its answer is read
            send(self.channel, json.dumps(arguments).encode())

    def receive(self) -> bytes | bytearray:
        """The next frame; `ChildError` if the process has ended."""
        frame = self.receive_any()
        return bytes(frame.map()) if isinstance(frame, Filed) else frame

    def receive_any(self) -> bytes | bytearray | Filed:
        """The same; a frame that is a file stays one."""
        frame = receive_any(self.channel)
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
