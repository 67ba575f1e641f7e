"""A checkpoint is the last committed round, whatever lies around it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.toys import written
from torch import Tensor

from visard.engines.checkpoint import Checkpoint
from visard.errors import VisardError


@dataclass(frozen=True)
class Server:
    theta: dict[str, Tensor]
    note: int


def server(value: int) -> Server:
    return Server({"w": torch.full((3,), float(value))}, value)


def put(states: Checkpoint, client: str, state: dict[str, object]) -> None:
    file = written(states, client, state)
    assert file is not None
    states.adopt(client, file)


def committed(folder: Path, rounds: int = 2) -> Checkpoint:
    states = Checkpoint(folder, "hash")
    for r in range(rounds):
        put(states, "a/b", {"r": r, "t": torch.tensor([r])})
        states.commit(server(r), 10 * r)
    return states


def test_resume_finds_the_last_round(tmp_path: Path) -> None:
    committed(tmp_path)
    again = Checkpoint(tmp_path, "hash")
    assert again.resume()
    assert again.committed.step == 2
    assert again.committed.ledger_bytes == 10
    assert again.server_state(Server).note == 1
    assert again.client_state("a/b")["r"] == 1
    assert again.client_state("unknown") == {}


def test_states_of_an_unfinished_round_do_not_count(tmp_path: Path) -> None:
    states = committed(tmp_path)
    put(states, "a/b", {"r": 99})
    put(states, "new", {"r": 99})
    assert states.client_state("a/b") == {"r": 99}
    again = Checkpoint(tmp_path, "hash")
    again.resume()
    assert again.client_state("a/b")["r"] == 1
    assert again.client_state("new") == {}


def test_debris_of_a_kill_is_harmless(tmp_path: Path) -> None:
    committed(tmp_path)
    (tmp_path / "server-000003.bin").write_bytes(b"half")
    (tmp_path / ".manifest.json.1.tmp").write_text("{")
    again = Checkpoint(tmp_path, "hash")
    assert again.resume()
    again.commit(server(5), 30)
    third = Checkpoint(tmp_path, "hash")
    third.resume()
    assert third.server_state(Server).note == 5


def test_old_files_are_removed(tmp_path: Path) -> None:
    committed(tmp_path, rounds=5)
    assert len(list(tmp_path.glob("server-*.bin"))) == 1
    assert len(list((tmp_path / "clients").iterdir())) == 1


def test_damage_is_one_clear_line(tmp_path: Path) -> None:
    committed(tmp_path)
    (file,) = tmp_path.glob("server-*.bin")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = Checkpoint(tmp_path, "hash")
    again.resume()
    with pytest.raises(VisardError, match="is damaged"):
        again.server_state(Server)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run": "other"}, "other settings"),
        ({"version": 99}, "format 99"),
        ({"step": None, "server": 3}, None),
    ],
)
def test_foreign_manifests_are_refused(tmp_path: Path, change: dict[str, object], says: str | None) -> None:
    committed(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if says is None:
        path.write_text("[]")
        says = "not a checkpoint"
    with pytest.raises(VisardError, match=says):
        Checkpoint(tmp_path, "hash").resume()


def test_an_unchanged_state_is_not_written_again(tmp_path: Path) -> None:
    states = committed(tmp_path)
    assert written(states, "a/b", {"r": 1, "t": torch.tensor([1])}) is None
    assert written(states, "never seen", {}) is None
