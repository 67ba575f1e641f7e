"""The attack that no encryption prevents: a party's own gradients determine the other side's batch moments (n > L)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visard.crypto.audit import determined, guess_moments
from visard.crypto.moments import SENSITIVITY, Moments, epsilon, gradient, moments, noisy, quadratic, rows_of
from visard.errors import UsageError
from visard.learning import mmd
from visard.learning.mmd import Polynomial, taylor


def own_gradient(a: Tensor, sides: list[Tensor], kernel: Polynomial) -> Tensor:
    """What the ideal protocol gives the owner of a: d L_p3 / d a, averaged over the sides (Eq. 18)."""
    x = a.clone().requires_grad_()
    torch.stack([mmd.between(x, b, kernel) for b in sides]).mean().backward()
    assert x.grad is not None
    return x.grad


def side(n: int, L: int, seed: int) -> Tensor:
    x = torch.randn(n, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1 * seed
    return x / x.norm(dim=1).max()


def recover_mean(a: Tensor, g: Tensor, kernel: Polynomial) -> Tensor:
    """B1 (L,) of the other side from a kernel of degree 1; one sample is enough."""
    return (a + len(a) / 2 * g / (2 * kernel.c[1])).mean(0)


def recover_moments(a: Tensor, g: Tensor, kernel: Polynomial) -> Moments | None:
    r"""B1, M2 and B3 of the other side from a quadratic kernel; None where the samples do not determine them.

    The gradient $g_i = -\frac{2}{n} \nabla_{a_i} E_b k$ by every own feature $a_i$ (n, L) says
    $(2 M_2 + Q I) a_i - |a_i|^2 B_1 - 2 (a_i \cdot B_1) a_i + t
    = \frac{1}{4 c_2} (-\frac{n}{2} g_i - 2 c_1 a_i) - |a_i|^2 a_i$ with $t = -\frac{c_1}{2 c_2} B_1 - B_3$, which is
    linear in the unknown moments. R4 stays unknown (not a number): only the loss contains it.
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


def test_the_sensitivity_is_reached_and_never_exceeded() -> None:
    """All lengths and angles of two samples on a grid, and the best that a search from random pairs finds."""
    r, s, c = torch.meshgrid(
        torch.linspace(0, 1, 81, dtype=torch.float64),
        torch.linspace(0, 1, 81, dtype=torch.float64),
        torch.linspace(-1, 1, 161, dtype=torch.float64),
        indexing="ij",
    )
    moved = (r**2 + s**2 - 2 * r * s * c) + (r**4 + s**4 - 2 * (r * s * c) ** 2)
    moved = moved + (r**6 + s**6 - 2 * (r * s) ** 3 * c) + (r**4 - s**4) ** 2
    assert float(moved.max()) == pytest.approx(8, abs=1e-12) == pytest.approx(SENSITIVITY**2, abs=1e-12)
    x = torch.tensor([[0.6, 0.3, -0.2]], dtype=torch.float64)
    y = torch.tensor([[-0.5, 0.7, 0.1]], dtype=torch.float64)
    for i in range(3):  # the formula is what the code's moments do
        x, y = x.roll(i, 1), y * 0.9
        direct = float((everything(moments(x)) - everything(moments(y))).norm() ** 2)
        a, b = float(x.norm()), float(y.norm())
        k = float((x * y).sum()) / (a * b)
        grid = a**2 + b**2 - 2 * a * b * k + a**4 + b**4 - 2 * (a * b * k) ** 2
        assert direct == pytest.approx(grid + a**6 + b**6 - 2 * (a * b) ** 3 * k + (a**4 - b**4) ** 2, abs=1e-12)
    best = 0.0
    for seed in range(12):
        pair = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
        climb = torch.optim.Adam([pair], lr=0.05)
        for _ in range(300):
            inside = pair / pair.norm(dim=1, keepdim=True).clamp_min(1)
            x, y = inside[:1], inside[1:]
            p, q = x @ x.t(), y @ y.t()  # squared lengths
            parts = [x - y, x.t() @ x - y.t() @ y, x * p - y * q, p**2 - q**2]
            far = torch.cat([part.flatten() for part in parts]).norm()
            climb.zero_grad()
            (-far).backward()
            climb.step()
            best = max(best, float(far.detach()))
    assert SENSITIVITY - 1e-3 < best <= SENSITIVITY + 1e-9


def test_noise_has_the_scale_that_the_guarantee_needs() -> None:
    b, n, multiplier = side(50, 40, 1), 50, 2.0
    exact, drawn = moments(b), [noisy(moments(b), n, multiplier, bytes([i]) * 16) for i in range(40)]
    assert noisy(exact, n, 0.0, b"") is exact
    expected = multiplier * SENSITIVITY / n
    spread = torch.stack([d.B1 - exact.B1 for d in drawn]).std()
    assert float(spread) == pytest.approx(expected, rel=0.1)
    off = torch.stack([(d.M2 - exact.M2)[~torch.eye(40, dtype=torch.bool)] for d in drawn]).std()
    assert float(off) == pytest.approx(expected / 2**0.5, rel=0.1), "symmetrised"
    assert torch.equal(drawn[0].M2, drawn[0].M2.t())
    assert not torch.equal(drawn[0].B1, drawn[1].B1)


@pytest.mark.parametrize(
    ("sigma", "delta", "expected"),
    [(0.25, 1e-5, 24.3816109), (1, 1e-5, 4.3771781), (1, 1e-7, 5.3493454), (3, 1e-5, 1.2710878), (20, 1e-7, 0.2151001)],
)
def test_epsilon_is_what_an_accountant_finds(sigma: float, delta: float, expected: float) -> None:
    """Google's dp-accounting 0.6.0: from_gaussian_mechanism(sigma).get_epsilon_for_delta(delta), steps of 1e-4."""
    assert epsilon(sigma, delta) == pytest.approx(expected, abs=1e-6)


def test_epsilon_by_integration() -> None:
    """delta is the integral of the positive part of p - e^eps q for two Gaussians one sensitivity apart."""
    x = torch.linspace(-40, 40, 2_000_001, dtype=torch.float64)
    for sigma in (0.7, 2.0):
        eps = epsilon(sigma)
        p, q = (torch.exp(-((x - m) ** 2) / (2 * sigma**2)) / (sigma * (2 * torch.pi) ** 0.5) for m in (1.0, 0.0))
        assert float(torch.trapezoid((p - math.exp(eps) * q).clamp_min(0), x)) == pytest.approx(1e-5, rel=1e-4)
    assert epsilon(0.0) == float("inf")
    assert epsilon(1e-3) > 1e5


def test_noise_hides_the_moments_from_the_attack() -> None:
    a, b, kernel = side(64, 4, 0), side(64, 4, 1), taylor(0.7, 2)
    m = noisy(moments(b), 64, 3.0, bytes(16))
    values = rows_of(m, kernel, 1.0)(a)
    found = recover_moments(a, -2 / 64 * gradient(a, values, kernel, 1.0), kernel)
    assert found is not None
    assert torch.allclose(found.B1, m.B1, atol=1e-7), "the noisy mean is what is revealed"
    assert float((found.B1 - b.mean(0)).abs().max()) > 0.02


def null_space(a: Tensor) -> tuple[Tensor, int]:
    """Directions of (P, B1, t) that no z and s of the own features tell apart; and the number of entries of P."""
    _, L = a.shape
    i, j = torch.triu_indices(L, L)
    rows = []
    for x in a:
        Z = x.new_zeros(L + 1, len(i) + 2 * L)
        for at, (p, q) in enumerate(zip(i.tolist(), j.tolist(), strict=True)):
            Z[p, at] = x[q]
            Z[q, at] = x[p]
        Z[:L, len(i) : len(i) + L] = -(x @ x) * torch.eye(L)
        Z[:L, len(i) + L :] = torch.eye(L)
        Z[L, len(i) : len(i) + L] = x
        rows.append(Z)
    _, S, V = torch.linalg.svd(torch.cat(rows), full_matrices=True)
    return V[int((1e-9 * S[0] < S).sum()) :], len(i)


@pytest.mark.parametrize(("n", "L"), [(9, 8), (8, 8), (7, 8), (6, 8), (3, 8), (2, 8), (5, 1)])
def test_what_few_samples_determine_is_counted(n: int, L: int) -> None:
    free, entries = null_space(side(n, L, 0))
    of_mean, of_second = determined(n, L)
    rank = torch.linalg.matrix_rank
    assert of_mean == pytest.approx(1 - int(rank(free[:, entries : entries + L], atol=1e-9)) / L)
    # P determines M2 and the other way round
    assert of_second == pytest.approx(1 - int(rank(free[:, :entries], atol=1e-9)) / entries)


@pytest.mark.parametrize(("n", "L", "second"), [(64, 16, 1e-9), (17, 16, 1e-9), (16, 16, 0.1)])
def test_as_many_samples_as_dimensions_reveal_the_mean(n: int, L: int, second: float) -> None:
    kernel, a, b = Polynomial((0.95, -0.6, 0.1)), side(n, L, 0), side(48, L, 1)
    B1, M2 = guess_moments(a, rows_of(moments(b), kernel, 1.0)(a), kernel)
    assert torch.allclose(B1, b.mean(0), atol=1e-9)
    assert float((M2 - moments(b).M2).norm() / moments(b).M2.norm()) < second


def test_fewer_samples_reveal_the_part_in_their_span() -> None:
    kernel, a, b = taylor(0.7, 2), side(6, 16, 0), side(48, 16, 1)
    B1, _ = guess_moments(a, rows_of(moments(b), kernel, 1.0)(a), kernel)
    assert torch.allclose(a @ B1, a @ b.mean(0), atol=1e-9)
    assert float((B1 - b.mean(0)).norm()) > 0.1 * float(b.mean(0).norm())


def test_the_audit_says_what_is_revealed() -> None:
    pytest.importorskip("gmpy2", reason="needs the extra crypto")
    from visard.cli.models import lines, verdict
    from visard.crypto.audit import audit

    one = audit(32, 4, 1, 0.0, 0)
    assert max(one["error_of_a_peer_s_mean"], one["error_of_the_second_moments"]) < 1e-2, "20 bits after the point"
    assert "revealed exactly: use more peers" in verdict(one)
    three = audit(32, 4, 3, 0.0, 0)
    assert three["error_of_the_average_mean"] < 1e-2 < 0.1 < three["error_of_a_peer_s_mean"]
    assert "average" in verdict(three)
    noisy_one = audit(32, 4, 1, 3.0, 0)
    assert noisy_one["error_of_the_second_moments"] > 0.02
    assert verdict(noisy_one).endswith("(1.3, 1e-5)-differentially private.")
    assert "hardly any protection" in verdict(audit(32, 4, 1, 0.01, 0))
    equal = audit(16, 16, 1, 0.0, 0)
    assert equal["error_of_a_peer_s_mean"] < 1e-3, "n = L hides nothing of the mean"
    assert "100 % of the mean and 99 % of the second moments are revealed" in verdict(equal)
    few = audit(4, 8, 1, 0.0, 0)
    assert [share for _, share, _ in lines(few)] == ["50 %", "50 %", "47 %"]
    assert float(lines(few)[0][2]) > 0.3
    assert audit(32, 1, 1, 0.0, 0)["error_of_a_peer_s_mean"] < 1e-2
    for n, noise in ((1, 0.0), (8, math.nan), (8, -1.0)):
        with pytest.raises(UsageError, match="an audit needs"):
            audit(n, 4, 1, noise, 0)
