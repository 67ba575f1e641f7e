"""Files appear whole, durable and with the mode asked for, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from visard.errors import UsageError, VisardError
from visard.files import PRIVATE, replacing, write_atomically, write_durably


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError), replacing(path) as beside:
        beside.write_text("half of", encoding="ascii") + beside.write_text("\u2026", encoding="ascii")
    assert path.read_text() == "old"
    with replacing(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"], "nothing is left beside"


def test_modes_are_kept_and_new_files_are_new(tmp_path: Path) -> None:
    for name, write in {"a": write_atomically, "b": write_durably}.items():
        write(tmp_path / name, b"secret", PRIVATE)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "a", b"other", PRIVATE, new=True)
    assert (tmp_path / "a").read_bytes() == b"secret"


def test_a_folder_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        write_atomically(tmp_path / "gone" / "a", "x")
    write_atomically(tmp_path / "made" / "a", "x", parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(VisardError, match="cannot write"):
        write_atomically(tmp_path / "file" / "a", "x", parents=True)
