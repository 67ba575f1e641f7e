r"""Stochastic gradient descent without the bookkeeping of `torch.optim`, which costs more than a small network's step.

    g <- g min(1, c / (|g| + 1e-6))     clipping, |g| over all parameters together
    v <- momentum v + g + decay p       v = g + decay p in the first step
    p <- p - lr v

The update is one pass over memory, that of `torch.optim.SGD(fused=True)`; clipping that of
`clip_grad_norm_(foreach=True)`: the same bits, which a test compares.
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
        if float(length) < 0.999 * norm:  # most steps: the factor below would be above 1
            return
        factor = norm / (length + 1e-6)
        if not float(factor) >= 1.0:  # a factor of 1 changes nothing, and not a number must pass on
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients that are there, which are gone then: they become the first velocities."""
        groups: dict[tuple[bool, torch.dtype, torch.device], tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            g, p.grad = _laid_out(p.grad, p), None
            first = i not in self._velocity
            params, grads, velocity = groups.setdefault((first, p.dtype, p.device), ([], [], []))
            params.append(p)
            grads.append(g)
            if self.momentum:
                self._velocity[i] = g if first else _laid_out(self._velocity[i], p)
                velocity.append(self._velocity[i])
        for (first, *_), (params, grads, velocity) in groups.items():
            torch._fused_sgd_(
                params, grads, velocity, weight_decay=self.weight_decay, momentum=self.momentum, lr=self.lr,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=first,
            )  # fmt: skip


def _laid_out(x: Tensor, p: Tensor) -> Tensor:
    """x in the memory order of p: the fused update walks through memory, not through indices."""
    return x if x.stride() == p.stride() else torch.empty_like(p).copy_(x)
