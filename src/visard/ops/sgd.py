r"""Stochastic gradient descent without the bookkeeping of `torch.optim`, which costs more than a small network's step.

    g <- g min(1, c / (|g| + 1e-6))     clipping, |g| over all parameters together
    v <- momentum v + g + decay p       v = g + decay p in the first step
    p <- p - lr v

The operations and their order are those of `torch.optim.SGD(foreach=True)` and `clip_grad_norm_(foreach=True)`:
the same bits, which a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Sgd:
    """Updates parameters in place; those without a gradient are left alone."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._velocity: dict[int, Tensor] = {}  # by position

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def clip(self, norm: float) -> None:
        """Shorten the gradient to `norm` if it is longer."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)), 2.0)
        factor = norm / (length + 1e-6)
        if not float(factor) >= 1.0:  # a factor of 1 changes nothing, and not a number must pass on
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients that are there, which are gone then: it computes in their memory."""
        moving = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if not moving:
            return
        params = [self.parameters[i] for i in moving]
        change: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
        for p in params:
            p.grad = None
        if self.weight_decay:
            torch._foreach_add_(change, params, alpha=self.weight_decay)
        if self.momentum:
            change = self._accelerated(moving, change)
        torch._foreach_add_(params, change, alpha=-self.lr)

    def _accelerated(self, moving: list[int], change: list[Tensor]) -> list[Tensor]:
        known = [self._velocity.get(i) for i in moving]
        if all(v is not None for v in known):
            velocity: list[Tensor] = known  # type: ignore[assignment]
            kinds = {v.dtype for v in velocity}
            # a number would become a tensor of the velocities' type once for each of them
            factor = torch.tensor(self.momentum, dtype=kinds.pop()) if len(kinds) == 1 else self.momentum
            torch._foreach_mul_(velocity, factor)
            torch._foreach_add_(velocity, change, alpha=1.0)
            return velocity
        for i, v, g in zip(moving, known, change, strict=True):
            self._velocity[i] = g if v is None else v.mul_(self.momentum).add_(g, alpha=1.0)
        return [self._velocity[i] for i in moving]
