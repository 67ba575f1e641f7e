"""SGD with clipping, momentum and weight decay: the bits of torch's own."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from torch import nn

from visard.learning.train import Sgd, new_optimiser


def network() -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.Linear(5, 5)
    )
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("momentum", "decay", "clip"), list(itertools.product([0.0, 0.9], [0.0, 5e-4], [0.0, 0.005, 1e6]))
)
def test_the_bits_of_torch(momentum: float, decay: float, clip: float) -> None:
    ours, theirs = network(), network()
    own = Sgd(ours.parameters(), 0.1, momentum, decay)
    reference = torch.optim.SGD(theirs.parameters(), 0.1, momentum, weight_decay=decay, fused=True)
    for step in range(5):
        x = torch.randn(6, 3, 8, 8)
        for model, optimiser in ((ours, own), (theirs, reference)):
            optimiser.zero_grad()
            out = model(x) if step != 1 else model[:5](x)  # the last layer has no gradient in one step
            out.square().mean().backward()
        if clip:
            own.clip(clip)
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip, foreach=True)
        own.step()
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), step


def test_gradients_and_velocities_in_another_memory_order() -> None:
    p = torch.arange(6.0).view(2, 3).t().requires_grad_()
    own = Sgd([p], 1.0, 0.5, 0.0)
    own._velocity = {0: torch.arange(6.0).view(3, 2)}  # as a state that was saved and read again has it
    p.grad = torch.ones(3, 2)
    expected = p.detach() - (0.5 * torch.arange(6.0).view(3, 2) + 1)
    own.step()
    assert torch.equal(p.detach(), expected)
    p.grad = torch.arange(6.0).view(3, 2)
    expected = p.detach() - (0.5 * (0.5 * torch.arange(6.0).view(3, 2) + 1) + torch.arange(6.0).view(3, 2))
    own.step()
    assert torch.equal(p.detach(), expected)


def test_a_late_first_gradient_starts_its_own_momentum() -> None:
    p = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    own = Sgd(p, 1.0, 0.5, 0.0)
    p[0].grad = torch.ones(2)
    own.step()
    p[0].grad, p[1].grad = torch.ones(2), torch.ones(2)
    own.step()
    assert p[0].tolist() == [1 - 1 - 1.5] * 2
    assert p[1].tolist() == [0.0] * 2


def test_a_gradient_that_is_not_a_number_is_not_hidden() -> None:
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.tensor([float("nan"), 1.0])
    own = Sgd([p], 1.0, 0.0, 0.0)
    own.clip(1.0)
    own.step()
    assert torch.isnan(p).all(), "as torch does: the length is not a number either"


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_factor_of_the_learning_rate_is_a_group_of_torch(kind: Literal["sgd", "adam"]) -> None:
    ours, theirs = network(), network()
    own = new_optimiser(kind, ours.parameters(), 0.01, 0.9, 5e-4)
    own.factors[-2:] = [30.0, 30.0]
    *first, weight, bias = theirs.parameters()
    groups = [{"params": first, "lr": 0.01}, {"params": [weight, bias], "lr": 0.3}]
    reference: torch.optim.Optimizer = (
        torch.optim.SGD(groups, momentum=0.9, weight_decay=5e-4)
        if kind == "sgd"
        else torch.optim.Adam(groups, weight_decay=5e-4)
    )
    for _ in range(4):
        x = torch.randn(6, 3, 8, 8)
        for model, optimiser in ((ours, own), (theirs, reference)):
            optimiser.zero_grad()
            model(x).square().mean().backward()
            optimiser.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
