"""Maximum mean discrepancy: how far apart two sets of features lie, as a loss (Kang et al. 2022, Eqs. 3-7).

a (n, L), b (m, L)   features of the two sides          d = |a_i - b_j|^2
k(d)                 kernel as a function of the squared distance
c                    coefficients of a polynomial kernel: k(d) = c[0] + c[1] d + c[2] d^2 + ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visard.core.method import AtLeastOne, NotNegative, Number, Positive
from visard.errors import UsageError, VisardError
from visard.learning.heads import direction

Kernel = Callable[[Tensor], Tensor]  # of squared distances, elementwise
INSIDE = 1 - 1e-6  # rounding must not carry a feature outside the unit ball
BEYOND = 1.25  # times the distance that a fitted kernel must reach: where its slope may vanish
STEPS = 4  # lengths that a client reveals are rounded up to one of these steps in each doubling


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """|a_i - b_j|^2 (n, m); rounding cannot make it negative."""
    cross = (a * a).sum(1)[:, None] - 2 * a @ b.t() + (b * b).sum(1)
    return cross.clamp_min(0)


def rbf(bandwidths: Sequence[float]) -> Kernel:
    r"""The mean over $\sigma$ of $\exp(-d / 2\sigma^2)$; the paper's $\alpha$ is $1 / 2\sigma^2$."""
    if not bandwidths or min(bandwidths) <= 0:
        raise UsageError(f"bandwidths {list(bandwidths)}: needs one or more positive numbers")
    return lambda d: torch.stack([torch.exp(-d / (2 * s * s)) for s in bandwidths]).mean(0)


@dataclass(frozen=True)
class Polynomial:
    """k(d) = sum of c[i] d^i: the kernels that an additive cipher can compute."""

    c: tuple[float, ...]

    def __call__(self, d: Tensor) -> Tensor:
        value = torch.full_like(d, self.c[-1])
        for coefficient in reversed(self.c[:-1]):  # Horner
            value = value * d + coefficient
        return value

    @property
    def degree(self) -> int:
        return len(self.c) - 1

    def slope(self, d: float) -> float:
        """k'(d): positive where the kernel pushes apart."""
        return sum(i * c * d ** (i - 1) for i, c in enumerate(self.c) if i)


def taylor(alpha: float, degree: int) -> Polynomial:
    r"""$\exp(-\alpha d)$ truncated after $d^K$. For K = 2 its slope turns at $\alpha d = 1$: keep distances below."""
    if degree < 1 or alpha <= 0:
        raise UsageError(f"a Taylor kernel of degree {degree}, alpha {alpha}: both must be positive")
    return Polynomial(tuple((-alpha) ** i / math.factorial(i) for i in range(degree + 1)))


def fit_quadratic(alpha: float, d: Tensor, reach: float = 0.0) -> Polynomial:
    r"""The quadratic nearest to $\exp(-\alpha d)$ at the given distances, by least squares, if it falls far enough.

    A quadratic turns somewhere, and pushes apart what is farther away. `reach` is a distance that the other side may
    have in the mean: one that would turn before BEYOND times it gives way to the one that turns just there and falls
    as fast as the exponential in the mean over d. Its slope is nearly constant near 0: the farther the reach, the more
    it compares means alone. Solved in units of the largest distance, so that the normal equations are well conditioned.
    """
    d = d.detach().double().flatten()
    if not len(d) or not torch.isfinite(d).all() or float(d.max()) <= 0:
        raise VisardError("a kernel cannot be fitted: all distances are zero or not finite")
    unit = float(d.max())
    powers = torch.stack([(d / unit) ** i for i in range(3)], 1)
    kernel = torch.exp(-alpha * d)
    solution = torch.linalg.lstsq(powers, kernel[:, None], driver="gelsd").solution[:, 0]
    nearest = Polynomial(tuple(float(c) / unit**i for i, c in enumerate(solution)))
    turn = BEYOND * reach
    if not reach or (nearest.slope(0) < 0 and nearest.slope(turn) <= 0):
        return nearest
    share = 1 - float(d.mean()) / turn  # of the slope at 0 that is left in the mean
    if share <= 0:
        raise VisardError("a kernel cannot be fitted: distances are larger than their reach")
    c1 = -alpha * float(kernel.mean()) / share
    c2 = -c1 / (2 * turn)
    return Polynomial((float((kernel - c1 * d - c2 * d * d).mean()), c1, c2))


def median_alpha(features: Tensor) -> float:
    r"""$1 / \mathrm{median}(d)$ over the pairs of one set: the usual choice of $\alpha$."""
    d = squared_distances(features, features)
    off = d[~torch.eye(len(d), dtype=torch.bool, device=d.device)]
    if not len(off) or float(off.median()) <= 0:
        raise VisardError("the median distance of the features is zero: no bandwidth fits them")
    return 1 / float(off.median())


def within(a: Tensor, kernel: Kernel) -> Tensor:
    """Mean kernel over the pairs of different rows of one side (Eqs. 4, 5): unbiased."""
    n = len(a)
    if n < 2:
        raise VisardError(f"an unbiased MMD needs two rows or more on each side, not {n}")
    k = kernel(squared_distances(a, a))
    off = ~torch.eye(n, dtype=torch.bool, device=a.device)  # a product with 0 would turn an infinity into nan
    return k[off].sum() / (n * (n - 1))


def between(a: Tensor, b: Tensor, kernel: Kernel) -> Tensor:
    """-2 times the mean kernel over all pairs of both sides (Eq. 6)."""
    return -2 * kernel(squared_distances(a, b)).mean()


def discrepancy(a: Tensor, b: Tensor, kernel: Kernel) -> Tensor:
    """The unbiased squared MMD with the same kernel in all three parts (Eq. 3)."""
    return within(a, kernel) + within(b, kernel) + between(a, b, kernel)


def mmd2(x: Tensor, y: Tensor, bandwidths: Sequence[float]) -> Tensor:
    r"""Unbiased squared MMD of x (n, L) and y (m, L) with the mean of Gaussian kernels of these $\sigma$; a scalar."""
    return discrepancy(x, y, rbf(bandwidths))


@dataclass(frozen=True)
class Compare:
    """Where and with which kernel features are compared: what all clients of an encrypted comparison agree on."""

    unit: bool = True  # at length 1, as faces are compared; else as they are, shortened to `radius` where longer
    radius: Positive = 10.0  # longest feature that is not shortened
    project: Number = 0  # length of a fixed random projection before that; 0 = none
    kernel: Literal["fitted", "taylor"] = "fitted"  # fitted: the nearest quadratic; taylor: the paper's
    degree: AtLeastOne = 2  # of the Taylor polynomial
    alpha: NotNegative = 0.0  # of exp(-alpha d), d in units of the ball; 0: 1 / median distance of the sources' data

    def __post_init__(self) -> None:
        if self.kernel == "fitted" and self.degree != 2:
            raise UsageError(f"method.compare.degree = {self.degree}: must be 2 for a fitted kernel")

    def length(self, embedding: int) -> int:
        """L, of what is compared."""
        return self.project or embedding

    def inside(self, features: Tensor) -> Tensor:
        """Features (n, E) -> (n, L) inside the unit ball, on the CPU: few numbers, which float64 and ciphers follow."""
        v: Tensor = features.cpu()
        if self.project:
            rng = torch.Generator().manual_seed(0)  # public, the same at all clients
            basis = torch.linalg.qr(torch.randn(v.shape[1], self.project, generator=rng, dtype=torch.float64)).Q
            v = v @ basis.to(v.dtype)
        if self.unit:
            return direction(v) * INSIDE
        length = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        shortened: Tensor = v * (INSIDE / length.clamp_min(self.radius))
        return shortened

    @property
    def asks_lengths(self) -> bool:
        """Whether a kernel that suits everyone needs to know how long features are: of length 1 it is known."""
        return self.kernel == "fitted" and not self.unit

    def polynomial(self, v: Tensor, longest: float = 1.0) -> Polynomial:
        """The kernel for features like these, which attracts those of others up to the length `longest`.

        The mean distance of two sides is at most (their root mean squares of the length, added up) squared.
        """
        alpha = self.alpha or median_alpha(v)
        if self.kernel == "taylor":
            return taylor(alpha, self.degree)
        own = spoken_length(v) if self.asks_lengths else 1.0
        reach = (own + min(1.0, max(own, longest))) ** 2
        return fit_quadratic(alpha, squared_distances(v, v)[~torch.eye(len(v), dtype=torch.bool)], reach)


def spoken_length(v: Tensor) -> float:
    """The root mean square of the lengths, rounded up to a step, at most 1: all that a client reveals of them."""
    square = float((v.detach().double() ** 2).sum(1).mean())
    if not 0 < square < math.inf:
        raise VisardError("all features are zero or not finite")
    return float(min(1.0, 2.0 ** (math.ceil(STEPS * math.log2(square) / 2) / STEPS)))
