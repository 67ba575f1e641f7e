"""Folders in memory: what processes leave that were killed is removed, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from visard.engines.shared_memory import _new_folder, remove_folder


@pytest.mark.parametrize(
    ("name", "stays"), [("visard-ab12_z9x", False), ("visard-thesis", True), ("visard-A2345678", True)]
)
def test_only_folders_of_killed_processes_are_removed(tmp_path: Path, name: str, stays: bool) -> None:
    other = tmp_path / name
    other.mkdir()
    (other / "lock").write_text("")
    (other / "mine.txt").write_text("mine")
    old = time.time() - 3600
    os.utime(other, (old, old))
    made = _new_folder(tmp_path)
    assert other.exists() is stays
    remove_folder(made)
    assert not made.exists()
