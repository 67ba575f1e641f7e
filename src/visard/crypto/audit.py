r"""The audit of encrypted MMD: a real exchange, then what a client can compute about the others from what it decrypts.

Every own feature $a_i$ (n, L) comes with $z_i$ and $s_i = a_i \cdot B_1$ (`crypto.moments`), which are linear in the
other side's unknown moments: with enough samples there is one solution.
"""

from __future__ import annotations

import math
import secrets
from typing import Any

import torch
from torch import Tensor

from visard.crypto.moments import epsilon, moments, noisy, scales
from visard.crypto.packed import Packed
from visard.crypto.paillier import generate
from visard.errors import UsageError
from visard.learning.mmd import Polynomial, fit_quadratic, squared_distances

BITS = 512  # the length of the key does not change what is revealed


def guess_moments(a: Tensor, values: Tensor, kernel: Polynomial) -> tuple[Tensor, Tensor]:
    r"""B1 (L,) and M2 (L, L) of the other side from decrypted values (n, L + 1), as well as the samples tell.

    $s = A B_1$ gives B1 in the span of the own features; $z_i + |a_i|^2 B_1 = P a_i + t$ then gives the symmetric
    $P = 2 M_2 + Q I$ on the span of their differences. Where nothing is known of P it is taken to be as elsewhere.
    """
    a, L = a.double(), a.shape[1]
    z, s = values[:, :L] / scales(kernel)[0], values[:, L]
    square = (a * a).sum(1)[:, None]
    B1 = torch.linalg.pinv(a, rtol=1e-6) @ s
    # combinations of samples in which t cancels and, unless B1 is known, |a|^2 B1 too
    left_out = torch.ones_like(square) if len(a) >= L else torch.cat([torch.ones_like(square), square], 1)
    y = z + square * B1 if len(a) >= L else z
    x, y = (v - left_out @ torch.linalg.lstsq(left_out, v).solution for v in (a, y))
    inverse = torch.linalg.pinv(x, rtol=1e-6)
    known, seen = inverse @ x, inverse @ y  # the projector on what is known, and P behind it
    eye = torch.eye(L, dtype=a.dtype)
    P = seen + seen.t() - seen @ known + (eye - known) * seen.trace() / known.trace().clamp_min(1)
    return B1, (P - P.trace() / (2 + L) * eye) / 2  # the trace of P is (2 + L) Q


def determined(n: int, L: int) -> tuple[float, float]:
    """Shares of the dimensions of B1 and of M2 that the values of n own samples determine.

    With k = L - n >= 0 the equations leave 1 + 2 k + k (k + 1) / 2 unknowns of M2 free, and k of B1; with n > L none.
    """
    k = max(0, L - n)
    free = 1 + 2 * k + k * (k + 1) // 2 if n <= L else 0
    return 1 - k / L, max(0.0, 1 - free / (L * (L + 1) / 2))


def audit(samples: int, length: int, peers: int, noise: float, seed: int) -> dict[str, Any]:
    """Metrics of one exchange on random features: how much of a peer's moments is determined, how far off the guess?

    Errors are relative to the length of what is guessed. With several peers their answers are added up, as
    `sums = true` does, and the guess is compared with each peer and with the average. What is determined is a share
    of the dimensions of the mean and of the second moments.
    """
    if samples < 2 or length < 1 or peers < 1 or not 0 <= noise < math.inf:
        raise UsageError("an audit needs two samples, one dimension and one peer or more, and no negative noise")
    rng = torch.Generator().manual_seed(seed)
    own, *others = (_features(samples, length, rng) for _ in range(peers + 1))
    d = squared_distances(own, own)[~torch.eye(samples, dtype=torch.bool)]
    plan = Packed(fit_quadratic(1 / float(d.median()), d), length, BITS)
    key = generate(BITS, insecure=True)
    offer = plan.offer(key.public, own)
    said = [noisy(moments(b), samples, noise, secrets.token_bytes(16)) for b in others]
    total = plan.total(key.public, [plan.answer(key.public, offer, samples, m, 1 / peers) for m in said])
    B1, M2 = guess_moments(own, plan.values(key, total, samples), plan.kernel)
    means = [b.mean(0) for b in others]
    of_mean, of_second = determined(samples, length)
    return {
        "samples": samples, "length": length, "peers": peers, "noise": noise,
        "epsilon_of_one_batch": epsilon(noise) if noise else None,
        "determined_of_the_mean": of_mean, "determined_of_the_second_moments": of_second,
        "error_of_a_peer_s_mean": min(_error(B1, m) for m in means),
        "error_of_the_average_mean": _error(B1, torch.stack(means).mean(0)),
        "error_of_the_second_moments": _error(M2, torch.stack([moments(b).M2 for b in others]).mean(0)),
    }  # fmt: skip


def _features(n: int, L: int, rng: torch.Generator) -> Tensor:
    """Inside the unit ball, of different lengths and with a mean of their own."""
    x = torch.randn(n, L, generator=rng, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True) * (0.5 + 0.5 * torch.rand(n, 1, generator=rng, dtype=torch.float64))
    x = x + 0.5 * torch.randn(L, generator=rng, dtype=torch.float64) / L**0.5
    inside: Tensor = x / x.norm(dim=1).max() * 0.99
    return inside


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
