"""Heads at the edges: exact ±1 cosines, zero vectors, autocast, bad input."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from visard.config import load
from visard.errors import UsageError, VisardError
from visard.learning.heads import HEADS, ArcFace, HeadSettings, Softmax, SphereFace2, arc_margin, build_head
from visard.methods.fedavg import FedAvg

KINDS = sorted(HEADS)
SETTINGS: dict[str, list[dict[str, object]]] = {
    "arcface": [{}, {"past_pi": "plain"}, {"past_pi": "easy"}, {"detach_margin": True}],
    "softmax": [{}, {"normalise": True}, {"bias": False}],
    "sphereface2": [{}, {"t": 1.0}, {"t": 2.5, "bias": "per_class"}, {"detach_margin": True}],
}
CASES = [(kind, given) for kind in KINDS for given in SETTINGS.get(kind, [{}])]


@pytest.mark.parametrize(("kind", "given"), CASES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_at_the_edges(kind: str, given: dict[str, object], autocast: bool, dtype: torch.dtype) -> None:
    """cos = +1, cos = -1, zero features, huge and tiny features, and a zero class vector."""
    head = build_head(kind, 4, 8, **given)  # type: ignore[arg-type]
    with torch.no_grad():
        head.weight[3] = 0
    w = head.weight.detach()
    features = torch.stack([w[0], -w[1], 0 * w[0], 1e4 * w[2], 1e-6 * w[2], w[0]]).to(dtype).requires_grad_()
    labels = torch.tensor([0, 1, 2, 2, 0, 3])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = head.loss(features, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize(("kind", "given"), CASES)
def test_autocast_changes_nothing(kind: str, given: dict[str, object]) -> None:
    head = build_head(kind, 4, 8, **given)  # type: ignore[arg-type]
    features, labels = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])
    plain = head.loss(features, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head.loss(features, labels), plain)


@pytest.mark.parametrize("kind", ["arcface", "cosface", "sphereface2"])
def test_zero_features_pass_no_gradient(kind: str) -> None:
    features = torch.zeros(2, 8, requires_grad=True)
    build_head(kind, 3, 8).loss(features, torch.tensor([0, 1])).backward()  # type: ignore[arg-type, no-untyped-call]
    assert features.grad is not None
    assert (features.grad == 0).all()


def test_arcface_slope_at_a_perfect_match_is_bounded() -> None:
    cos = torch.tensor([1 + 2e-7, 1.0, 1 - 1e-7, 1 - 1e-6, -1.0], requires_grad=True)
    arc_margin(cos, 0.5).sum().backward()  # type: ignore[no-untyped-call]
    assert cos.grad is not None
    assert (cos.grad > 0).all()
    assert (cos.grad < 1100).all()
    assert cos.grad[-1] == 1  # past pi: the monotone branch


def test_arc_margin_falls_over_the_whole_half_circle() -> None:
    theta = torch.linspace(0.001, math.pi - 0.001, 2000, dtype=torch.float64)
    for margin in (0.1, 0.5, 1.0, 2.0):
        assert (arc_margin(torch.cos(theta), margin).diff() < 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn(kind: str) -> None:
    """Fifty steps separate three classes of fixed features."""
    torch.manual_seed(0)
    centres = torch.randn(3, 8)
    labels = torch.arange(30) % 3
    features = centres[labels] + 0.1 * torch.randn(30, 8)
    head = build_head(kind, 3, 8, scale=8.0, margin=0.2)  # type: ignore[arg-type]
    optimiser = torch.optim.SGD(head.parameters(), lr=0.5)
    first = head.loss(features, labels).item()
    for _ in range(50):
        optimiser.zero_grad()
        head(features, labels).backward()
        optimiser.step()
    assert head.loss(features, labels).item() < first / 2
    assert (head.logits(features).argmax(1) == labels).all()


def test_initialisation_follows_the_default_generator() -> None:
    def weight(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return build_head("arcface", 50, 64).weight.detach()

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))
    assert weight(1).norm(dim=1).mean() == pytest.approx(1.0, abs=0.05)


def test_sphereface2_label_of_no_class() -> None:
    """-1 is a negative for all classes: its loss equals that of a stranger and pulls no class closer."""
    head = SphereFace2(4, 8)
    features = torch.randn(1, 8, requires_grad=True)
    no_class = head.loss(features, torch.tensor([-1]))
    cos_before = head.logits(features).detach()
    (gradient,) = torch.autograd.grad(no_class, features)
    after = head.logits(features.detach() - 1e-2 * gradient / gradient.norm())
    assert torch.logsumexp(after, 1) < torch.logsumexp(cos_before, 1)
    with pytest.raises(VisardError, match="label -1"):
        build_head("arcface", 4, 8).loss(features, torch.tensor([-1]))


def test_bias_shapes() -> None:
    assert SphereFace2(7, 4).bias.shape == (1,)
    assert SphereFace2(7, 4, bias="per_class").bias.shape == (7,)
    assert SphereFace2(7, 4, bias_start="zero").bias.item() == 0
    assert math.isfinite(SphereFace2(1, 4).bias.item())
    assert Softmax(7, 4, bias=False).bias is None
    assert [name for name, _ in Softmax(7, 4).named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("features", "labels", "mask", "message"),
    [
        (torch.ones(2, 7), torch.tensor([0, 1]), None, "8-d features got features"),
        (torch.ones(2, 8), torch.tensor([0]), None, "labels"),
        (torch.ones(2, 8), torch.tensor([0, 4]), None, "label 4 outside the head's 4 classes"),
        (torch.ones(2, 8), torch.tensor([-2, 1]), None, "label -2 outside"),
        (torch.ones(0, 8), torch.tensor([], dtype=torch.int64), None, "empty batch"),
        (torch.ones(1, 8), torch.tensor([1]), torch.tensor([True, False, True, True]), "label 1 .* absent"),
        (torch.ones(1, 8), torch.tensor([1]), torch.ones(3, dtype=torch.bool), "mask must be bool"),
        (torch.ones(1, 8), torch.tensor([1]), torch.ones(4), "mask must be bool"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_input_is_one_line(
    kind: str, features: Tensor, labels: Tensor, mask: Tensor | None, message: str
) -> None:
    with pytest.raises(VisardError, match=message) as caught:
        build_head(kind, 4, 8).loss(features, labels, mask)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_masked_label_of_no_class_is_allowed() -> None:
    mask = torch.tensor([True, True, True, False])
    assert torch.isfinite(SphereFace2(4, 8).loss(torch.randn(2, 8), torch.tensor([-1, 0]), mask))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("arcfase", {}, "unknown head 'arcfase'.*did you mean 'arcface'"),
        ("arcface", {"margin": 28.6}, "radians"),
        ("arcface", {"past_pi": "wrong"}, "past_pi"),
        ("arcface", {"colour": 1}, "head arcface: .*colour"),
        ("cosface", {"margin": -0.1}, "units of cosine"),
        ("cosface", {"scale": 0.0}, "scale"),
        ("softmax", {"scale": math.nan}, "scale"),
        ("sphereface2", {"balance": 1.0}, "balance"),
        ("sphereface2", {"t": 0.5}, "t >= 1"),
        ("sphereface2", {"bias": "none"}, "bias"),
    ],
)
def test_wrong_settings_are_one_line(kind: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build_head(kind, 4, 8, **given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_defaults_stay_where_nothing_is_given() -> None:
    head = build_head("arcface", 4, 8, scale=None, margin=None)
    assert isinstance(head, ArcFace)
    assert (head.scale, head.margin) == (64.0, 0.5)
    with pytest.raises(UsageError, match="at least 1 class"):
        build_head("arcface", 0, 8)
    build_head("softmax", 4, 8, scale=30.0, margin=0.35)  # the margin of a shared setting is ignored


@pytest.mark.parametrize("kind", ["arcface", "cosface", "adaface", "softmax", "sphereface2"])
def test_settings_know_which_heads_have_biases(kind: Any) -> None:
    assert HeadSettings(kind).biased == ("bias" in HeadSettings(kind).build(3, 4).state_dict())
    if HeadSettings(kind).biased:
        with pytest.raises(UsageError, match="biases"):
            FedAvg(share_head=True, head=HeadSettings(kind))


def test_settings_pass_all_of_a_heads_own_parameters() -> None:
    head = load("fedavg", ["method.head.kind=arcface", "method.head.options.past_pi=easy"]).method.head  # type: ignore[attr-defined]
    built = head.build(3, 4)
    assert isinstance(built, ArcFace)
    assert built.past_pi == "easy"
    assert "options" not in load("fedavg").to_dict()["method"]["head"], "what is not given is not written"
    with pytest.raises(UsageError, match="unknown option 'past_py'.*past_pi"):
        HeadSettings("arcface", options={"past_py": "easy"}).build(3, 4)
    with pytest.raises(UsageError, match="unknown head 'arcfac'"):
        load("fedavg", ["method.head.kind=arcfac"])
