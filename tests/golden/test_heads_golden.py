"""Each head's loss and gradients against its formula, written as a plain loop in float64."""

import math

import pytest
import torch
from torch import Tensor

from visard.errors import UsageError
from visard.learning.heads import (
    AdaFace,
    ArcFace,
    CosFace,
    Head,
    HeadSettings,
    Softmax,
    SphereFace2,
    SubCenterArcFace,
    balanced_bias,
    build_head,
)
from visard.methods.fedavg import FedAvg

B, K, D = 7, 5, 6
M = 0.5


def angle_cos(f: Tensor, w: Tensor) -> Tensor:
    return (f * w).sum() / ((f * f).sum().sqrt() * (w * w).sum().sqrt())


def softmax_loop(logit_of: list[list[Tensor]], y: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(logit_of):
        denominator = sum((torch.exp(v) for v in row), torch.zeros((), dtype=torch.float64))
        total = total - torch.log(torch.exp(row[int(y[i])]) / denominator)
    return total / len(logit_of)


def arcface_loop(f: Tensor, w: Tensor, y: Tensor, s: float, m: float) -> Tensor:
    rows = []
    for i in range(len(f)):
        row = []
        for j in range(len(w)):
            theta = torch.acos(angle_cos(f[i], w[j]))
            if j == y[i]:
                moved = torch.cos(theta + m) if theta + m < math.pi else torch.cos(theta) - m * math.sin(m)
                row.append(s * moved)
            else:
                row.append(s * torch.cos(theta))
        rows.append(row)
    return softmax_loop(rows, y)


def cosface_loop(f: Tensor, w: Tensor, y: Tensor, s: float, m: float) -> Tensor:
    rows = [[s * (angle_cos(f[i], w[j]) - (m if j == y[i] else 0.0)) for j in range(len(w))] for i in range(len(f))]
    return softmax_loop(rows, y)


def softmax_plain_loop(f: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return softmax_loop([[(f[i] * w[j]).sum() + b[j] for j in range(len(w))] for i in range(len(f))], y)


def sphereface2_loop(f: Tensor, w: Tensor, b: Tensor, y: Tensor, r: float, m: float, t: float, lam: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(f)):
        for j in range(len(w)):
            g = 2 * ((angle_cos(f[i], w[j]) + 1) / 2) ** t - 1
            bias = b[j] if len(b) > 1 else b[0]
            if j == y[i]:
                total = total + lam / r * torch.log(1 + torch.exp(-r * (g - m) - bias))
            else:
                total = total + (1 - lam) / r * torch.log(1 + torch.exp(r * (g + m) + bias))
    return total / len(f)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    f = torch.randn(B, D, dtype=torch.float64, requires_grad=True)
    return f, torch.tensor([0, 1, 2, 3, 4, 1, 1])


def agree(head: Head, f: Tensor, y: Tensor, slow: Tensor, slow_inputs: list[Tensor]) -> None:
    """Loss and all gradients, in float64 nearly exactly and in float32 to its precision."""
    expected = torch.autograd.grad(slow, slow_inputs)
    for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        x = f.detach().to(dtype).requires_grad_()
        head = head.to(dtype)
        loss = head.loss(x, y)
        got = torch.autograd.grad(loss, [x, *head.parameters()])
        assert loss.item() == pytest.approx(slow.item(), rel=tol)
        for a, e in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=tol, atol=tol)


def test_arcface_is_equation_3(batch: tuple[Tensor, Tensor]) -> None:
    f, y = batch
    head = ArcFace(K, D, scale=8.0, margin=M).double()
    w = head.weight
    # one feature opposite to its class vector: theta + m > pi, the monotone branch
    opposite = torch.cat([f.detach()[:-1], -w.detach()[1:2] + 0.01]).requires_grad_()
    assert angle_cos(opposite[-1], w[1]).item() < -math.cos(M)
    agree(head, opposite, y, arcface_loop(opposite, w, y, 8.0, M), [opposite, w])


def test_arcface_past_pi_plain_and_easy() -> None:
    w = torch.eye(2, dtype=torch.float64)
    f = torch.tensor([[math.cos(3.0), math.sin(3.0)], [math.cos(1.0), math.sin(1.0)]], dtype=torch.float64)
    y = torch.zeros(2, dtype=torch.int64)
    expected = {
        "monotone": [math.cos(3.0) - 0.5 * math.sin(0.5), math.cos(1.5)],
        "plain": [math.cos(3.5), math.cos(1.5)],
        "easy": [math.cos(3.0), math.cos(1.5)],
    }
    for past_pi, values in expected.items():
        head = build_head("arcface", 2, 2, scale=1.0, margin=0.5, past_pi=past_pi).double()
        head.weight.data = w
        assert head.logits(f, y)[:, 0].tolist() == pytest.approx(values, abs=1e-12)


def test_arcface_detached_margin_has_gradient_s(batch: tuple[Tensor, Tensor]) -> None:
    """d logit_y / d cos is s with the margin detached and s sin(theta + m) / sin(theta) without."""
    f, y = batch
    for detach in (True, False):
        head = ArcFace(K, D, scale=8.0, margin=M, detach_margin=detach).double()
        cos = torch.stack([angle_cos(f[i], head.weight[y[i]]) for i in range(B)])
        logit = head.logits(f, y).gather(1, y[:, None])[:, 0]
        got = torch.autograd.grad(logit.sum(), f, retain_graph=True)[0]
        direct = torch.autograd.grad(cos.sum(), f, retain_graph=True)[0]
        theta = torch.acos(cos.detach())
        assert (theta + M < math.pi).all()
        slope = 8.0 * (1.0 if detach else torch.sin(theta + M) / torch.sin(theta))
        torch.testing.assert_close(got, direct * torch.as_tensor(slope).reshape(-1, 1))


def test_cosface_is_equation_4(batch: tuple[Tensor, Tensor]) -> None:
    f, y = batch
    head = CosFace(K, D, scale=8.0, margin=0.35).double()
    agree(head, f, y, cosface_loop(f, head.weight, y, 8.0, 0.35), [f, head.weight])


def adaface_loop(f, w, y, s, m, h, mean, std):
    """Picture by picture, with the mean and the standard deviation of lengths given."""
    total = 0.0
    for i in range(len(f)):
        z = max(-1.0, min(1.0, h * (min(max(f[i].detach().norm().item(), 1e-3), 100) - mean) / (std + 1e-3)))
        logits = [s * angle_cos(f[i], w[j]) for j in range(len(w))]
        logits[y[i]] = s * (torch.cos(torch.acos(angle_cos(f[i], w[y[i]])) - m * z) - m * (1 + z))
        total = total - torch.log(torch.exp(logits[y[i]]) / sum(torch.exp(x) for x in logits))
    return total / len(f)


def test_adaface_is_equations_4_to_8(batch: tuple[Tensor, Tensor]) -> None:
    f, y = batch
    lengths = [row.norm().item() for row in f.detach()]
    mean, std = sum(lengths) / B, (sum((x - sum(lengths) / B) ** 2 for x in lengths) / (B - 1)) ** 0.5
    head = AdaFace(K, D, scale=8.0, margin=0.4).double().eval()
    agree(head, f, y, adaface_loop(f, head.weight, y, 8.0, 0.4, 0.333, mean, std), [f, head.weight])
    assert head.lengths is None, "only training remembers"
    head = AdaFace(K, D, scale=8.0, margin=0.4, h=0.7, pace=0.1).double().train()
    head.loss(f, y)
    head.loss(2 * f, y)
    assert [float(x) for x in head.lengths or ()] == pytest.approx([1.1 * mean, 1.1 * std]), (
        "0.9 of one and 0.1 of twice it"
    )
    slow = adaface_loop(f, head.weight, y, 8.0, 0.4, 0.7, 0.9 * 1.1 * mean + 0.1 * mean, 0.9 * 1.1 * std + 0.1 * std)
    assert head.loss(f, y).item() == pytest.approx(slow.item(), rel=1e-9)


def test_softmax_is_linear_with_bias(batch: tuple[Tensor, Tensor]) -> None:
    f, y = batch
    head = Softmax(K, D).double()
    assert head.bias is not None
    head.bias.data = torch.linspace(-1, 1, K, dtype=torch.float64)
    agree(head, f, y, softmax_plain_loop(f, head.weight, head.bias, y), [f, head.weight, head.bias])


@pytest.mark.parametrize("bias", ["shared", "per_class"])
@pytest.mark.parametrize("start", ["balanced", "zero"])
def test_sphereface2_is_equation_8(batch: tuple[Tensor, Tensor], bias: str, start: str) -> None:
    f, y = batch
    y = y.clone()
    y[-1] = -1  # a picture of nobody here
    head = SphereFace2(K, D, scale=10.0, margin=0.3, t=3.0, balance=0.7, bias=bias, bias_start=start).double()  # type: ignore[arg-type]
    slow = sphereface2_loop(f, head.weight, head.bias, y, 10.0, 0.3, 3.0, 0.7)
    agree(head, f, y, slow, [f, head.weight, head.bias])


def test_sphereface2_start_of_the_bias() -> None:
    assert balanced_bias(classes=100, scale=30.0, margin=0.4, t=3.0, balance=0.7) == pytest.approx(6.78, abs=0.005)
    assert SphereFace2(100, 8).bias.item() == pytest.approx(6.78, abs=0.005)


@pytest.mark.parametrize("classes", [2, 3, 4, 100, 10_000])
@pytest.mark.parametrize(("scale", "margin"), [(30.0, 0.4), (64.0, 0.5), (10.0, 0.0)])
def test_sphereface2_bias_balances_the_two_pulls(classes: int, scale: float, margin: float) -> None:
    """lambda sigma(-(a_y + b)) = (1 - lambda)(K - 1) sigma(a_n + b)."""
    lam, t = 0.7, 3.0
    b = balanced_bias(classes, scale, margin, t, lam)
    a_y, a_n = scale * (2 * 0.5**t - 1 - margin), scale * (2 * 0.5**t - 1 + margin)
    positive = lam / (1 + math.exp(a_y + b))
    negative = (1 - lam) * (classes - 1) / (1 + math.exp(-(a_n + b)))
    assert positive == pytest.approx(negative, rel=1e-9)


@pytest.mark.parametrize("centres", [2, 4])
def test_subcentre_arcface_takes_the_nearest_centre_of_each_class(batch: tuple[Tensor, Tensor], centres: int) -> None:
    """Deng et al. 2020, Eqs. 3 and 4: the smallest angle to the K centres of a class, then ArcFace."""
    f, y = batch
    head = SubCenterArcFace(K, D, 8.0, M, centres=centres).double()
    first, more = (p.detach().clone().requires_grad_() for p in (head.weight, head.more))
    rows = []
    for i in range(B):
        row = []
        for j in range(K):
            own = [first[j], *more[j]]
            theta = torch.stack([torch.acos(angle_cos(f[i], c)) for c in own]).min()
            moved = torch.cos(theta + M) if theta + M < math.pi else torch.cos(theta) - M * math.sin(M)
            row.append(8.0 * (moved if j == y[i] else torch.cos(theta)))
        rows.append(row)
    slow = softmax_loop(rows, y)
    agree(head, f, y, slow, [f, first, more])


def test_one_centre_is_arcface(batch: tuple[Tensor, Tensor]) -> None:
    f, y = batch
    head, plain = SubCenterArcFace(K, D, 8.0, M, centres=1).double(), ArcFace(K, D, 8.0, M).double()
    plain.load_state_dict({"weight": head.weight.detach()})
    assert torch.equal(plain.loss(f, y), head.loss(f, y))


def test_subcentres_are_not_shared() -> None:
    with pytest.raises(UsageError, match=r"method\.share_head: further centres of subcenter-arcface are not shared"):
        FedAvg(share_head=True, head=HeadSettings("subcenter-arcface"))
    with pytest.raises(UsageError, match="1 centre of a class or more: got 0"):
        build_head("subcenter-arcface", K, D, centres=0)
