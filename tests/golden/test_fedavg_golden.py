"""FedAvg and FedProx against slow loops: one client's steps with plain autograd, one round with a plain average."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.toys import first_step, toy_engine, toy_network, toy_world
from torch import Tensor, nn

from visard.core import Client, sample_clients
from visard.data.augment import Augment, augment, to_float
from visard.engines.local import LocalNetwork
from visard.engines.world import derive, generator
from visard.errors import UsageError
from visard.learning.heads import HeadSettings
from visard.learning.train import Training, batches
from visard.methods.fedavg import Down, FedAvg, Server

TRAINING = Training(lr=0.05, batch_size=4, clip=0.0, augment=Augment(flip=True), weight_decay=0.01)


def slow_cosface(features: Tensor, W: Tensor, labels: Tensor, rows: list[int], s: float, m: float) -> Tensor:
    """Mean over the batch of -log softmax over the classes in `rows`, written out."""
    losses = []
    for f, y in zip(features, labels.tolist(), strict=True):
        logits = []
        for j in rows:
            cos = torch.dot(f / f.norm(), W[j] / W[j].norm())
            logits.append(s * (cos - m) if j == y else s * cos)
        losses.append(torch.logsumexp(torch.stack(logits), 0) - logits[rows.index(y)])
    return torch.stack(losses).mean()


def slow_local(
    net: LocalNetwork, method: FedAvg, client: str, s: Server, lr: float, ask: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """One client's round in plain PyTorch: theta and W after it."""
    place = ("federate", 0, ask, client)
    torch.manual_seed(derive(net.world.seed, *place, "default"))
    rng = generator(net.world.seed, *place)
    model = toy_network()
    torch.manual_seed(derive(net.world.seed, *place, "default"))
    model.load_state_dict(s.theta)
    view = net.world.clients[client].train
    rows = view.classes.tolist() if s.W is not None else list(range(view.n_classes))
    head = method.head.build(view.n_classes if s.W is None else len(s.W), 8)
    W = nn.Parameter(head.weight.detach().clone() if s.W is None else s.W.clone())
    labels = torch.from_numpy(view.identity if s.W is not None else view.labels)
    parameters = [*model.parameters(), W]
    velocity = [torch.zeros_like(p) for p in parameters]
    anchors = [s.theta[name] for name, _ in model.named_parameters()]
    model.train()
    for chosen in batches(len(view), method.training, rng):
        x = augment(to_float(view.batch(chosen)), rng, method.training.augment)
        loss = slow_cosface(model(x), W, labels[chosen], rows, method.head.scale, method.head.margin)
        proximal = sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchors, strict=True))
        gradients = torch.autograd.grad(loss + method.mu / 2 * proximal, parameters)
        with torch.no_grad():
            for p, g, v in zip(parameters, gradients, velocity, strict=True):
                v.mul_(0.9).add_(g + method.training.weight_decay * p)
                p.sub_(lr * v)
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, W.detach()


@pytest.mark.parametrize("share_head", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("weighting", ["data", "uniform"])
def test_one_round(tmp_path: Path, share_head: bool, mu: float, weighting: str) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = FedAvg(
        rounds=3, training=TRAINING, head=HeadSettings("cosface", 16.0, 0.2),
        share_head=share_head, mu=mu, weighting=weighting,  # type: ignore[arg-type]
    )  # fmt: skip
    start = method.start(net.world.setup())
    net.begin("federate", 0)
    after = method.round(start, net)
    slow = [slow_local(net, method, c, start, lr=0.05) for c in net.clients]
    sizes = [len(net.world.clients[c].train) if weighting == "data" else 1 for c in net.clients]
    for key, value in after.theta.items():
        if value.is_floating_point():
            expected = sum(n * theta[key].double() for n, (theta, _) in zip(sizes, slow, strict=True)) / sum(sizes)
            torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)
        else:
            assert value == max(theta[key] for theta, _ in slow)
    if share_head:
        expected = sum(n * W.double() for n, (_, W) in zip(sizes, slow, strict=True)) / sum(sizes)
        assert after.W is not None
        torch.testing.assert_close(after.W.double(), expected, rtol=1e-4, atol=1e-5)


def test_absent_classes_of_a_global_head_feel_only_weight_decay(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = FedAvg(training=Training(lr=0.05, batch_size=4, weight_decay=0.0), share_head=True)
    s = method.start(net.world.setup())
    assert s.W is not None
    message = Down(s.theta, s.fixed, s.W, 0.05)
    up, _ = first_step(net.world, method.local, net.clients[0], message)
    assert up.W is not None
    present = set(net.world.clients[net.clients[0]].train.classes.tolist())
    for row in range(len(s.W)):
        moved = not torch.equal(up.W[row], s.W[row])
        assert moved == (row in present)


def test_without_the_mask_everybody_of_a_global_head_is_a_negative(tmp_path: Path) -> None:
    """FedFace's Figure 4: a client has all of W, and with one person its loss is no longer 0."""
    net = toy_engine(tmp_path, toy_world(tmp_path))
    how = Training(lr=0.05, batch_size=64, weight_decay=0.0, momentum=0.0, clip=0.0, augment=Augment(flip=False))
    method = FedAvg(training=how, share_head=True, mask_absent=False, head=HeadSettings("cosface", 16.0, 0.2))
    s = method.start(net.world.setup())
    assert s.W is not None
    c = net.clients[0]
    up, _ = first_step(net.world, method.local, c, Down(s.theta, s.fixed, s.W, 0.05))
    view, model = net.world.clients[c].train, toy_network()
    model.load_state_dict(s.theta)
    W = s.W.clone().requires_grad_()
    features, everybody = model.train()(to_float(view.batch(range(len(view))))), list(range(len(s.W)))
    loss = slow_cosface(features, W, torch.from_numpy(view.identity), everybody, 16.0, 0.2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert up.W is not None
    assert W.grad is not None
    assert up.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(up.W, s.W - 0.05 * W.grad, rtol=1e-4, atol=1e-6)
    absent = [row for row in everybody if row not in view.classes]
    assert absent
    assert int((up.W[absent] - s.W[absent]).abs().sum(1).gt(1e-4).sum()) > 2, "those that are near are pushed away"
    with pytest.raises(UsageError, match=r"method\.mask_absent is about a global head"):
        FedAvg(mask_absent=False)


def test_local_batch_norm_stays_and_comes_back(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = FedAvg(training=TRAINING, batch_norm="local", rounds=2)
    s = method.start(net.world.setup())
    assert set(s.fixed) == {k for k in toy_network().state_dict() if k.startswith("1.")}
    for r in range(2):
        net.begin("federate", r)
        s = method.round(s, net)
    assert not set(s.theta) & set(s.fixed)
    states = [net.states.client_state(c)["batch_norm"] for c in net.clients]
    assert all(set(state) == set(s.fixed) for state in states)
    assert states[0]["1.num_batches_tracked"] > 0
    assert not torch.equal(states[0]["1.running_mean"], states[1]["1.running_mean"])
    assert method.backbone(s) is None
    personal = method.personal({"batch_norm": states[0]}, method.basis(s))
    assert personal is not None
    assert torch.equal(personal["1.running_mean"], states[0]["1.running_mean"])


def test_sampling_is_fair_and_ordered(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path, clients=5))
    method = FedAvg(participation=0.4)
    seen: dict[str, int] = dict.fromkeys(net.clients, 0)
    for r in range(200):
        net.begin("federate", r)
        chosen = sample_clients(net, method.participation)
        assert len(chosen) == 2
        assert chosen == sorted(chosen)
        for c in chosen:
            seen[c] += 1
    assert min(seen.values()) > 50


def test_the_client_sees_only_its_own_data(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    rows = [set(net.world.clients[c].train.index.tolist()) for c in net.clients]
    assert not rows[0] & rows[1]
    assert set(Client.__dataclass_fields__) == {
        "id", "data", "state", "rng", "network", "embedding", "numerics", "benchmarks", "public", "others", "secret",
        "signer",
    }  # fmt: skip
    assert net.world.public is None
    assert net.world.others is None
