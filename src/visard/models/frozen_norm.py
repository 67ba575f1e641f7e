"""Batch norm that keeps its statistics while the rest of the network trains (`model.frozen_norm`)."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def keep_statistics(network: nn.Module) -> None:
    """Make batch norm of this network and its copies use its running statistics and never change them.

    `train()` no longer has an effect on it, so methods need not know. Its scale and shift still train.
    """
    for module in network.modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            kind: Any = type(module)
            module.__class__ = _still(kind)
            module.eval()


@cache
def _still(kind: type[Any]) -> type[Any]:
    """The kind of layer, always in evaluation mode."""

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        return nn.Module.train(self, False)

    return type(kind.__name__, (kind,), {"train": train, "__module__": kind.__module__})
