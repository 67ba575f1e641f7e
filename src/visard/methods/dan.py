"""DAN: Long et al., Learning Transferable Features with Deep Adaptation Networks, ICML 2015: the discrepancy of source
and target features (MMD with several Gaussian kernels) is part of the loss. A baseline of FedFR-DA; it pools pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from visard.core import Leaves
from visard.errors import UsageError
from visard.heads import Head, direction
from visard.methods.adapting import Adapting, Penalty
from visard.ops.mmd import mmd2, squared_distances


@dataclass(frozen=True)
class DAN(Adapting):
    """The head learns from the source while MMD pulls the two domains' features together."""

    name = "dan"
    title = "domain adaptation by MMD on pooled pictures"
    paper = "Long et al. 2015"
    pools = frozenset({Leaves.pictures, Leaves.labels})

    kernels: int = 5  # Gaussians, each twice as wide (in squared distance) as the one before

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernels < 1:
            raise UsageError(f"method.kernels = {self.kernels}: must be at least 1")

    def penalty(self, head: Head, progress: Callable[[], float]) -> Penalty:
        def gap(source: Tensor, target: Tensor) -> Tensor:
            x, y = direction(source), direction(target)
            return mmd2(x, y, bandwidths(torch.cat([x, y]), self.kernels))

        return gap


def bandwidths(features: Tensor, kernels: int) -> list[float]:
    r"""$\sigma_k$ with $2\sigma_k^2 = 2^k \bar d$, k centred on 0: around the mean squared distance of the batch."""
    with torch.no_grad():
        n = len(features)
        mean = float(squared_distances(features, features).sum()) / (n * (n - 1))
    middle = kernels // 2
    return [max(mean, 1e-12) ** 0.5 * (2.0 ** (k - middle) / 2) ** 0.5 for k in range(kernels)]
