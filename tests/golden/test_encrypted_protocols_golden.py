"""Every protocol's gradients equal autograd on the plaintext kernel; nothing but its own result reaches a party.

Tolerances: packed carries 20 bits after the point, so 1e-5 in units of the ball's radius times the kernel's slope;
the paper's carries 24.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.crypto.forward import Forward
from visard.crypto.moments import gradient, mean_kernel, moments
from visard.crypto.packed import Packed
from visard.crypto.paillier import PrivateKey, generate
from visard.errors import VisardError
from visard.learning import mmd
from visard.learning.mmd import Polynomial, taylor

BITS = 512
KERNELS = [taylor(0.8, 1), taylor(0.8, 2), Polynomial((0.97, -0.7, 0.16))]


@functools.cache
def key(i: int = 0) -> PrivateKey:
    return generate(BITS, insecure=True)


def features(n: int, L: int, seed: int) -> Tensor:
    x = torch.randn(n, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2 * seed
    return x / x.norm(dim=1).max()


def by_autograd(a: Tensor, sides: list[Tensor], kernel: Polynomial) -> tuple[Tensor, float]:
    """(1 / S) sum of L_p3 (Eq. 18) and its gradient by a."""
    x = a.clone().requires_grad_()
    loss = torch.stack([mmd.between(x, b, kernel) for b in sides]).mean()
    loss.backward()
    assert x.grad is not None
    return x.grad, float(loss.detach())


@pytest.mark.parametrize("kernel", KERNELS, ids=["degree 1", "degree 2", "fitted"])
@pytest.mark.parametrize("sources", [1, 3])
@pytest.mark.parametrize("L", [4, 16, 64])
def test_packed(L: int, sources: int, kernel: Polynomial) -> None:
    a, sides = features(13, L, 0), [features(9 + i, L, i + 1) for i in range(sources)]
    exact, loss = by_autograd(a, sides, kernel)
    plan, owner = Packed(kernel, L, BITS), key()
    offer = plan.offer(owner.public, a)
    assert len(offer) == plan.offered(len(a))
    total: list[int] = []
    for b in sides:
        answer = plan.answer(owner.public, offer, len(a), moments(b), 1 / sources, loss=True)
        assert len(answer) == plan.answered(len(a), loss=True)
        assert not set(answer) & set(offer)
        total = [owner.public.add(c, d) for c, d in zip(total, answer, strict=True)] if total else answer
    values = plan.values(owner, total, len(a), loss=True)
    found = -2 / len(a) * gradient(a, values, plan.kernel, 1.0)
    assert float((found - exact).abs().max()) < 1e-5 * 2 / len(a)
    assert -2 * float(mean_kernel(a, values, plan.kernel, 1.0).mean()) == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("compressed", [True, False], ids=["both", "chain_rule"])
@pytest.mark.parametrize(("L", "degree"), [(4, 1), (4, 2), (4, 3), (16, 1), (16, 2), (64, 1)])
def test_the_paper_s_protocol(L: int, degree: int, compressed: bool) -> None:
    a, b, kernel = features(3, L, 0), features(4, L, 1), taylor(0.8, degree)
    exact, loss = by_autograd(a, [b], kernel)
    plan, peer = Forward(kernel, L, compressed), key()
    offer = plan.offer(peer.public, b)
    assert len(offer) == plan.offered(len(b))
    means = plan.means(peer.public, offer)
    slopes, known = plan.terms.slopes(a)
    scale = -2 / len(a)
    ciphers = plan.combine(peer.public, means, scale * slopes.flatten(0, 1), scale * known.flatten())
    masked, masks = plan.mask(peer.public, ciphers)
    seen = plan.unveil(peer, masked)
    found = plan.unmask(peer.public, seen, masks, a.shape)
    assert float((found - exact).abs().max()) < 1e-6
    assert all(abs(v).bit_length() > 100 for v in seen), "what the peer decrypts is noise"
    weights, constant = plan.terms.weights(a)
    (total,) = plan.combine(peer.public, means, -2 * weights[None], -2 * constant[None])
    assert peer.decrypt(total) / 2**48 - 2 * float(plan.terms.alone(b)) == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("compressed", [True, False], ids=["both", "chain_rule"])
def test_the_paper_s_protocol_at_length_64_degree_2(compressed: bool) -> None:
    """Four entries of the gradient: all of them take minutes, which is the paper's problem."""
    a, b, kernel = features(2, 64, 0), features(3, 64, 1), taylor(0.8, 2)
    exact, _ = by_autograd(a, [b], kernel)
    plan, peer = Forward(kernel, 64, compressed), key()
    slopes, known = plan.terms.slopes(a)
    means = plan.means(peer.public, plan.offer(peer.public, b))
    rows = plan.combine(peer.public, means, -slopes[0, ::16], -known[0, ::16])
    masked, masks = plan.mask(peer.public, rows)
    found = plan.unmask(peer.public, plan.unveil(peer, masked), masks, (4,))
    assert float((found - exact[0, ::16]).abs().max()) < 1e-6


def test_more_samples_than_slots() -> None:
    plan = Packed(taylor(0.5, 2), 4, BITS)
    n = 2 * plan.slots.capacity + 3
    a, b = features(n, 4, 0), features(5, 4, 1)
    exact, _ = by_autograd(a, [b], plan.kernel)
    answer = plan.answer(key().public, plan.offer(key().public, a), n, moments(b), 1.0)
    assert len(answer) == 3 * 5
    found = -2 / n * gradient(a, plan.values(key(), answer, n), plan.kernel, 1.0)
    assert float((found - exact).abs().max()) < 1e-5 * 2 / n


def test_values_outside_their_range_are_refused() -> None:
    plan = Packed(taylor(0.5, 2), 4, BITS)
    with pytest.raises(VisardError, match="outside the unit ball"):
        plan.offer(key().public, 2 * features(3, 4, 0))
    a = features(3, 4, 0)
    offer = plan.offer(key().public, a)
    with pytest.raises(VisardError, match="does not fit its slots"):
        plan.answer(key().public, offer, 3, moments(50 * a), 1.0)
    with pytest.raises(VisardError, match="does not fit its slots"):
        plan.answer(key().public, offer, 3, moments(a), 1.0, loss=True, extra=1e4)
    with pytest.raises(VisardError, match="does not fit its slots"):
        Packed(taylor(0.5, 1), 4, BITS).answer(key().public, [], 3, moments(500 * a), 1.0)
    with pytest.raises(VisardError, match="degree 1 and 2, not 3"):
        Packed(taylor(0.5, 3), 4, BITS)
    huge = [key().public.multiply(c, 2**30) for c in offer]  # a cheating owner corrupts its own result only
    with pytest.raises(VisardError, match="overflows its slots"):
        plan.values(key(), plan.answer(key().public, huge, 3, moments(a), 1.0), 3)


def test_masks_are_never_the_same() -> None:
    plan, public = Forward(taylor(0.5, 1), 2), key().public
    ciphers = [public.encrypt(1) for _ in range(8)]
    _, first = plan.mask(public, ciphers)
    _, second = plan.mask(public, ciphers)
    assert len({*first, *second}) == 16
