"""MMD equations of Kang et al. 2022: loops, autograd in float64 and literal numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visard.crypto import moments
from visard.crypto.forward import expand
from visard.errors import UsageError, VisardError
from visard.learning import mmd
from visard.learning.mmd import Polynomial, fit_quadratic, mmd2, taylor

TWO = torch.float64


def two_sides(n: int = 6, m: int = 9, L: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, L, generator=rng, dtype=TWO), torch.randn(m, L, generator=rng, dtype=TWO) + 0.3
    return a / a.norm(dim=1).max(), b / b.norm(dim=1).max()


def test_equations_3_to_6_by_loops() -> None:
    a, b = two_sides()
    alpha = 0.7

    def k(u: Tensor, v: Tensor) -> float:
        return math.exp(-alpha * float(((u - v) ** 2).sum()))

    n, m = len(a), len(b)
    p1 = sum(k(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    p2 = sum(k(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    p3 = -2 / (n * m) * sum(k(u, v) for u in a for v in b)
    sigma = math.sqrt(1 / (2 * alpha))
    assert float(mmd2(a, b, [sigma])) == pytest.approx(p1 + p2 + p3, abs=1e-12)
    both = (float(mmd2(a, b, [sigma])) + float(mmd2(a, b, [2.0]))) / 2
    assert float(mmd2(a, b, [sigma, 2.0])) == pytest.approx(both, abs=1e-12)


def test_a_literal_case() -> None:
    x, y = torch.tensor([[0.0], [1.0]], dtype=TWO), torch.tensor([[0.0], [2.0]], dtype=TWO)
    e = math.exp
    expected = e(-0.5) + e(-2) - 0.5 * (1 + e(-2) + e(-0.5) + e(-0.5))
    assert float(mmd2(x, y, [1.0])) == pytest.approx(expected, abs=1e-14)


def test_the_estimate_is_unbiased() -> None:
    rng = torch.Generator().manual_seed(1)
    found = [float(mmd2(*torch.randn(2, 8, 3, generator=rng, dtype=TWO), [1.0])) for _ in range(3000)]
    mean, error = sum(found) / len(found), torch.tensor(found).std().item() / math.sqrt(len(found))
    assert abs(mean) < 4 * error
    assert min(found) < 0, "an unbiased estimate of 0 is negative half of the time"


@pytest.mark.parametrize("degree", [1, 2, 3, 7])
def test_taylor_is_the_truncated_series(degree: int) -> None:
    d = torch.linspace(0, 2, 9, dtype=TWO)
    expected = sum((-0.4 * d) ** k / math.factorial(k) for k in range(degree + 1))
    assert torch.allclose(taylor(0.4, degree)(d), torch.as_tensor(expected), atol=1e-15)
    assert taylor(0.4, 12)(d) == pytest.approx(torch.exp(-0.4 * d), abs=1e-9)


def test_the_fitted_kernel_is_the_least_squares_one() -> None:
    a, _ = two_sides(n=30)
    d = mmd.squared_distances(a, a).flatten()
    k = fit_quadratic(1.5, d)
    residual = k(d) - torch.exp(-1.5 * d)
    for power in range(3):  # the residual is orthogonal to 1, d and d^2
        assert abs(float((residual * d**power).sum())) < 1e-9
    assert float((residual**2).mean()) < float(((taylor(1.5, 2)(d) - torch.exp(-1.5 * d)) ** 2).mean()) / 50


def test_the_fitted_kernel_keeps_the_direction_that_taylor_reverses() -> None:
    """Beyond alpha d = 1 the slope of the quadratic Taylor polynomial turns: its gradient pushes sides apart."""
    a, b = two_sides(64, 64, 64)
    alpha = 2 / float(mmd.squared_distances(a, b).mean())

    def slope(kernel: mmd.Kernel) -> Tensor:
        x = a.clone().requires_grad_()
        mmd.discrepancy(x, b, kernel).backward()
        assert x.grad is not None
        return x.grad.flatten()

    exact = slope(lambda d: torch.exp(-alpha * d))
    fitted = slope(fit_quadratic(alpha, mmd.squared_distances(a, a)[~torch.eye(64, dtype=torch.bool)]))
    assert torch.cosine_similarity(slope(taylor(alpha, 2)), exact, dim=0) < 0.3
    assert torch.cosine_similarity(fitted, exact, dim=0) > 0.9


def test_degree_one_is_mean_matching() -> None:
    a, b = two_sides()
    spread = sum((x - x.mean(0)).pow(2).sum() / (len(x) - 1) / len(x) for x in (a, b))
    expected = 2 * 0.3 * ((a.mean(0) - b.mean(0)).pow(2).sum() - spread)
    assert torch.allclose(mmd.discrepancy(a, b, taylor(0.3, 1)), expected, atol=1e-14)


def by_autograd(a: Tensor, others: list[tuple[float, Tensor]], kernel: mmd.Kernel) -> tuple[Tensor, Tensor]:
    x = a.clone().requires_grad_()
    means = sum((w * kernel(mmd.squared_distances(x, b)).mean(1) for w, b in others), torch.zeros(len(a), dtype=TWO))
    means.sum().backward()
    assert x.grad is not None
    return x.grad, means.detach()


@pytest.mark.parametrize("L", [4, 16, 64])
@pytest.mark.parametrize("weights", [[1.0], [0.2, 0.3, -0.9]])
def test_moment_form_is_autograd(L: int, weights: list[float]) -> None:
    a, _ = two_sides(7, 9, L)
    sides = [(w, two_sides(5, 8 + i, L, seed=i)[1]) for i, w in enumerate(weights)]
    for k in (taylor(0.9, 2), Polynomial((0.9, -0.8, 0.05)), Polynomial((1.0, -0.01, 3.0))):
        slope, means = by_autograd(a, sides, k)
        total = sum(weights)
        summed = sum(
            (moments.rows_of(moments.moments(b), k, w, loss=True, extra=0.25)(a) for w, b in sides),
            torch.zeros((), dtype=TWO),
        )
        assert torch.allclose(moments.gradient(a, summed, k, total), slope, atol=1e-11)
        assert torch.allclose(moments.mean_kernel(a, summed, k, total), means + 0.25 * total, atol=1e-11)
    linear = taylor(0.9, 1)
    slope, means = by_autograd(a, sides, linear)
    B1 = sum((w * b.mean(0) for w, b in sides), torch.zeros(L, dtype=TWO))
    Q = sum(w * float((b * b).sum(1).mean()) for w, b in sides)
    summed = torch.cat([B1, torch.tensor([Q], dtype=TWO)])[None]
    assert torch.allclose(moments.gradient(a, summed, linear, total), slope, atol=1e-12)
    assert torch.allclose(moments.mean_kernel(a, summed, linear, total), means, atol=1e-12)


def test_rows_stay_inside_their_bound() -> None:
    a, b = two_sides(200, 50, 8)
    rows = moments.rows_of(moments.moments(b), taylor(0.01, 2), 1.0, loss=True)
    assert float(rows(a).abs().max()) <= rows.bound() <= 8


@pytest.mark.parametrize(("L", "degree"), [(4, 1), (4, 2), (3, 3), (16, 2)])
def test_equation_7_and_15(L: int, degree: int) -> None:
    a, b = two_sides(5, 6, L)
    k = taylor(0.6, degree)
    terms = expand(k, L)
    G = terms.values(b).mean(0)
    slope, means = by_autograd(a, [(1.0, b)], k)
    factors, known = terms.slopes(a)
    assert torch.allclose(factors @ G + known, slope, atol=1e-12)
    factors, constant = terms.weights(a)
    mine = terms.alone(b)
    assert float(factors @ G + constant + mine) == pytest.approx(float(means.mean()), abs=1e-12)
    assert float(mine) != 0


@pytest.mark.parametrize(("L", "degree", "pairs", "monomials"), [(4, 1, 13, 4), (4, 2, 87, 30), (64, 2, None, 6240)])
def test_only_monomials_that_the_peer_multiplies_are_sent(
    L: int, degree: int, pairs: int | None, monomials: int
) -> None:
    """The paper's expansion has 8, 40 and 8,320: those beside f = 1 alone are of no use to the receiver."""
    terms = expand(taylor(1.0, degree), L)
    assert len(terms.received) == monomials
    assert pairs in (None, len(terms.terms))
    every = {g for _, g, _ in terms.terms if g}
    assert len(every) == {4: {1: 8, 2: 40}, 64: {2: 8320}}[L][degree]
    for g in every - set(terms.received):
        assert [f for f, other, _ in terms.terms if other == g] == [()]


def test_bad_input_is_refused() -> None:
    a, b = two_sides()
    with pytest.raises(VisardError, match="two rows or more"):
        mmd2(a[:1], b, [1.0])
    with pytest.raises(UsageError, match="positive numbers"):
        mmd2(a, b, [])
    with pytest.raises(UsageError, match="must be positive"):
        taylor(1.0, 0)
    with pytest.raises(VisardError, match="cannot be fitted"):
        fit_quadratic(1.0, torch.zeros(5))
    with pytest.raises(VisardError, match="median distance"):
        mmd.median_alpha(torch.zeros(5, 2))
    with pytest.raises(VisardError, match="where a quadratic one is needed"):
        moments.rows_of(moments.moments(b), taylor(1.0, 3), 1.0)
