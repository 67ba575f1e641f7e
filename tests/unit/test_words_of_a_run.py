"""What a run says before it starts and at its end: what the preset does, what left the clients, how long it took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import write_run

from visard.cli import main
from visard.cli.console import console
from visard.cli.run import show
from visard.presets import about, presets
from visard.report.disclosure import COLUMNS, DECLARED
from visard.report.run_folder import read_run
from visard.text import duration, size


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 200)


def of_traffic(up: int, down: int) -> dict[str, Any]:
    """The metrics of a run without any test."""
    traffic = {"rounds": 6, "bytes_up": up, "bytes_down": down, "bytes_pooled": 0}
    return {"generic": {}, "clients": {"summary": {}}, "communication": traffic}


def test_the_end_of_a_run_says_what_left_and_how_long_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_run(write_run(tmp_path / "run", rounds=6))
    show(replace(run, metrics=of_traffic(3000, 2000)))
    kinds = "network weights, figures and counts"
    moved = f"{size(3000)} left the clients ({kinds}), {size(2000)} went to them"
    lost = "warning client-007: no reply 1 time, last in federate round 5: no reply within 120 s"
    took = f"6 rounds in {duration(run.seconds)}"
    assert capsys.readouterr().out == f"{took}: {moved}\n{DECLARED}\n{lost}\nreport: {run.report}\n"


def test_the_end_of_a_run_from_which_pictures_left_does_not_reassure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    rows = [["federate", 0, "client-0", "Up", "x", "pictures", 3072, False]]
    (folder / "ledger.json").write_text(json.dumps({"columns": COLUMNS, "rows": rows}))
    show(replace(read_run(folder), metrics=of_traffic(3072, 0)))
    out = capsys.readouterr().out
    assert DECLARED not in out
    assert "alarm Private data left the clients. Pictures left the clients" in out


def test_a_preset_says_what_it_does_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").touch()
    for more, said in (([], True), (["--set", "data.identities=40"], False)):  # which may make it untrue
        monkeypatch.setattr("sys.argv", ["visard", "run", "fedavg", "--out", str(tmp_path / "a-file"), *more])
        with pytest.raises(SystemExit):
            main()
        assert (about(presets()["fedavg"]) in capsys.readouterr().out) == said
