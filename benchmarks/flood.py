"""What a flood of strangers costs a server and a party that wants to connect, against the same without a flood.

Strangers are idle, send one byte a second, or send without end, before TLS and after it; half of them come from the
address of the party and half from many others. One that is closed connects again at once. The server has a soft limit
of 1,024 descriptors; with --hard it cannot raise it. A party's handshake is connection, TLS and the first signed reply.

    python -m benchmarks.flood [--strangers 2000] [--seconds 60] [--hard]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import resource
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from flwr.proto.fleet_pb2 import DeactivateNodeRequest

from visard.deployment.flower import require

require()

from visard.deployment.flower.client import Fleet  # noqa: E402
from visard.deployment.keys import PartyKeys, make_keys  # noqa: E402

KINDS = tuple(itertools.product((False, True), ("idle", "slow", "endless")))  # after TLS or before it, and how
DESCRIPTORS = 1024
HEAD = b"POST /v1/fleet/push-messages HTTP/1.1\r\nhost: server\r\n"
HEADER = b"x-more: " + b"a" * 8000 + b"\r\n"
NO_PORT_YET = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)  # Linux


# Strangers, in a process of their own


async def stranger(number: int, port: int, context: ssl.SSLContext, done: Counter[str]) -> None:
    """Connect as one kind of stranger, again and again."""
    tls, how = KINDS[number // 2 % len(KINDS)]
    source = "127.0.0.1" if number % 2 else f"127.0.{1 + number // 250 % 250}.{1 + number % 250}"
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_IP, NO_PORT_YET, 1)
            sock.bind((source, 0))
            await loop.sock_connect(sock, ("127.0.0.1", port))
            done["connected"] += 1
            reader, writer = await asyncio.open_connection(
                sock=sock, **({"ssl": context, "server_hostname": "localhost"} if tls else {})
            )
            done["with TLS"] += tls
            try:
                await speak(how, HEAD if tls else hello(context), HEADER if tls else HEAD + HEADER, reader, writer)
            finally:
                done["closed"] += 1
                writer.transport.abort()


def hello(context: ssl.SSLContext) -> bytes:
    """The first message of TLS."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def speak(
    how: str, first: bytes, endless: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """What one kind of stranger sends, until the server closes."""
    if how == "idle":
        await reader.read(1)
    elif how == "slow":
        for byte in itertools.cycle(first):
            writer.write(bytes([byte]))
            with contextlib.suppress(asyncio.TimeoutError):
                if not await asyncio.wait_for(reader.read(1), 1.0):
                    return
    else:
        writer.write(first if first == HEAD else b"")
        while True:
            writer.write(endless)
            await writer.drain()
            await asyncio.sleep(0)


async def flood(port: int, count: int, ca: str) -> None:
    done: Counter[str] = Counter()
    context = ssl.create_default_context(cafile=ca)

    def over() -> None:
        print(json.dumps(done), flush=True)
        os._exit(0)

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over)
    await asyncio.gather(*(stranger(i, port, context, done) for i in range(count)))


# The server, the party, and what is measured


@dataclass
class Measured:
    """Of a time with or without a flood."""

    handshakes: list[float] = field(default_factory=list)  # seconds
    memory: list[float] = field(default_factory=list)  # MB, of the server and its children
    server_cpu: float = 0.0  # seconds a second
    strangers_cpu: float = 0.0
    failed: int = 0
    strangers: dict[str, int] = field(default_factory=dict)

    @property
    def typical(self) -> float:
        return statistics.median(self.handshakes or [math.inf])


class Server:
    """A `visard server` on loopback with few descriptors."""

    def __init__(self, folder: Path, hard: bool) -> None:
        make_keys(folder / "keys", 1, ["127.0.0.1"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = f'ulimit {"-n" if hard else "-Sn"} {DESCRIPTORS}; exec "$@"'
        words = ["server", "--keys", str(folder / "keys" / "server"), "--state", str(folder / "state")]
        words += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            ["sh", "-c", command, "sh", str(Path(sys.executable).with_name("visard")), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.ca = folder / "keys" / "node-1" / "ca.crt"
        self.key = PartyKeys.load(folder / "keys", "1").private
        end = time.monotonic() + 60
        while not (folder / "state" / "control.sock").is_socket():
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)

    def handshake(self) -> float:
        """Seconds until a party has its first reply."""
        begun = time.perf_counter()
        fleet = Fleet(f"127.0.0.1:{self.port}", self.ca, self.key, print)
        try:
            fleet._activate(first=False)
            taken = time.perf_counter() - begun
            fleet._client.DeactivateNode(DeactivateNodeRequest(node_id=fleet._node.node_id))
            return taken
        finally:
            fleet._client.close()

    def memory(self) -> float:
        top = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [top, *top.children(recursive=True)]) / 2**20


def measure(server: Server, seconds: float, strangers: subprocess.Popen[str] | None) -> Measured:
    """Handshakes one after the other, with the same pauses."""
    found = Measured()
    watched = {"server_cpu": server.process.pid} | ({"strangers_cpu": strangers.pid} if strangers else {})
    before = {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in watched.items()}
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        try:
            found.handshakes.append(server.handshake())
        except Exception as error:
            found.failed += 1
            print(f"a handshake failed: {error!r}", flush=True)
        found.memory.append(server.memory())
        time.sleep(0.3)
    for name, pid in watched.items():
        setattr(found, name, (sum(psutil.Process(pid).cpu_times()[:2]) - before[name]) / (time.monotonic() - begun))
    return found


@contextlib.contextmanager
def strangers(server: Server, count: int) -> Iterator[subprocess.Popen[str]]:
    words = ["--attack", str(server.port), "--strangers", str(count), "--ca", str(server.ca)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.flood", *words], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()


def compare(folder: Path, count: int, seconds: float, hard: bool = False) -> tuple[Measured, Measured]:
    """The same server without and with a flood; a third of the time without one before it, a third after."""
    server = Server(folder, hard)
    try:
        server.handshake()
        quiet = measure(server, seconds / 3, None)
        with strangers(server, count) as attackers:
            time.sleep(5.0)  # to be there
            loud = measure(server, seconds, attackers)
        loud.strangers = json.loads(attackers.communicate(timeout=60)[0])
        time.sleep(1.0)
        after = measure(server, seconds / 3, None)
    finally:
        server.process.terminate()
        server.process.wait(30)
    quiet.handshakes += after.handshakes
    return quiet, loud


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strangers", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ca", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.attack:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(flood(asked.attack, asked.strangers, asked.ca))
        return
    with tempfile.TemporaryDirectory() as folder:
        quiet, loud = compare(Path(folder), asked.strangers, asked.seconds, asked.hard)
    for name, found in (("without", quiet), (f"{asked.strangers} strangers", loud)):
        times = sorted(found.handshakes or [math.inf])
        print(
            f"{name:>16}: handshake {found.typical * 1000:6.0f} ms (median of {len(times)}, "
            f"90% {times[int(0.9 * len(times))] * 1000:.0f}, longest {times[-1] * 1000:.0f}), {found.failed} failed; "
            f"memory {max(found.memory):.0f} MB; CPU server {found.server_cpu:.2f}, strangers {found.strangers_cpu:.2f}"
        )
    print(f"strangers: {loud.strangers}")
    longest = max(loud.handshakes, default=math.inf)
    print(
        f"handshake {loud.typical / quiet.typical:.2f} times (at most 2), longest {longest:.2f} s (at most 3); "
        f"memory {max(loud.memory) - quiet.memory[-1]:+.1f} MB (at most 64)"
    )


if __name__ == "__main__":
    main()
