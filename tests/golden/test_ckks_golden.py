"""Gradients under CKKS equal autograd on the plaintext kernel.

Tolerance: a value of an answer is right to 2^-28, of a sum of three to 2^-26; a gradient is 2 / n times the
kernel's slope (at most 2 here) times a few of them.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

pytest.importorskip("tenseal", reason="needs the extra ckks")

from visard.crypto import ckks
from visard.crypto import ckks as residues
from visard.crypto.ckks import PrivateKey, PublicKey
from visard.crypto.moments import gradient, mean_kernel, moments
from visard.crypto.packed import PackedCkks
from visard.learning import mmd
from visard.learning.mmd import Polynomial, taylor

KERNELS = [taylor(0.8, 1), taylor(0.8, 2), Polynomial((0.97, -0.7, 0.16))]
TOLERANCE = 2.0**-24


@functools.cache
def keys(block: int) -> tuple[PrivateKey, PublicKey]:
    return ckks.generate(block)


def features(n: int, L: int, seed: int) -> Tensor:
    x = torch.randn(n, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2 * seed
    return x / x.norm(dim=1).max()


@pytest.mark.parametrize("kernel", KERNELS, ids=["degree 1", "degree 2", "fitted"])
@pytest.mark.parametrize(("n", "L", "sources"), [(13, 4, 1), (13, 16, 3), (64, 64, 1), (64, 4, 3), (200, 40, 1)])
def test_gradients_and_loss(n: int, L: int, sources: int, kernel: Polynomial) -> None:
    a, sides = features(n, L, 0), [features(9 + i, L, i + 1) for i in range(sources)]
    x = a.clone().requires_grad_()
    loss = torch.stack([mmd.between(x, b, kernel) for b in sides]).mean()
    (exact,) = torch.autograd.grad(loss, [x])
    plan = PackedCkks(kernel, L, n)
    private, public = keys(plan.block)
    offer = plan.offer(private, a)
    assert [len(c) for c in offer] == [plan.cipher_bytes("offer")] * plan.offered(n)
    answers = [plan.answer(public, offer, n, moments(b), 1 / sources, loss=True) for b in sides]
    assert [len(c) for c in answers[0]] == [plan.cipher_bytes("answer")] * plan.answered(n, loss=True)
    total = [residues.add(parts, 2, residues.ANSWER, "a sum") for parts in zip(*answers, strict=True)]
    values = plan.values(private, total, n, loss=True)
    found = -2 / n * gradient(a, values, plan.kernel, 1.0)
    assert float((found - exact).abs().max()) < TOLERANCE * 2 / n
    assert -2 * float(mean_kernel(a, values, plan.kernel, 1.0).mean()) == pytest.approx(
        float(loss.detach()), abs=TOLERANCE
    )


def test_slots_of_no_sample_and_no_row_tell_nothing() -> None:
    """Three samples in blocks of four, five rows in a tile of 1024 blocks: all else is noise around 0."""
    plan, a, b = PackedCkks(taylor(0.8, 2), 4, 3), features(3, 4, 0), features(5, 4, 1)
    private, public = keys(plan.block)
    (answer,) = plan.answer(public, plan.offer(private, a), 3, moments(b), 1.0)
    slots = torch.from_numpy(private.open(answer)).reshape(-1, 4)
    assert float(slots[:5, :3].abs().min()) > 1e-4
    assert float(slots[:, 3].abs().max()) < 2.0**-28
    assert float(slots[5:].abs().max()) < 2.0**-28
