"""Adam against torch's, also when its moments go through a client's state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.toys import toy_network, toy_world

from visard.data.augment import Augment, to_float
from visard.errors import UsageError
from visard.learning.heads import build_head
from visard.learning.positive import OneStep
from visard.learning.train import Adam, Sgd, Training, batches, new_optimiser, train
from visard.methods.encrypted_mmd import EncryptedMMD
from visard.numerics import Numerics


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


def test_clients_train_with_it(tmp_path: Path) -> None:
    """A round with training.optimiser = adam is torch's Adam on the same batches."""
    world = toy_world(tmp_path)
    view = next(iter(world.clients.values())).train
    how = Training(lr=0.01, batch_size=4, clip=0.0, augment=Augment(flip=False), weight_decay=0.0, optimiser="adam")
    torch.manual_seed(0)
    mine, theirs = toy_network(), toy_network()
    theirs.load_state_dict(mine.state_dict())
    heads = [build_head("cosface", view.n_classes, 8, 16.0, 0.2) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    train(mine, heads[0], view, how, torch.Generator().manual_seed(3), Numerics())
    reference = torch.optim.Adam([*theirs.parameters(), *heads[1].parameters()], 0.01)
    theirs.train()
    for rows in batches(len(view), how, torch.Generator().manual_seed(3)):
        reference.zero_grad()
        heads[1].loss(theirs(to_float(view.batch(rows))), torch.from_numpy(view.labels[rows])).backward()
        reference.step()
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        # a bias before batch norm has no gradient but rounding, which Adam blows up
        if name != "0.bias":
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    assert not OneStep(optimiser="adam").is_one_step
    with pytest.raises(UsageError, match=r"method\.optimiser = adam"):
        EncryptedMMD(training=how)


def test_parameters_without_a_gradient_stay() -> None:
    p, q = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    Adam([p, q], 0.1, 0.5).step()
    assert torch.equal(q, torch.ones(2))
    assert not torch.equal(p, torch.ones(2))
    assert type(new_optimiser("sgd", [p], 0.1, 0.9, 0.0)) is Sgd
