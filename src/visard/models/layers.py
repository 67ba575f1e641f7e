"""Layers whose backward pass torch does slowly on a CPU: the same weights, and the same code in evaluation mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import prelu


class _PRelu(torch.autograd.Function):
    """PReLU whose gradients are those of torch, bit for bit, computed with vector instructions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return prelu(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        (g,) = grads
        slope, positive = weight.view(1, -1, *[1] * (x.ndim - 2)), x > 0
        by_weight = None
        if ctx.needs_input_grad[1]:
            places = [0, *range(2, x.ndim)]
            by_weight = torch.where(positive, 0.0, x * g).sum(places).view(weight.shape)
        return torch.where(positive, g, slope * g), by_weight


class PReLU(nn.PReLU):
    """x where it is positive, a slope that is learnt times x elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.ndim < 2 or x.dtype != self.weight.dtype or self.num_parameters != x.shape[1]:
            return super().forward(x)
        found: Tensor = _PRelu.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return found


class MapConv2d(nn.Conv2d):
    """A depthwise convolution as large as its map: a sum over places, each with its weight."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.training or input.shape[2:] != weight.shape[2:] or bias is not None:
            found: Tensor = super()._conv_forward(input, weight, bias)
            return found
        return (input * weight.transpose(0, 1)).sum((2, 3), keepdim=True)
