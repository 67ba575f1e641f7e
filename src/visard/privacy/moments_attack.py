"""The audit of encrypted MMD: a real exchange, then what one party computes of the others from what it decrypts."""

from __future__ import annotations

import math
import secrets
from typing import Any

import torch
from torch import Tensor

from visard.crypto.packed import Packed
from visard.crypto.paillier import generate
from visard.errors import UsageError
from visard.ops.leaks import determined, guess_moments
from visard.ops.mmd import fit_quadratic, squared_distances
from visard.ops.moments import moments
from visard.ops.noise import epsilon, noisy

BITS = 512  # what is revealed does not depend on the key


def audit(samples: int, length: int, peers: int, noise: float, seed: int) -> dict[str, Any]:
    """Figures of one exchange on random features: how much of a peer's moments is determined, how far off the guess?

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
