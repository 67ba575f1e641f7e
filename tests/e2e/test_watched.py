"""A run that goes on, watched: pictures of the page at its start, middle and end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.watching import command, shots
from PIL import Image
from tests.unit.chromium import find

ROUNDS = 8


@pytest.mark.skipif(find() is None, reason="no Chromium here")
def test_pictures_of_a_run_that_goes_on_and_no_error_in_the_console(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = command(folder, ROUNDS, 2, 40)  # a second or more for each round: the page asks every two
    found = shots(folder, words, ROUNDS, tmp_path / "shots")
    assert [path.name for path in found] == ["start.png", "middle.png", "end.png"]
    start, middle, end = (np.asarray(Image.open(path).convert("L")) for path in found)
    assert start.shape[1] == middle.shape[1] == end.shape[1] == 1280
    same = min(len(start), len(middle), len(end))
    assert (start[:same] != middle[:same]).any()
    assert (middle[:same] != end[:same]).any()
