"""A large network between a server and parties with several roles each, on loopback with TLS: memory, bytes and time.

A round sends the network to every role and takes it back trained by one step of SGD, with everything that a deployment
does on the way: signatures, policies, records, checks, the limits of an average between parties. Beside it, in turns,
as many processes move the same bytes over plain TLS sockets, which is the least that it can take. Memory is what the
processes of a side have (proportional set size, children counted) above what they had before the first round.

    python -m benchmarks.large_network [--megabytes 250] [--parties 4] [--roles 4 20] [--rounds 1] [--check]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from visard.deployment.flower import require

require()

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.deployment import end, free_port, reachable, start, tool  # noqa: E402
from benchmarks.engines import SIZE, noise  # noqa: E402
from visard.core import Method  # noqa: E402
from visard.data.partition import PartitionSettings, partition  # noqa: E402
from visard.engines.world import World  # noqa: E402
from visard.learning.train import Training  # noqa: E402
from visard.methods.fedavg import FedAvg  # noqa: E402
from visard.numerics import Numerics  # noqa: E402
from visard.processes import LARGE_PAGES  # noqa: E402  (as the commands of visard have them)

WIDTH = 1024
PIECE = 2**20  # bytes that the plain sockets move at once
MB = 1e6


def network(megabytes: float) -> nn.Module:
    """As many layers of a perceptron as make so many megabytes; a small one is narrower."""
    inputs, numbers = 3 * SIZE * SIZE, megabytes * MB / 4
    widest = 4 * WIDTH if megabytes >= 100 else WIDTH  # few layers, so that all of them learn
    width = min(widest, max(8, round(numbers / (inputs + 64))))
    layers = max(0, round((numbers - width * (inputs + 64)) / width**2)) if width == widest else 0
    middle = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), *middle, nn.Linear(width, 32))


def world_of(folder: str, roles: int, megabytes: float) -> tuple[World, Method[Any]]:
    """What the run and every party build."""
    faces = noise(Path(folder) / "faces", 2 * roles)
    settings = PartitionSettings(kind="equal", clients=roles, split=(1.0, 0.0, 0.0))
    federation = partition(faces, settings, 0).federation(faces)
    world = World(
        seed=0, clients=federation.clients, training=tuple(federation.training), benchmarks={},
        classes=federation.identities, embedding=32, build=lambda: network(megabytes), numerics=Numerics(),
    )  # fmt: skip
    world.aggregation = world.aggregation.between_parties()
    return world, FedAvg(rounds=100, training=Training(lr=0.01, unit="iterations", amount=1, batch_size=4))


def party_world(run: dict[str, Any], _: Any, roles: list[str]) -> Any:
    world, method = world_of(**run)
    return replace(world, clients={role: world.clients[role] for role in roles}), method


def party(server: str, keys: str, number: str, state: str, roles: str) -> None:
    """A party, until it is ended."""
    from visard.cli.deploy import take_part
    from visard.processes import Recipe

    recipe = Recipe("benchmarks.large_network:party_world", {"roles": roles.split(",")})
    policy = {"methods": ["fedavg"], "kinds": ["weights", "statistic", "metric", "count"]}
    take_part(server, Path(keys), number, recipe, Path(state), 1.0, policy)


def run(state: str, folder: str, spec: str, check: str) -> None:
    """The run: a round for each line of input, and a line of output when it is done."""
    from visard.deployment.flower.driver import DeploymentLink
    from visard.deployment.remote import RemoteNetwork
    from visard.engines.checkpoint import Checkpoint
    from visard.engines.ledger import Ledger

    torch.set_num_threads(1)
    run_spec = json.loads(spec)
    world, method = world_of(**run_spec)
    assert isinstance(method, FedAvg)
    say(ready=True)
    sys.stdin.readline()
    link = DeploymentLink(Path(state), 120.0, lambda text: print(text, file=sys.stderr))
    states = Checkpoint(Path(folder) / "checkpoint", "benchmark", remote=True)
    net = RemoteNetwork(world, states, Ledger(states.ledger), link, "ab" * 16, run_spec)
    link.introduce(net.run, run_spec)
    link.gather(net.clients, len(net.clients))
    say(connected=len(net.clients))
    server = method.start(world.setup())
    try:
        for r, _ in enumerate(sys.stdin):
            begun = time.perf_counter()
            net.begin("federate", r)
            server = method.round(server, net)
            seconds = time.perf_counter() - begun
            states.commit(server, net.ledger.flush() if net.ledger else 0)
            same = r == 0 and check == "check" and same_as_local(world, method, server, Path(folder))
            moved = {"up": net.traffic.bytes_up, "down": net.traffic.bytes_down, "replied": net.traffic.replied}
            say(seconds=seconds, same_as_local=same, problems=net.traffic.problems, **moved)
    finally:
        net.close()


def same_as_local(world: World, method: FedAvg, server: Any, folder: Path) -> bool:
    """Whether a round in this process gives the same bits."""
    from visard.engines.checkpoint import Checkpoint
    from visard.engines.local import LocalNetwork

    net = LocalNetwork(world, Checkpoint(folder / "local", "benchmark"), None)
    net.begin("federate", 0)
    expected = method.round(method.start(world.setup()), net)
    return all(torch.equal(expected.theta[k], server.theta[k]) for k in expected.theta)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# The same bytes over plain sockets


def bare_server(port: str, keys: str, parties: str, roles: str, size: str) -> None:
    """Sends and takes so many bytes for each role of each party, once for each line of input.

    A line `once` sends them to each party once, however many roles it has.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(keys) / "server.crt", Path(keys) / "server.key")
    listener = socket.create_server(("127.0.0.1", int(port)))
    say(ready=True)
    connections = [context.wrap_socket(listener.accept()[0], server_side=True) for _ in range(int(parties))]
    say(connected=len(connections))  # all of them have started: what follows is moving alone
    piece = os.urandom(PIECE)
    for asked in sys.stdin:
        begun = time.perf_counter()

        def serve(connection: ssl.SSLSocket, once: bool = asked.strip() == "once") -> None:
            for role in range(int(roles)):
                down = 0 if once and role else int(size)
                connection.sendall(down.to_bytes(8, "little"))
                move_out(connection, piece, down)
                move_in(connection, int(size))

        threads = [threading.Thread(target=serve, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        say(seconds=time.perf_counter() - begun)


def bare_party(port: str, ca: str, size: str) -> None:
    context = ssl.create_default_context(cafile=ca)
    piece = os.urandom(PIECE)
    plain = socket.create_connection(("127.0.0.1", int(port)))
    with contextlib.suppress(OSError), context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
        while head := connection.recv(8):
            move_in(connection, int.from_bytes(head, "little"))
            move_out(connection, piece, int(size))


def move_out(connection: ssl.SSLSocket, piece: bytes, size: int) -> None:
    for place in range(0, size, PIECE):
        connection.sendall(memoryview(piece)[: min(PIECE, size - place)])


def move_in(connection: ssl.SSLSocket, size: int) -> bool:
    buffer = bytearray(PIECE)
    while size > 0:
        if not (count := connection.recv_into(buffer, min(PIECE, size))):
            return False
        size -= count
    return True


# What processes take


def family(pid: int) -> list[int]:
    """A process and all of its descendants."""
    found = [pid]
    for own in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{own}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def memory(pid: int) -> int:
    """Bytes of a process and its descendants: the proportional set size."""
    total = 0
    for own in family(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{own}/smaps_rollup").read_text().splitlines()
            total += next(int(text.split()[1]) for text in lines if text.startswith("Pss:")) * 1024
    return total


def cpu(pid: int) -> float:
    """Seconds of cores that a process and its descendants have used."""
    ticks = 0
    for own in family(pid):
        with contextlib.suppress(OSError):
            parts = Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()
            ticks += int(parts[11]) + int(parts[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def loopback() -> int:
    """Bytes that the loopback interface has carried, of everything on the machine."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(text for text in lines if text.strip().startswith("lo:")).split(":")[1].split()[0])


class Sampler:
    """The most memory of each side while it runs, looked at in a thread."""

    def __init__(self, sides: dict[str, list[int]]) -> None:
        self.sides, self.most = sides, dict.fromkeys(sides, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def now(self) -> dict[str, int]:
        """Of each side; of several parties the largest one."""
        found = {name: max(memory(pid) for pid in pids) for name, pids in self.sides.items()}
        found["both"] = found["server"] + found["run"]
        return found

    def _look(self) -> None:
        while not self._over.is_set():
            for name, size in self.now().items():
                self.most[name] = max(self.most.get(name, 0), size)
            self._over.wait(0.1)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Talker:
    """A process of this benchmark that answers lines."""

    def __init__(self, folder: Path, *words: str) -> None:
        command = [sys.executable, "-m", "benchmarks.large_network", *words]
        with (folder / f"{words[0]}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
                env={**LARGE_PAGES, **os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        self.log = folder / f"{words[0]}.log"

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a process has ended: {self.log.read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin)
        return self.hear()


def measure(megabytes: float, parties: int, roles: int, rounds: int, check: bool, folder: Path) -> dict[str, Any]:
    from visard.deployment.keys import Assignment, make_keys

    spec = {"folder": str(folder), "roles": roles, "megabytes": megabytes}
    names = list(world_of(**spec)[0].training)  # type: ignore[arg-type]
    own = {f"node-{n + 1}": tuple(names[n * roles // parties : (n + 1) * roles // parties]) for n in range(parties)}
    make_keys(folder / "keys", parties, ["127.0.0.1"], Assignment(own))
    port, bare_port, state = free_port(), free_port(), folder / "server-state"
    keys, ca = folder / "keys" / "server", folder / "keys" / "ca" / "ca.crt"
    command = [tool("visard"), "server", "--keys", str(keys), "--state", str(state)]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    running = [start([*command, "--port", str(port), "--host", "127.0.0.1"], folder, "server", PYTHONPATH=path)]
    try:
        reachable(port)
        here = []
        for number, (node, mine) in enumerate(own.items(), 1):
            (home := folder / f"party-{number}").mkdir()
            words = [f"127.0.0.1:{port}", str(folder / "keys" / node), str(number), str(home), ",".join(mine)]
            command = [sys.executable, "-m", "benchmarks.large_network", "party", *words]
            here.append(start(command, folder, f"party-{number}", PYTHONPATH=path))
        running += here
        run = Talker(folder, "run", str(state), str(folder), json.dumps(spec), "check" if check else "")
        running.append(run.process)  # type: ignore[arg-type]
        run.hear()
        size = sum(v.numel() * v.element_size() for v in network(megabytes).state_dict().values())
        bare = Talker(folder, "bare_server", str(bare_port), str(keys), str(parties), str(roles // parties), str(size))
        running.append(bare.process)  # type: ignore[arg-type]
        bare.hear()
        for number in range(parties):
            command = [sys.executable, "-m", "benchmarks.large_network", "bare_party", str(bare_port), str(ca)]
            running.append(start([*command, str(size)], folder, f"bare-{number}", PYTHONPATH=path))
        bare.hear()
        plain = [process.pid for process in running[-parties - 1 :]]
        sides = {"server": [running[0].pid], "run": [run.process.pid], "party": [p.pid for p in here]}
        sampler = Sampler(sides)
        before_run = memory(run.process.pid)
        run.ask()  # all are connected
        idle = sampler.now() | {"run": before_run}
        idle["both"] = idle["server"] + idle["run"]
        found: dict[str, Any] = {name: [] for name in ("bare", "bare_cpu", "once", "once_cpu", "round", "cpu", "moved")}
        with sampler:
            for r in range(rounds + 1):
                for name, what in (("bare", ""), ("once", "once")):
                    before = sum(map(cpu, plain))
                    found[name].append(bare.ask(what)["seconds"])
                    found[f"{name}_cpu"].append(sum(map(cpu, plain)) - before)
                used, moved = {n: sum(map(cpu, pids)) for n, pids in sides.items()}, loopback()
                said = run.ask()
                if said["replied"] != roles or (r == 0 and check and not said["same_as_local"]):
                    raise SystemExit(f"the round is not what it should be: {said}")
                found["round"].append(said["seconds"])
                found["moved"].append(loopback() - moved)
                found["cpu"].append({n: sum(map(cpu, pids)) - used[n] for n, pids in sides.items()})
                found["messages"] = said["up"] + said["down"]
        found["above"] = {name: sampler.most[name] - idle[name] for name in sampler.most}
        return found | {"size": size, "roles": roles, "parties": parties}
    finally:
        end(running)


def show(found: dict[str, Any]) -> None:
    size, above = found["size"], found["above"]
    taken = statistics.median(found["round"])
    print(f"{found['roles']} roles in {found['parties']} parties, a network of {size / MB:.0f} MB")
    print(f"  a round       {taken:7.2f} s ({', '.join(f'{s:.2f}' for s in found['round'])})")
    for name, what in (("bare", "every message"), ("once", "a message to a party once")):
        bare, all_of_them = statistics.median(found[name]), ", ".join(f"{s:.2f}" for s in found[name])
        print(f"  bare TLS      {bare:7.2f} s ({all_of_them}): {taken / bare:.2f} times; {what}")
    cores = {n: statistics.median(c[n] for c in found["cpu"]) for n in found["cpu"][0]}
    print(
        f"  cores         {', '.join(f'{n} {s:.1f} s' for n, s in cores.items())}, together {sum(cores.values()):.1f} s"
    )
    for name, what in (("bare_cpu", "every message"), ("once_cpu", "a message to a party once")):
        bare = statistics.median(found[name])
        print(f"  bare cores    {bare:7.2f} s: {sum(cores.values()) / bare:.2f} times; {what}")
    print(
        f"  moved         {statistics.median(found['moved']) / 1e9:.2f} GB, messages {found['messages'] / 1e9:.2f} GB"
    )
    for name in ("server", "run", "both", "party"):
        print(f"  {name:8s}      {above[name] / 1e9:6.2f} GB above idle, {above[name] / size:.1f} networks")
    print(json.dumps(found), flush=True)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("party", "run", "bare_server", "bare_party"):
        {"party": party, "run": run, "bare_server": bare_server, "bare_party": bare_party}[sys.argv[1]](*sys.argv[2:])
        return
    options = argparse.ArgumentParser()
    options.add_argument("--megabytes", type=float, nargs="+", default=[250.0])
    options.add_argument("--parties", type=int, default=4)
    options.add_argument("--roles", type=int, nargs="+", default=[4, 20])
    options.add_argument("--rounds", type=int, default=1, help="after a first one that counts too")
    options.add_argument(
        "--check", action="store_true", help="hold the first round against one in process, bit for bit"
    )
    chosen = options.parse_args()
    torch.set_num_threads(1)
    for megabytes, roles in itertools.product(chosen.megabytes, chosen.roles):
        with tempfile.TemporaryDirectory() as scratch:
            show(measure(megabytes, chosen.parties, roles, chosen.rounds, chosen.check, Path(scratch)))


if __name__ == "__main__":
    main()
