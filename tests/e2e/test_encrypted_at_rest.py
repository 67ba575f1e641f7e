"""`--encrypt-with`: runs, parties and galleries do the same with a key, and nothing of people is readable on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.e2e.smoke import smoke
from tests.e2e.test_interrupt import Impatient
from tests.e2e.test_methods import assert_same_results
from tests.engines.test_remote import CLIENTS, RUN, DictLink, expected, network, parties, rounds
from tests.toys import Toy, ToyServer

import visard
from visard.at_rest import MAGIC, Key
from visard.deployment.party import OwnStates, Party
from visard.engines.world import _class_vectors
from visard.errors import UsageError
from visard.models.files import read_model

METHOD = "fedfr-joint"  # has client states, a server state and class vectors
SETTINGS = [*smoke(METHOD), "method.rounds=4"]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return Key.make(tmp_path / "my.key").path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    visard.run(METHOD, overrides=SETTINGS, out=out)
    return out


def assert_encrypted_alike(plain: Path, encrypted: Path, key: Path) -> None:
    """The same results, with class vectors and states that only the key opens."""
    vectors = encrypted / "class_vectors.safetensors"
    states = [p for p in (encrypted / "checkpoint").rglob("*") if p.suffix in (".bin", ".pack")]
    assert len(states) >= 2
    assert all(p.read_bytes().startswith(MAGIC) for p in [vectors, *states])
    held, spec = read_model(vectors, Key.load(key))
    before, told = read_model(plain / "class_vectors.safetensors")
    assert spec == told
    assert all(torch.equal(held[name], before[name]) for name in before | held)
    content = vectors.read_bytes()
    vectors.write_bytes((plain / "class_vectors.safetensors").read_bytes())
    assert_same_results(plain, encrypted)
    vectors.write_bytes(content)


@pytest.mark.parametrize("engine", ["local", "pool"])
def test_a_run_that_is_stopped_and_resumed(plain: Path, key: Path, tmp_path: Path, engine: str) -> None:
    settings = [*SETTINGS, f"engine.kind={engine}", "engine.workers=2", f"engine.encrypt_with={key}"]
    with pytest.raises(visard.VisardError, match="continue with"):
        visard.run(METHOD, overrides=settings, out=tmp_path / "run", watcher=Impatient())
    visard.resume(tmp_path / "run")
    assert_encrypted_alike(plain, tmp_path / "run", key)


@pytest.mark.flower
def test_a_run_on_flower_from_the_command_line(plain: Path, key: Path, tmp_path: Path, ray: dict[str, str]) -> None:
    pytest.importorskip("flwr")
    words = [word for setting in SETTINGS if not setting.startswith("engine") for word in ("--set", setting)]
    words += ["--engine", "flower", "--set", "engine.workers=2", "--encrypt-with", key.name, "--out", "run"]
    program = "from visard.cli import main; main()"
    command = [sys.executable, "-W", "ignore", "-c", program, "run", METHOD, *words]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | ray, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_encrypted_alike(plain, tmp_path / "run", key)


def test_a_key_that_moved_is_named_again(plain: Path, key: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(visard.VisardError, match="continue with"):
        visard.run(METHOD, overrides=[*SETTINGS, f"engine.encrypt_with={key}"], out=out, watcher=Impatient())
    moved = key.rename(tmp_path / "moved.key")
    with pytest.raises(UsageError, match="my.key cannot be read"):
        visard.resume(out)
    wrong = Key.make(tmp_path / "wrong.key").path
    with pytest.raises(visard.VisardError, match="encrypted with another key than .*wrong.key"):
        visard.resume(out, overrides=[f"engine.encrypt_with={wrong}"])
    visard.resume(out, overrides=[f"engine.encrypt_with={moved}"])
    assert_encrypted_alike(plain, out, moved)


def test_a_run_is_encrypted_from_its_first_round_or_not_at_all(plain: Path, key: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are not encrypted: resume it without --encrypt-with"):
        visard.run(METHOD, overrides=[*SETTINGS, f"engine.encrypt_with={key}"], out=plain, resume=True)
    visard.run(METHOD, overrides=[*SETTINGS, "method.rounds=1", f"engine.encrypt_with={key}"], out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"are encrypted with .*my\.key: resume it with --encrypt-with"):
        visard.run(METHOD, overrides=[*SETTINGS, "method.rounds=1"], out=tmp_path / "run", resume=True)


def test_encrypted_class_vectors_are_where_a_run_starts_from(key: Path, tmp_path: Path) -> None:
    visard.run("pretrain", overrides=[*smoke("pretrain"), f"engine.encrypt_with={key}"], out=tmp_path / "run")
    file = str(tmp_path / "run" / "class_vectors.safetensors")
    vectors, _ = _class_vectors(file, 16, str(key))
    assert vectors is not None
    assert vectors.shape[1] == 16
    with pytest.raises(UsageError, match="is encrypted: give its key"):
        _class_vectors(file, 16, None)


def encrypting(folder: Path, key: Path) -> dict[str, Party]:
    some = parties(folder)
    for role, party in some.items():
        party.states = OwnStates(folder / "at" / role, Key.load(key))
    return some


def test_a_party(key: Path, tmp_path: Path) -> None:
    net = network(tmp_path / "e", DictLink(encrypting(tmp_path / "e", key)))
    rounds(net, Toy(), 0, 1)
    again = network(tmp_path / "e", DictLink(encrypting(tmp_path / "e", key)))  # server and parties restart
    server = rounds(again, Toy(), 1, 2, again.states.server_state(ToyServer))
    assert torch.equal(server.w, expected(tmp_path, 3).w)
    states = [p for role in CLIENTS for p in (tmp_path / "e" / "at" / role / RUN / "clients").iterdir()]
    assert states
    assert all(p.read_bytes().startswith(MAGIC) for p in states)


def test_a_party_whose_state_was_exchanged_or_whose_key_is_gone(
    key: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net = network(tmp_path, DictLink(encrypting(tmp_path, key)))
    server = rounds(net, Toy(), 0, 1)
    first, second = (next((tmp_path / "at" / role / RUN / "clients").iterdir()) for role in CLIENTS[:2])
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    net.begin("add", 1)
    Toy().round(server, net)
    assert "was changed, cut short or given another name" in capfd.readouterr().err
    assert [p["client"] for p in net.traffic.problems] == [CLIENTS[0]]
    assert str(tmp_path) not in json.dumps(net.traffic.problems), "paths stay in the party's log"
    first.write_bytes(kept)
    without = network(tmp_path, DictLink(parties(tmp_path)))
    without.begin("add", 1)
    with pytest.raises(visard.VisardError):
        Toy().round(server, without)
    assert "is encrypted: give its key" in capfd.readouterr().err
