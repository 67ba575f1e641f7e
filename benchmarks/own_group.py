"""A head for a control experiment: central training in which each person has only the people of one group as negatives.

The people are divided into groups as large as a client has people. Everything else is as in central training, so that
the difference between the two is what negatives from other clients bring, and the difference to FedAvg what averaging
after every pass costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visard.errors import UsageError
from visard.learning.heads import CosFace


class OwnGroup(CosFace):
    """CosFace whose softmax runs over the classes with the same remainder modulo `groups` as the target."""

    def __init__(
        self, classes: int, embedding: int, scale: float = 64.0, margin: float = 0.35, detach_margin: bool = False,
        groups: int = 20,
    ) -> None:  # fmt: skip
        super().__init__(classes, embedding, scale, margin, detach_margin)
        if groups < 1:
            raise UsageError(f"own-group needs 1 group or more: got {groups}")
        self.groups = groups

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        found = super().scores(f, w, labels)
        if labels is None:
            return found
        group = torch.arange(self.classes, device=f.device) % self.groups
        return found.masked_fill(group != (labels % self.groups)[:, None], -torch.inf)
