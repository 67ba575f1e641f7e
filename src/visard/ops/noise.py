r"""Gaussian noise on the moments of a batch, and what it guarantees for one sample of that batch.

Features lie inside the unit ball, so exchanging one of n samples moves B1 by at most 2/n, M2 by $\sqrt 2 / n$
(Frobenius), B3 by 2/n and R4 by 1/n: all together by $\sqrt{11} / n$, where no sample moves the features of others.
Noise of $\sigma \sqrt{11} / n$ on every entry makes the answer of one batch, for one given network,
$(\epsilon, \delta)$-private. Nothing is claimed for a run: the network itself is trained on the samples without noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from scipy.special import log_ndtr
from torch import Tensor

from visard.errors import UsageError
from visard.ops.moments import Moments

SENSITIVITY = math.sqrt(4 + 2 + 4 + 1)  # times 1 / n
DELTA = 1e-5  # of the differential privacy that runs log
MIXED = "noise: one sample moves the features of others, as batch norm does: take model.name = tiny_nobn, or an mlp"


def noisy(m: Moments, n: int, multiplier: float, key: bytes) -> Moments:
    """The moments of a batch of n with noise that 16 secret bytes determine: asked again, it is the same noise.

    With new noise every time, whoever makes a party answer often enough could average it away.
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
