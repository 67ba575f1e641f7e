r"""The mean of a quadratic kernel over the other side's features, from moments alone.

    a (n, L)    own features               b (m, L)   the other side's, known only through moments
    B1 = E b    M2 = E b b^T    Q = tr M2    B3 = E |b|^2 b    R4 = E |b|^4
    k(d) = c0 + c1 d + c2 d^2

With $s_i = a_i \cdot B_1$ and $z_i = (2 M_2 + Q I) a_i - |a_i|^2 B_1 - \frac{c_1}{2 c_2} B_1 - B_3$,
$\nabla_{a_i} E_b k = 2 c_1 a_i + 4 c_2 |a_i|^2 a_i + 4 c_2 (z_i - 2 s_i a_i)$:
what the owner of a needs is linear in $(a_i, |a_i|^2, 1)$ with coefficients that only the other side knows, and
linear in the moments, so weighted sums over several sides are as easy as one. For c2 = 0 it is $2 c_1 (a_i - B_1)$.

Gaussian noise on the moments of a batch protects one sample of it. Features lie inside the unit ball and no sample
moves the features of others. So exchanging one of n samples, x of length r for y of length s with a cosine of c between
them, moves (B1, M2, B3, R4) by 1 / n times the root of

$r^2 + s^2 - 2 r s c + r^4 + s^4 - 2 r^2 s^2 c^2 + r^6 + s^6 - 2 r^3 s^3 c + (r^4 - s^4)^2 \leq 8$:

it falls with c (its slope in c falls, and is $-2 r s (1 - r s)^2 \leq 0$ at c = -1), grows when r and s grow by the
same factor, and for c = -1 and r = 1 it grows with s, up to 8 at s = 1: opposite ends of the ball. Noise of
$\sigma \sqrt 8 / n$ on every entry makes the answer of one batch, for one given network, $(\epsilon, \delta)$-private.
Nothing is claimed for a run: the network is trained on the samples without noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import log_ndtr
from torch import Tensor

from visard.errors import UsageError, VisardError
from visard.learning.mmd import Polynomial

SENSITIVITY = math.sqrt(8)  # times 1 / n
DELTA = 1e-5  # of the differential privacy that runs log
MIXED = "noise: one sample moves the features of others, as batch norm does: take model.name = tiny_nobn, or an mlp"


@dataclass(frozen=True)
class Moments:
    B1: Tensor  # (L,)
    M2: Tensor  # (L, L)
    B3: Tensor  # (L,)
    R4: Tensor  # ()

    @property
    def Q(self) -> Tensor:
        return self.M2.trace()


def moments(b: Tensor) -> Moments:
    """Moments of the rows of b, in float64."""
    b = b.detach().double()
    square = (b * b).sum(1)
    return Moments(b.mean(0), b.t() @ b / len(b), (square[:, None] * b).mean(0), (square * square).mean())


@dataclass(frozen=True)
class Rows:
    """An affine map of (a, |a|^2, 1): `by_a` (r, L), `by_norm` (r,), `constant` (r,)."""

    by_a: Tensor
    by_norm: Tensor
    constant: Tensor

    def __call__(self, a: Tensor) -> Tensor:
        """Values (n, r) for the rows of a."""
        return a @ self.by_a.t() + (a * a).sum(1)[:, None] * self.by_norm + self.constant

    def matrix(self) -> Tensor:
        """The factors (r, L + 1) of a and of |a|^2."""
        return torch.cat([self.by_a, self.by_norm[:, None]], 1)

    def bound(self) -> float:
        """The largest value for features inside the unit ball."""
        return float((torch.linalg.vector_norm(self.by_a, dim=1) + self.by_norm.abs() + self.constant.abs()).max())


def scales(kernel: Polynomial) -> tuple[float, float]:
    """Public factors of z and of e that keep both near 1 whatever the kernel's coefficients are."""
    c1, c2 = kernel.c[1], kernel.c[2]
    return min(1.0, abs(2 * c2 / c1)), 1 / max(1.0, abs(c1), 2 * abs(c2))


def rows_of(m: Moments, kernel: Polynomial, weight: float, loss: bool = False, extra: float = 0.0) -> Rows:
    r"""What one side contributes to the other's gradient: z (L rows, scaled), s, and with `loss` also
    $e_i = c_1 Q + c_2 R_4 - 2 c_2 a_i \cdot B_3$ (scaled) plus a number of its own.
    """
    _, c1, c2 = quadratic(kernel)
    by_z, by_e = scales(kernel)
    L = len(m.B1)
    zero, one = m.B1.new_zeros(1), m.B1.new_ones(1)
    A = [by_z * (2 * m.M2 + m.Q * torch.eye(L, dtype=torch.float64)), m.B1[None]]
    norm = [-by_z * m.B1, zero]
    constant = [-by_z * (c1 / (2 * c2) * m.B1 + m.B3), zero]
    if loss:
        A.append(-2 * c2 * by_e * m.B3[None])
        norm.append(zero)
        constant.append(by_e * (c1 * m.Q + c2 * m.R4 + extra) * one)
    return Rows(weight * torch.cat(A), weight * torch.cat(norm), weight * torch.cat(constant))


def gradient(a: Tensor, values: Tensor, kernel: Polynomial, weights: float) -> Tensor:
    r"""$\sum_j w_j \nabla_{a_i} E_j k$ (n, L) in float64; `weights` is the sum of the w.

    `values` are those of the summed rows (n, L + 1 or more), or for c2 = 0 the weighted sum of B1 (1, L or more).
    """
    a, L = a.detach().double(), a.shape[1]
    if kernel.degree == 1:
        return 2 * kernel.c[1] * (weights * a - values[0, :L])
    _, c1, c2 = quadratic(kernel)
    z, s = values[:, :L] / scales(kernel)[0], values[:, L, None]
    square = (a * a).sum(1)[:, None]
    return weights * (2 * c1 * a + 4 * c2 * square * a) + 4 * c2 * (z - 2 * s * a)


def mean_kernel(a: Tensor, values: Tensor, kernel: Polynomial, weights: float) -> Tensor:
    r"""$\sum_j w_j E_j k$ for each row of a (n,), plus the sum of w times `extra`.

    Needs the row e, or for c2 = 0 the weighted sum of Q and `extra` / c1 behind that of B1.
    """
    a, L = a.detach().double(), a.shape[1]
    square = (a * a).sum(1)
    if kernel.degree == 1:
        c0, c1 = kernel.c
        return weights * (c0 + c1 * square) - 2 * c1 * a @ values[0, :L] + c1 * float(values[0, L])
    c0, c1, c2 = quadratic(kernel)
    by_z, by_e = scales(kernel)
    z, s, e = values[:, :L] / by_z, values[:, L], values[:, L + 1] / by_e
    return weights * (c0 + c1 * square + c2 * square**2) - c1 * s + c2 * (2 * (a * z).sum(1) - 2 * square * s) + e


def quadratic(kernel: Polynomial) -> tuple[float, float, float]:
    """The three coefficients; moments of this order serve no higher degree."""
    if kernel.degree != 2 or not kernel.c[1] or not kernel.c[2]:
        raise VisardError(f"a kernel of degree {kernel.degree} where a quadratic one is needed")
    return kernel.c[0], kernel.c[1], kernel.c[2]


def noisy(m: Moments, n: int, multiplier: float, key: bytes) -> Moments:
    """The moments of a batch of n with noise that 16 secret bytes determine: asked again, it is the same noise.

    With new noise every time, a server that makes a client answer often enough could average it away.
    """
    if not multiplier:
        return m
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "big")))
    scale = multiplier * SENSITIVITY / n

    def add(x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.asarray(rng.normal(0.0, scale, tuple(x.shape))))

    M2 = add(m.M2)
    return Moments(add(m.B1), (M2 + M2.t()) / 2, add(m.B3), add(m.R4))


def epsilon(multiplier: float, delta: float = DELTA) -> float:
    r"""$\epsilon$ of one batch: exact for Gaussian noise (Balle and Wang 2018, Theorem 8); infinite without noise.

    $\delta(\epsilon) = \Phi(\frac{1}{2\sigma} - \epsilon\sigma) - e^\epsilon \Phi(-\frac{1}{2\sigma} - \epsilon\sigma)$
    falls with $\epsilon$: the smallest one with $\delta(\epsilon) \leq \delta$ is found by halving.
    """
    if not multiplier:
        return math.inf
    low, high = 0.0, 1.0
    while _delta(high, multiplier) > delta:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(middle, multiplier) > delta else (low, middle)
    return high


def _delta(eps: float, sigma: float) -> float:
    """In logarithms: both factors of the second term leave the range of floats."""
    first, second = log_ndtr(1 / (2 * sigma) - eps * sigma), eps + log_ndtr(-1 / (2 * sigma) - eps * sigma)
    return float(-math.exp(first) * math.expm1(second - first)) if second < first else 0.0


def check_apart(weights: Iterable[str]) -> None:
    """Refuse names of weights that are batch norm's."""
    if any(name.endswith("running_mean") for name in weights):
        raise UsageError(f"method.{MIXED}")
