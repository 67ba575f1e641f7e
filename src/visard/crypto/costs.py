"""Counters of what encryption costs a party: operations, never contents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Costs:
    """Operations inside one `counted()` block."""

    encryptions: int = 0
    decryptions: int = 0
    multiplications: int = 0  # of a ciphertext by a number
    refreshes: int = 0  # re-randomised ciphertexts
    cpu_seconds: float = 0.0


_current: ContextVar[Costs | None] = ContextVar("costs", default=None)


@contextmanager
def counted() -> Iterator[Costs]:
    """Count the operations of this block, whichever keys do them."""
    costs, begun = Costs(), time.process_time()
    token = _current.set(costs)
    try:
        yield costs
    finally:
        _current.reset(token)
        costs.cpu_seconds = time.process_time() - begun


def count(name: str, amount: int = 1) -> None:
    """Add to a counter of the surrounding block, if there is one."""
    if (costs := _current.get()) is not None:
        setattr(costs, name, getattr(costs, name) + amount)
