r"""Gaussian noise on the moments of a batch, and what it guarantees for one sample of a party.

Features lie inside the unit ball, so exchanging one of n samples moves B1 by at most 2/n, M2 by $\sqrt 2 / n$
(Frobenius), B3 by 2/n and R4 by 1/n: all together by $\sqrt{11} / n$. Noise of $\sigma \sqrt{11} / n$ on every entry
makes one batch $\frac{1}{2\sigma^2}$-zCDP (Bun and Steinke 2016); batches add up, and nothing is claimed for sampling.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
import torch
from torch import Tensor

from visard.ops.moments import Moments

SENSITIVITY = math.sqrt(4 + 2 + 4 + 1)  # times 1 / n
DELTA = 1e-5  # of the differential privacy that runs log


def noisy(m: Moments, n: int, multiplier: float) -> Moments:
    """The moments of a batch of n with noise from the system's randomness, which no seed of the run determines."""
    if not multiplier:
        return m
    rng = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
    scale = multiplier * SENSITIVITY / n

    def add(x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.asarray(rng.normal(0.0, scale, tuple(x.shape))))

    M2 = add(m.M2)
    return Moments(add(m.B1), (M2 + M2.t()) / 2, add(m.B3), add(m.R4))


def epsilon(batches: int, multiplier: float, delta: float) -> float:
    r"""$\epsilon$ of $(\epsilon, \delta)$-differential privacy for one sample after so many batches.

    $\rho = T / 2\sigma^2$ and $\epsilon = \rho + 2 \sqrt{\rho \ln(1 / \delta)}$; infinite without noise.
    """
    if not multiplier:
        return math.inf if batches else 0.0
    rho = batches / (2 * multiplier**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))
