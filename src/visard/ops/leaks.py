r"""What a party can compute about the other side from its own plaintext gradients of encrypted MMD.

The gradient $g_i = -\frac{2}{n} \nabla_{a_i} E_b k$ by every own feature $a_i$ (n, L) says
$(2 M_2 + Q I) a_i - |a_i|^2 B_1 - 2 (a_i \cdot B_1) a_i + t
= \frac{1}{4 c_2} (-\frac{n}{2} g_i - 2 c_1 a_i) - |a_i|^2 a_i$ with $t = -\frac{c_1}{2 c_2} B_1 - B_3$:
linear in the unknown moments, and with enough samples there is one solution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visard.ops.mmd import Polynomial
from visard.ops.moments import Moments, quadratic


def recover_mean(a: Tensor, g: Tensor, kernel: Polynomial) -> Tensor:
    """B1 (L,) of the other side from a kernel of degree 1; one sample is enough."""
    return (a + len(a) / 2 * g / (2 * kernel.c[1])).mean(0)


def recover_moments(a: Tensor, g: Tensor, kernel: Polynomial) -> Moments | None:
    """B1, M2 and B3 of the other side from a quadratic kernel; None where the samples do not determine them.

    R4 stays unknown (not a number): only the loss contains it.
    """
    a, g = a.double(), g.double()
    n, L = a.shape
    _, c1, c2 = quadratic(kernel)
    square = (a * a).sum(1)
    left = (-n / 2 * g - 2 * c1 * a - 4 * c2 * square[:, None] * a) / (4 * c2)  # (n, L)
    i, j = torch.triu_indices(L, L)
    unknowns = len(i) + 2 * L  # P = 2 M2 + Q I (symmetric), B1, t
    if n * L < unknowns:
        return None
    A = a.new_zeros(n, L, unknowns)
    at = torch.arange(len(i))
    A[:, i, at] = a[:, j]
    A[:, j, at] = a[:, i]  # on the diagonal both lines write the same
    rows = torch.arange(L)
    A[:, rows, len(i) + rows] -= square[:, None]
    A[:, :, len(i) : len(i) + L] -= 2 * a[:, :, None] * a[:, None, :]
    A[:, rows, len(i) + L + rows] = 1
    solved = torch.linalg.lstsq(A.reshape(n * L, unknowns), left.reshape(-1, 1), rcond=1e-12, driver="gelsy")
    if int(solved.rank) < unknowns:
        return None
    x = solved.solution[:, 0]
    P = a.new_zeros(L, L)
    P[i, j] = P[j, i] = x[: len(i)]
    B1, t = x[len(i) : len(i) + L], x[len(i) + L :]
    Q = P.trace() / (2 + L)  # the trace of P is 2 Q + L Q
    M2 = (P - Q * torch.eye(L, dtype=a.dtype)) / 2
    return Moments(B1, M2, -t - c1 / (2 * c2) * B1, torch.tensor(float("nan"), dtype=a.dtype))
