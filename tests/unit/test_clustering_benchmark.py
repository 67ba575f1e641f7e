"""The benchmark of clustering counts what clustering takes, and nothing that came before."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.clustering import features, measure


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for the peak")
def test_memory_is_at_least_that_of_the_copy_that_is_made(tmp_path: Path) -> None:
    """A pass over directions holds them, as many bytes as the features."""
    np.save(tmp_path / "x.npy", x := features(12_000))
    found = measure("exact", tmp_path / "x.npy", threads=1)
    assert x.nbytes / 2**20 < found["megabytes"] < 8 * x.nbytes / 2**20
