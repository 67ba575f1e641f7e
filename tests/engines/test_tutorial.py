"""docs/deploy.md, line by line: one server and three parties, on machines that share nothing but a network.

A machine is a network namespace with a folder of its own, in which the folders of the others cannot be seen. What the
page copies from one to another with scp, the test copies. Where namespaces are not permitted, all runs on loopback.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from cryptography.hazmat.primitives import serialization
from tests.engines.deployed import ROOT, VISARD, free_port, until

from visard.cli import main
from visard.deployment.keys import fingerprints

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of flwr
]

MACHINES = ("server", "party-1", "party-2", "party-3")
PEM = rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*KEY-----"
SMALL = ("evaluation.pairs=60", "evaluation.bootstrap=0", "engine.wait=60")


def tutorial() -> list[tuple[str, list[str]]]:
    """(machine, words of the command) of the page."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [(line.partition("$ ")[0], shlex.split(line.partition("$ ")[2])) for line in lines]


def ip(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *words], capture_output=True, check=True)


class Machines:
    """The four machines; `port` is the page's where they are separate."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: folder / name for name in MACHINES}
        for path in self.folders.values():
            path.mkdir()
        self.replaced: dict[str, str] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def prefix(self, machine: str) -> list[str]:
        """What comes before a command that is to run on a machine."""
        return []

    def start(self, machine: str, command: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*self.prefix(machine), *command]
        self.running[machine] = subprocess.Popen(command, cwd=self.folders[machine], env=environment)

    def close(self) -> list[int]:
        for machine in reversed(self.running):
            self.running[machine].terminate()
        return [process.wait(30) for process in self.running.values()]


class Loopback(Machines):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        port = free_port()
        self.replaced = {"server.example": "127.0.0.1", "9443": str(port), "server.example:9443": f"127.0.0.1:{port}"}


class Namespaces(Machines):
    """A wire from the server to each party, and none between parties; names are looked up in /etc/netns/NAME/hosts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names = {machine: f"visard-{os.getpid()}-{machine}" for machine in MACHINES}
        self.made: list[str] = []
        self.hosts = [Path("/etc/netns") / name for name in self.names.values()]
        for machine, name in self.names.items():
            ip("netns", "add", name)
            self.made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
            if machine == "server":
                continue
            number, server = machine[-1], self.names["server"]
            ends = f"v{os.getpid() % 10**6}s{number}", f"v{os.getpid() % 10**6}p{number}"
            ip("link", "add", ends[0], "netns", server, "type", "veth", "peer", "name", ends[1], "netns", name)
            for end, where, address in ((ends[0], server, f"10.99.{number}.1"), (ends[1], name, f"10.99.{number}.2")):
                ip("-n", where, "address", "add", f"{address}/24", "dev", end)
                ip("-n", where, "link", "set", end, "up")
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n10.99.{number}.1 server.example\n")

    def prefix(self, machine: str) -> list[str]:
        others = [str(path) for name, path in self.folders.items() if name != machine]
        hide = "; ".join(f"mount -t tmpfs tmpfs {shlex.quote(path)}" for path in others)
        return ["ip", "netns", "exec", self.names[machine], "sh", "-c", f'set -e; {hide}; exec "$@"', "sh"]

    def remove(self) -> None:
        for name in self.made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        for folder in self.hosts:
            shutil.rmtree(folder, ignore_errors=True)


def permitted() -> str:
    """Why there can be no network namespaces here; empty if there can."""
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    name = f"visard-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"ip netns is not permitted: {tried.stderr.strip()}"
    inside = ["ip", "netns", "exec", name, "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    mounted = subprocess.run(inside, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    return f"ip netns exec is not permitted: {mounted.stderr.strip()}" if mounted.returncode else ""


@pytest.fixture(params=["namespaces", "loopback"])
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    why = permitted()
    if request.param == "loopback" and not why:
        pytest.skip("the same lines ran in network namespaces")
    if request.param == "namespaces" and why:
        pytest.skip(why)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
        if why:
            yield Loopback(Path(folder))
            return
        found = Namespaces(Path(folder))
        try:
            yield found
        finally:
            found.remove()


def copy(machines: Machines, machine: str, words: list[str]) -> None:
    """scp FILE... MACHINE:FOLDER"""
    where, _, name = words[-1].partition(":")
    for file in words[1:-1]:
        shutil.copy(machines.folders[machine] / file, machines.folders[where] / (name or "."))


def test_the_tutorial(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = machines.folders
    try:
        for machine, words in tutorial():
            words = [machines.replaced.get(word, word) for word in words]
            if words[0] == "scp":
                copy(machines, machine, words)
                continue
            assert words[0] == "visard"
            for i, word in enumerate(words):
                if word.startswith("FINGERPRINT-"):  # as the party says it
                    words[i] = fingerprints(folders[f"party-{word[-1]}"] / f"node-{word[-1]}")[f"node-{word[-1]}"]
            command = [str(VISARD), *words[1:]]
            if words[1] == "run" and "--resume" not in words:
                command += [part for s in SMALL for part in ("--set", s)]
            if words[1] == "server" or (words[1] == "client" and words[2] != "policy"):
                machines.start(machine, command)
                if words[1] == "server":
                    until((folders["server"] / "server-state" / "control.sock").is_socket, "the server")
                continue
            monkeypatch.chdir(folders[machine])  # none of these needs a network
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as ended:  # in this process, which has torch already
                main()
            assert not ended.value.code, words
        seen = {machine: visible(machines, machine) for machine in MACHINES}
    finally:
        codes = machines.close()
    assert codes == [0] * 4
    if isinstance(machines, Namespaces):
        assert seen == {machine: {machine} for machine in MACHINES}, "no machine sees the files of another"
    out = folders["server"] / "runs" / "ours"
    figures = json.loads((out / "metrics.json").read_text())["clients"]["figures"]
    assert sorted(figures) == ["house-1", "house-2", "house-3"]
    joined = [row for row in json.loads((out / "ledger.json").read_text())["rows"] if row[0] == "join"]
    assert [(row[2], row[4], row[5]) for row in joined] == [
        (f"house-{i}", field, "count") for i in (1, 2, 3) for field in ("identities", "pictures")
    ]
    secrets = {machine: private_keys(folders[machine]) for machine in MACHINES}
    for number in (1, 2, 3):
        kept = next((folders[f"party-{number}"] / "mine" / "models").glob(f"fedavg-*-house-{number}.safetensors"))
        assert kept.read_bytes() == (out / "model.safetensors").read_bytes()
        own = secrets.pop(f"party-{number}")
        assert len(own) == 1, "a party has the key that it made, and no other"
        assert all(own.isdisjoint(others) for others in secrets.values()), "and it never left"


def visible(machines: Machines, machine: str) -> set[str]:
    """The machines whose files a process on this one can see."""
    root = Path(f"/proc/{machines.running[machine].pid}/root")
    return {name for name, path in machines.folders.items() if any((root / path.relative_to("/")).iterdir())}


def private_keys(folder: Path) -> set[bytes]:
    """All private keys in the files of a folder."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file():
            for text in re.findall(
                rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*KEY-----", path.read_bytes(), re.S
            ):
                key = serialization.load_pem_private_key(text, None)
                form = serialization.PrivateFormat.PKCS8
                none = serialization.NoEncryption()
                found.add(key.private_bytes(serialization.Encoding.DER, form, none))
    return found
