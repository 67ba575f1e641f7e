"""Worker processes that draw: plain child programs that speak JSON lines in and raw bytes out.

Not `multiprocessing`: its children import the caller's main module again, which fails in a script without
a main guard, and its messages are pickles. A child here works from a script, a notebook or a test alike.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from visard.data.synthetic.render import SyntheticSpec, render_rows
from visard.errors import VisardError

Job = dict[str, Any]
Answer = tuple[int, bytes]  # number of the job, its bytes


def run(program: str, jobs: list[Job], workers: int) -> Iterator[Answer]:
    """Answers of `python -m program` to each job, in the order in which they get ready."""
    todo: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
    for item in enumerate(jobs):
        todo.put(item)
    done: queue.Queue[Answer | str] = queue.Queue(maxsize=2 * workers)
    stop = threading.Event()
    children = [_start(program) for _ in range(min(workers, len(jobs)))]
    threads = [threading.Thread(target=_feed, args=(c, todo, done, stop), daemon=True) for c in children]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            answer = done.get()
            if isinstance(answer, str):
                raise VisardError(f"a drawing process failed: {answer}")
            yield answer
    finally:
        stop.set()
        for child in children:
            child.kill()
        while any(thread.is_alive() for thread in threads):
            _drain(done)
        for child in children:
            child.wait()
            for pipe in (child.stdin, child.stdout, child.stderr):
                _close(pipe)


def serve(answer: Callable[[Job], bytes]) -> None:
    """A child's life: read a job a line from standard input, write the length and bytes of its answer."""
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        reply = answer(json.loads(line))
        out.write(len(reply).to_bytes(8, "little") + reply)
        out.flush()


def _start(program: str) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            [sys.executable, "-m", program], stdin=pipe, stdout=pipe, stderr=pipe,
            env=os.environ | one | {"PYTHONPATH": path},
        )  # fmt: skip
    except OSError as error:
        raise VisardError(f"cannot start a drawing process: {error.strerror}") from None


def _feed(
    child: subprocess.Popen[bytes],
    todo: queue.SimpleQueue[tuple[int, Job]],
    done: queue.Queue[Answer | str],
    stop: threading.Event,
) -> None:
    """Give one child job after job until none is left."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    while not stop.is_set():
        try:
            number, job = todo.get_nowait()
        except queue.Empty:
            return
        try:
            child.stdin.write(json.dumps(job).encode() + b"\n")
            child.stdin.flush()
            length = int.from_bytes(_exactly(child.stdout, 8), "little")
            done.put((number, _exactly(child.stdout, length)))
        except (OSError, EOFError, ValueError):
            lines = child.stderr.read().decode(errors="replace").strip().splitlines() if not stop.is_set() else []
            done.put(lines[-1] if lines else f"ended with code {child.poll()}")
            return


def _exactly(pipe: IO[bytes], n: int) -> bytes:
    data = pipe.read(n)
    if len(data) != n:
        raise EOFError
    return data


def _drain(done: queue.Queue[Answer | str]) -> None:
    """Take what a thread waits to hand over, so that it can end."""
    try:
        done.get(timeout=0.02)
    except queue.Empty:
        return


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:
        return  # what was still unsent went to a child that is gone


# ----------
# The program of a drawing process: `python -m visard.data.synthetic.workers`, jobs on standard input.


def answer(job: dict[str, Any]) -> bytes:
    """The pictures and then the attributes of rows start .. stop - 1 of a set."""
    spec = SyntheticSpec(**job["spec"])
    images, marks = render_rows(spec, np.arange(job["start"], job["stop"]))
    return images.tobytes() + marks.tobytes()


if __name__ == "__main__":
    serve(answer)
