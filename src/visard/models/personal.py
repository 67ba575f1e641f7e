"""Personal models: a backbone, and after it a linear layer of one client (entries `transform.weight`, `.bias`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visard.errors import VisardError

PREFIX = "transform."


class Transformed(nn.Module):
    """Pi(backbone(x)): (B, 3, size, size) -> (B, embedding)."""

    def __init__(self, backbone: nn.Module, transform: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.transform = backbone, transform

    def forward(self, x: Tensor) -> Tensor:
        # `forward` itself: a compiled backbone would be compiled again for evaluation
        out: Tensor = self.transform(self.backbone.forward(x))
        return out


def split_transform(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], nn.Linear | None]:
    """The backbone's entries, and the layer that follows it if there is one."""
    rest = {name: value for name, value in weights.items() if not name.startswith(PREFIX)}
    if len(rest) == len(weights):
        return weights, None
    weight, bias = (weights.get(PREFIX + name) for name in ("weight", "bias"))
    if len(weights) - len(rest) != 2 or weight is None or bias is None:
        raise VisardError("a personal model needs transform.weight and transform.bias")
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise VisardError(f"transform.weight {tuple(weight.shape)} and .bias {tuple(bias.shape)} do not fit together")
    if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        raise VisardError("the transformation holds NaN or infinity")
    layer = nn.Linear(weight.shape[1], weight.shape[0]).requires_grad_(False)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return rest, layer


def with_transform(backbone: nn.Module, transform: nn.Linear | None, embedding: int) -> nn.Module:
    """The backbone alone, or followed by the client's own layer, which must take its features."""
    if transform is not None and transform.in_features != embedding:
        raise VisardError(f"transform.weight takes features of {transform.in_features}, the network gives {embedding}")
    return backbone if transform is None else Transformed(backbone, transform)
