"""Replies that lie in files: an average leaves them there, and gives the same bits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from visard.aggregation import limits, reduction
from visard.aggregation.reduction import Reduction
from visard.aggregation.robust import Median
from visard.aggregation.rules import Mean, Rule, RunningMean
from visard.core import Weights
from visard.engines.codec import decode, encode
from visard.engines.frame import ALIGNED, largest_at
from visard.processes import Filed, Outbox

SHAPES = {"a": (40, 50), "none": (0, 3), "b": (64,), "n": ()}


@dataclass(frozen=True)
class Up:
    theta: Weights


def values(seed: int, far: float = 1.0) -> Weights:
    torch.manual_seed(seed)
    found = {k: far * torch.randn(shape) for k, shape in SHAPES.items()}
    return found | {"n": torch.tensor(seed)}


def filed(value: Up, folder: Path) -> Up:
    """The same, mapped from a file in which it lies so that nothing is copied."""
    data = encode(value)
    pad = -largest_at(data) % ALIGNED
    file = Outbox(folder).write([bytes(pad), data])
    return decode(Filed(os.dup(file.handle), len(data), pad).map(), Up)


def reduced(rule: Rule, ups: list[Up], folder: Path) -> tuple[Any, list[Any], int]:
    made = Reduction(rule, ("theta",), None, Up(values(0)), folder)
    for number, up in enumerate(ups):
        made.take(f"client-{number}", Up(values(0)), up)
    assert made._store is not None
    written = made._store._file.seek(0, 2)
    result = made.result()["theta"]
    made.close()
    return result, made.remarks, written


@pytest.mark.parametrize("rule", [Mean(), Median()], ids=["mean", "median"])
def test_values_in_files_stay_there_and_give_the_same_bits(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "LARGE", 2**12)
    ups = [Up(values(n, far)) for n, far in ((1, 1.0), (2, 1.0), (3, 1.0), (4, 100.0))]  # the last one is shortened
    limited = rule.between_parties()
    expected, remarks, written = reduced(limited, ups, tmp_path)
    assert written > 0
    found, again, written = reduced(limited, [filed(up, tmp_path) for up in ups], tmp_path)
    assert written == 0, "nothing was copied"
    assert again == remarks != []
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize("in_file", [False, True], ids=["in memory", "in files"])
def test_an_average_in_blocks_gives_the_bits_of_one_in_whole(
    in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "LARGE", 2**12)
    monkeypatch.setattr(reduction, "BLOCK", 64)
    monkeypatch.setattr(reduction, "SLICE", 2**10)
    ups = [Up(values(seed)) for seed in range(1, 6)]
    running = RunningMean()
    for up in ups:
        running.add(up.theta, 1)
    expected = running.result()
    found, _, _ = reduced(Mean(max_weight=0.5), [filed(up, tmp_path) for up in ups] if in_file else ups, tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) and found[k].dtype == expected[k].dtype for k in expected)


@pytest.mark.parametrize("size", [63, 64, 65, 1000, 4099])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.float64])
def test_a_norm_in_pieces_is_that_of_the_whole(size: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK", 64)
    one = torch.Generator().manual_seed(size)
    value, sent = (torch.randn(size, 3, generator=one).to(kind) for _ in range(2))
    for key, tensor, before in (("a", value, sent), ("turned", value.T, sent.T)):
        plain = float(torch.linalg.vector_norm((tensor - before).double()))
        assert limits.norms({key: tensor}, {key: before}) == {"": pytest.approx(plain, rel=1e-12)}
        alone = float(torch.linalg.vector_norm(tensor.double()))
        assert limits.norms({key: tensor}) == {"": pytest.approx(alone, rel=1e-12)}
