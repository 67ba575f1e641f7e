"""A party behind a connection that breaks again and again in the middle of large messages."""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from benchmarks.large_network import world_of
from tests.engines.deployed import Deployment

from visard.deployment.flower.driver import DeploymentLink
from visard.deployment.flower.objects import AT_ONCE
from visard.deployment.ledger_check import compare
from visard.deployment.listener import RESET
from visard.deployment.remote import RemoteNetwork
from visard.engines import records
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork
from visard.runs.run import run_id

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr

MEGABYTES = 14
PART = 2**20  # bytes, instead of 5 MB
EVERY = 3 * 2**20  # bytes in one direction after which a connection breaks
UP, DOWN = "up", "down"


class Proxy(threading.Thread):
    """Passes bytes on between parties and server, counts them, and breaks connections as long as `breaks` are left."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.listener, self.to = socket.create_server(("127.0.0.1", 0)), port
        self.port: int = self.listener.getsockname()[1]
        self.passed, self.breaks, self.broken = {UP: 0, DOWN: 0}, {UP: 0, DOWN: 0}, {UP: 0, DOWN: 0}
        self._since = {UP: 0, DOWN: 0}
        self.start()

    def run(self) -> None:
        while True:
            try:
                near = self.listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._pass, args=(near,), daemon=True).start()

    def _pass(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self.to)) as far:
            other = {near: far, far: near}
            while True:
                for one in select.select([near, far], [], [])[0]:
                    try:
                        data = one.recv(2**16)
                        if not data:
                            return
                        other[one].sendall(data)
                    except OSError:
                        return
                    if self._count(UP if one is near else DOWN, len(data)):
                        for end in (near, far):
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        return

    def _count(self, way: str, size: int) -> bool:
        """Whether the connection breaks now."""
        self.passed[way] += size
        self._since[way] += size
        if self._since[way] < EVERY or self.broken[way] >= self.breaks[way]:
            return False
        self._since[way], self.broken[way] = 0, self.broken[way] + 1
        return True


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Deployment, Proxy]]:
    monkeypatch.setenv("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", str(PART))
    monkeypatch.setattr(records, "PART", PART)  # of the run, which is in this process
    made = Deployment(tmp_path, 1, ["1=client-000", "1=client-001"])
    made.wait_server()
    proxy = Proxy(made.port)
    try:
        (tmp_path / "party-1").mkdir()
        words = [f"127.0.0.1:{proxy.port}", str(tmp_path / "keys" / "node-1"), "1", str(tmp_path / "party-1")]
        command = [sys.executable, "-m", "benchmarks.large_network", "party", *words, "client-000,client-001"]
        made.start("node-1", command)
        made.wait_connected("node-1")
        yield made, proxy
    finally:
        made.close()
        proxy.listener.close()


def one_round(net: Any, method: Any) -> Any:
    net.begin("federate", 0)
    return method.round(method.start(net.world.setup()), net)


def test_a_message_goes_on_where_the_connection_broke(tmp_path: Path, there: tuple[Deployment, Proxy]) -> None:
    deployed, proxy = there
    spec = {"folder": str(tmp_path), "roles": 2, "megabytes": MEGABYTES}
    world, method = world_of(**spec)  # type: ignore[arg-type]
    size = sum(v.numel() * v.element_size() for v in world.build().state_dict().values())
    link = DeploymentLink(deployed.state, 60.0, lambda _: None)
    states = Checkpoint(tmp_path / "run" / "checkpoint", "test", remote=True)
    net = RemoteNetwork(world, states, Ledger(states.ledger), link, run_id(states.folder), spec)
    link.received = net.received
    link.introduce(net.run, spec)
    try:
        link.gather(net.clients, 2)
        before = dict(proxy.passed)
        proxy.breaks = {UP: 4, DOWN: 2}
        server = one_round(net, method)
    finally:
        net.close()
    assert net.traffic.problems == []
    assert proxy.broken == {UP: 4, DOWN: 2}, "it broke as often as it should"
    passed = {way: proxy.passed[way] - before[way] for way in (UP, DOWN)}
    lost = {way: proxy.broken[way] * AT_ONCE * PART for way in (UP, DOWN)}  # what was on its way, once more
    assert size < passed[DOWN] < size + lost[DOWN] + 0.1 * size, "the same weights go to both roles once"
    assert 2 * size < passed[UP] < 2 * size + lost[UP] + 0.1 * size, "no reply is sent from its beginning again"
    assert "going on with the rest" in deployed.log("node-1")
    assert deployed.log("node-1").count("connected") == 1, "the party did not begin anew"
    expected = one_round(LocalNetwork(world, Checkpoint(tmp_path / "local", "test"), None), method)
    assert all(torch.equal(expected.theta[k], server.theta[k]) for k in expected.theta)
    assert compare(tmp_path / "run", [tmp_path / "party-1"]).differences == []
