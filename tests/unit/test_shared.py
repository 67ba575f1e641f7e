"""Tensors in shared memory between processes of one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from visard.engines import shared_memory
from visard.engines.codec import CodecError, build
from visard.engines.shared_memory import Bundle, Mapped, memory_folder
from visard.errors import VisardError


@dataclass(frozen=True)
class Down:
    w: Tensor
    note: str


TENSORS = [
    torch.arange(6.0).view(2, 3),
    torch.tensor(3),
    torch.zeros(0, 4),
    torch.tensor([True, False]),
    torch.ones(3, dtype=torch.bfloat16),
    torch.arange(6.0).view(2, 3).t(),
]


@pytest.mark.parametrize("copied", [False, True])
def test_every_kind_of_tensor_comes_back(tmp_path: Path, copied: bool) -> None:
    bundle, mapped = Bundle(tmp_path / "x"), Mapped(tmp_path / "x", copied)
    for tensor in TENSORS:  # the file grows under the reader
        got = build(bundle.tree({"a": tensor, "b": b"bytes", "c": [1.5]}), dict, mapped)
        assert got["a"].dtype == tensor.dtype
        assert torch.equal(got["a"], tensor)
        assert (got["b"], got["c"]) == (b"bytes", [1.5])
    bundle.close()


def test_what_messages_share_is_written_once(tmp_path: Path) -> None:
    w = torch.ones(1000)
    bundle = Bundle(tmp_path / "x")
    messages = [Down(w, "same") for _ in range(5)] + [Down(w, "other")]
    trees = [bundle.tree(m) for m in messages]
    assert trees[0] is trees[4]
    assert trees[5] is not trees[0]
    assert (tmp_path / "x").stat().st_size < 2 * 4000
    assert torch.equal(build(trees[5], Down, Mapped(tmp_path / "x")).w, w)
    bundle.close()


def test_a_reader_that_writes_changes_no_other_copy(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "x")
    tree = bundle.tree(torch.ones(4))
    build(tree, Tensor, Mapped(tmp_path / "x")).zero_()
    assert build(tree, Tensor, Mapped(tmp_path / "x")).tolist() == [1, 1, 1, 1]
    bundle.close()


def test_copies_survive_the_next_hand_over(tmp_path: Path) -> None:
    bundle, mapped = Bundle(tmp_path / "x", once=False), Mapped(tmp_path / "x", copied=True)
    first = build(bundle.tree(torch.ones(4)), Tensor, mapped)
    bundle.clear()
    mapped.forget()
    second = build(bundle.tree(torch.zeros(4)), Tensor, mapped)
    assert (first.tolist(), second.tolist()) == ([1] * 4, [0] * 4)
    bundle.close()


@pytest.mark.parametrize("key", ["", "float32/0", "float32/0/99999999", "object/0/1", "float32/-8/1", "float32/x/1"])
def test_a_place_that_is_not_there_is_refused(tmp_path: Path, key: str) -> None:
    bundle = Bundle(tmp_path / "x")
    bundle.tree(torch.ones(4))
    with pytest.raises(CodecError, match="points to a tensor that is not there"):
        build({"t": key}, Tensor, Mapped(tmp_path / "x"))
    bundle.close()


def test_no_room_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(VisardError, match="cannot share .* bytes .*No space left on device"):
        Bundle(tmp_path / "x").tree(torch.ones(4))


def test_folders_of_killed_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"""
import os, signal
from pathlib import Path
from visard.engines import shared_memory as shared
shared.MEMORY = Path({str(tmp_path)!r})
shared.memory_folder()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    mine = memory_folder()
    (left,) = (p for p in tmp_path.iterdir() if p != mine)
    for folder in (left, mine):
        os.utime(folder, (0, 0))
    memory_folder()
    assert not left.exists()
    assert mine.exists(), "of a process that lives"
