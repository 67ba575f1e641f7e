"""What all tests share: one torch thread, no waiting for the disk, the same examples every time, the real data."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import disk, forked
from visard import plugins, processes

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # bits are promised on the CPU
torch.set_num_threads(1)
disk.do_not_wait()
settings.register_profile("fixed", derandomize=True, deadline=None)  # a busy machine is no failure
settings.register_profile("random", deadline=None)  # `make fuzz`
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


@pytest.fixture(scope="session")
def ray() -> Iterator[dict[str, str]]:
    """Variables with which simulations of Flower take a Ray that is there already."""
    if find_spec("ray") is None:
        pytest.skip("Flower is not installed: pip install 'visard[flower]'")
    from tests.engines.simulated import one_ray

    with one_ray() as address:
        yield {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": address}


@pytest.fixture(scope="session")
def _parent_of_children() -> Iterator[forked.Parent]:
    parent = forked.Parent()
    yield parent
    parent.close()


@pytest.fixture
def quick_children(monkeypatch: pytest.MonkeyPatch, _parent_of_children: forked.Parent) -> None:
    """Child processes, such as workers of a pool, are forked from one that has torch already: see `tests.forked`."""
    monkeypatch.setattr(processes, "subprocess", forked.patched(_parent_of_children))
