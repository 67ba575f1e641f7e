"""The attack that no encryption prevents: a party's own gradients determine the other side's batch moments (n > L)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visard.errors import UsageError
from visard.ops import mmd
from visard.ops.leaks import recover_mean, recover_moments
from visard.ops.mmd import Polynomial, taylor
from visard.ops.moments import Moments, gradient, moments, rows_of
from visard.ops.noise import SENSITIVITY, epsilon, noisy


def own_gradient(a: Tensor, sides: list[Tensor], kernel: Polynomial) -> Tensor:
    """What the ideal protocol gives the owner of a: d L_p3 / d a, averaged over the sides (Eq. 18)."""
    x = a.clone().requires_grad_()
    torch.stack([mmd.between(x, b, kernel) for b in sides]).mean().backward()
    assert x.grad is not None
    return x.grad


def side(n: int, L: int, seed: int) -> Tensor:
    x = torch.randn(n, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1 * seed
    return x / x.norm(dim=1).max()


def test_degree_one_reveals_the_mean_from_one_sample() -> None:
    kernel, a, b = taylor(0.7, 1), side(3, 8, 0), side(32, 8, 1)
    found = recover_mean(a, own_gradient(a, [b], kernel), kernel)
    assert torch.allclose(found, b.mean(0), atol=1e-12)


@pytest.mark.parametrize("L", [4, 16])
@pytest.mark.parametrize("kernel", [taylor(0.7, 2), Polynomial((0.95, -0.6, 0.1))], ids=["taylor", "fitted"])
def test_degree_two_reveals_all_moments_of_a_batch(L: int, kernel: Polynomial) -> None:
    a, b = side(64, L, 0), side(48, L, 1)
    found, exact = recover_moments(a, own_gradient(a, [b], kernel), kernel), moments(b)
    assert found is not None
    assert torch.allclose(found.B1, exact.B1, atol=1e-7)
    assert torch.allclose(found.M2, exact.M2, atol=1e-7)
    assert torch.allclose(found.B3, exact.B3, atol=1e-7)


def test_few_samples_do_not_determine_the_moments() -> None:
    a, b = side(8, 16, 0), side(48, 16, 1)
    assert recover_moments(a, own_gradient(a, [b], taylor(0.7, 2)), taylor(0.7, 2)) is None


def test_a_sum_over_sources_reveals_their_average_only() -> None:
    kernel, a = taylor(0.7, 2), side(64, 6, 0)
    sides = [side(40, 6, i) for i in (1, 2, 3)]
    found = recover_moments(a, own_gradient(a, sides, kernel), kernel)
    assert found is not None
    average = torch.stack([b.mean(0) for b in sides]).mean(0)
    assert torch.allclose(found.B1, average, atol=1e-7)
    assert all(float((found.B1 - b.mean(0)).abs().max()) > 1e-3 for b in sides)


def everything(m: Moments) -> Tensor:
    return torch.cat([m.B1, m.M2.flatten(), m.B3, m.R4[None]])


@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 10**6))
def test_one_sample_moves_the_moments_by_no_more_than_their_sensitivity(n: int, L: int, seed: int) -> None:
    a = side(n, L, seed % 997)
    b = a.clone()
    b[0] = -a[0] if seed % 2 else side(1, L, seed % 991)[0]  # opposite ends of the ball, or anywhere
    distance = float((everything(moments(a)) - everything(moments(b))).norm())
    assert distance <= SENSITIVITY / n + 1e-12


def test_noise_has_the_scale_that_the_guarantee_needs() -> None:
    b, n, multiplier = side(50, 40, 1), 50, 2.0
    exact, drawn = moments(b), [noisy(moments(b), n, multiplier) for _ in range(40)]
    assert noisy(exact, n, 0.0) is exact
    expected = multiplier * SENSITIVITY / n
    spread = torch.stack([d.B1 - exact.B1 for d in drawn]).std()
    assert float(spread) == pytest.approx(expected, rel=0.1)
    off = torch.stack([(d.M2 - exact.M2)[~torch.eye(40, dtype=torch.bool)] for d in drawn]).std()
    assert float(off) == pytest.approx(expected / 2**0.5, rel=0.1), "symmetrised"
    assert torch.equal(drawn[0].M2, drawn[0].M2.t())
    assert not torch.equal(drawn[0].B1, drawn[1].B1)


def test_epsilon_is_that_of_zcdp() -> None:
    assert epsilon(1, 1.0, 1e-5) == pytest.approx(0.5 + 2 * (0.5 * 11.512925464970229) ** 0.5)
    assert epsilon(100, 10.0, 1e-5) == pytest.approx(epsilon(1, 1.0, 1e-5))
    assert epsilon(0, 0.0, 1e-5) == 0
    assert epsilon(1, 0.0, 1e-5) == float("inf")


def test_noise_hides_the_moments_from_the_attack() -> None:
    a, b, kernel = side(64, 4, 0), side(64, 4, 1), taylor(0.7, 2)
    m = noisy(moments(b), 64, 3.0)
    values = rows_of(m, kernel, 1.0)(a)
    found = recover_moments(a, -2 / 64 * gradient(a, values, kernel, 1.0), kernel)
    assert found is not None
    assert torch.allclose(found.B1, m.B1, atol=1e-7), "the noisy mean is what is revealed"
    assert float((found.B1 - b.mean(0)).abs().max()) > 0.02


def test_the_audit_says_what_is_revealed() -> None:
    pytest.importorskip("gmpy2", reason="needs the extra crypto")
    from visard.cli.audit import lines, verdict
    from visard.privacy.moments_attack import audit

    one = audit(32, 4, 1, 0.0, 0)
    assert one["determined"]
    assert one["error_of_a_peer_s_mean"] < 1e-2, "20 bits after the point"
    assert "revealed exactly: use more peers" in verdict(one)
    three = audit(32, 4, 3, 0.0, 0)
    assert three["error_of_the_average_mean"] < 1e-2 < 0.1 < three["error_of_a_peer_s_mean"]
    assert "average" in verdict(three)
    noisy_one = audit(32, 4, 1, 3.0, 0)
    assert noisy_one["error_of_a_peer_s_mean"] > 0.1
    assert "private" in verdict(noisy_one)
    few = audit(4, 8, 1, 0.0, 0)
    assert not few["determined"]
    assert lines(few) == [("mean and second moments of the batch", "not determined")]
    with pytest.raises(UsageError, match="an audit needs"):
        audit(1, 4, 1, 0.0, 0)
