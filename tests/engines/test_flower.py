"""Flower deployed: the bits of the in-process engine, and what every fault of a deployment costs."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import ssl
import stat
import subprocess
import threading
import time
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("flwr") is None or find_spec("ray") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from tests.e2e.smoke import SMOKE
from tests.engines.deployed import VISARD, Deployment, children, until
from tests.engines.test_parties import Heard

import visard
from visard import models
from visard.deployment.flower.client import Fleet, Refused
from visard.deployment.keys import PartyKeys, make_keys
from visard.deployment.ledger_check import compare
from visard.deployment.policy import SAFE, Policy
from visard.engines.watchers import Watcher
from visard.errors import VisardError
from visard.models.files import save_model

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of flwr
]

METHODS = ("central", "local", "fedavg")
PARTS = ("from:layer3", "lora:2")


def run(method: str, out: Path, *overrides: str, watcher: Any = None, resume: bool = False) -> visard.Run:
    return visard.run(
        method, out=out, overrides=[*SMOKE, "evaluation.every=0", *overrides], watcher=watcher, resume=resume
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a method on the in-process engine, made once."""
    folder = tmp_path_factory.mktemp("local")

    def made(method: str) -> Path:
        if not (folder / method).exists():
            run(method, folder / method)
        return folder / method

    return made


def assert_same_run(a: Path, b: Path, personal: bool = True) -> None:
    """Weights, figures and ledger, bit for bit."""
    for name in ("model.safetensors", "ledger.json"):
        assert (a / name).exists() == (b / name).exists()
        if (a / name).exists():
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    one, two = (json.loads((f / "metrics.json").read_text()) for f in (a, b))
    assert one == two
    if personal:
        theirs = sorted(p.name for p in (a / "clients").glob("*"))
        assert theirs == sorted(p.name for p in (b / "clients").glob("*"))
        for name in theirs:
            assert (a / "clients" / name).read_bytes() == (b / "clients" / name).read_bytes()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of which a part is frozen; its statistics are those of some pictures."""
    torch.manual_seed(0)
    network = models.build("tiny", embedding=16, size=32).train()
    for _ in range(20):
        network(torch.randn(16, 3, 32, 32) / 2)
    file = tmp_path_factory.mktemp("start") / "start.safetensors"
    save_model(file, network.state_dict(), {"model": "tiny", "embedding": "16", "size": "32"})
    return file


def part_of(start: Path, how: str) -> tuple[str, ...]:
    return f"model.weights={start}", f"model.train={how}"


# Deployment


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Iterator[Deployment]:
    """A server and three nodes with synthetic faces, all separate processes; the third has a network already."""
    roles = ["1=client-000", "1=pool", "2=client-001", "3=client-002"]
    there = Deployment(tmp_path_factory.mktemp("far"), 6, roles)
    try:
        there.start_node(1, ["client-000", "pool"])
        there.start_node(2, ["client-001"])
        there.start_node(3, ["client-002"], "synthetic", "--trunk", str(start))
        there.wait_server()
        there.wait_connected(*(f"node-{i}" for i in range(1, 4)))
        yield there
    finally:
        there.close()


def far(there: Deployment, wait: float = 40.0) -> tuple[str, ...]:
    return "engine.kind=flower", f"engine.server='{there.state}'", f"engine.wait={wait}", "engine.min_replies=1.0"


@pytest.mark.parametrize("method", METHODS)
def test_deployment_gives_the_bits_of_local(
    tmp_path: Path, runs: Callable[[str], Path], deployed: Deployment, method: str
) -> None:
    roles = ["partition.clients=3"] if method != "central" else []
    run(method, tmp_path / "run", *roles, *far(deployed))
    assert_same_run(runs(method), tmp_path / "run", personal=False)
    assert not (tmp_path / "run" / "clients").exists(), "personal models stay with their parties"
    if method == "local":
        for number in (1, 2, 3):
            (kept,) = (deployed.folder / f"party-{number}" / "models").glob(
                f"local-*-client-00{number - 1}.safetensors"
            )
            assert kept.read_bytes() == (runs("local") / "clients" / f"client-00{number - 1}.safetensors").read_bytes()


@pytest.mark.parametrize("how", PARTS)
def test_parties_train_a_part_with_the_bits_of_local(
    tmp_path: Path, deployed: Deployment, start: Path, how: str
) -> None:
    settings = ("partition.clients=3", *part_of(start, how))
    run("fedavg", tmp_path / "near", *settings)
    run("fedavg", tmp_path / "far", *settings, *far(deployed))
    run("fedavg", tmp_path / "again", *settings, *far(deployed))
    assert_same_run(tmp_path / "near", tmp_path / "again", personal=False)
    near, first = (json.loads((tmp_path / f / "metrics.json").read_text()) for f in ("near", "far"))
    sent = first["communication"].pop("bytes_down") - near["communication"].pop("bytes_down")
    assert near == first
    for name in ("model.safetensors", "ledger.json"):
        assert (tmp_path / "near" / name).read_bytes() == (tmp_path / "far" / name).read_bytes()
    kept = {number: [*(deployed.folder / f"party-{number}").glob("trunks/*.bin")] for number in (1, 2, 3)}
    assert not kept[3], "the third party has a file of its own"
    latest = [max(kept[number], key=lambda p: p.stat().st_mtime_ns) for number in (1, 2)]
    assert latest[0].name == latest[1].name
    assert sent == pytest.approx(sum(p.stat().st_size for p in latest), rel=0.02), "the two others got it once"


def test_parties_postprocess_what_leaves_them(tmp_path: Path, deployed: Deployment) -> None:
    settings = ("partition.clients=3", "method.rounds=1", 'outgoing=[{name="clip", norm=0.01}]')
    run("fedavg", tmp_path / "near", *settings, "engine.kind=local")
    run("fedavg", tmp_path / "far", *settings, *far(deployed))
    assert_same_run(tmp_path / "near", tmp_path / "far", personal=False)
    assert json.loads((tmp_path / "far" / "ledger.json").read_text())["outgoing"]


@pytest.mark.parametrize("limits", [(), ("aggregation.bound=1.0",)])
def test_clients_in_turn_give_the_bits_of_local(tmp_path: Path, deployed: Deployment, limits: tuple[str, ...]) -> None:
    """Each party trains from the weights of the one before, as they are or within the bound of updates."""
    settings = ("partition.clients=3", "method.in_turn=2", "method.rounds=2", *limits)
    run("fedavg", tmp_path / "near", *settings, "engine.kind=local")
    run("fedavg", tmp_path / "far", *settings, *far(deployed))
    assert_same_run(tmp_path / "near", tmp_path / "far", personal=False)
    report = compare(tmp_path / "far", [deployed.folder / f"party-{number}" for number in (1, 2, 3)])
    assert not report.differences


def test_a_default_policy_refuses_clients_in_turn_in_one_line(tmp_path: Path, deployed: Deployment) -> None:
    default = deployed.folder / "default.toml"
    default.write_text(Policy(methods=("fedavg",), kinds=(*SAFE, "statistic")).to_toml())
    loose, heard = deployed.starters["node-2"], Heard()
    deployed.end("node-2")
    try:
        deployed.start("node-2", [str(default) if part.endswith("policy.toml") else part for part in loose])
        settings = ("partition.clients=3", "method.in_turn=2", *far(deployed, 40.0))
        with pytest.raises(VisardError, match="waited 40 s for client-001"):
            run("fedavg", tmp_path / "run", *settings, watcher=heard)
        assert "node-2 cannot take part: this party wants 2 parties in an average, at least (bounds.parties)" in (
            heard.problems
        )
    finally:
        deployed.end("node-2")
        deployed.start("node-2", loose)


class AfterRound(Watcher):
    """Does something once, after the first round."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act

    def round(self, stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()


def test_a_node_that_restarts_between_rounds_still_has_its_state(
    tmp_path: Path, runs: Callable[[str], Path], deployed: Deployment
) -> None:
    def restart() -> None:
        assert deployed.end("node-2") == 0
        deployed.restart("node-2")

    run("local", tmp_path / "run", *far(deployed), watcher=AfterRound(restart))
    assert_same_run(runs("local"), tmp_path / "run", personal=False)


def test_a_worker_killed_once_costs_nothing_but_time(
    tmp_path: Path, runs: Callable[[str], Path], deployed: Deployment
) -> None:
    def kill() -> None:
        (worker,) = children(deployed.processes["node-3"].pid)
        os.kill(worker, signal.SIGKILL)

    run("local", tmp_path / "run", *far(deployed), watcher=AfterRound(kill))
    assert_same_run(runs("local"), tmp_path / "run", personal=False)
    assert "its worker process died" in deployed.log("node-3")


def test_a_killed_server_and_a_killed_run_are_resumed_bit_for_bit(
    tmp_path: Path, runs: Callable[[str], Path], deployed: Deployment
) -> None:
    out = tmp_path / "run"
    sets = [part for s in (*SMOKE, "evaluation.every=0", *far(deployed)) for part in ("--set", s)]
    command = [str(VISARD), "run", "local", "--out", str(out), *sets]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    until((out / "checkpoint" / "manifest.json").exists, "the first checkpoint")
    process.kill()
    process.wait()
    deployed.end("server", signal.SIGKILL)
    deployed.restart("server")
    until(lambda: deployed.log("server").count("listening") == 2, "the server to come back")
    run("local", out, *far(deployed), resume=True)
    assert_same_run(runs("local"), out, personal=False)


def test_a_server_that_dies_ends_the_run_with_one_line(tmp_path: Path, deployed: Deployment) -> None:
    def kill() -> None:
        deployed.end("server", signal.SIGKILL)

    try:
        with warnings.catch_warnings(action="ignore"):  # httpcore forgets its socket where a connection is refused
            with pytest.raises(VisardError, match="does not answer") as caught:
                run("local", tmp_path / "run", *far(deployed), watcher=AfterRound(kill))
            assert caught.value.exit_code == 1
            del caught
            gc.collect()
    finally:
        before = deployed.log("server").count("listening")
        deployed.restart("server")
        until(lambda: deployed.log("server").count("listening") > before, "the server to come back")


def test_too_few_nodes_are_waited_for_and_then_named(tmp_path: Path, deployed: Deployment) -> None:
    begun = time.monotonic()
    with pytest.raises(VisardError, match=r"3 of 4 clients are connected, 4 are needed; waited 20 s for client-003"):
        run("fedavg", tmp_path / "run", *far(deployed, 20.0), "partition.clients=4")
    assert time.monotonic() - begun < 60


# A key that is used twice


def test_of_two_processes_with_one_key_the_first_ends_with_one_line(deployed: Deployment) -> None:
    own, said = PartyKeys.load(deployed.folder / "keys", "6"), list[str]()
    first = Fleet(deployed.address, own.ca, own.private, said.append)
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(first.serve, lambda *_: (b"", b""), 0.1)
        until(lambda: bool(said), "the first")
        second = Fleet(deployed.address, own.ca, own.private, lambda _: None)
        second._activate(first=True)
        with pytest.raises(Refused, match="another process with this node's key has connected to"):
            serving.result(20)
        assert not second._turn(lambda *_: (b"", b"")), "the second goes on"
        second._client.close()


# Strangers


def activate(there: Deployment, ca: Path, key: ec.EllipticCurvePrivateKey, address: str = "") -> None:
    """Try to connect as a node, for ten seconds at most."""
    fleet = Fleet(address or there.address, ca, key, lambda _: None)
    timer = threading.Timer(10, fleet.stop)
    timer.start()
    try:
        fleet.serve(lambda *_: (b"", b""), 0.1)
    finally:
        timer.cancel()


def test_an_unregistered_key_is_refused(deployed: Deployment) -> None:
    with pytest.raises(Refused, match="does not accept this node's key"):
        activate(deployed, deployed.folder / "keys" / "node-6" / "ca.crt", ec.generate_private_key(ec.SECP384R1()))


def test_a_server_of_another_ca_is_refused(tmp_path: Path, deployed: Deployment) -> None:
    make_keys(tmp_path / "other", 1, ["127.0.0.1"])
    own = PartyKeys.load(deployed.folder / "keys", "6")
    with pytest.raises(Refused, match="is not the server that ca.crt vouches for: self-signed certificate"):
        activate(deployed, tmp_path / "other" / "node-1" / "ca.crt", own.private)


def test_plain_text_is_refused(deployed: Deployment) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://{deployed.address}/v1/fleet/activate-node", content=b"", timeout=10)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/stop-run", "/v1/control/register-node",
        "/v1/runtime/acquire-task", "/v1/runtime/get-nodes", "/v1/fleet/register-node", "/v1/fleet/unregister-node",
        "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs",
        "//v1/control/list-runs", "/v1/fleet", "/docs", "/openapi.json", "/health", "/",
    ],
)  # fmt: skip
def test_a_stranger_at_the_outside_port_reaches_nothing(deployed: Deployment, path: str) -> None:
    context = ssl.create_default_context(cafile=str(deployed.folder / "keys" / "node-1" / "ca.crt"))
    with httpx.Client(verify=context, timeout=20) as client:
        for method in ("POST", "GET"):
            request = client.build_request(method, f"https://{deployed.address}/")
            request.url = request.url.copy_with(raw_path=path.encode())
            answer = client.send(request)
            assert answer.status_code == (401 if "%2" in path else 404)
            assert answer.content == b""


def test_a_stranger_without_a_signature_is_not_let_in(deployed: Deployment) -> None:
    context = ssl.create_default_context(cafile=str(deployed.folder / "keys" / "node-1" / "ca.crt"))
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    own = PartyKeys.load(deployed.folder / "keys", "1").private
    key = b64encode(public_key_to_bytes(own.public_key())).decode()
    unsigned = {"flwr-public-key": key, "flwr-timestamp": now().isoformat(), "flwr-signature": b64encode(b"x").decode()}
    with httpx.Client(verify=context, timeout=20) as client:
        for call in ("activate-node", "pull-messages", "push-messages", "pull-object", "get-run"):
            url = f"https://{deployed.address}/v1/fleet/{call}"
            for also in ({}, unsigned):  # at the door, and where somebody knows a registered public key
                answer = client.post(url, content=b"", headers=headers | also)
                assert answer.status_code == 401, (call, also, answer.status_code)


def test_a_stranger_cannot_fill_the_servers_memory(deployed: Deployment) -> None:
    def peak() -> int:
        status = Path(f"/proc/{deployed.processes['server'].pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])

    before = peak()
    context = ssl.create_default_context(cafile=str(deployed.folder / "keys" / "node-1" / "ca.crt"))
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    with contextlib.suppress(httpx.HTTPError), httpx.Client(verify=context, timeout=20) as client:
        url = f"https://{deployed.address}/v1/fleet/push-messages"
        client.post(url, content=(bytes(1 << 20) for _ in range(100)), headers=headers)
    assert peak() - before < 20_000, "in kB"


def test_only_the_account_of_the_server_can_open_its_inside_door(deployed: Deployment) -> None:
    assert stat.S_IMODE((deployed.state / "control.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE(deployed.state.stat().st_mode) == 0o700
    for path in (deployed.folder / "keys").rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
