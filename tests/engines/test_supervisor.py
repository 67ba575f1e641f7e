"""The supervisor of a party: what a worker that dies, hangs or is stopped costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.policies import ANYTHING
from tests.toys import ToyDown, ToyUp, toy_world

from visard.at_rest import MAGIC, Key
from visard.config import load
from visard.deployment.supervisor import Supervisor
from visard.engines.codec import decode, encode
from visard.engines.request import Reply, Request, pack, unpack
from visard.errors import UsageError, VisardError
from visard.processes import Recipe

CLIENT = "client-000"
quick = pytest.mark.usefixtures("quick_children")  # not everywhere: a worker really begins where there is a key
MESSAGE = encode(ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}))


@contextmanager
def supervisor(folder: Path, key: Path | None = None) -> Iterator[Supervisor]:
    toy_world(folder)
    recipe = Recipe("tests.toys:party_world", {"folder": str(folder), "roles": [CLIENT]})
    made = Supervisor(recipe, folder / "state", lambda _: None, ANYTHING.model_dump(mode="json"), "", key)
    try:
        yield made
    finally:
        made.close()


def ask(of: Supervisor, fault: str = "", timeout: float = 60.0) -> tuple[Reply, bytes]:
    told = {"method": "toy", "clients": 3, "faults": {CLIENT: fault} if fault else {}}
    name = "clients/client-000-000001-1.bin"
    run = f"{hash(fault) % 2**63:032x}"  # with other settings it is another run
    request = Request(run, told, CLIENT, "add", "add", 0, 1, new_state=name, timeout=timeout)
    header, payload = of.do(pack(request), MESSAGE)
    return unpack(header, Reply), payload


@quick
def test_deaths_and_time_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISARD_TOY_MARK", str(tmp_path / "died"))
    with supervisor(tmp_path) as f:
        good, payload = ask(f)
        expected = decode(payload, ToyUp).w
        assert good.failure is None
        again, payload = ask(f, "die once")
        assert again.failure is None
        assert torch.equal(decode(payload, ToyUp).w, expected), "the second try gives the same bits"
        assert ask(f, "die")[0].failure == "its worker process died"
        assert ask(f, "bug")[0].failure == "ZeroDivisionError: the party's log says more"
        begun = time.monotonic()
        assert ask(f, "hang", timeout=2.0)[0].failure == "no reply before the time limit"
        assert time.monotonic() - begun < 10
        assert ask(f)[0].failure is None, "the supervisor hires a new worker"


def test_states_are_encrypted_with_the_key_of_the_party(tmp_path: Path) -> None:
    key = Key.make(tmp_path / "my.key").path
    with supervisor(tmp_path, key) as f:
        assert ask(f)[0].failure is None
    (state,) = (tmp_path / "state" / "states").rglob("*.bin")
    assert state.read_bytes().startswith(MAGIC)


@quick
def test_any_time_limit_can_be_asked_for(tmp_path: Path) -> None:
    with supervisor(tmp_path) as f:
        for limit in (float("inf"), 1e10, 1e300):
            assert ask(f, timeout=limit)[0].failure is None


@pytest.mark.parametrize("limit", ["inf", "nan", "1e10", "0"])
def test_a_run_has_a_time_limit_that_sockets_can_count(limit: str) -> None:
    with pytest.raises(UsageError, match=r"engine\.timeout"):
        load("fedavg", [f"engine.timeout={limit}"])


@quick
def test_a_stopped_front_gives_up_its_step(tmp_path: Path) -> None:
    with supervisor(tmp_path) as f:
        threading.Timer(1.0, f.stop).start()
        begun = time.monotonic()
        assert ask(f, "hang")[0].failure == "the party was stopped"
        assert time.monotonic() - begun < 10


@quick
def test_a_worker_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(VisardError, match="the worker process did not start"):
        Supervisor(Recipe("tests.toys:no_such_function", {}), tmp_path, lambda _: None, None)
