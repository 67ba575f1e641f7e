"""Decoupled feature customisation: a transformation of the feature and a head of its own (Liu et al. 2022, Eq. 6).

Nothing of it ever leaves a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visard.core import Weights
from visard.errors import UsageError
from visard.heads import Head, build_head


@dataclass(frozen=True)
class BranchSettings:
    """The personal branch: f' = Pi(f) and what it is trained with."""

    weight: float = 10.0  # alpha_3; 0 = no branch
    kind: Literal["bce", "cosface"] = "bce"  # one-vs-all (Eq. 6), or CosFace over the client's own people
    scale: float = 30.0  # s'
    margin: float = 0.4  # m'
    t: float = 3.0  # t' of g(z) = 2((z + 1)/2)^t' - 1
    balance: float = 0.7  # lambda
    bias: Literal["shared", "per_class"] = "shared"  # b: one number, or one for each head
    bias_start: Literal["balanced", "zero"] = "balanced"  # balanced: positives and negatives pull equally at first
    detach: bool = False  # True: the gradient of the branch stops before the backbone

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise UsageError(f"method.branch.weight = {self.weight}: must not be negative")

    def build_head(self, classes: int, embedding: int) -> Head:
        """Omega, freshly initialised."""
        if self.kind == "cosface":
            return build_head("cosface", classes, embedding, self.scale, self.margin)
        return build_head(
            "sphereface2", classes, embedding, self.scale, self.margin,
            t=self.t, balance=self.balance, bias=self.bias, bias_start=self.bias_start,
        )  # fmt: skip


class Branch(nn.Module):
    """Pi (E -> E, starts as the identity) and the heads Omega of the client's K_l people."""

    def __init__(self, settings: BranchSettings, classes: int, embedding: int) -> None:
        super().__init__()
        self.settings = settings
        self.transform = nn.Linear(embedding, embedding)
        nn.init.eye_(self.transform.weight)
        nn.init.zeros_(self.transform.bias)
        self.head = settings.build_head(classes, embedding)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean over the batch; a label of -1 is a public picture.

        One-vs-all: a negative for every head. CosFace has no class for it and leaves it out.
        """
        if self.settings.detach:
            features = features.detach()
        if self.settings.kind == "cosface":
            own = labels >= 0
            if not own.any():
                return features.new_zeros(())
            features, labels = features[own], labels[own]
        return self.head.loss(self.transform(features), labels)


def transform_of(branch: Weights) -> Weights:
    """The entries of Pi, which a personal model carries after its backbone."""
    return {name: value for name, value in branch.items() if name.startswith("transform.")}


def start_at(head: Head, rows: Tensor) -> None:
    """Set the first class vectors of a head; a row of zeros leaves the head's own."""
    with torch.no_grad():
        known = torch.nonzero(rows.abs().sum(1)).flatten()
        head.weight[known] = rows[known].to(head.weight.dtype)
