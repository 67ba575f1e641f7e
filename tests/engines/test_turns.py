"""The coordinator of a pool gives way while it works, and is as before afterwards."""

from __future__ import annotations

import os
import sys

import pytest

from visard.engines.pool import wait_in_turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")


def policy() -> int:
    return os.sched_getscheduler(0)


def test_gives_way_and_comes_back() -> None:
    before = wait_in_turn()
    assert policy() == os.SCHED_BATCH
    wait_in_turn(before)
    assert policy() == os.SCHED_OTHER


def test_a_second_ask_inside_the_first_changes_nothing() -> None:
    outer = wait_in_turn()
    inner = wait_in_turn()
    wait_in_turn(inner)
    assert policy() == os.SCHED_BATCH, "only the outer one ends it"
    wait_in_turn(outer)
    assert policy() == os.SCHED_OTHER
