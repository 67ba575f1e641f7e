"""Adam against torch's, also when its moments go through a client's state."""

from __future__ import annotations

import pytest
import torch

from visard.learning.train import Adam, Sgd, new_optimiser


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_the_same_steps_as_torch(decay: float) -> None:
    torch.manual_seed(0)
    mine = [torch.randn(3, 2, requires_grad=True), torch.randn(4, requires_grad=True)]
    theirs = [p.detach().clone().requires_grad_() for p in mine]
    reference = torch.optim.Adam(theirs, 0.05, weight_decay=decay)
    optimiser = new_optimiser("adam", mine, 0.05, 0.9, decay)
    for step in range(12):
        for parameters in (mine, theirs):
            loss = sum(((p - 1) ** 2 * (step + 1)).sum() for p in parameters)
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):  # type: ignore[arg-type]
                p.grad = g
        reference.step()
        optimiser.step()
        if step == 5:  # as when a party's state is kept between two exchanges
            kept = {str(i): v for i, v in optimiser._velocity.items()}
            optimiser = Adam(mine, 0.05, decay)
            optimiser._velocity = {int(i): v for i, v in kept.items()}
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_parameters_without_a_gradient_stay() -> None:
    p, q = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    Adam([p, q], 0.1, 0.5).step()
    assert torch.equal(q, torch.ones(2))
    assert not torch.equal(p, torch.ones(2))
    assert type(new_optimiser("sgd", [p], 0.1, 0.9, 0.0)) is Sgd
