r"""Adam (Kingma and Ba 2015) behind the interface of `Sgd`.

    m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

with g the gradient plus weight decay times p, as in `torch.optim.Adam`, with which a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from visard.ops.sgd import Sgd

Optimiser = Literal["sgd", "adam"]
B1, B2, EPS = 0.9, 0.999, 1e-8
STEPS = -1  # where the number of steps is kept among the moments


class Adam(Sgd):
    """Keeps [m, v] of each parameter by its position, where `Sgd` keeps its velocity."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, lr, 0.0, weight_decay)

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients that are there."""
        t = self._velocity.setdefault(STEPS, torch.zeros((), dtype=torch.int64))
        t += 1
        small, large = 1 - B1 ** int(t), 1 - B2 ** int(t)
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            g = p.grad + self.weight_decay * p if self.weight_decay else p.grad
            m, v = self._velocity.setdefault(i, torch.zeros(2, *p.shape, dtype=p.dtype, device=p.device))
            m.lerp_(g, 1 - B1)
            v.mul_(B2).addcmul_(g, g, value=1 - B2)
            p.addcdiv_(m, (v / large).sqrt_().add_(EPS), value=-self.lr / small)


def new_optimiser(
    kind: Optimiser, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float
) -> Sgd:
    """The optimiser of that name; Adam has no use for `momentum`."""
    return Adam(parameters, lr, weight_decay) if kind == "adam" else Sgd(parameters, lr, momentum, weight_decay)
