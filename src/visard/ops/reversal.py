r"""Domain-adversarial training (Ganin et al., JMLR 2016): a critic tells domains apart, the features unlearn that.

critic   features -> one number, positive = target          p   progress of training, 0 to 1
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def reverse(x: Tensor, strength: float) -> Tensor:
    """x itself; its gradient comes back times -strength (their Eq. 17-18)."""
    out: Tensor = _Reverse.apply(x, strength)  # type: ignore[no-untyped-call]
    return out


def strength_at(progress: float, gamma: float = 10.0) -> float:
    r"""$\lambda_p = 2 / (1 + e^{-\gamma p}) - 1$: no reversal while the critic knows nothing, full at the end."""
    return 2 / (1 + math.exp(-gamma * progress)) - 1


class Critic(nn.Module):
    """Features (B, embedding) -> (B,): one hidden layer is enough to tell two domains apart."""

    def __init__(self, embedding: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(embedding, hidden), nn.Linear(hidden, 1)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.out(torch.relu(self.hidden(features)))[:, 0]
        return found


def domain_loss(critic: nn.Module, source: Tensor, target: Tensor, strength: float) -> Tensor:
    """Binary cross-entropy of the critic on reversed features, both domains with the same weight."""
    logits = critic(reverse(torch.cat([source, target]), strength))
    labels = torch.cat([torch.zeros(len(source)), torch.ones(len(target))]).to(logits)
    return binary_cross_entropy_with_logits(logits, labels)
