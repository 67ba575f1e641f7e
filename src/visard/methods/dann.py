"""DANN: Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016: a critic learns to tell source from
target features, its gradient is reversed on the way to the backbone. A baseline of FedFR-DA; it pools pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from visard.core import Leaves
from visard.errors import UsageError
from visard.heads import Head, direction
from visard.methods.adapting import Adapting, Penalty
from visard.ops.reversal import Critic, domain_loss, strength_at


@dataclass(frozen=True)
class DANN(Adapting):
    """The head learns from the source while the features learn to hide which domain they come from."""

    name = "dann"
    title = "domain adaptation by an adversarial critic on pooled pictures"
    paper = "Ganin et al. 2016"
    pools = frozenset({Leaves.pictures, Leaves.labels})

    hidden: int = 256  # width of the critic
    gamma: float = 10.0  # how fast the reversal grows to 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden < 1:
            raise UsageError(f"method.hidden = {self.hidden}: must be at least 1")

    def extend(self, head: Head) -> None:
        head.add_module("critic", Critic(head.embedding, self.hidden))

    def penalty(self, head: Head, progress: Callable[[], float]) -> Penalty:
        critic = cast(Critic, head.get_submodule("critic"))
        scale = head.embedding**0.5  # unit features have entries of size 1 / sqrt(E), too small for fresh layers

        def gap(source: Tensor, target: Tensor) -> Tensor:
            strength = strength_at(progress(), self.gamma)
            return domain_loss(critic, scale * direction(source), scale * direction(target), strength)

        return gap
