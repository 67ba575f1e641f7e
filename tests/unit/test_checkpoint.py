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
        states.ledger.write_bytes(b"123456789\n" * r)
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
    again.commit(server(5), 10)
    third = Checkpoint(tmp_path, "hash")
    third.resume()
    assert third.server_state(Server).note == 5


def test_a_file_of_the_users_beside_the_states_stays(tmp_path: Path) -> None:
    committed(tmp_path)
    (tmp_path / "clients" / "notes.txt").write_text("mine")
    again = Checkpoint(tmp_path, "hash")
    assert again.resume()
    again.commit(server(5), 10)
    assert (tmp_path / "clients" / "notes.txt").read_text() == "mine"


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


def older(folder: Path, name: str) -> None:
    """Put a file of the second round back in its place after the fifth."""
    before = folder.with_name("before")
    committed(before)
    for path in before.rglob("*"):
        if path.is_file() and path.name != "chain.jsonl":
            target = folder / path.relative_to(before)
            if name in ("all", path.name):
                target.write_bytes(path.read_bytes())


@pytest.mark.parametrize("field", ["step", "ledger_bytes", "digest", "ledger_digest", "clients"])
def test_a_changed_manifest_is_refused(tmp_path: Path, field: str) -> None:
    committed(tmp_path, rounds=5)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    lowered: dict[str, object] = {
        "step": 3, "ledger_bytes": 20, "digest": "0" * 64, "ledger_digest": "1" * 64,
        "clients": {},
    }  # fmt: skip
    path.write_text(json.dumps(manifest | {field: lowered[field]}))
    again = Checkpoint(tmp_path, "hash")
    with pytest.raises(VisardError, match=r"manifest.json was changed|ledger.jsonl was changed"):
        again.resume()


def test_a_manifest_without_its_clients_is_refused(tmp_path: Path) -> None:
    """A dropped state would start its client anew, without a word."""
    committed(tmp_path, rounds=3)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clients": {}}))
    with pytest.raises(VisardError, match=r"manifest.json was changed"):
        Checkpoint(tmp_path, "hash").resume()


@pytest.mark.parametrize("name", ["manifest.json", "all"])
def test_an_older_manifest_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    committed(folder, rounds=5)
    older(folder, name)
    with pytest.raises(VisardError, match="of round 2, but round 4 was committed"):
        Checkpoint(folder, "hash").resume()


def test_changed_rows_of_the_ledger_are_refused(tmp_path: Path) -> None:
    states = committed(tmp_path, rounds=3)
    states.ledger.write_bytes(b"123456789\n123456780\n")
    with pytest.raises(VisardError, match=r"ledger.jsonl was changed"):
        Checkpoint(tmp_path, "hash").resume()
    states.ledger.write_bytes(b"123456789\n")
    with pytest.raises(VisardError, match="too short"):
        Checkpoint(tmp_path, "hash").resume()


def test_a_chain_that_is_lost_or_cut_is_refused(tmp_path: Path) -> None:
    states = committed(tmp_path, rounds=5)
    lines = states.chain.path.read_text().splitlines(keepends=True)
    other = lines[3].replace(lines[3][6:20], "0" * 14)
    changed = (lines[:3], lines[:2] + lines[4:], [*lines[:3], other, lines[4]], ["[1, 2\n"], ["7\n"], [])
    for text in map("".join, changed):
        states.chain.path.write_text(text)
        with pytest.raises(VisardError, match=r"chain\.jsonl"):
            Checkpoint(tmp_path, "hash").resume()
    states.chain.path.unlink()
    with pytest.raises(VisardError, match="missing or damaged"):
        Checkpoint(tmp_path, "hash").resume()


@pytest.mark.parametrize("half", ["", "[6"])
def test_a_kill_between_chain_and_manifest_is_harmless(tmp_path: Path, half: str) -> None:
    """The round is done again, and its line is written again."""
    states = committed(tmp_path, rounds=2)
    manifest = (tmp_path / "manifest.json").read_bytes()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".bin", ".pack")}
    states.commit(server(2), 10)
    chain = states.chain.path.read_text()
    (tmp_path / "manifest.json").write_bytes(manifest)
    for path, data in kept.items():
        path.write_bytes(data)
    with states.chain.path.open("a") as file:
        file.write(half)
    again = Checkpoint(tmp_path, "hash")
    assert again.resume()
    assert again.committed.step == 2
    again.commit(server(2), 10)
    assert again.chain.path.read_text() == chain


@pytest.mark.parametrize("half", ["", "[2"])
def test_a_kill_before_the_first_manifest_is_harmless(tmp_path: Path, half: str) -> None:
    """Its line would stand there twice, and the run could not go on after the next kill."""
    committed(tmp_path, rounds=1)
    (tmp_path / "manifest.json").unlink()
    with (tmp_path / "chain.jsonl").open("a") as file:
        file.write(half)
    states = Checkpoint(tmp_path, "hash")
    assert not states.resume()
    for round_ in range(3):
        states.commit(server(round_), 0)
    assert [json.loads(line)[0] for line in states.chain.path.read_text().splitlines()] == [1, 2, 3]
    assert Checkpoint(tmp_path, "hash").resume()


def test_a_lost_manifest_does_not_begin_the_run_anew(tmp_path: Path) -> None:
    committed(tmp_path, rounds=2)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(VisardError, match=r"manifest\.json is missing, but round 1 was committed"):
        Checkpoint(tmp_path, "hash").resume()


def test_a_checkpoint_without_a_chain_goes_on_with_one(tmp_path: Path) -> None:
    states = committed(tmp_path, rounds=3)
    states.chain.path.unlink()
    path = tmp_path / "manifest.json"
    before = {k: v for k, v in json.loads(path.read_text()).items() if k != "ledger_digest"}
    path.write_text(json.dumps(before | {"version": 2}))
    again = Checkpoint(tmp_path, "hash")
    assert again.resume()
    again.commit(server(3), 20)
    last = Checkpoint(tmp_path, "hash")
    assert last.resume()
    assert last.committed.step == 4


def test_an_unchanged_state_is_not_written_again(tmp_path: Path) -> None:
    states = committed(tmp_path)
    assert written(states, "a/b", {"r": 1, "t": torch.tensor([1])}) is None
    assert written(states, "never seen", {}) is None
