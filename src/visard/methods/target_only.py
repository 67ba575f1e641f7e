"""Target-Only of FedFR-DA: supervised training on the target's pictures, with the labels that it should not need."""

from __future__ import annotations

from dataclasses import dataclass

from visard.core import ClientId, Leaves
from visard.methods.central import Central
from visard.methods.domains import SOURCE


@dataclass(frozen=True)
class TargetOnly(Central):
    """`central` without the source."""

    name = "target-only"
    title = "all target pictures in one place, with labels: what labels would give"
    paper = "a baseline of Zhuang et al. 2021"

    def pools_of(self, client: ClientId) -> frozenset[Leaves]:
        return frozenset() if client == SOURCE else self.pools
