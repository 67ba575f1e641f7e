"""FedFR-joint: Eqs. 1 to 7 and Algorithm 1 of Liu et al. 2022 against slow loops in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.joint_toys import (
    SlowClient,
    joint_world,
    slow_balanced_bias,
    slow_bce,
    slow_contrast,
    slow_cosface,
    slow_features,
    slow_training,
)
from tests.toys import toy_engine
from torch import Tensor

from visard.core import Weights
from visard.data.augment import Augment
from visard.engines.local import LocalNetwork
from visard.learning.heads import HeadSettings, SphereFace2, balanced_bias, spread
from visard.learning.objective import ContrastSettings, model_contrastive
from visard.methods.fedfr_joint import FedFRJoint, Server
from visard.methods.fedfr_joint_client import (
    Branch,
    BranchSettings,
    JointHead,
    JointTraining,
    PersonalSettings,
    PublicSettings,
    closest,
    hard_negatives,
)

TRAINING = JointTraining(lr=0.05, batch_size=4, amount=2, clip=0.0, augment=Augment(flip=True), schedule="constant")
METHOD = FedFRJoint(
    rounds=3, training=TRAINING, head=JointHead("cosface", 12.0, 0.2), cosine_weight=0.7,
    public=PublicSettings(threshold=0.965), contrast=ContrastSettings(weight=3.0, tau=0.4),
    branch=BranchSettings(weight=6.0, scale=16.0, margin=0.3, balance=0.6, bias_start="balanced"),
)  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_eq_1_and_3_cosface_over_own_and_public_people() -> None:
    f, vectors, labels = random(6, 8), random(7, 8, seed=1), torch.tensor([0, 3, 6, 2, 5, 1])
    head = HeadSettings("cosface", 30.0, 0.4).build(7, 8).double()
    head.weight.data = vectors
    slow = torch.stack([slow_cosface(f[i], vectors, int(y), 30.0, 0.4) for i, y in enumerate(labels)]).mean()
    torch.testing.assert_close(head.loss(f, labels), slow)


def test_the_public_people_are_more_terms_in_the_denominator() -> None:
    """Eq. 3 is Eq. 1 with K_g more negative terms, so the loss of an own picture can only grow."""
    f, W, Phi = random(1, 8), random(3, 8, seed=1), random(4, 8, seed=2)
    alone, joined = slow_cosface(f[0], W, 1, 30.0, 0.4), slow_cosface(f[0], torch.cat([W, Phi]), 1, 30.0, 0.4)
    added = sum(math.exp(30 * float(torch.cosine_similarity(f[0], p, dim=0))) for p in Phi)
    target = math.exp(30 * (float(torch.cosine_similarity(f[0], W[1], dim=0)) - 0.4))
    assert math.exp(float(joined)) == pytest.approx(math.exp(float(alone)) + added / target)


def test_hard_negatives_are_those_near_any_own_picture() -> None:
    public, own = random(23, 6), random(5, 6, seed=1)
    nearest = [max(float(torch.cosine_similarity(p, o, dim=0)) for o in own) for p in public]
    torch.testing.assert_close(closest(public, own, rows=4, columns=2), torch.tensor(nearest, dtype=torch.float64))
    assert hard_negatives(public, own, 0.4).tolist() == [i for i, c in enumerate(nearest) if c > 0.4]


def test_eq_5_contrastive() -> None:
    f, f_glob, f_prev = random(5, 8), random(5, 8, seed=1), random(5, 8, seed=2)
    slow = torch.stack([slow_contrast(*rows, 0.5) for rows in zip(f, f_glob, f_prev, strict=True)]).mean()
    torch.testing.assert_close(model_contrastive(f, f_glob, f_prev, 0.5), slow)


def test_eq_5_in_numbers() -> None:
    f = torch.tensor([[1.0, 0.0]])
    same, opposite = torch.tensor([[2.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    assert float(model_contrastive(f, same, same, 0.5)) == pytest.approx(math.log(2))
    assert float(model_contrastive(f, same, opposite, 0.5)) == pytest.approx(math.log(1 + math.exp(-4)))
    assert float(model_contrastive(f, opposite, same, 1e-3)) == pytest.approx(2000.0)  # e^2000 is no number


@pytest.mark.parametrize("training", [True, False])
def test_teachers_see_a_batch_as_the_student_does(training: bool) -> None:
    """With `norm = batch` the mean and deviation of the batch, by hand; nothing is recorded of it.

    The records are of other pictures: by them equal weights have other features, and a student that has not moved a
    cosine below 1. A student whose batch norm is frozen has teachers whose batch norm is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
    model[1].running_mean, model[1].running_var = torch.rand(6) * 3, torch.rand(6) + 2
    theta = {k: v.clone() for k, v in model.state_dict().items()}
    previous = {k: v + 0.3 if v.is_floating_point() else v for k, v in theta.items()}
    x = random(7, 5).float()

    def by_hand(w: Weights, batch: bool) -> Tensor:
        h = x @ w["0.weight"].t() + w["0.bias"]
        m, v = (h.mean(0), h.var(0, unbiased=False)) if batch else (w["1.running_mean"], w["1.running_var"])
        h = (h - m) / torch.sqrt(v + 1e-5) * w["1.weight"] + w["1.bias"]
        return h @ w["2.weight"].t() + w["2.bias"]

    def by_loops(batch: bool) -> Tensor:
        features = (by_hand(w, batch) for w in (theta, theta, previous))
        return torch.stack([slow_contrast(*row, 0.4) for row in zip(*features, strict=True)]).mean()

    for norm in ("batch", "running"):
        model.load_state_dict(theta)
        terms = ContrastSettings(weight=1.0, tau=0.4, norm=norm).terms(model, theta, previous)  # type: ignore[arg-type]
        model.train(training)
        f = model(x)
        found = terms["con"][1](x, f, torch.zeros(7))
        slow = by_loops(training)
        assert bool(torch.isclose(found, slow, atol=1e-5)) == (norm == "batch" or not training)
        model.load_state_dict(theta)
        model.eval()
        later = terms["con"][1](x, model(x), torch.zeros(7))
        torch.testing.assert_close(later, by_loops(False), atol=1e-5, rtol=0)  # teachers have recorded nothing


def test_the_second_stage_keeps_the_class_vectors_or_starts_anew(tmp_path: Path) -> None:
    """A stage that does not move (learning rate 0) leaves what it began with: W of the rounds, or mean features."""
    world = joint_world(tmp_path)
    for vectors in ("kept", "fresh"):
        how = replace(
            METHOD, branch=BranchSettings(weight=0), training=replace(TRAINING, lr=1e-30),
            personalise=PersonalSettings(stage="kd", vectors=vectors),  # type: ignore[arg-type]
        )  # fmt: skip
        (tmp_path / vectors).mkdir()
        net = toy_engine(tmp_path / vectors, world)
        s = replace(METHOD, branch=BranchSettings(weight=0)).start(world.setup())
        net.begin("federate", 0)
        s = replace(METHOD, branch=BranchSettings(weight=0)).round(s, net)
        before = {c: net.states.client_state(c)["W"] for c in net.clients}
        net.begin("personalise", 0)
        how.personal_round(s, net)
        for c in net.clients:
            view, W = world.clients[c].train, net.states.client_state(c)["W"]
            f = slow_features(s.theta, view.batch(list(range(len(view)))))
            units = [v / v.norm() for v in f]
            rows = [sum(u for u, y in zip(units, view.labels, strict=True) if y == k) for k in range(view.n_classes)]
            fresh = torch.stack([r / r.norm() for r in rows])  # type: ignore[union-attr]
            close(W, before[c] if vectors == "kept" else fresh)
            assert not torch.allclose(before[c].double(), fresh, atol=1e-3)


@pytest.mark.parametrize("bias", ["shared", "per_class"])
def test_eq_6_one_against_all(bias: str) -> None:
    f, omega = random(5, 8), random(4, 8, seed=1)
    head = SphereFace2(4, 8, scale=30.0, margin=0.4, t=3.0, balance=0.7, bias=bias).double()  # type: ignore[arg-type]
    head.weight.data, head.bias.data = omega, random(len(head.bias), seed=2)
    b = head.bias.detach().expand(4)
    labels = torch.tensor([2, -1, 0, 3, -1])  # -1: a public picture
    slow = torch.zeros((), dtype=torch.float64)
    for i, k in enumerate(labels.tolist()):
        parts = [slow_bce(f[i], omega[j : j + 1], b[j], 0 if j == k else None, 30.0, 0.4, 3.0, 0.7) for j in range(4)]
        slow = slow + torch.stack(parts).sum()
    torch.testing.assert_close(head.loss(f, labels), slow / 5)


def test_g_is_the_repaired_one() -> None:
    """The paper prints 2((z + 1)^t / 2) - 1, which leaves [-1, 1]; SphereFace2's g does not."""
    z = torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    expected = torch.tensor([-1.0, -0.75, 2 * 0.75**3 - 1, 1.0], dtype=torch.float64)
    torch.testing.assert_close(spread(z, 3.0), expected)


def test_the_balanced_bias_start() -> None:
    assert balanced_bias(100, 30.0, 0.4, 3.0, 0.7) == pytest.approx(slow_balanced_bias(100, 30.0, 0.4, 3.0, 0.7))
    assert balanced_bias(100, 30.0, 0.4, 3.0, 0.7) == pytest.approx(6.78, abs=0.01)
    assert Branch(BranchSettings(), 3, 8).head.bias.item() == 0, "as in the released code"
    assert Branch(BranchSettings(bias_start="balanced"), 3, 8).head.bias.item() != 0


def test_the_transformation_starts_as_the_identity() -> None:
    branch = Branch(BranchSettings(), 3, 8)
    f = random(5, 8).float()
    assert torch.equal(branch.transform(f), f)


def test_detach_keeps_the_branch_from_the_backbone() -> None:
    for kind in ("bce", "cosface"):
        for detach in (False, True):
            f = random(4, 8).float().requires_grad_()
            branch = Branch(BranchSettings(kind=kind, detach=detach), 3, 8)  # type: ignore[arg-type]
            branch.loss(f, torch.tensor([0, 2, -1, 1])).backward()
            assert (f.grad is None) == detach
            assert branch.transform.weight.grad is not None


def test_a_cosface_branch_has_no_class_for_public_pictures() -> None:
    branch = Branch(BranchSettings(kind="cosface"), 3, 8).double()
    f, labels = random(4, 8), torch.tensor([0, -1, 2, -1])
    Omega = branch.head.weight.detach()
    slow = (slow_cosface(f[0], Omega, 0, 30.0, 0.4) + slow_cosface(f[2], Omega, 2, 30.0, 0.4)) / 2
    torch.testing.assert_close(branch.loss(f, labels), slow)
    assert float(branch.loss(f[1:2], labels[1:2])) == 0


def run_round(net: LocalNetwork, s: Server, round: int) -> Server:
    net.begin("federate", round)
    return METHOD.round(s, net)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=2e-4, atol=2e-5)


def same_weights(theta: Weights, slow: dict[str, Tensor]) -> None:
    for key, value in theta.items():
        if value.is_floating_point():
            close(value, slow[key])
        else:
            assert value == slow[key]


def mean(parts: list[Tensor], sizes: list[int]) -> Tensor:
    if not parts[0].is_floating_point():
        return torch.stack(parts).max(0).values
    return sum((n * p.double() for n, p in zip(sizes, parts, strict=True)), torch.zeros(())) / sum(sizes)


def test_algorithm_1(tmp_path: Path) -> None:
    """Two rounds of server and clients: Eqs. 2, 4 and 7, line by line, with W, Pi, Omega and b at home."""
    world = joint_world(tmp_path)
    world.class_vectors = random(4, 8, seed=5).float()
    net = toy_engine(tmp_path, world)
    s = METHOD.start(world.setup())
    theta, Phi = {k: v.double() if v.is_floating_point() else v for k, v in s.theta.items()}, s.Phi
    assert Phi is not None
    clients: dict[str, SlowClient] = {}
    sizes = [len(world.clients[c].train) for c in net.clients]
    for round in range(2):
        s = run_round(net, s, round)
        clients = {
            c: slow_training(world, METHOD, c, round, theta, Phi, 0.05, clients.get(c)) for c in net.clients
        }  # lines 4-7
        theta = {k: mean([c.theta[k] for c in clients.values()], sizes) for k in theta}  # line 8, Eq. 2
        Phi = mean([c.Phi for c in clients.values()], sizes)  # line 9, Eq. 4
        assert any(0 < len(c.hard) < 28 for c in clients.values()), "the threshold chooses"
        same_weights(s.theta, theta)
        assert s.Phi is not None
        close(s.Phi, Phi)
    for name, slow in clients.items():
        state = net.states.client_state(name)
        same_weights(state["theta"], slow.theta)
        close(state["W"], slow.W)
        close(state["branch"]["transform.weight"], slow.Pi)
        close(state["branch"]["transform.bias"], slow.shift)
        close(state["branch"]["head.weight"], slow.Omega)
        close(state["branch"]["head.bias"], slow.b)
        personal = METHOD.personal(state, s.theta)
        assert personal is not None
        assert torch.equal(personal["5.weight"], state["theta"]["5.weight"]), "before the last average"
        assert not torch.equal(personal["5.weight"], s.theta["5.weight"])
        assert torch.equal(personal["transform.weight"], state["branch"]["transform.weight"])


def test_a_second_round_uses_the_averaged_class_matrix(tmp_path: Path) -> None:
    """The released code averages Phi and sends the first one out for ever."""
    world = joint_world(tmp_path)
    world.class_vectors = random(4, 8, seed=5).float()
    net, sent = toy_engine(tmp_path, world), []
    s = METHOD.start(world.setup())
    ask = net.reduce

    def spy(step, messages, **more):  # type: ignore[no-untyped-def]
        sent.append(next(iter(messages.values())))
        return ask(step, messages, **more)

    net.reduce = spy  # type: ignore[method-assign]
    first = run_round(net, s, 0)
    second = run_round(net, first, 1)
    assert torch.equal(sent[0].Phi, world.class_vectors)
    assert first.Phi is not None
    assert second.Phi is not None
    assert torch.equal(sent[1].Phi, first.Phi)
    assert not torch.allclose(first.Phi, world.class_vectors, atol=1e-4)
    # with the first matrix in its place the second round ends elsewhere
    (tmp_path / "other").mkdir()
    again = toy_engine(tmp_path / "other", world)
    run_round(again, s, 0)
    stale = run_round(again, replace(first, Phi=world.class_vectors), 1)
    assert stale.Phi is not None
    assert not torch.allclose(stale.Phi, second.Phi, atol=1e-4)


def test_phi_from_mean_features(tmp_path: Path) -> None:
    world = joint_world(tmp_path)
    net = toy_engine(tmp_path, world)
    s = METHOD.start(world.setup())
    assert s.Phi is None
    net.begin("federate", 0)
    down = METHOD.down(s, net, 0.1)
    assert world.public is not None
    f = slow_features(s.theta, world.public.batch(list(range(len(world.public)))))
    for k in range(4):
        rows = torch.stack([v / v.norm() for v, y in zip(f, world.public.labels, strict=True) if y == k]).sum(0)
        assert down.Phi is not None
        close(down.Phi[k], rows / rows.norm())
