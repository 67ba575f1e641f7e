"""How a client makes a model its own before it is tested a second time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from visard.errors import UsageError


@dataclass(frozen=True)
class Tuning:
    """`[evaluation.tuning]`: the test of a client's model before and after tuning, on drawn pairs."""

    batches: int = 0  # of the client's own training pictures that it tunes on; 0 = no such test
    batch_size: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    head: Literal["means", "random"] = "means"  # what a client without a head starts from
    norm: Literal["update", "frozen"] = "update"  # frozen: batch norm keeps the statistics that the model came with
    pairs: int = 1000  # half of the same person, half of two people
    draws: int = 5  # times that batches and pairs are drawn; figures are means
    alone: bool = False  # True: clients make no other test

    def __post_init__(self) -> None:
        if self.batches < 0 or not 0 <= self.momentum < 1:
            raise UsageError("evaluation.tuning: batches must not be negative, momentum is from 0 to below 1")
        if min(self.batch_size, self.draws) < 1 or self.lr <= 0 or self.pairs < 2:
            raise UsageError("evaluation.tuning: batch_size, draws and lr must be positive, pairs at least 2")
