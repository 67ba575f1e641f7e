"""FedFace: what becomes of class vectors at a client, and of those whose client was not asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.golden.test_fedface_golden import STILL, linear_world
from tests.toys import first_step, toy_engine

from visard.learning.positive import SpreadOut, squared_hinge
from visard.methods.fedface import Down, FedFace, Server

ALONE = FedFace(rounds=2, training=replace(STILL, lr=5.0), margin=1.0, spread=SpreadOut(weight=0.0))


def rows(seed: int, people: int) -> torch.Tensor:
    found = torch.randn(people, 8, generator=torch.Generator().manual_seed(seed))
    return found / found.norm(dim=1, keepdim=True)


def test_a_class_vector_leaves_at_length_1(tmp_path: Path) -> None:
    """A step as long as this one makes a class vector longer: its gradient is at right angles to it."""
    world = linear_world(tmp_path)
    c = world.training[0]
    sent = rows(0, world.clients[c].n_classes)
    up, _ = first_step(world, ALONE.local, c, Down(world.new_weights(), sent, 5.0))
    assert float((up.w - sent).abs().max()) > 0.1, "it moved"
    assert up.w.norm(dim=1).tolist() == pytest.approx([1.0] * len(sent), abs=1e-6)


@pytest.mark.parametrize("together", [True, False], ids=["cohort", "client by client"])
def test_fixed_class_vectors_stay(tmp_path: Path, together: bool) -> None:
    """`train_vectors` = False: only the network learns."""
    net = toy_engine(tmp_path, linear_world(tmp_path))
    if not together:
        net.replies_together = lambda step, requests, mean: net.replies(step, requests)  # type: ignore[method-assign]
    W = {c: rows(i, net.world.clients[c].n_classes) for i, c in enumerate(net.clients)}
    theta = net.world.new_weights()
    net.begin("federate", 0)
    after = replace(ALONE, train_vectors=False).round(Server(theta, W, False), net)
    for c in net.clients:
        torch.testing.assert_close(after.W[c], W[c], rtol=0, atol=1e-6)
    assert float((after.theta["A.weight"] - theta["A.weight"]).abs().max()) > 0.01


def test_who_was_not_asked_keeps_its_class_vector(tmp_path: Path) -> None:
    """Half of two clients is one: the other's row is still there, as it was."""
    net = toy_engine(tmp_path, linear_world(tmp_path))
    W = {c: rows(i, net.world.clients[c].n_classes) for i, c in enumerate(net.clients)}
    net.begin("federate", 0)
    after = replace(ALONE, participation=0.5).round(Server(net.world.new_weights(), W, False), net)
    assert list(after.W) == list(W)
    changed = [c for c in W if not torch.allclose(after.W[c], W[c], atol=1e-5)]
    assert len(changed) == 1


def test_a_class_vector_of_any_length_is_used_at_length_1() -> None:
    """Cosines with (3, 4) are those with (0.6, 0.8), and a longer vector turns more slowly, not faster."""
    features, w = torch.tensor([[2.0, 0.0], [0.0, 5.0], [3.0, 4.0]]), torch.tensor([[3.0, 4.0]], requires_grad=True)
    each = squared_hinge(features, w.expand(3, 2), 0.9)
    torch.testing.assert_close(each.detach(), torch.tensor([0.09, 0.01, 0.0]), rtol=1e-5, atol=1e-6)
    each[0].backward()  # type: ignore[no-untyped-call]
    # -2 (0.9 - 0.6) times d cos / d w, which is the part of (1, 0) across (0.6, 0.8), by 1 / |w|: (0.64, -0.48) / 5
    assert w.grad is not None
    assert w.grad[0].tolist() == pytest.approx([-0.6 * 0.64 / 5, 0.6 * 0.48 / 5], abs=1e-6)
