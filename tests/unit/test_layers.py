"""Layers with a quicker backward pass: torch's own results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from visard.models.layers import MapConv2d, PReLU


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(torch.cos(torch.arange(y.numel())).view(y.shape))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("shape", [(4, 6, 5, 5), (64, 32, 7, 7), (8, 6)])
def test_prelu_has_the_bits_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).round(decimals=1)  # zeros among them
    x = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    theirs, ours = nn.PReLU(shape[1]), PReLU(shape[1])
    theirs.weight.data.uniform_(-0.5, 0.5)
    ours.load_state_dict(theirs.state_dict())
    assert bool((x == 0).any())
    y, by_x, by_slope = gradients(ours.train(), x)
    expected = gradients(theirs.train(), x)
    assert torch.equal(y, expected[0])
    assert torch.equal(by_x, expected[1])
    assert torch.allclose(by_slope, expected[2], rtol=1e-5, atol=1e-5)
    ours.weight.requires_grad_(False)
    assert torch.equal(gradients(ours, x)[1], by_x)


def test_second_derivatives_are_those_of_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(PReLU(3).double(), (x,))
    assert torch.autograd.gradgradcheck(PReLU(3).double(), (x,))


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_convolution_as_large_as_its_map_is_a_weighted_sum(channels_last: bool) -> None:
    torch.manual_seed(0)
    layer = MapConv2d(16, 16, 7, groups=16, bias=False)
    plain = nn.Conv2d(16, 16, 7, groups=16, bias=False)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 16, 7, 7)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
        layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for got, expected in zip(gradients(layer, x), gradients(plain, x), strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(layer).eval()
    assert torch.equal(other(x), plain.eval()(x)), "the same code in evaluation mode"
    wide = torch.randn(2, 16, 9, 9)
    assert torch.equal(layer(wide), plain(wide)), "and on maps that are larger"
