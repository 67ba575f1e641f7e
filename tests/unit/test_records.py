"""Append-only records: what breaks a chain, what a kill in the middle of a line leaves, how files follow each other."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from visard.deployment.ledger_check import chain_of, verify
from visard.engines.records import Records, files_of, read_records
from visard.errors import UsageError, VisardError


def fill(folder: Path, count: int, segment: int = 1 << 26, first: int = 0) -> None:
    records = Records(folder, "ledger", segment)
    for number in range(first, first + count):
        records.append("reply", value=number)
    records.close()


def values(folder: Path) -> list[object]:
    return [line.record.get("value", line.record["event"]) for line in read_records(files_of(folder, "ledger"))]


def test_each_line_names_the_digest_of_the_one_before(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    fill(tmp_path, 2, first=3)  # another process goes on
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = path.read_bytes().splitlines()
    previous = ""
    for number, line in enumerate(lines, 1):
        record = json.loads(line)
        assert (record["n"], record["previous"]) == (number, previous)
        previous = hashlib.sha256(line).hexdigest()
    checked = verify(tmp_path)
    assert (checked.records, checked.head) == (5, previous)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda lines: [*lines[:2], lines[2].replace(b'"value":2', b'"value":7'), *lines[3:]],
            "line 4: does not follow from the line before it: one of the two was changed",
        ),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3: is record 4, expected 3"),
        (lambda lines: lines[1:], "line 1: is record 2, expected 1"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], "line 3: is record 2, expected 3"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2: is record 3, expected 2"),
        (lambda lines: [*lines[:2], b"\xff", *lines[3:]], "line 3: is not a record"),
        (lambda lines: [*lines[:2], b"[" * 100_000, *lines[3:]], "line 3: is not a record"),
        (lambda lines: [*lines[:2], b'{"n":true,"previous":"","event":""}', *lines[3:]], "line 3: is not a record"),
    ],
)
def test_the_first_broken_line_is_named(tmp_path: Path, change: object, says: str) -> None:
    fill(tmp_path, 5)
    path = tmp_path / "ledger-000001.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in change(lines)))  # type: ignore[operator]
    with pytest.raises(VisardError, match=says):
        verify(path)


def test_the_last_line_can_be_changed_only_by_changing_the_digest_that_was_noted(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    head, path = verify(tmp_path).head, tmp_path / "ledger-000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"value":2', b'"value":9'))
    assert verify(tmp_path).head != head, "a chain alone cannot show it: docs/deploy.md says so"


def test_half_a_line_is_cut_off_and_that_is_on_record(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    path = tmp_path / "ledger-000001.jsonl"
    whole = path.read_bytes()
    for torn in (b"{", b'{"n":4,"previous":"ab', whole.splitlines()[0]):
        path.write_bytes(whole + torn)
        assert verify(tmp_path).records == 3, "it may be in the middle of being written"
        fill(tmp_path, 1, first=7)
        assert values(tmp_path) == [0, 1, 2, "repaired", 7]


def test_a_damaged_end_is_not_written_on(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    path = tmp_path / "ledger-000001.jsonl"
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    with pytest.raises(VisardError, match="last line: is not a record"):
        fill(tmp_path, 1)


def test_files_follow_each_other(tmp_path: Path) -> None:
    fill(tmp_path, 20, segment=500)
    fill(tmp_path, 20, segment=500, first=20)
    files = files_of(tmp_path, "ledger")
    assert len(files) > 5
    assert all(path.stat().st_size <= 500 for path in files)
    assert values(tmp_path) == list(range(40))
    assert chain_of(files[2]) == files
    assert verify(files[2]).records == 40
    alone = tmp_path / "elsewhere" / files[2].name
    alone.parent.mkdir()
    alone.write_bytes(files[2].read_bytes())
    assert verify(alone).records == len(files[2].read_bytes().splitlines())
    files[2].write_bytes(files[3].read_bytes())
    with pytest.raises(VisardError, match=f"{files[2].name}, line 1: is record"):
        verify(tmp_path)
    files[2].unlink()
    with pytest.raises(VisardError, match=f"{files[2].name} is missing"):
        verify(tmp_path)


def test_an_empty_last_file_goes_on_from_the_one_before(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    (tmp_path / "ledger-000002.jsonl").touch()  # a kill right after it was made
    fill(tmp_path, 1, first=3)
    assert values(tmp_path) == [0, 1, 2, 3]


def test_a_full_disk_leaves_no_record_and_no_broken_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, write = Records(tmp_path, "ledger"), os.write
    records.append("reply", value=0)

    def half(handle: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(handle, bytes(data)[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(VisardError, match="cannot write .*No space left on device"):
        records.append("reply", value=1)
    monkeypatch.undo()
    records.append("reply", value=2)
    assert values(tmp_path) == [0, 2]


def test_a_record_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    """A process that is killed right after `append` leaves the record."""
    code = (
        "import os, signal, sys; from pathlib import Path; from visard.engines.records import Records\n"
        "r = Records(Path(sys.argv[1]), 'ledger'); r.append('reply', value=0); r.append('reply', value=1)\n"
        "r.add('reply', value=2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert values(tmp_path) == [0, 1]


def test_what_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no record of replies"):
        verify(tmp_path)
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(VisardError, match="line 1: is not a record"):
        verify(tmp_path / "x.jsonl")


def test_records_need_no_torch() -> None:
    code = (
        "import sys, visard.deployment.party_ledger, visard.deployment.ledger_check; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
