"""Seconds a round between processes on loopback with TLS: visard's long-lived workers against Flower's default.

Both sides ask three nodes to take 2 SGD steps on a perceptron of 100,000 parameters and average what comes back.
visard's nodes keep a worker process with torch and the data; Flower's default starts a ClientApp process for every
message, which imports torch each time. Flower runs without node keys here, which is in its favour.

    python -m benchmarks.deployment visard|flower|all [--nodes 3] [--rounds 5] [--poll 1.0]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from visard.deployment.flower import require

require()

import torch  # noqa: E402

from benchmarks.engines import world_of  # noqa: E402
from visard.deployment.flower.driver import DeploymentLink  # noqa: E402
from visard.deployment.keys import Assignment, make_keys  # noqa: E402
from visard.deployment.remote import RemoteNetwork  # noqa: E402
from visard.engines.checkpoint import Checkpoint  # noqa: E402
from visard.engines.ledger import Ledger  # noqa: E402
from visard.methods.fedavg import FedAvg  # noqa: E402

APP = """
[project]
name = "light"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "benchmark"
[tool.flwr.app.components]
serverapp = "light.server:app"
clientapp = "light.client:app"
[tool.flwr.app.config]
nodes = 3
rounds = 5
"""

CLIENT = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 2))
    model.load_state_dict(message.content["theta"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for _ in range(2):
        x, y = torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    content = {"theta": ArrayRecord(model.state_dict()), "n": MetricRecord({"num-examples": 8})}
    return Message(RecordDict(content), reply_to=message)
"""

SERVER = """
import time
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import nn

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 2))
    theta, nodes = model.state_dict(), context.run_config["nodes"]
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.2)
    for _ in range(context.run_config["rounds"] + 1):
        begun = time.perf_counter()
        content = RecordDict({"theta": ArrayRecord(theta)})
        sent = [Message(content, node, "train") for node in grid.get_node_ids()]
        replies = [r.content["theta"].to_torch_state_dict() for r in grid.send_and_receive(sent)]
        theta = {k: sum(r[k] for r in replies) / len(replies) for k in theta}
        with open(OUT, "a") as out:
            out.write(f"{time.perf_counter() - begun:.3f} {len(replies)}\\n")
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def reachable(port: int, seconds: float = 60.0) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"nobody listens at port {port} after {seconds:g} s")
        time.sleep(0.2)


def start(command: list[str], folder: Path, name: str, **extra: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1]), **extra}
    environment["PATH"] = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower's own helpers
    )
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes and the children of their sessions."""
    for process in reversed(processes):
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(10)
                break
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def party_world(run: dict[str, Any], _: Any, role: str) -> Any:
    """What a node of the visard side builds: the light workload with one client of its own."""
    world, method = world_of(**run)
    return replace(world, clients={role: world.clients[role]}), method


def node(server: str, keys: str, number: str, state: str, role: str, poll: str) -> None:
    """A node of the visard side."""
    from visard.cli.deploy import take_part
    from visard.processes import Recipe

    recipe = Recipe("benchmarks.deployment:party_world", {"role": role})
    policy = {"methods": ["fedavg"], "kinds": ["weights", "statistic", "metric", "count"]}
    take_part(server, Path(keys), number, recipe, Path(state), float(poll), policy)


def visard_rounds(nodes: int, rounds: int, poll: float, folder: Path) -> list[float]:
    run_spec: dict[str, Any] = {"folder": str(folder), "clients": nodes, "steps": 2, "network": "perceptron"}
    world, method = world_of(**run_spec)
    assert isinstance(method, FedAvg)
    roles = list(world.training)
    bound = Assignment({f"node-{number}": (role,) for number, role in enumerate(roles, 1)})
    make_keys(folder / "keys", nodes, ["127.0.0.1"], bound)
    port, state = free_port(), folder / "server-state"
    command = [tool("visard"), "server", "--keys", str(folder / "keys" / "server"), "--state", str(state)]
    running = [start([*command, "--port", str(port), "--host", "127.0.0.1"], folder, "server")]
    try:
        for number, role in enumerate(roles, 1):
            (own := folder / f"party-{number}").mkdir()
            words = [f"127.0.0.1:{port}", str(folder / "keys" / f"node-{number}"), str(number), str(own), role]
            command = [sys.executable, "-m", "benchmarks.deployment", "node", *words, str(poll)]
            running.append(start(command, folder, f"node-{number}"))
        while not (state / "control.sock").is_socket():
            time.sleep(0.2)
        link = DeploymentLink(state, 120.0, print)
        states = Checkpoint(folder / "checkpoint", "benchmark", remote=True)
        net = RemoteNetwork(world, states, Ledger(states.ledger), link, "ab" * 16, run_spec)
        link.introduce(net.run, run_spec)
        server, taken = method.start(world.setup()), []
        try:
            for r in range(rounds + 1):
                begun = time.perf_counter()
                net.begin("federate", r)
                server = method.round(server, net)
                states.commit(server, net.ledger.flush() if net.ledger else 0)
                taken.append(time.perf_counter() - begun)
        finally:
            net.close()
        return taken[1:]
    finally:
        end(running)


def flower_rounds(nodes: int, rounds: int, folder: Path) -> list[float]:
    app, home, out = folder / "app", folder / "flwr-home", folder / "rounds.txt"
    (app / "light").mkdir(parents=True)
    home.mkdir()
    make_keys(folder / "keys", 1, ["127.0.0.1"])
    (app / "pyproject.toml").write_text(APP)
    (app / "light" / "__init__.py").touch()
    (app / "light" / "client.py").write_text(CLIENT)
    (app / "light" / "server.py").write_text(f"OUT = {str(out)!r}\n{SERVER}")
    port = free_port()
    ca, own = folder / "keys" / "ca" / "ca.crt", folder / "keys" / "server"
    settings = f'[superlink.here]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{ca}"\n'
    (home / "config.toml").write_text(settings)
    command = [tool("flower-superlink"), "--host", "127.0.0.1", "--port", str(port), "--ssl-ca-certfile", str(ca)]
    command += ["--ssl-certfile", str(own / "server.crt"), "--ssl-keyfile", str(own / "server.key")]
    running = [start([*command, "--disable-runtime-dependency-installation"], folder, "superlink", FLWR_HOME=str(home))]
    try:
        reachable(port)
        for number in range(nodes):
            command = [tool("flower-supernode"), "--root-certificates", str(ca), "--superlink", f"127.0.0.1:{port}"]
            command += ["--node-config", f"partition-id={number}", "--port", str(free_port())]
            running.append(start(command, folder, f"node-{number}", FLWR_HOME=str(home)))
        time.sleep(5)
        config = f"nodes={nodes} rounds={rounds}"
        running.append(start([tool("flwr"), "run", str(app), "here", "--run-config", config, "--stream"], folder, "run",
                             FLWR_HOME=str(home)))  # fmt: skip
        deadline = time.monotonic() + 60 + 60 * (rounds + 1)
        while not out.exists() or len(out.read_text().splitlines()) <= rounds:
            if time.monotonic() > deadline:
                raise SystemExit(f"Flower did not finish: {(folder / 'run.log').read_text()[-2000:]}")
            time.sleep(0.2)
        lines = [line.split() for line in out.read_text().splitlines()[1:]]
        if any(int(count) != nodes for _, count in lines):
            raise SystemExit(f"replies are missing: {lines}")
        return [float(seconds) for seconds, _ in lines]
    finally:
        end(running)


def main() -> None:
    if sys.argv[1:2] == ["node"]:
        node(*sys.argv[2:])
        return
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=["visard", "flower", "all"], nargs="?", default="all")
    options.add_argument("--nodes", type=int, default=3)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--poll", type=float, default=1.0)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    medians = {}
    for what in ("visard", "flower") if chosen.what == "all" else (chosen.what,):
        with tempfile.TemporaryDirectory() as scratch:
            if what == "visard":
                taken = visard_rounds(chosen.nodes, chosen.rounds, chosen.poll, Path(scratch))
            else:
                taken = flower_rounds(chosen.nodes, chosen.rounds, Path(scratch))
        medians[what] = statistics.median(taken)
        spread = f"{min(taken):.2f} to {max(taken):.2f}"
        print(f"  {what:8s} {medians[what]:6.2f} s a round ({spread}), {chosen.nodes} nodes, TLS")
    if len(medians) == 2:
        print(json.dumps({"times_faster": round(medians["flower"] / medians["visard"], 1)}))


if __name__ == "__main__":
    main()
