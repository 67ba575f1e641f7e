"""The bench of server optimisers: runs are begun once, and the way from local to central is a share."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import server_optimisers
from tests.e2e.smoke import smoke

import visard


def test_a_finished_run_is_read_and_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_optimisers, "ROWS", {"fedavgm": ("fedavg", ("aggregation.optimiser=sgd",))})
    first = server_optimisers.measured("fedavgm", 1, tmp_path, smoke("fedavg"))
    monkeypatch.setattr(visard, "run", None, raising=False)
    assert server_optimisers.measured("fedavgm", 1, tmp_path) == first
    assert 0 < first["AUC"] < 1
    assert "momentum" in (tmp_path / "fedavgm-1" / "config.toml").read_text()


def test_the_way_is_that_from_local_to_central(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*values: float) -> list[dict[str, float]]:
        return [dict.fromkeys(server_optimisers.METRICS, value) for value in values]

    server_optimisers.table({"local": runs(0.2, 0.4), "fedavg": runs(0.5, 0.52), "central": runs(0.8, 0.8)})
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "fedavg" in text]
    assert "| 0.500 0.520 | 50 % 30 %, mean 40 % |" in line
