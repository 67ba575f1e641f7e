"""A hundredth of the flood of `benchmarks/flood.py`: strangers fill no memory and keep no party out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

from benchmarks.flood import KINDS, compare

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr


def test_a_party_gets_in_through_a_flood_that_fills_no_memory(tmp_path: Path) -> None:
    quiet, loud = compare(tmp_path, 4 * len(KINDS), 6.0, hard=True)
    assert loud.strangers["connected"] >= 4 * len(KINDS)
    assert loud.strangers["with TLS"] >= 2 * len(KINDS), "some got so far"
    assert loud.failed == 0
    assert max(loud.handshakes) < 3
    assert max(loud.memory) - max(quiet.memory) < 64
