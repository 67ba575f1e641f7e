"""KD of Liu et al. 2022 (Table 2) followed by hand: the teacher is the global model, frozen, not the student itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.joint_toys import joint_world, slow_cosface, slow_features, unit
from tests.toys import first_step, toy_network
from torch import Tensor

from visard.data.augment import augment, to_float
from visard.engines.local import enter
from visard.engines.request import Request
from visard.learning.objective import ContrastSettings
from visard.learning.train import batches
from visard.methods.fedfr_joint import Down, FedFRJoint
from visard.methods.fedfr_joint_client import BranchSettings, JointHead, JointTraining, PersonalSettings, PublicSettings

LR, S, M = 0.05, 12.0, 0.2


def softmax(z: Tensor) -> Tensor:
    return torch.exp(z) / torch.exp(z).sum()


@pytest.mark.parametrize(("weight", "T"), [(0.7, 2.0), (3.0, 1.0)])
def test_distillation_from_the_global_model_by_hand(tmp_path: Path, weight: float, T: float) -> None:
    """Two epochs of several steps, so that student and class vectors leave the teacher's behind.

    loss = L_cos + weight T^2 sum_k p_k log(p_k / q_k), p from the round's network in evaluation mode with the class
    vectors as they were, q from the network and the class vectors in training.
    """
    how = PersonalSettings(stage="kd", epochs=2, kd_weight=weight, kd_temperature=T)
    training = JointTraining(lr=LR, batch_size=6, momentum=0.9, weight_decay=0.01, clip=0.0)
    method = FedFRJoint(
        training=training, head=JointHead(scale=S, margin=M), public=PublicSettings(use="none"),
        contrast=ContrastSettings(weight=0.0), branch=BranchSettings(weight=0.0), personalise=how,
    )  # fmt: skip
    world = joint_world(tmp_path)
    name = world.training[0]
    theta = world.new_weights()
    up, state = first_step(world, method.alone, name, Down(theta, None, LR), "personalise")

    party = enter(world, Request(client=name, stage="personalise", ask=1), {})
    view = party.data.train
    features = slow_features(theta, view.batch(list(range(len(view)))))
    means = [
        unit(torch.stack([unit(f) for f, y in zip(features, view.labels, strict=True) if y == k]).sum(0))
        for k in range(view.n_classes)
    ]
    fixed = torch.stack(means)
    W = fixed.clone().requires_grad_()
    student, teacher = toy_network().double(), toy_network().double()
    student.load_state_dict(theta)
    teacher.load_state_dict(theta)
    student.train(), teacher.eval()
    parameters = [*student.parameters(), W]
    velocity = [torch.zeros_like(p) for p in parameters]
    losses, seen = [], 0
    for rows in batches(len(view), JointTraining(batch_size=6, amount=2), party.rng):
        x = augment(to_float(view.batch(rows)), party.rng, training.augment).double()
        f = student(x)
        with torch.no_grad():
            told = teacher(x)
        loss, kd = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for i, row in enumerate(rows):
            p = softmax(torch.stack([S * torch.dot(unit(told[i]), unit(w)) for w in fixed]) / T)
            q = softmax(torch.stack([S * torch.dot(unit(f[i]), unit(w)) for w in W]) / T)
            kd = kd + T * T * (p * torch.log(p / q)).sum() / len(rows)
            loss = loss + slow_cosface(f[i], W, int(view.labels[row]), S, M) / len(rows)
        gradients = torch.autograd.grad(loss + weight * kd, parameters)
        losses.append(float(kd.detach()) * len(rows))
        seen += len(rows)
        with torch.no_grad():
            for p, g, v in zip(parameters, gradients, velocity, strict=True):
                v.mul_(0.9).add_(g + 0.01 * p)
                p.sub_(LR * v)
    assert len(losses) > 3
    for key, value in student.named_parameters():
        torch.testing.assert_close(state["theta"][key].double(), value.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state["W"].double(), W.detach(), rtol=1e-3, atol=1e-4)
    assert up.figures["kd"] == pytest.approx(sum(losses) / seen, rel=1e-3)
    assert up.figures["kd"] > 0.01, "the student is not its own teacher"
