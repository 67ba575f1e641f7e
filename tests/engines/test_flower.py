"""Flower: the same bits simulated and deployed, and what every fault of a deployment costs."""

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
import sys
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
from tests.engines.deployed import ROOT, VISARD, Deployment, children, until
from tests.engines.simulated import FAULTS
from tests.toys import Toy, ToyServer, toy_engine, toy_world

import visard
from visard import models
from visard.deployment.flower.client import Fleet, Refused
from visard.deployment.flower.driver import DeploymentLink
from visard.deployment.keys import PartyKeys, make_keys
from visard.deployment.ledger_check import compare
from visard.deployment.remote import RemoteNetwork
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.watchers import Watcher
from visard.errors import VisardError
from visard.models.files import save_model
from visard.runs.run import run_id

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of flwr
]

METHODS = ("central", "local", "fedavg")
PARTS = ("from:layer3", "lora:2")
TOYS = ("client-000", "client-001", "client-002")


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


# Simulation


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Path:
    """A folder with the runs of all methods on Flower's simulation, and a run with toys."""
    folder = tmp_path_factory.mktemp("simulated")
    settings = (*SMOKE, "evaluation.every=0", "engine.kind=flower", "engine.workers=2")
    wanted = ",".join(["toys", *METHODS, *(f"fedavg@{how}@{start}" for how in PARTS)])
    command = [sys.executable, "-m", "tests.engines.simulated", str(folder), wanted, *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return folder


def test_simulation_refuses_bad_replies_and_keeps_the_bits(tmp_path: Path, simulated: Path) -> None:
    local = toy_engine(tmp_path, toy_world(tmp_path, 5))
    expected = toy_rounds(local, Toy(faults=FAULTS), 3)
    told = json.loads((simulated / "toy.json").read_text())
    reasons = {p["client"]: p["reason"] for p in told["problems"]}
    assert torch.equal(torch.tensor(told["w"]), expected.w)
    assert "not finite" in reasons.pop("client-001")
    assert reasons == {"client-003": "the disk is full"}
    assert told["states"] == {c: {} if c in FAULTS else {"steps": 3} for c in local.clients}


@pytest.mark.parametrize("method", METHODS)
def test_simulation_gives_the_bits_of_local(simulated: Path, runs: Callable[[str], Path], method: str) -> None:
    assert_same_run(runs(method), simulated / method)


@pytest.mark.parametrize("how", PARTS)
def test_simulation_trains_a_part_with_the_bits_of_local(
    tmp_path: Path, simulated: Path, start: Path, how: str
) -> None:
    run("fedavg", tmp_path / "near", *part_of(start, how))
    assert_same_run(tmp_path / "near", simulated / f"fedavg-{how.replace(':', '-')}")


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


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server and three nodes with toys."""
    there = Deployment(
        tmp_path_factory.mktemp("toys"), 4, ["1=client-000", "1=client-002", "2=client-001", "3=client-003"]
    )
    try:
        toy_world(there.folder)
        there.start_toy(1, '["client-000", "client-002"]')
        there.start_toy(2, '["client-001", "client-003"]')  # the second is not its own
        there.start_toy(4, '["client-000", "client-001", "client-002", "client-003"]')  # it has none
        there.wait_server()
        there.wait_connected("node-1", "node-2", "node-4")
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
    with pytest.raises(VisardError, match=r"3 of 4 clients are connected, 4 are needed; waited 4 s for client-003"):
        run("fedavg", tmp_path / "run", *far(deployed, 4.0), "partition.clients=4")
    assert time.monotonic() - begun < 60


# Faults of single clients, with toys


def toy_rounds(net: Any, method: Toy, count: int) -> ToyServer:
    server = method.start(net.world.setup())
    for r in range(count):
        net.begin("add", r)
        server = method.round(server, net)
        net.states.commit(server, net.ledger.flush())
    return server


def toy_problems(
    there: Deployment,
    out: Path,
    faults: dict[str, str],
    forge: dict[str, str],
    rounds: int = 2,
    wait: float = 60.0,
    say: Callable[[str], None] = lambda _: None,
    between: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Any:
    """Some rounds with toys; returns the network and its problems."""
    link = DeploymentLink(there.state, wait, say)
    states = Checkpoint(out / "checkpoint", "toy", remote=True)
    told = {"method": "toy", "clients": 3, "faults": faults, "forge": forge}
    run = run_id(states.folder)
    net = RemoteNetwork(toy_world(there.folder, **changes), states, Ledger(states.ledger), link, run, told)
    link.received = net.received
    link.introduce(net.run, told)
    problems = []
    try:
        server = Toy().start(net.world.setup())
        for r in range(rounds):
            if r:
                between()
            net.begin("add", r)
            server = Toy().round(server, net)
            problems += net.traffic.problems
            states.commit(server, net.ledger.flush())  # type: ignore[union-attr]
    finally:
        net.close()
    return server, problems


def test_good_toys(tmp_path: Path, toys: Deployment) -> None:
    server, problems = toy_problems(toys, tmp_path, {}, {})
    assert not problems
    expected = toy_rounds(toy_engine(tmp_path, toy_world(toys.folder)), Toy(), 2)
    assert torch.equal(server.w, expected.w)


@pytest.mark.parametrize(
    ("fault", "forge", "says"),
    [
        ("nan", "", ["not finite"] * 2),
        ("shape", "", ["has shape (3,), expected (4,)"] * 2),
        ("raise", "", ["the disk is full"] * 2),
        ("", "undeclared", ["undeclared field 'face'"] * 2),
        ("", "old", ["it belongs to add round 0, ask 1"]),
    ],
)
def test_a_bad_client_loses_only_itself(
    tmp_path: Path, toys: Deployment, fault: str, forge: str, says: list[str]
) -> None:
    faults, forges = ({TOYS[1]: f} if f else {} for f in (fault, forge))
    _, problems = toy_problems(toys, tmp_path, faults, forges)
    assert [p["client"] for p in problems] == [TOYS[1]] * len(says)
    assert all(part in p["reason"] for part, p in zip(says, problems, strict=True))


def test_a_client_that_kills_its_worker_is_missing_and_named(tmp_path: Path, toys: Deployment) -> None:
    _, problems = toy_problems(toys, tmp_path, {TOYS[1]: "die"}, {}, rounds=1)
    assert [(p["client"], p["reason"]) for p in problems] == [(TOYS[1], "its worker process died")]


def test_a_client_that_hangs_is_dropped_at_the_time_limit(tmp_path: Path, toys: Deployment) -> None:
    toy_problems(toys, tmp_path / "warm", {}, {}, rounds=1)  # the worker is up
    _, problems = toy_problems(toys, tmp_path / "hang", {TOYS[1]: "hang"}, {}, rounds=1, timeout=4.0)
    assert [(p["client"], p["reason"]) for p in problems] == [(TOYS[1], "no reply before the time limit")]


def test_a_party_that_is_killed_and_restarted_at_once_does_its_step_after_all(tmp_path: Path, toys: Deployment) -> None:
    toy_problems(toys, tmp_path / "warm", {}, {}, rounds=1)  # the worker is up
    mark, begun = tmp_path / "in the middle of a step", time.monotonic()

    def kill() -> None:
        until(mark.exists, "the step")
        toys.end("node-2", signal.SIGKILL)
        toys.restart("node-2")

    killer = threading.Thread(target=kill)
    killer.start()
    server, problems = toy_problems(toys, tmp_path, {TOYS[1]: f"hang once {mark}"}, {}, rounds=2)
    killer.join()
    assert not problems
    assert time.monotonic() - begun < 50, "not only when the step had hung for a minute"
    assert torch.equal(server.w, toy_rounds(toy_engine(tmp_path, toy_world(toys.folder)), Toy(), 2).w)


def test_a_party_that_is_killed_while_it_uploads_is_waited_for_no_longer_than_it_is_away(
    tmp_path: Path, toys: Deployment
) -> None:
    toy_problems(toys, tmp_path / "warm", {}, {}, rounds=1)  # the worker is up
    mark, back = tmp_path / "in the middle of an upload", list[float]()

    def restart() -> None:
        until(mark.exists, "the upload")
        toys.processes["node-2"].wait(30)
        before = toys.log("node-2").count("connected")
        toys.restart("node-2")
        until(lambda: toys.log("node-2").count("connected") > before, "the party")
        back.append(time.monotonic())

    out, restarting = tmp_path / "run", threading.Thread(target=restart)
    restarting.start()
    server, problems = toy_problems(toys, out, {}, {TOYS[1]: f"die uploading {mark}"}, rounds=2)
    ended = time.monotonic()
    restarting.join()
    assert not problems
    assert ended - back[0] < 30, "Flower would wait for the rest of the reply until a time limit"
    assert torch.equal(server.w, toy_rounds(toy_engine(tmp_path, toy_world(toys.folder)), Toy(), 2).w)
    found = compare(out, [toys.folder / "party-1", toys.folder / "party-2"])
    assert found.differences == []
    assert len(found.open) == 1, "the reply that was half uploaded"


# A registered key in another's place


def test_a_node_cannot_take_the_role_of_another_key(toys: Deployment) -> None:
    said: list[str] = []
    link = DeploymentLink(toys.state, 60.0, said.append)
    try:
        link.introduce(os.urandom(16).hex(), {"method": "toy", "clients": 4, "faults": {}})
        assert list(link.parties(3)) == list(TOYS), "each node gets its own roles and no others"
        until(lambda: link._look() or len(said) >= 2, "the node without roles")  # type: ignore[func-returns-value]
    finally:
        link.close()
    assert "refused: node-2 claims to be client-003, which belongs to the key of node-3" in said
    assert "refused: node-4 claims to be client-000, which belongs to the key of node-1 (and 3 more)" in said


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
        for call in ("activate-node", "pull-messages", "push-messages", "pull-object", "push-object", "get-run"):
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
        url = f"https://{deployed.address}/v1/fleet/push-object"
        client.post(url, content=(bytes(1 << 20) for _ in range(100)), headers=headers)
    assert peak() - before < 20_000, "in kB"


def test_only_the_account_of_the_server_can_open_its_inside_door(deployed: Deployment) -> None:
    assert stat.S_IMODE((deployed.state / "control.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE(deployed.state.stat().st_mode) == 0o700
    for path in (deployed.folder / "keys").rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
