"""LoRA by slow loops: W + scale B A, what a convolution with it gives, and how its factors descend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from visard.models.lora import SCALE, adapt, merged

SHAPES = {"linear": (5, 7), "convolution": (6, 4, 3, 3), "groups": (6, 2, 3, 3), "depthwise": (8, 1, 3, 3)}
RANK = 2


def factors(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=rng)
    columns = weight[0].numel()
    return weight, torch.randn(RANK, columns, generator=rng), torch.randn(len(weight), RANK, generator=rng)


def slowly(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Every number of W + 2 B A by itself."""
    found = weight.clone()
    rest = list(weight.shape[1:])
    for o in range(len(weight)):
        for column in range(weight[0].numel()):
            place, left = [], column
            for side in reversed(rest):
                place.insert(0, left % side)
                left //= side
            found[(o, *place)] += 2.0 * sum(float(b[o, r]) * float(a[r, column]) for r in range(RANK))
    return found


@pytest.mark.parametrize("kind", SHAPES)
def test_the_merge_is_w_plus_scale_b_a(kind: str) -> None:
    weight, a, b = factors(SHAPES[kind])
    assert torch.allclose(merged(weight, a, b), slowly(weight, a, b), atol=1e-5)
    assert merged(weight, a, b).shape == weight.shape
    assert SCALE == 2.0


@pytest.mark.parametrize(("kind", "groups"), [("convolution", 1), ("groups", 2), ("depthwise", 8)])
def test_a_convolution_with_factors_is_one_with_the_merged_kernel(kind: str, groups: int) -> None:
    weight, a, b = factors(SHAPES[kind])
    out, each = weight.shape[:2]
    layer = nn.Conv2d(each * groups, out, 3, 2, 1, groups=groups)
    layer.weight.data.copy_(weight)
    bias = layer.bias.detach().clone()  # type: ignore[union-attr]
    adapt(layer, 1)
    layer.lora_A, layer.lora_B = nn.Parameter(a), nn.Parameter(b)
    x = torch.randn(2, each * groups, 6, 6, generator=torch.Generator().manual_seed(1))
    whole, got = slowly(weight, a, b), layer(x).detach()
    assert torch.allclose(got, conv2d(x, whole, bias, 2, 1, 1, groups), atol=1e-4)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    for o, i, j in ((0, 0, 0), (out - 1, 2, 1), (out // 2, 1, 2)):  # each kernel sees the channels of its group
        group = o // (out // groups)
        expected = bias[o] + sum(
            whole[o, c, u, v] * padded[1, group * each + c, 2 * i + u, 2 * j + v]
            for c in range(each) for u in range(3) for v in range(3)
        )  # fmt: skip
        assert float(got[1, o, i, j]) == pytest.approx(float(expected), abs=1e-4)


def test_factors_descend_by_the_chain_rule() -> None:
    weight, a, b = factors(SHAPES["linear"])
    layer = nn.Linear(7, 5, bias=False)
    layer.weight.data.copy_(weight)
    adapt(layer, 1)
    layer.lora_A, layer.lora_B = nn.Parameter(a), nn.Parameter(b)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    layer(x).square().sum().backward()
    by_w = 2 * (x @ slowly(weight, a, b).T).T @ x  # the gradient by W itself
    for r in range(RANK):
        for o in range(5):
            expected = sum(2.0 * float(by_w[o, c]) * float(a[r, c]) for c in range(7))
            assert float(layer.lora_B.grad[o, r]) == pytest.approx(expected, rel=1e-3, abs=1e-3)  # type: ignore[union-attr,index]
        for c in range(7):
            expected = sum(2.0 * float(by_w[o, c]) * float(b[o, r]) for o in range(5))
            assert float(layer.lora_A.grad[r, c]) == pytest.approx(expected, rel=1e-3, abs=1e-3)  # type: ignore[union-attr,index]
    assert not layer.weight.requires_grad


def test_the_mean_of_factors_is_not_the_mean_of_products() -> None:
    """What averaging does, and what it does not: with one A for all they are the same."""
    weight, a, b = factors(SHAPES["linear"])
    _, c, d = factors(SHAPES["linear"], seed=1)
    products = (merged(weight, a, b) + merged(weight, c, d)) / 2
    assert (merged(weight, (a + c) / 2, (b + d) / 2) - products).abs().max() > 0.1
    same = (merged(weight, a, b) + merged(weight, a, d)) / 2
    assert torch.allclose(merged(weight, a, (b + d) / 2), same, atol=1e-5)
