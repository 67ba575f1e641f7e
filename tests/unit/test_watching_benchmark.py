"""The benchmark of watching: what is said about pairs of blocks, and which rounds are blocks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.watching import Block, Pair, Running, more
from scipy import stats


def pairs(ratios: list[float], drift: float = 0.0) -> list[Pair]:
    """Blocks that get slower and slower, of which the watched ones take so much longer than their neighbours."""
    slow = [10 * (1 + drift * k) for k in range(len(ratios))]
    return [Pair(Block(s, 3.0, 0.0, 0), Block(s * r, 3.0, 0.1, 3)) for s, r in zip(slow, ratios, strict=True)]


def test_an_interval_is_that_of_students_t_on_the_logarithms() -> None:
    ratios = [1.01, 0.98, 1.05, 1.0, 0.99, 1.02]
    found = more(pairs(ratios, drift=0.5), "wall")  # what both blocks of a pair have cancels
    tested = stats.ttest_1samp(np.log(ratios), 0.0).confidence_interval(0.95)
    assert found.mean == pytest.approx(100 * (np.prod(ratios) ** (1 / 6) - 1))
    assert (found.low, found.high) == pytest.approx((100 * np.expm1(tested.low), 100 * np.expm1(tested.high)))
    assert found.text == f"{found.mean:+.2f} % (95 %: {found.low:+.2f} to {found.high:+.2f})"
    assert more(pairs(ratios), "cpu").text == "+0.00 % (95 %: +0.00 to +0.00)"


def test_rounds_are_counted_as_they_are_written(tmp_path: Path) -> None:
    lines = [json.dumps({"event": kind, "time": f"2026-01-01T00:00:0{k}.500Z"}) for k, kind in enumerate(
        ("run_started", "round", "evaluation", "round", "round")
    )]  # fmt: skip
    program = """
import sys, time
with open(sys.argv[1], "wb", buffering=0) as file:
    for part in sys.argv[2:]:
        file.write(part.encode())
        time.sleep(0.05)
"""
    halves = [part for line in lines for part in (line[:9], line[9:] + "\n")]
    run = Running(tmp_path, [sys.executable, "-S", "-c", program, str(tmp_path / "events.jsonl"), *halves])
    try:
        run.reach(2)
        assert run.done >= 2
        run.reach(3)
        assert np.diff(run.times).tolist() == [2.0, 1.0]
        with pytest.raises(RuntimeError, match="the run ended with 0 after 3 rounds"):
            run.reach(4)
        run.end()
    finally:
        run.close()
