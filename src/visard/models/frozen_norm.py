"""Parts of a network that stay as they are while the rest trains."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def keep_statistics(network: nn.Module) -> None:
    """Batch norm of this network and of its copies uses its running statistics and leaves them alone, for good.

    `train()` no longer reaches it, so no method has to know. Its scale and shift still train; names and weights stay.
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
