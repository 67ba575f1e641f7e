"""Tuning of Gansekoele et al. 2024: five batches of SGD with a momentum of 0.9, followed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.joint_toys import slow_cosface
from tests.toys import toy_network, toy_world

from visard.data.augment import Augment, augment, to_float
from visard.engines.local import enter
from visard.engines.request import Request
from visard.learning.heads import HeadSettings
from visard.learning.train import Training, batches
from visard.learning.weights import load_weights, weights_of
from visard.methods.scoring import Tuning, tune


def test_the_paper_s_settings() -> None:
    assert (Tuning().lr, Tuning().momentum, Tuning().batch_size) == (0.01, 0.9, 64)


@pytest.mark.parametrize("momentum", [0.9, 0.5])
def test_tuning_is_momentum_sgd_by_hand(tmp_path: Path, momentum: float) -> None:
    """v <- momentum v + g, p <- p - lr v for three batches; without decay and clipping."""
    lr, size, s, m = 0.05, 4, 8.0, 0.1
    world = toy_world(tmp_path)
    theta, request = world.new_weights(), Request(client=world.training[0], stage="final", ask=1)
    torch.manual_seed(4)
    head = HeadSettings("cosface", s, m).build(world.clients[world.training[0]].train.n_classes, 8)
    client = enter(world, request, {"head": weights_of(head)})
    model = client.network()
    load_weights(model, theta)
    tune(client, model, Tuning(batches=3, batch_size=size, lr=lr, momentum=momentum), HeadSettings("cosface", s, m),
         None)  # fmt: skip

    again = enter(world, request, {})
    view, plain = again.data.train, toy_network().double()
    plain.load_state_dict(theta)
    plain.train()
    W = head.weight.detach().double().requires_grad_()
    parameters = [*plain.parameters(), W]
    velocity = [torch.zeros_like(p) for p in parameters]
    drawn = Training(batch_size=size, unit="iterations", amount=3, partial=False)
    steps = 0
    for rows in batches(len(view), drawn, again.rng):
        f = plain(augment(to_float(view.batch(rows)), again.rng, Augment()).double())
        losses = [slow_cosface(f[i], W, int(view.labels[row]), s, m) for i, row in enumerate(rows)]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), parameters)
        with torch.no_grad():
            for p, g, v in zip(parameters, gradients, velocity, strict=True):
                v.mul_(momentum).add_(g)
                p.sub_(lr * v)
        steps += 1
    assert steps == 3
    for name, p in plain.named_parameters():
        torch.testing.assert_close(weights_of(model)[name].double(), p.detach(), rtol=1e-4, atol=2e-6)
