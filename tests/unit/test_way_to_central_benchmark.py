"""The bench of the way to central: runs are begun once, the way is a share, and the control sees one group alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks import way_to_central
from benchmarks.own_group import OwnGroup
from tests.e2e.smoke import smoke

import visard
from visard.learning.heads import CosFace


def test_a_finished_run_is_read_and_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_to_central, "ROWS", {"fedavgm": ("fedavg", ("aggregation.optimiser=sgd",))})
    first = way_to_central.measured("fedavgm", 1, tmp_path, smoke("fedavg"))
    monkeypatch.setattr(visard, "run", None, raising=False)
    assert way_to_central.measured("fedavgm", 1, tmp_path) == first
    assert 0 < first["AUC"] < 1
    assert "momentum" in (tmp_path / "fedavgm-1" / "config.toml").read_text()


def test_the_way_is_that_from_local_to_central(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*values: float) -> list[dict[str, float]]:
        return [dict.fromkeys(way_to_central.METRICS, value) for value in values]

    way_to_central.table({"local": runs(0.2, 0.4), "fedavg": runs(0.5, 0.52), "central": runs(0.8, 0.8)})
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "fedavg" in text]
    assert "| 0.500 0.520 | 50 % 30 %, mean 40 % |" in line


def test_the_control_has_negatives_of_one_group_alone() -> None:
    torch.manual_seed(0)
    head, f = OwnGroup(6, 4, scale=8.0, margin=0.2, groups=2), torch.randn(3, 4)
    labels = torch.tensor([0, 3, 4])
    alone = CosFace(3, 4, scale=8.0, margin=0.2)
    for row, (label, group) in enumerate(((0, 0), (3, 1), (4, 0))):
        alone.weight.data.copy_(head.weight.data[group::2])
        expected = alone.loss(f[row : row + 1], torch.tensor([label // 2]))
        torch.testing.assert_close(head.loss(f[row : row + 1], labels[row : row + 1]), expected)
