"""Child processes that begin at once: forked from a process that has imported what they need.

A child of `visard.processes` begins with importing torch, which takes longer than the steps of a small run. The fixture
`quick_children` has children forked from a process that did nothing but import: `python -m tests.forked FD`. They are
processes of their own as before, with the arguments, the environment and the socket that they would have had. How they
really begin is tested where a test does not ask for the fixture.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import disk

ROOT = Path(__file__).resolve().parents[1]
MOST = 1 << 20  # bytes of a request


class Parent:
    """The process that forks, from the side of the tests. It begins when a child is asked for."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._socket: socket.socket | None = None

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(p for p in (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, cwd=ROOT,
            )  # fmt: skip
        return ours

    def ask(self, what: dict[str, Any], *files: int) -> int:
        """One request and its answer, a number."""
        with self._turn:
            self._socket = self._socket or self._begin()
            socket.send_fds(self._socket, [json.dumps(what).encode()], files)
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError(f"the process that forks has ended with {self._process.wait()}")
        return int(answer)

    def popen(
        self, command: list[str], *, pass_fds: list[int], stdin: int, stdout: int | None, stderr: int | None,
        env: dict[str, str], start_new_session: bool,
    ) -> Forked:  # fmt: skip
        """In the place of `subprocess.Popen` in `visard.processes`."""
        assert command[:3] == [sys.executable, "-m", "visard.processes"]
        assert (stdin, start_new_session) == (subprocess.DEVNULL, True)
        with open(os.devnull, "r+b") as nothing:
            files = [pass_fds[0], nothing.fileno()]
            files += [nothing.fileno() if way == subprocess.DEVNULL else n for n, way in ((1, stdout), (2, stderr))]
            what = {"env": env, "folder": os.getcwd(), "arguments": command[4:]}
            return Forked(self, self.ask(what, *files))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._process.wait(30)


class Forked:
    """What `visard.processes` needs of a `subprocess.Popen`."""

    def __init__(self, parent: Parent, pid: int) -> None:
        self.pid, self.returncode, self._parent, self._file = pid, None, parent, os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._file, select.POLLIN)
            if not ended.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(f"the child {self.pid}", timeout or 0.0)
            self.returncode = self._parent.ask({"ended": self.pid})
            os.close(self._file)
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._file, signal.SIGKILL)


def patched(parent: Parent) -> SimpleNamespace:
    """In the place of the module `subprocess` in `visard.processes`."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": parent.popen})


def become(control: socket.socket, files: list[int], env: dict[str, str], folder: str, arguments: list[str]) -> int:
    """Be the child from here on; the code that it ends with."""
    from visard import processes

    control.close()
    os.setsid()
    os.chdir(folder)
    sys.path[0] = folder
    for place, file in enumerate(files[1:]):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["visard.processes", str(files[0]), *arguments]
    try:
        processes.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def main() -> None:
    """Fork when asked, and tell how a child ended."""
    import visard.deployment.party
    import visard.engines.worker
    import visard.runs.run  # noqa: F401  (what workers build their world with)

    disk.do_not_wait()
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, files, _, _ = socket.recv_fds(control, MOST, 4)
        if not data:
            return
        what = json.loads(data)
        if "ended" in what:
            control.send(str(os.waitstatus_to_exitcode(os.waitpid(what["ended"], 0)[1])).encode())
            continue
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = become(control, files, **what)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        for file in files:
            os.close(file)
        control.send(str(pid).encode())


if __name__ == "__main__":
    main()
