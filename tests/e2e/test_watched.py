"""A run that goes on, watched in some of its rounds: what is compared, and pictures at its start, middle and end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.watching import command, measure
from PIL import Image
from tests.unit.chromium import find

ROUNDS = 14


@pytest.mark.skipif(find() is None, reason="no Chromium here")
def test_pictures_of_a_run_that_goes_on_and_no_error_in_the_console(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = command(folder, ROUNDS, 2, 30, cycle=1)
    pairs = measure(folder, words, ROUNDS, 2, tmp_path / "shots", cycle=1)
    assert all(pair.watched.wall > 0 and pair.bare.cpu > 0 for pair in pairs)
    assert len(pairs) >= 1
    assert {pair.bare.answers for pair in pairs} == {0}  # nobody asks, and nobody could answer
    assert max(pair.bare.serving for pair in pairs) <= 0.01
    assert sum(pair.watched.answers for pair in pairs) > 0
    start, middle, end = (
        np.asarray(Image.open(tmp_path / "shots" / f"{name}.png").convert("L")) for name in ("start", "middle", "end")
    )
    assert start.shape[1] == middle.shape[1] == end.shape[1] == 1280
    same = min(len(start), len(middle), len(end))
    assert (start[:same] != middle[:same]).any()
    assert (middle[:same] != end[:same]).any()
