"""What an image runs, without one: a server and a party with no root, a read-only file system and an empty environment.

A mount namespace stands for the container: everything is read-only but a folder and /tmp, which is new and empty, and
the processes have the account and the environment of containers/Dockerfile.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from tests.engines.deployed import ROOT, free_port, until
from tests.policies import ANYTHING

from visard.deployment.keys import Assignment, make_keys

pytestmark = pytest.mark.flower
ACCOUNT = "10001"
TOOLS = ("unshare", "setpriv", "mount")


def contained(home: Path, *words: str) -> list[str]:
    """A command as in a container: `home` is /mnt there, and all that can be written besides /tmp."""
    code = "import sys; from visard.cli import main; sys.argv[0] = 'visard'; main()"
    inside = [
        "setpriv", "--reuid", ACCOUNT, "--regid", ACCOUNT, "--clear-groups", "--no-new-privs", "--inh-caps=-all",
        "env", "-i", "PATH=/usr/bin:/bin", "HOME=/mnt", "TMPDIR=/tmp", f"PYTHONPATH={ROOT / 'src'}",
        "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1", sys.executable, "-c", code,
    ]  # fmt: skip
    hidden = [Path("/tmp"), Path.home()]  # the code and Python may be in these
    parts = {path for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)) if {*path.parents} & {*hidden}}
    kept = {f"/dev/shm/{number}": path for number, path in enumerate(sorted(parts))}
    script = [
        "set -e; mount --make-rprivate /; mount -t tmpfs tmpfs /dev/shm",
        f"mount --bind {home} /mnt",
        *(f"mkdir {there}; mount --bind {path} {there}" for there, path in kept.items()),
        *(f"mount -t tmpfs -o mode=1777 tmpfs {path}" for path in hidden),
        *(f"mkdir -p {path}; mount --bind -o ro {there} {path}" for there, path in kept.items()),
        'mount -o remount,bind,ro /; cd /mnt; exec "$@"',
    ]
    return ["unshare", "--mount", "sh", "-c", "; ".join(script), "sh", *inside, *words]


def permitted() -> str:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed"
    if os.geteuid() != 0:
        return "only root can make a read-only file system for another account"
    tried = subprocess.run(["unshare", "--mount", "mount", "--make-rprivate", "/"], capture_output=True, text=True)
    return f"unshare is not permitted: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.skipif(bool(permitted()), reason=permitted())
def test_server_and_party_run_read_only_without_root(tmp_path: Path) -> None:
    port, ports = free_port(), (free_port(), free_port())
    make_keys(tmp_path / "keys", 1, ["127.0.0.1"], Assignment({"node-1": ("client-000",)}))
    homes = {"server": tmp_path / "keys" / "server", "node-1": tmp_path / "keys" / "node-1"}
    (homes["node-1"] / "policy.toml").write_text(ANYTHING.to_toml())
    for home in homes.values():
        for path in (home, *home.rglob("*")):
            os.chown(path, int(ACCOUNT), int(ACCOUNT))
    words = {
        "server": ["server", "--keys", ".", "--state", "state", "--port", str(port), "--host", "127.0.0.1"],
        "node-1": ["client", "--server", f"127.0.0.1:{port}", "--keys", ".", "--node", "1", "--role", "client-000",
                   "--data", "synthetic", "--policy", "policy.toml", "--state", "mine"],
    }  # fmt: skip
    running, logs = {}, {}
    try:
        for (name, given), health in zip(words.items(), ports, strict=True):
            logs[name] = tmp_path / f"{name}.log"
            with logs[name].open("wb") as log:
                command = contained(homes[name], *given, "--health", str(health), "--log", "json")
                running[name] = subprocess.Popen(command, stdout=log, stderr=log)
            well = [sys.executable, "-c", "from visard.cli import main; main()", "health", "--port", str(health)]
            until(lambda: subprocess.run(well, capture_output=True).returncode == 0, logs[name].read_text(), 90)  # noqa: B023
        asked = subprocess.run(well, capture_output=True, text=True, check=True)
        assert json.loads(asked.stdout)["connected"] is True
        status = Path(f"/proc/{running['server'].pid}/status").read_text()
        assert f"Uid:\t{ACCOUNT}\t{ACCOUNT}" in status
        assert "NoNewPrivs:\t1" in status
        mounts = Path(f"/proc/{running['server'].pid}/mounts").read_text().splitlines()
        root = next(line.split() for line in mounts if line.split()[1] == "/")
        assert "ro" in root[3].split(",")
    finally:
        for process in reversed(running.values()):
            process.terminate()
        codes = [process.wait(30) for process in running.values()]
    assert codes == [0, 0]
    for log in logs.values():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert lines[-1]["text"] == "stopped"
        assert all(line.keys() == {"time", "level", "text"} for line in lines)
