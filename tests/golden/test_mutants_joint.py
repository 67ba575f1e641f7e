"""FedFR-joint: the two averages of the server with literal numbers, and where class vectors start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.joint_toys import joint_world, slow_features, unit
from tests.toys import toy_engine

from visard.core import Client, client_step
from visard.engines.local import enter
from visard.engines.request import Request
from visard.methods.fedfr_joint import Down, FedFRJoint, Server, Up
from visard.methods.fedfr_joint_client import BranchSettings, Joint, JointHead, PublicSettings


@dataclass(frozen=True)
class Literal(FedFRJoint):
    """Clients that answer what is written here: 3 and 1 own pictures, 5 and 11 public ones, weights of 1 and of 5."""

    @client_step
    def local(self, client: Client, msg: Down) -> Up:
        n, public, x = {"client-000": (3, 5.0, 1.0), "client-001": (1, 11.0, 5.0)}[client.id]
        assert msg.Phi is not None
        theta = {k: torch.full_like(v, int(x) if k.endswith("tracked") else x) for k, v in msg.theta.items()}
        return Up(theta, torch.full_like(msg.Phi, -x), n, {"public": public})


@pytest.mark.parametrize(
    ("weighting", "mean"),
    [("local", (3 * 1 + 1 * 5) / 4), ("trained", (8 * 1 + 12 * 5) / 20), ("uniform", 3.0)],
)
def test_equations_2_and_4_with_literal_numbers(tmp_path: Path, weighting: Any, mean: float) -> None:
    net = toy_engine(tmp_path, joint_world(tmp_path, clients=2))
    assert net.clients == ("client-000", "client-001")
    net.begin("federate", 0)
    before = Server(net.world.new_weights(), torch.zeros(4, 8))
    after = Literal(rounds=1, weighting=weighting).round(before, net)
    assert after.Phi is not None
    torch.testing.assert_close(after.theta["5.weight"], torch.full_like(after.theta["5.weight"], mean))
    torch.testing.assert_close(after.Phi, torch.full((4, 8), -mean))
    assert net.traffic.figures["public"] == pytest.approx((3 * 5 + 1 * 11) / 4)


@pytest.mark.parametrize("weight", [0.0, 10.0], ids=["no branch", "branch"])
def test_class_vectors_of_a_client_start_at_mean_features(tmp_path: Path, weight: float) -> None:
    """The direction of the sum of a person's unit features, in W and in Omega; public people have the rows of Phi."""
    world = joint_world(tmp_path)
    client: Client = enter(world, Request(client=world.training[0], stage="federate", ask=1), {})
    theta, Phi, branch = world.new_weights(), torch.randn(4, 8), BranchSettings(weight=weight)
    joint = Joint.prepare(client, theta, Phi, JointHead(), branch, PublicSettings(), "mean")
    view = client.data.train
    features = slow_features(theta, view.batch(list(range(len(view)))))
    for k in range(view.n_classes):
        total = torch.stack([unit(f) for f, y in zip(features, view.labels, strict=True) if y == k]).sum(0)
        torch.testing.assert_close(joint.head.weight[k].detach().double(), unit(total), rtol=0, atol=1e-5)
        if joint.branch is not None:
            torch.testing.assert_close(joint.branch.head.weight[k].detach().double(), unit(total), rtol=0, atol=1e-5)
    assert (joint.branch is None) == (weight == 0)
    assert torch.equal(joint.head.weight.detach()[view.n_classes :], Phi)
