"""Child processes: they start with little, answer in any order, end with their parent, and fail in one line."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from visard.errors import VisardError
from visard.processes import (
    Child,
    ChildError,
    Filed,
    Outbox,
    compute,
    mapped_at,
    receive,
    receive_any,
    resolve,
    send,
)


def echo(channel: socket.socket, greeting: str) -> None:
    send(channel, greeting.encode())
    while (frame := receive(channel)) is not None:
        send(channel, frame[::-1])


def about(channel: socket.socket, greeting: str) -> None:
    found = {"greeting": greeting, "pid": os.getpid(), "folder": os.getcwd(), "mark": os.environ.get("VISARD_MARK")}
    send(channel, json.dumps(found | {"threads": os.environ["OMP_NUM_THREADS"]}).encode())
    if greeting == "go":
        raise SystemExit(3)
    if receive(channel) is not None:
        raise VisardError("not a\nword more")


def shout(channel: socket.socket, folder: str, memory: bool) -> None:
    """Answers in a file what came in one."""
    box = Outbox(Path(folder), memory)
    while (frame := receive_any(channel)) is not None:
        assert isinstance(frame, Filed)
        seen = frame.map()
        seen[:1] = b"#"  # on a copy of its own
        send(channel, box.write([bytes(frame.map()[:1]), b"", bytes(seen).upper()]))


@pytest.mark.parametrize("memory", [False, True])
def test_long_frames_are_files_that_change_hands(tmp_path: Path, memory: bool) -> None:
    child = Child("tests.unit.test_processes:shout", folder=str(tmp_path), memory=memory)
    try:
        for text in (b"hello", b"a", b"goodbye"):
            with tempfile.TemporaryFile(dir=tmp_path) as file:
                file.write(b"before " + text)
                file.flush()
                sent = Filed(os.dup(file.fileno()), len(text), 7)
            send(child.channel, sent)
            answer = child.receive_any()
            assert isinstance(answer, Filed)
            assert bytes(answer.map()) == text[:1] + b"#" + text[1:].upper() == answer.read(0, len(answer))
            assert answer.read(1, 3) == bytes(answer.map())[1:3]
        send(child.channel, sent)
        assert child.receive() == b"g#OODBYE", "who wants bytes gets them"
        assert list(tmp_path.iterdir()) == []
    finally:
        child.kill()


def test_mapped_memory_can_be_let_go_and_is_read_again(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(os.urandom(5 * mmap.PAGESIZE))
    view = Filed(os.open(path, os.O_RDONLY), 5 * mmap.PAGESIZE - 8, 8).map()
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    out = mapped_at(start, len(view))
    assert out is not None
    view[0], view[-1] = 0, view[-1] ^ 1
    out()
    assert bytes(view[mmap.PAGESIZE :]) == path.read_bytes()[mmap.PAGESIZE + 8 :], "what was written is gone"
    assert mapped_at(start, len(view) + 1) is None
    assert mapped_at(start - 9, 1) is None
    other = bytearray(100)
    assert mapped_at(ctypes.addressof(ctypes.c_char.from_buffer(other)), 100) is None


def double(job: dict[str, Any]) -> bytes:
    if job["n"] == 13:
        raise VisardError("thirteen\nis not a number")
    return bytes(2 * job["n"])


def test_frames_go_both_ways_and_arguments_arrive() -> None:
    child = Child("tests.unit.test_processes:echo", greeting="hello")
    try:
        assert child.receive() == b"hello"
        for frame in (b"", b"abc", bytes(3_000_000) + b"x"):
            send(child.channel, frame)
            assert child.receive() == frame[::-1]
        child.channel.shutdown(socket.SHUT_WR)
        assert child.process.wait(20) == 0, "it ends when its parent has nothing more to say"
    finally:
        child.kill()


def test_answers_come_as_they_get_ready() -> None:
    answers = dict(compute("tests.unit.test_processes:double", [{"n": n} for n in range(9)], 2))
    assert answers == {n: bytes(2 * n) for n in range(9)}


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("tests.unit.test_processes:double", "thirteen is not a number"),
        ("visard.no_such:function", "internal error: ModuleNotFoundError: No module named 'visard.no_such'"),
    ],
)
def test_what_a_child_raises_arrives_as_one_line(function: str, line: str) -> None:
    with pytest.raises(ChildError) as error:
        list(compute(function, [{"n": 13}, {"n": 13}], 2))
    assert str(error.value) == line


def test_a_killed_child_is_one_line() -> None:
    child = Child("tests.unit.test_processes:echo", greeting="hello")
    assert child.receive() == b"hello"
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(ChildError, match="the process ended with code -9"):
        child.receive()
    child.kill()


def test_names_are_resolved() -> None:
    assert resolve("visard.processes:Child") is Child


def test_a_child_starts_with_little() -> None:
    code = "import sys, visard.processes; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize("way", ["begun", "forked"])
def test_where_a_child_is_and_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, way: str
) -> None:
    if way == "forked":
        request.getfixturevalue("quick_children")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VISARD_MARK", "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]), prepend=os.pathsep)
    files = len(os.listdir("/proc/self/fd"))
    children = [Child("tests.unit.test_processes:about", greeting=text) for text in ("stay", "go", "speak", "die")]
    said = [json.loads(child.receive()) for child in children]
    pids = [child.process.pid for child in children]
    assert [s["pid"] for s in said] == pids
    assert len({*pids, os.getpid()}) == 5
    assert {(s["folder"], s["mark"], s["threads"]) for s in said} == {(str(tmp_path), "here", "1")}
    assert os.getsid(pids[0]) == pids[0], "Ctrl-C does not reach it"
    send(children[2].channel, b"speak")
    with pytest.raises(ChildError, match="not a word more"):
        children[2].receive()
    assert children[0].process.poll() is None
    children[0].channel.shutdown(socket.SHUT_WR)
    os.kill(pids[3], signal.SIGKILL)
    assert [child.process.wait(20) for child in children] == [0, 3, 1, -9]
    for child in children:
        child.kill()
    assert len(os.listdir("/proc/self/fd")) <= files + (way == "forked"), "one leads to the process that forks"
