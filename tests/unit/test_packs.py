"""Packs of client states: what they cost on disk, and what a kill or damage at any moment leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import written

from visard.engines.checkpoint import MOST_PACKS, Checkpoint, Packs
from visard.errors import VisardError

CLIENTS = [f"client-{i:03d}" for i in range(20)]


@dataclass(frozen=True)
class Server:
    step: int


def state(client: str, round: int) -> dict[str, Any]:
    return {"who": client, "round": round, "w": torch.full((50,), float(round))}


def play(states: Checkpoint, round: int, clients: list[str]) -> None:
    """A round in which these clients change their states."""
    for client in clients:
        file = written(states, client, state(client, round))
        assert file is not None
        states.adopt(client, file)
    states.commit(Server(round), 0)


def last_rounds(states: Checkpoint) -> dict[str, int]:
    return {c: s["round"] for c in CLIENTS if (s := states.client_state(c))}


def packs(folder: Path) -> list[Path]:
    return sorted((folder / "clients").iterdir())


def test_a_round_is_one_file_and_one_fsync_however_many_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = os.fsync

    def counted(handle: int) -> None:
        calls.append(handle)
        real(handle)

    monkeypatch.setattr(os, "fsync", counted)
    states = Checkpoint(tmp_path, "x")
    play(states, 0, CLIENTS[:2])
    few = len(calls)
    play(states, 1, CLIENTS)
    assert len(calls) == 2 * few
    assert len(packs(tmp_path)) == 1


def test_partial_participation_keeps_every_state_and_bounds_the_disk(tmp_path: Path) -> None:
    states = Checkpoint(tmp_path, "x")
    play(states, 0, CLIENTS)
    full = packs(tmp_path)[0].stat().st_size
    expected = dict.fromkeys(CLIENTS, 0)
    for round in range(1, 120):
        chosen = [CLIENTS[(7 * round + k) % 20] for k in range(1 + round % 4)]
        play(states, round, chosen)
        expected |= dict.fromkeys(chosen, round)
        assert sum(p.stat().st_size for p in packs(tmp_path)) <= 2.2 * full
        assert len(packs(tmp_path)) <= MOST_PACKS
    assert last_rounds(states) == expected
    again = Checkpoint(tmp_path, "x")
    again.resume()
    assert last_rounds(again) == expected


def test_many_small_packs_are_merged(tmp_path: Path) -> None:
    states = Checkpoint(tmp_path, "x")
    for number in range(3 * MOST_PACKS):  # every client alone in its pack: none of them is ever dead
        file = written(states, f"c{number}", {"n": number})
        assert file is not None
        states.adopt(f"c{number}", file)
        states.commit(Server(number), 0)
        assert len(packs(tmp_path)) <= MOST_PACKS + 1
    assert [states.client_state(f"c{n}")["n"] for n in range(3 * MOST_PACKS)] == list(range(3 * MOST_PACKS))


def test_several_states_of_a_client_in_one_round(tmp_path: Path) -> None:
    states = Checkpoint(tmp_path, "x")
    for number in range(10):
        file = written(states, "a", state("a", number))
        assert file is not None
        states.adopt("a", file)
        assert states.client_state("a")["round"] == number
    states.commit(Server(0), 0)
    assert states.client_state("a")["round"] == 9
    (pack,) = packs(tmp_path)
    assert pack.stat().st_size == states.committed.clients["a"].length, "dead states of the round are gone"


class Killed(BaseException):
    """The process is gone: nothing after this happens."""


def deadly(monkeypatch: pytest.MonkeyPatch, fatal: int) -> Callable[[], int]:
    """Die at the given file operation; returns how many there were."""
    calls = 0

    def wrap(real: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= fatal:
                raise Killed
            return real(*args, **kwargs)

        return wrapped

    for name in ("fsync", "replace", "unlink", "write", "open"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: calls


def test_a_kill_at_any_moment_of_a_round_with_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 2 changes 12 of 20 states, so the pack of round 0 is mostly dead and the living move."""
    seen = set()
    for fatal in range(1, 200):
        folder = tmp_path / str(fatal)
        states = Checkpoint(folder, "x")
        play(states, 0, CLIENTS)
        play(states, 1, CLIENTS[:4])
        with monkeypatch.context() as patch:
            count = deadly(patch, fatal)
            try:
                play(states, 2, CLIENTS[:12])
                survived = True
            except Killed:
                survived = False
            calls = count()
        states.packs.close()
        again = Checkpoint(folder, "x")
        again.resume()
        seen.add(again.committed.step)
        before = dict.fromkeys(CLIENTS, 0) | dict.fromkeys(CLIENTS[:4], 1)
        after = before | dict.fromkeys(CLIENTS[:12], 2)
        assert last_rounds(again) == (before if again.committed.step == 2 else after)
        if again.committed.step == 2:
            play(again, 2, CLIENTS[:12])
        assert last_rounds(again) == after
        assert len(packs(folder)) <= 3
        if survived:
            assert calls < fatal
            break
    assert survived
    assert seen == {2, 3}, "kills fell before and after the manifest"


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_pack_is_one_clear_line(tmp_path: Path, damage: str) -> None:
    states = Checkpoint(tmp_path, "x")
    play(states, 0, CLIENTS)
    (pack,) = packs(tmp_path)
    data = bytearray(pack.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    elif damage == "cut":
        pack.write_bytes(data[: len(data) // 2])
    else:
        pack.unlink()
    again = Checkpoint(tmp_path, "x")
    again.resume()
    says = "cannot be read" if damage == "gone" else "is damaged"
    with pytest.raises(VisardError, match=says) as caught:
        last_rounds(again)
    assert "\n" not in str(caught.value)
    assert str(pack) in str(caught.value)
    if damage != "flip":  # compaction notices what is missing
        with pytest.raises(VisardError, match=says):
            play(again, 1, CLIENTS[:18])


def test_two_writers_never_share_a_pack(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    one, two = Packs(tmp_path), Packs(tmp_path)
    files = [p.write("clients/000001-aa", state("x", i), None) for i, p in enumerate((one, two, one, two))]
    assert len({f.name for f in files if f}) == 2
    assert [one.read(f)["round"] for f in files] == [0, 1, 2, 3]
    one.close()
    two.close()


def test_a_full_disk_leaves_the_pack_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clients").mkdir()
    packs = Packs(tmp_path)
    first = packs.write("clients/000001-aa", state("x", 0), None)
    real = os.write

    def full(handle: int, data: Any) -> int:
        real(handle, bytes(data)[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(VisardError, match="No space left on device"):
            packs.write("clients/000001-aa", state("x", 1), first)
    second = packs.write("clients/000001-aa", state("x", 2), first)
    assert first is not None
    assert second is not None
    assert second.offset == first.length
    assert [packs.read(f)["round"] for f in (first, second)] == [0, 2]
    packs.close()
