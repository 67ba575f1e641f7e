"""Keep a client's features near those of the model that the round started from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from visard.heads import direction


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norm goes on using the statistics of the batch in training mode, but writes none down."""
    tracking = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


def cosine_drift(features: Tensor, reference: Tensor) -> Tensor:
    """Mean over the batch of 1 - cos(features, reference), both (B, E)."""
    return 1 - (direction(features.float()) * direction(reference.float())).sum(dim=1).mean()


class Drift:
    r"""The penalty $C (1 - \cos(f_{global}(x), f_{local}(x)))$ of Gansekoele et al., Eq. 4.

    `model` is copied as it is now and frozen. The copy sees batches as the training network does, batch norm
    included, so that the penalty is 0 at the start of the round and only what changed since then counts.
    """

    def __init__(self, model: nn.Module, C: float) -> None:
        self.C = C
        self.model = copy.deepcopy(model).requires_grad_(False).train()

    def reference(self, x: Tensor) -> Tensor:
        """The features that the round's first model gives (B, E)."""
        with torch.no_grad(), still_statistics(self.model):
            # `forward` itself: a compiled network would be compiled again for its copy
            features: Tensor = self.model.forward(x)
        return features

    def penalty(self, features: Tensor, reference: Tensor) -> Tensor:
        """C times the drift from the reference."""
        return self.C * cosine_drift(features, reference)

    def __call__(self, x: Tensor, features: Tensor) -> Tensor:
        return self.penalty(features, self.reference(x))
