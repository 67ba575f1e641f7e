"""How the coordinator of a pool shares the cores with its workers."""

from __future__ import annotations

import os
import sys


def wait_in_turn(policy: int | None = None) -> int | None:
    """Let this thread no longer interrupt others when it wakes up; returns how it was, which the next call restores.

    Woken by every reply, the coordinator would take a core from a worker each time and clear its cache; like this it
    runs when a core is free or its turn has come, and finds several replies. Only Linux has this, elsewhere nothing
    happens; a thread that is scheduled in a special way is left alone. A worker that is replaced meanwhile inherits
    it, which does no harm: it computes, and hardly ever wakes up.
    """
    if sys.platform != "linux":
        return None
    try:
        now = os.sched_getscheduler(0)
        if policy is not None:
            os.sched_setscheduler(0, policy, os.sched_param(0))
        elif now == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return None
    return now if now == os.SCHED_OTHER else None
