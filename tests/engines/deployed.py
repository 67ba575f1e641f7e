"""A deployment on loopback as separate processes, for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.policies import ANYTHING

ROOT = Path(__file__).resolve().parents[2]
VISARD = Path(sys.executable).with_name("visard")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def until(met: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


class Deployment:
    """A server and its nodes; every process is ended when the tests are over."""

    def __init__(self, folder: Path, nodes: int, roles: Sequence[str] = (), paths: Sequence[Path] = ()) -> None:
        self.folder, self.port = folder, free_port()
        self.paths = os.pathsep.join(map(str, [*paths, ROOT / "src", ROOT]))
        self.state = folder / "server-state"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.starters: dict[str, list[str]] = {}
        keys = [
            str(VISARD),
            "keys",
            "make",
            "--out",
            str(folder / "keys"),
            "--nodes",
            str(nodes),
            "--host",
            "127.0.0.1",
        ]
        keys += [part for role in roles for part in ("--role", role)]
        subprocess.run(keys, check=True, capture_output=True)
        self.start_server()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def start(self, name: str, command: list[str]) -> None:
        self.starters[name] = command
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": self.paths}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)

    def start_server(self) -> None:
        command = [str(VISARD), "server", "--keys", str(self.folder / "keys" / "server"), "--state", str(self.state)]
        self.start("server", [*command, "--port", str(self.port), "--host", "127.0.0.1"])

    def start_node(self, number: int, roles: list[str], data: str = "synthetic", *more: str) -> None:
        command = [
            str(VISARD),
            "client",
            "--server",
            self.address,
            "--keys",
            str(self.folder / "keys" / f"node-{number}"),
        ]
        policy = self.folder / "policy.toml"
        policy.write_text(ANYTHING.to_toml())
        command += [
            "--policy",
            str(policy),
            "--node",
            str(number),
            "--state",
            str(self.folder / f"party-{number}"),
            "--data",
            data,
        ]
        command += ["--poll", "0.5", *(part for role in roles for part in ("--role", role)), *more]
        self.start(f"node-{number}", command)

    def start_toy(self, number: int, roles: str) -> None:
        keys, state = self.folder / "keys" / f"node-{number}", self.folder / f"party-{number}"
        state.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.engines.toy_node", self.address, str(keys), str(number), str(state)]
        self.start(f"node-{number}", [*command, str(self.folder), roles])

    def wait_connected(self, *names: str) -> None:
        for name in names:
            until(lambda name=name: "connected" in self.log(name), f"{name}: {self.log(name)}")  # type: ignore[misc]

    def wait_server(self) -> None:
        until((self.state / "control.sock").is_socket, f"the server: {self.log('server')}")

    def end(self, name: str, number: int = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(30)

    def restart(self, name: str) -> None:
        self.start(name, self.starters[name])

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
