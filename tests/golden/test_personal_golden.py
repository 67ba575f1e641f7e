"""Personal baselines: FedBABU, Ditto and FedRep against slow loops of their papers' algorithms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.golden.test_examples_golden import HEAD, close, loss_of
from tests.toys import toy_engine, toy_network, toy_world
from torch import Tensor, nn

from visard.data.augment import Augment, augment, to_float
from visard.engines.local import LocalNetwork
from visard.engines.world import derive, generator
from visard.errors import UsageError
from visard.learning.train import Training, batches
from visard.methods.ditto import Ditto
from visard.methods.fedbabu import FedBabu
from visard.methods.fedrep import FedRep

HOW = Training(lr=0.05, weight_decay=0.01, clip=0.0, schedule="constant", batch_size=4, augment=Augment(flip=True))


def average(net: LocalNetwork, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """By pictures; counters by their maximum."""
    n = [len(net.world.clients[i].train) for i in net.clients]
    found = {}
    for k, first in parts[0].items():
        if first.is_floating_point():
            found[k] = sum((w * p[k].double() for w, p in zip(n, parts, strict=True)), torch.zeros(())) / sum(n)
        else:
            found[k] = torch.stack([p[k] for p in parts]).amax(0)
    return {k: v.to(parts[0][k].dtype) for k, v in found.items()}


def descend(
    model: nn.Module, W: Tensor, net: LocalNetwork, i: str, rng: torch.Generator, how: Training, parts: str,
    near: dict[str, Tensor] | None = None, lam: float = 0.0,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """Plain SGD with momentum on body, head or both; with lam also lam / 2 |body - near|^2."""
    view = net.world.clients[i].train
    model.train("body" in parts)
    W = nn.Parameter(W.clone())
    named = dict(model.named_parameters()) if "body" in parts else {}
    parameters = [*named.values(), *([W] if "head" in parts else ())]
    velocity = [torch.zeros_like(p) for p in parameters]
    for rows in batches(len(view), how, rng):
        pictures = augment(to_float(view.batch(rows)), rng, how.augment)
        loss = loss_of(model(pictures), W, torch.from_numpy(view.labels)[rows])
        if lam and near:
            loss = loss + lam / 2 * sum(((p - near[k]) ** 2).sum() for k, p in named.items())
        for p, g, v in zip(parameters, torch.autograd.grad(loss, parameters), velocity, strict=True):
            with torch.no_grad():
                v.mul_(how.momentum).add_(g + how.weight_decay * p)
                p.sub_(how.lr * v)
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, W.detach().clone()


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto(tmp_path: Path, lam: float) -> None:
    """Algorithm 1 with FedAvg for w: in every round w and, from where it was, v_k, both against the w that was sent."""
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = Ditto(rounds=2, training=HOW, head=HEAD, lam=lam)
    server = method.start(net.world.setup())
    w = dict(server.theta)
    own: dict[str, tuple[dict[str, Tensor], Tensor]] = {}
    common: dict[str, Tensor] = {}
    for number in range(2):
        net.begin("federate", number)
        server = method.round(server, net)
        learnt = []
        for i in net.clients:
            place, classes = ("federate", number, 1, i), net.world.clients[i].train.n_classes
            torch.manual_seed(derive(net.world.seed, *place, "default"))
            if i not in common:
                common[i] = HEAD.build(classes, 8).weight.detach().clone()
            first = own[i] if i in own else (w, HEAD.build(classes, 8).weight.detach().clone())
            rng, model = generator(net.world.seed, *place), toy_network()
            model.load_state_dict(w)
            theta, common[i] = descend(model, common[i], net, i, rng, HOW, "body and head")
            learnt.append(theta)
            model.load_state_dict(first[0])
            own[i] = descend(model, first[1], net, i, rng, HOW, "body and head", w, lam)
        w = average(net, learnt)
        close(server.theta, w)
        for i in net.clients:
            state = net.states.client_state(i)
            close(method.personal(state, server.theta) or {}, own[i][0])
            close({"W": state["own"]["head"]["weight"]}, {"W": own[i][1]})
            close({"W": state["head"]["weight"]}, {"W": common[i]})
    assert method.personal({}, server.theta) == server.theta
    with pytest.raises(UsageError, match=r"method\.share_head"):
        Ditto(share_head=True)


def test_ditto_holds_clients_together(tmp_path: Path) -> None:
    """The larger lambda, the nearer is v_k to w."""
    apart = {}
    for lam in (0.0, 5.0):
        (tmp_path / str(lam)).mkdir()
        net = toy_engine(tmp_path / str(lam), toy_world(tmp_path))
        method = Ditto(rounds=1, training=HOW, head=HEAD, lam=lam)
        start = method.start(net.world.setup())
        net.begin("federate", 0)
        method.round(start, net)
        own = net.states.client_state(net.clients[0])["own"]["theta"]
        apart[lam] = float(sum((own[k] - start.theta[k]).pow(2).sum() for k in ("0.weight", "5.weight")))
    assert apart[5.0] < 0.7 * apart[0.0]


def test_fedrep(tmp_path: Path) -> None:
    """Algorithm 1: tau passes of the head under the backbone as it came, then the backbone under that head."""
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = FedRep(rounds=2, training=HOW, head=HEAD, head_epochs=3)
    server = method.start(net.world.setup())
    phi, heads = dict(server.theta), dict[str, Tensor]()
    for number in range(2):
        net.begin("federate", number)
        server = method.round(server, net)
        learnt = []
        for i in net.clients:
            place = ("federate", number, 1, i)
            torch.manual_seed(derive(net.world.seed, *place, "default"))
            if i not in heads:
                heads[i] = HEAD.build(net.world.clients[i].train.n_classes, 8).weight.detach().clone()
            rng, model = generator(net.world.seed, *place), toy_network()
            model.load_state_dict(phi)
            same, heads[i] = descend(model, heads[i], net, i, rng, replace(HOW, amount=3), "head")
            assert all(torch.equal(same[k], phi[k]) for k in phi)
            theta, unmoved = descend(model, heads[i], net, i, rng, HOW, "body")
            assert torch.equal(unmoved, heads[i])
            learnt.append(theta)
        phi = average(net, learnt)
        close(server.theta, phi)
        for i in net.clients:
            close({"W": net.states.client_state(i)["head"]["weight"]}, {"W": heads[i]})
    with pytest.raises(UsageError, match=r"method\.share_head"):
        FedRep(share_head=True)


def slow_babu(
    net: LocalNetwork, i: str, place: tuple[Any, ...], theta: dict[str, Tensor], W: Tensor, how: Training, parts: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Plain SGD with momentum on body, head or both; all classes of other clients are masked."""
    torch.manual_seed(derive(net.world.seed, *place, "default"))
    rng, model, view = generator(net.world.seed, *place), toy_network(), net.world.clients[i].train
    model.load_state_dict(theta)
    model.train("body" in parts)
    W = nn.Parameter(W.clone())
    mask = torch.zeros(len(W), dtype=torch.bool)
    mask[torch.from_numpy(np.asarray(view.classes))] = True
    parameters = [*(model.parameters() if "body" in parts else ()), *([W] if "head" in parts else ())]
    velocity = [torch.zeros_like(p) for p in parameters]
    for rows in batches(len(view), how, rng):
        pictures = augment(to_float(view.batch(rows)), rng, how.augment)
        loss = loss_of(model(pictures), W, torch.from_numpy(view.identity)[rows], mask)
        for p, g, v in zip(parameters, torch.autograd.grad(loss, parameters), velocity, strict=True):
            with torch.no_grad():
                v.mul_(how.momentum).add_(g + how.weight_decay * p)
                p.sub_(how.lr * v)
    return {k: v.detach() for k, v in model.state_dict().items()}, W.detach()


@pytest.mark.parametrize("tune", ["full", "body", "head"])
def test_fedbabu(tmp_path: Path, tune: Any) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    how = Training(lr=0.05, weight_decay=0.01, clip=0.0, schedule="constant", batch_size=4, augment=Augment(flip=True))
    method = FedBabu(rounds=2, training=how, head=HEAD, tune=tune)
    server = method.start(net.world.setup())
    theta, W = dict(server.theta), server.W.clone()
    for number in range(2):
        net.begin("federate", number)
        server = method.round(server, net)
        slow = [slow_babu(net, i, ("federate", number, 1, i), theta, W, how, "body")[0] for i in net.clients]
        n = [len(net.world.clients[i].train) for i in net.clients]
        for k, start in theta.items():
            if start.is_floating_point():
                theta[k] = sum(w * s[k] for w, s in zip(n, slow, strict=True)) / sum(n)
            else:
                theta[k] = max(s[k] for s in slow)
        close(server.theta, theta)
        assert torch.equal(server.W, W), "the head is never trained together"
    net.begin("personalise", 0)
    assert method.personalise(server, net) == server
    parts = "body and head" if tune == "full" else tune
    for i in net.clients:
        own, head = slow_babu(net, i, ("personalise", 0, 1, i), theta, W, how, parts)
        state = net.states.client_state(i)
        close(method.personal(state, server.theta) or {}, own)
        rows = net.world.clients[i].train.classes.tolist()
        close({"W": state["head"]["weight"]}, {"W": head[rows]})
        assert torch.equal(state["head"]["weight"], W[rows]) is (tune == "body")
