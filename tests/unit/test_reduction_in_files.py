"""Replies that lie in files: an average leaves them there, and gives the same bits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from visard.aggregation import reduction
from visard.aggregation.reduction import Reduction
from visard.aggregation.robust import Median
from visard.aggregation.rules import Mean, Rule
from visard.core import Weights
from visard.engines.codec import ALIGNED, decode, encode, largest_at
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
