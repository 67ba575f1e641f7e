"""The plug-ins of examples/ against slow loops of their papers' algorithms."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.toys import toy_engine, toy_network, toy_world
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from visard import plugins
from visard.data.augment import Augment, augment, to_float
from visard.engines.local import LocalNetwork
from visard.engines.world import derive, generator
from visard.errors import UsageError
from visard.learning.heads import HeadSettings
from visard.learning.train import batches

with patch.object(plugins, "_added", {kind: {} for kind in plugins.KINDS}):  # not registered for the other tests
    from examples.median import CoordinateMedian
    from examples.normface import NormFace
    from examples.scaffold import PlainSteps, Scaffold

HEAD = HeadSettings("cosface", 16.0, 0.2)
PLAIN = PlainSteps(lr=0.02, batch_size=4, augment=Augment(flip=True))


def loss_of(features: Tensor, W: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """CosFace of HEAD, written out; absent classes do not count."""
    cos = normalize(features) @ normalize(W).t()
    logits = HEAD.scale * (cos - HEAD.margin * torch.eye(len(W))[labels])
    return cross_entropy(logits if mask is None else logits.masked_fill(~mask, -torch.inf), labels)


def close(ours: dict[str, Tensor], slow: dict[str, Tensor], atol: float = 1e-5, share: float = 1e-4) -> None:
    """To a share of the length of each entry: processors round differently, and a ReLU whose input is rounded to the
    other side of 0 changes single numbers by more."""
    assert ours.keys() == slow.keys()
    for key, value in ours.items():
        error = torch.linalg.vector_norm(value.double() - slow[key].double())
        assert float(error) <= share * float(torch.linalg.vector_norm(slow[key].double())) + atol, key


class SlowScaffold:
    """Algorithm 1 of Karimireddy et al. with option II, one number after the other."""

    def __init__(self, net: LocalNetwork, x: dict[str, Tensor]) -> None:
        self.net, self.x = net, dict(x)
        names = [name for name, _ in toy_network().named_parameters()]
        self.c = {k: torch.zeros_like(x[k]) for k in names}
        self.c_i = {i: dict(self.c) for i in net.clients}
        self.heads: dict[str, Tensor] = {}

    def local(self, i: str, round: int, method: Scaffold) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        place = ("federate", round, 1, i)
        torch.manual_seed(derive(self.net.world.seed, *place, "default"))
        view = self.net.world.clients[i].train
        if i not in self.heads:
            self.heads[i] = HEAD.build(view.n_classes, 8).weight.detach().clone()
        rng, model = generator(self.net.world.seed, *place), toy_network()
        model.load_state_dict(self.x)
        model.train()
        W, labels, K = nn.Parameter(self.heads[i]), torch.from_numpy(view.labels), 0
        for rows in batches(len(view), method.training, rng):
            pictures = augment(to_float(view.batch(rows)), rng, method.training.augment)
            loss = loss_of(model(pictures), W, labels[rows])
            *gradients, of_W = torch.autograd.grad(loss, [*model.parameters(), W])
            with torch.no_grad():
                for (k, y), g in zip(model.named_parameters(), gradients, strict=True):
                    y -= method.training.lr * (g - self.c_i[i][k] + self.c[k])
                W -= method.training.lr * of_W
            K += 1
        y = {k: v.detach() for k, v in model.state_dict().items()}
        plus = {k: self.c_i[i][k] - self.c[k] + (self.x[k] - y[k]) / (K * method.training.lr) for k in self.c}
        delta = {k: plus[k] - self.c_i[i][k] for k in plus}
        self.c_i[i], self.heads[i] = plus, W.detach()
        return {k: y[k] - self.x[k] for k in y}, delta

    def round(self, number: int, method: Scaffold, S: list[str]) -> None:
        deltas = [self.local(i, number, method) for i in S]
        for k in self.x:
            if self.x[k].is_floating_point():
                self.x[k] = self.x[k] + method.eta_g * sum(dy[k] for dy, _ in deltas) / len(S)
            else:  # a counter
                self.x[k] = self.x[k] + max(dy[k] for dy, _ in deltas)
        N = len(self.net.clients)
        self.c = {k: v + len(S) / N * sum(dc[k] for _, dc in deltas) / len(S) for k, v in self.c.items()}


@pytest.mark.parametrize(("eta_g", "participation"), [(1.0, 1.0), (0.5, 0.67)])
def test_scaffold(tmp_path: Path, eta_g: float, participation: float) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = Scaffold(rounds=3, training=PLAIN, head=HEAD, eta_g=eta_g, participation=participation)
    server = method.start(net.world.setup())
    slow = SlowScaffold(net, server.x)
    for number in range(3):
        net.begin("federate", number)
        server = method.round(server, net)
        asked = [c for c in net.clients if c in net.traffic.seconds]
        assert len(asked) == round(participation * 3)
        slow.round(number, method, asked)
        close(server.x, slow.x)
        close(server.c, slow.c, 2e-4, 1e-3)  # differences of weights over K eta_l
    assert max(float(v.abs().max()) for v in server.c.values()) > 1e-3, "the control variates move"
    for i in asked:
        close(net.states.client_state(i)["c"], slow.c_i[i], 2e-4, 1e-3)


def test_scaffold_refuses_steps_that_its_formula_does_not_know() -> None:
    with pytest.raises(UsageError, match="SCAFFOLD needs momentum = 0"):
        PlainSteps(momentum=0.9)


def test_the_head() -> None:
    torch.manual_seed(0)
    head, f, y = NormFace(5, 8, scale=7.0), torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    slow = 0.0
    for row, label in zip(f, y.tolist(), strict=True):
        cos = [float(torch.dot(row, w) / row.norm() / w.norm()) for w in head.weight.detach()]
        slow -= 7 * cos[label] - float(np.log(sum(np.exp(7 * c) for c in cos)))
    assert head.loss(f, y).item() == pytest.approx(slow / 6, rel=1e-5)


@pytest.mark.parametrize("clients", [1, 4, 5])
def test_the_median(clients: int) -> None:
    rng = np.random.default_rng(clients)
    values = rng.normal(size=(clients, 3, 2)).astype(np.float32)
    gathered = CoordinateMedian().begin(None)
    for number, value in enumerate(values):
        gathered.add({"w": torch.from_numpy(value), "count": torch.tensor(number)}, 1.0 + number)
    found = gathered.result()
    np.testing.assert_allclose(found["w"], np.median(values, axis=0), rtol=1e-6)
    assert int(found["count"]) == clients - 1
