"""What all tests share: one torch thread, the same examples every time, and the folder of real data."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from visard import plugins

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # bits are promised on the CPU
torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True)
settings.register_profile("random")  # `make fuzz`
settings.load_profile("fixed")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data next to the project; the test is skipped where there is none."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data next to the project: tests on real data are skipped")
    return SHARED


@pytest.fixture(autouse=True)
def _any_plugin() -> Iterator[None]:
    """A party's process imports few plug-ins; tests that play a party in this process leave no trace.

    Nor do tests that read settings of somebody else.
    """
    yield
    plugins.allow_only(None)
    plugins._doubted.clear()
