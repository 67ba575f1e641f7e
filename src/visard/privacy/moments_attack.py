"""The audit of encrypted MMD: a real exchange, then what one party computes of the others from its own gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visard.crypto.packed import Packed
from visard.crypto.paillier import generate
from visard.errors import UsageError
from visard.ops.leaks import recover_moments
from visard.ops.mmd import fit_quadratic, squared_distances
from visard.ops.moments import moments
from visard.ops.noise import epsilon, noisy

BITS = 512  # what is revealed does not depend on the key


def audit(samples: int, length: int, peers: int, noise: float, seed: int) -> dict[str, Any]:
    """Figures of one exchange on random features: is a peer's mean determined, and how far off is the guess?

    Errors are relative to the length of what is guessed. With several peers their answers are added up, as
    `sums = true` does, and the guess is compared with each peer and with the average.
    """
    if samples < 2 or length < 1 or peers < 1 or noise < 0:
        raise UsageError("an audit needs two samples, one dimension and one peer or more, and no negative noise")
    rng = torch.Generator().manual_seed(seed)
    own, *others = (_features(samples, length, rng) for _ in range(peers + 1))
    d = squared_distances(own, own)[~torch.eye(samples, dtype=torch.bool)]
    plan = Packed(fit_quadratic(1 / float(d.median()), d), length, BITS)
    key = generate(BITS, insecure=True)
    offer, total = plan.offer(key.public, own), list[int]()
    for b in others:
        answer = plan.answer(key.public, offer, samples, noisy(moments(b), samples, noise), 1 / peers)
        total = [key.public.add(c, e) for c, e in zip(total, answer, strict=True)] if total else answer
    gradient = -2 / samples * plan.gradient(own, plan.values(key, total, samples), 1.0)
    found = recover_moments(own, gradient, plan.kernel)
    report: dict[str, Any] = {
        "samples": samples, "length": length, "peers": peers, "noise": noise, "determined": found is not None,
        "epsilon_of_one_batch": epsilon(1, noise, 1e-5) if noise else None,
    }  # fmt: skip
    if found is not None:
        means = [b.mean(0) for b in others]
        report["error_of_a_peer_s_mean"] = min(_error(found.B1, m) for m in means)
        report["error_of_the_average_mean"] = _error(found.B1, torch.stack(means).mean(0))
        second = torch.stack([moments(b).M2 for b in others]).mean(0)
        report["error_of_the_second_moments"] = _error(found.M2, second)
    return report


def _features(n: int, L: int, rng: torch.Generator) -> Tensor:
    """Inside the unit ball, with a mean of their own."""
    x = torch.randn(n, L, generator=rng, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True) + 0.5 * torch.randn(L, generator=rng, dtype=torch.float64) / L**0.5
    inside: Tensor = x / x.norm(dim=1).max() * 0.99
    return inside


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
