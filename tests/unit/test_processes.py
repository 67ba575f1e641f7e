"""Child processes: they start with little, answer in any order, end with their parent, and fail in one line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from visard.errors import VisardError
from visard.processes import Child, ChildError, compute, receive, resolve, send


def echo(channel: socket.socket, greeting: str) -> None:
    send(channel, greeting.encode())
    while (frame := receive(channel)) is not None:
        send(channel, frame[::-1])


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
