"""Keys that change while a server runs: signed, renewed, ended, revoked, and the server's own certificate."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from tests.engines.deployed import Deployment, until
from tests.engines.test_flower_toys import TOYS, toy_problems, toy_rounds
from tests.toys import Toy, toy_engine, toy_world

from visard.deployment import key_lifecycle
from visard.deployment.certificates import Asked, Ca
from visard.deployment.flower.client import Fleet, Refused
from visard.deployment.health import own_version
from visard.deployment.keys import PartyKeys, ServerKeys

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of flwr
]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server that began without a party, and two parties with entries that were signed while it ran."""
    deployed = Deployment(tmp_path_factory.mktemp("keys"), 0)
    try:
        deployed.wait_server()
        toy_world(deployed.folder)
        for number, roles in ((1, (TOYS[0],)), (2, (TOYS[1], TOYS[2]))):
            sign(deployed, key_lifecycle.request(home(deployed, number), str(number), roles), number)
        until(lambda: deployed.log("server").count("may connect with the key") == 2, "the entries")
        deployed.start_toy(1, f'["{TOYS[0]}"]')
        deployed.start_toy(2, f'["{TOYS[1]}", "{TOYS[2]}"]')
        deployed.wait_connected("node-1", "node-2")
        yield deployed
    finally:
        deployed.close()


def home(there: Deployment, number: int) -> Path:
    return there.folder / "keys" / f"node-{number}"


def sign(there: Deployment, asked: Asked, number: int, days: float = 90.0) -> None:
    keys = there.folder / "keys"
    key_lifecycle.sign(
        asked, key_lifecycle.load_ca(keys / "ca"), ServerKeys.load(keys), home(there, number), None, days
    )


def sites(there: Deployment) -> dict[str, Any]:
    """What the server writes down of its parties, for visard watch."""
    path = there.state / "sites.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def certificate(there: Deployment) -> str:
    return ssl.get_server_certificate(("127.0.0.1", there.port))


def test_a_key_and_the_certificate_are_renewed_in_the_middle_of_a_run(tmp_path: Path, there: Deployment) -> None:
    before, keys = certificate(there), there.folder / "keys"
    processes = {name: process.pid for name, process in there.processes.items()}

    def renew() -> None:
        sign(there, key_lifecycle.renew_party(home(there, 2), "2"), 2)
        key_lifecycle.renew_server(keys, key_lifecycle.load_ca(keys / "ca"), [], new_key=True)
        until(lambda: "this node's new key is in use" in there.log("node-2"), there.log("node-2"), 30)
        until(lambda: certificate(there) != before, "the new certificate", 30)
        until(lambda: "the server's new certificate is in use" in there.log("server"), there.log("server"), 30)
        old = next(e for e in ServerKeys.load(keys).entries if e.party == "node-2")
        key_lifecycle.revoke(keys, "node-2", old.fingerprint, "renewed")
        until(lambda: "the key of node-2 was revoked" in there.log("server"), there.log("server"), 30)

    server, problems = toy_problems(there, tmp_path, {}, {}, rounds=3, between=lambda: done or done.append(renew()))
    assert problems == []
    assert torch.equal(server.w, toy_rounds(toy_engine(tmp_path, toy_world(there.folder)), Toy(), 3).w)
    assert {name: process.pid for name, process in there.processes.items()} == processes
    assert all(process.poll() is None for process in there.processes.values())
    until(lambda: all(site["connected"] for site in sites(there).values()), "the sites", 30)
    site = sites(there)["node-2"]
    assert (site["roles"], site["version"], site["refused"]) == ([TOYS[1], TOYS[2]], own_version(), "")
    assert time.time() - site["seen"] < 30


done: list[None] = []  # what is done between the first two rounds alone


def test_an_entry_that_ends_is_named_and_a_new_one_is_taken(there: Deployment) -> None:
    asked, said = key_lifecycle.request(home(there, 3), "3", ["client-003"]), list[str]()
    sign(there, asked, 3, 6 / 86400)
    until(lambda: "node-3 may connect" in there.log("server"), "the entry", 30)
    own = PartyKeys.load(home(there, 3), "3")
    fleet = Fleet(there.address, own.ca, own.private, said.append)
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(fleet.serve, lambda *_: (b"", b""), 0.2)
        try:
            until(lambda: any("the entry of node-3 ended" in line for line in said), "its end", 30)
            assert said[0] == f"connected to {there.address}"
            sign(there, asked, 3)
            until(lambda: said[-1] == f"connected again to {there.address}", "the same key", 30)
        finally:
            fleet.stop()
        serving.result(20)


def test_what_another_ca_has_signed_is_refused_and_named(there: Deployment) -> None:
    own = PartyKeys.load(home(there, 2), "2").private
    nodes = there.folder / "keys" / "server" / "nodes"
    (nodes / "node-8.crt").write_bytes(Ca.make().entry("node-8", [], own.public_key(), 9))
    line = "node-8.crt is an entry of another deployment: another CA has signed it"
    until(lambda: line in there.log("server"), there.log("server"), 30)


def test_a_revoked_key_is_out_within_the_round(tmp_path: Path, there: Deployment) -> None:
    mark, revoked = tmp_path / "in the middle of a step", list[float]()

    def revoke() -> None:
        until(mark.exists, "the step")
        key_lifecycle.revoke(there.folder / "keys", "node-1", "", "the laptop was stolen")
        revoked.append(time.monotonic())

    revoking = threading.Thread(target=revoke)
    revoking.start()
    _, problems = toy_problems(there, tmp_path, {TOYS[0]: f"hang once {mark}"}, {}, rounds=1)
    ended = time.monotonic()
    revoking.join()
    assert [p["client"] for p in problems] == [TOYS[0]], "the run goes on with the others"
    assert problems[0]["reason"].startswith("the key of node-1 was revoked on ")
    assert problems[0]["reason"].endswith(": the laptop was stolen")
    assert ended - revoked[0] < 15, "not only when the step had hung for a minute"
    until(lambda: not sites(there)["node-1"]["connected"], "the sites", 30)
    assert sites(there)["node-1"]["refused"] == problems[0]["reason"]
    own = PartyKeys.load(home(there, 1), "1")
    with pytest.raises(Refused, match="the key of node-1 was revoked on .* the laptop was stolen"):
        Fleet(there.address, own.ca, own.private, lambda _: None).serve(lambda *_: (b"", b""), 0.1)
