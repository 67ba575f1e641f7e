"""Files appear whole, durable and with the mode asked for, or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from visard.errors import UsageError, VisardError
from visard.files import (
    APPENDING,
    PRIVATE,
    open_file,
    open_handle,
    read_bytes,
    read_json,
    read_text,
    replacing,
    write_atomically,
    write_durably,
)


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


@pytest.mark.parametrize("what", ["a named pipe", "a socket", "a device"])
@pytest.mark.parametrize(
    "touch",
    [
        read_bytes,
        read_text,
        read_json,
        open_file,
        open_handle,
        lambda path: open_handle(path, APPENDING),
        lambda path: write_durably(path, b"x"),
    ],
    ids=["bytes", "text", "json", "file", "handle", "append", "write"],
)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, what: str, touch: Callable[[Path], object]) -> None:
    path = tmp_path / "x"
    if what == "a named pipe":
        os.mkfifo(path)
    elif what == "a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.bind(os.path.relpath(path))  # the whole path may be too long
    with pytest.raises((OSError, VisardError), match=f"it is {what}, not a file"):
        touch(path)


def test_a_link_to_a_file_is_a_file_and_a_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("a")
    assert read_text(tmp_path / "b") == "x"
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
