"""Where features are compared and with which kernel: what all parties of an encrypted comparison agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visard.errors import UsageError
from visard.heads import direction
from visard.ops.mmd import Polynomial, fit_quadratic, median_alpha, squared_distances, taylor

INSIDE = 1 - 1e-6  # rounding must not carry a feature outside the ball


@dataclass(frozen=True)
class Compare:
    """Where and with which kernel features are compared."""

    unit: bool = True  # at length 1, as faces are compared; else as they are, shortened to `radius` where longer
    radius: float = 10.0  # longest feature that is not shortened
    project: int = 0  # length of a fixed random projection before that; 0 = none
    kernel: Literal["fitted", "taylor"] = "fitted"  # fitted: the nearest quadratic; taylor: the paper's
    degree: int = 2  # of the Taylor polynomial
    alpha: float = 0.0  # of exp(-alpha d), d in units of the ball; 0: 1 / median distance of the sources' features

    def __post_init__(self) -> None:
        if self.radius <= 0 or self.alpha < 0 or self.project < 0:
            raise UsageError("method.compare: radius must be positive, alpha and project not negative")
        if self.degree < 1 or (self.kernel == "fitted" and self.degree != 2):
            raise UsageError(f"method.compare.degree = {self.degree}: 1 or more, and 2 for a fitted kernel")

    def length(self, embedding: int) -> int:
        """L, of what is compared."""
        return self.project or embedding

    def inside(self, features: Tensor) -> Tensor:
        """Features (n, E) -> (n, L) inside the unit ball."""
        v: Tensor = features
        if self.project:
            rng = torch.Generator().manual_seed(0)  # public, the same at all parties
            basis = torch.linalg.qr(torch.randn(v.shape[1], self.project, generator=rng, dtype=torch.float64)).Q
            v = v @ basis.to(v.dtype)
        if self.unit:
            return direction(v) * INSIDE
        length = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        shortened: Tensor = v * (INSIDE / length.clamp_min(self.radius))
        return shortened

    def polynomial(self, v: Tensor) -> Polynomial:
        """The kernel for features like these."""
        alpha = self.alpha or median_alpha(v)
        if self.kernel == "taylor":
            return taylor(alpha, self.degree)
        return fit_quadratic(alpha, squared_distances(v, v)[~torch.eye(len(v), dtype=torch.bool)])
