"""Runs on Flower's simulation, in a process of their own because Ray leaves warnings behind.

python -m tests.engines.simulated FOLDER METHODS SETTING...

The method `toys` is a run of toys with two bad clients. Of a method `fedavg@lora:2@start.safetensors` only that is
trained, from these weights.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tests.engines.deployed import ROOT, free_port, until

FAULTS = {"client-001": "nan", "client-003": "raise"}


def toy(folder: Path) -> None:
    """Three rounds with two bad clients; writes the sum and the problems of the last round to `toy.json`."""
    from tests.toys import Toy, toy_world

    from visard.deployment.flower.simulation import SimulationLink
    from visard.deployment.remote import RemoteNetwork
    from visard.engines.checkpoint import Checkpoint
    from visard.engines.ledger import Ledger
    from visard.processes import Recipe

    world = toy_world(folder, 5)
    states = Checkpoint(folder / "flower", "toy")
    recipe = Recipe("tests.toys:pool_world", {"folder": str(folder), "clients": 5, "faults": FAULTS})
    link = SimulationLink(world.clients, recipe, states.folder, 2)
    net = RemoteNetwork(world, states, Ledger(states.ledger), link, "ab" * 16)
    try:
        server = Toy().start(world.setup())
        for r in range(3):
            net.begin("add", r)
            server = Toy().round(server, net)
    finally:
        net.close()
    states_now = {c: states.client_state(c) for c in world.clients}
    result = {"w": server.w.tolist(), "problems": net.traffic.problems, "states": states_now}
    (folder / "toy.json").write_text(json.dumps(result))


@contextmanager
def one_ray() -> Iterator[str]:
    """The address of a Ray that several runs share, as one that spans machines would be; one for each takes longer."""
    home, port = tempfile.mkdtemp(prefix="ray-"), free_port()  # in the temporary folder: sockets need short paths
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus", "1"]
    command += ["--port", str(port), "--include-dashboard=false", "--temp-dir", home]
    head = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        until(lambda: _listens(port), "Ray")
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(home, ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def main(where: str, methods: str, *overrides: str) -> None:
    import visard

    torch.set_num_threads(1)
    for entry in methods.split(","):
        method, *part = entry.split("@")
        if method == "toys":
            toy(Path(where))
            continue
        more = [f"model.train={part[0]}", f"model.weights={part[1]}"] if part else []
        visard.run(
            method, out=Path(where) / "-".join([method, *part[:1]]).replace(":", "-"), overrides=[*overrides, *more]
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
