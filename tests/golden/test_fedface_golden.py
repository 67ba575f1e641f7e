"""FedFace, equation by equation and line by line: literal numbers, slow loops, autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.toys import first_step, toy_engine, toy_world
from torch import Tensor, nn

from visard.core import Client
from visard.data.augment import Augment, to_float
from visard.engines.local import LocalNetwork, enter
from visard.engines.request import Request
from visard.engines.world import World
from visard.learning.features import class_means
from visard.learning.heads import build_head
from visard.learning.positive import (
    OneStep,
    PositiveHead,
    SpreadOut,
    distance,
    gradient,
    off_diagonal,
    spread_out,
    squared_hinge,
    variance,
)
from visard.methods.fedface import Down, FedFace, Server

STILL = OneStep(lr=0.2, augment=Augment(flip=False))


class Channels(nn.Module):
    """f(x) = A mean colour of x: two parameters' worth of network that can be followed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Linear(3, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.A(x.mean(dim=(2, 3)))
        return out


def linear_world(folder: Path, clients: int = 2) -> World:
    return toy_world(folder, clients, build=Channels)


def unit(v: list[float]) -> list[float]:
    length = math.sqrt(sum(a * a for a in v))
    return [a / length for a in v]


def test_equation_2_and_7_with_literal_numbers() -> None:
    features = torch.tensor([[2.0, 0.0], [0.0, 5.0], [3.0, 4.0]])  # cosines with w: 0.6, 0.8, 1
    w = torch.tensor([[0.6, 0.8]])
    each = squared_hinge(features, w.expand(3, 2), 0.9)
    torch.testing.assert_close(each, torch.tensor([0.09, 0.01, 0.0]), rtol=1e-5, atol=1e-6)
    loss = PositiveHead(w, 0.9).loss(features, torch.zeros(3, dtype=torch.int64))
    assert float(loss.detach()) == pytest.approx((0.09 + 0.01) / 3, rel=1e-5)


def test_equation_6_is_the_direction_of_the_mean_unit_feature() -> None:
    features = torch.tensor([[2.0, 0.0], [0.0, 0.5], [0.0, -7.0]])
    w = class_means(features, torch.tensor([0, 0, 1]), 2)
    torch.testing.assert_close(w, torch.tensor([[math.sqrt(0.5), math.sqrt(0.5)], [0.0, -1.0]]))


def test_equation_9_with_literal_numbers() -> None:
    W = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]], dtype=torch.float64)  # cosines 0.6, -1, -0.6
    how = SpreadOut(margin=0.9, reduction="sum")
    # only d = 0.4 lies within 0.9, both ways
    # d reg / d cos = -2 (v - d) d' = 1, twice; the part of w_2 across w_1 is (0, 0.8)
    expected = torch.tensor([[0.0, 2 * 0.8], [2 * (1 - 0.36), 2 * -0.48], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient(W, how), expected)
    torch.testing.assert_close(gradient(W, replace(how, reduction="mean")), expected / 6)
    torch.testing.assert_close(gradient(W, replace(how, reduction="per_class")), expected / 2)
    moved = spread_out(W, replace(how, weight=0.1))
    torch.testing.assert_close(moved[0], torch.tensor(unit([1.0, -0.16]), dtype=torch.float64))
    torch.testing.assert_close(moved[1], torch.tensor(unit([0.6 - 0.128, 0.8 + 0.096]), dtype=torch.float64))
    torch.testing.assert_close(moved[2], W[2])


@pytest.mark.parametrize("pairs", ["all", "nearest"])
@pytest.mark.parametrize("kind", ["cosine", "half", "euclidean", "squared"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "per_class"])
def test_equation_9_as_a_slow_loop_and_its_gradient_by_autograd(pairs: str, kind: str, reduction: str) -> None:
    C, v, k = 9, 0.8, 3
    W = torch.nn.functional.normalize(torch.randn(C, 4, dtype=torch.float64, generator=torch.manual_seed(3)))
    how = SpreadOut(pairs=pairs, distance=kind, reduction=reduction, margin=v, k=k)  # type: ignore[arg-type]

    def slow(rows: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for c in range(C):
            d = {}
            for other in range(C):
                if other != c:
                    cos = torch.dot(rows[c], rows[other]) / rows[c].norm() / rows[other].norm()
                    d[other] = {
                        "cosine": 1 - cos, "half": (1 - cos) / 2, "squared": 2 - 2 * cos,
                        "euclidean": (rows[c] / rows[c].norm() - rows[other] / rows[other].norm()).norm(),
                    }[kind]  # fmt: skip
            if pairs == "all":
                total = total + sum(max(torch.zeros(()), v - x) ** 2 for x in d.values())
            else:
                total = total - sum(x**2 for x in sorted(d.values(), key=lambda x: float(x.detach()))[:k])
        others = C - 1 if pairs == "all" else k
        return total / {"sum": 1, "per_class": others, "mean": C * others}[reduction]

    free = W.clone().requires_grad_()
    slow(free).backward()  # type: ignore[no-untyped-call]
    assert free.grad is not None
    torch.testing.assert_close(gradient(W, how), free.grad)


def test_the_blocks_of_many_classes_give_the_same_as_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    W = torch.nn.functional.normalize(torch.randn(70, 5, dtype=torch.float64, generator=torch.manual_seed(1)))
    for pairs in ("all", "nearest"):
        how = SpreadOut(pairs=pairs, margin=0.9)  # type: ignore[arg-type]
        whole = gradient(W, how), off_diagonal(W)
        with monkeypatch.context() as patch:
            patch.setattr("visard.learning.positive.BLOCK", 16)
            torch.testing.assert_close(gradient(W, how), whole[0])
            assert off_diagonal(W) == pytest.approx(whole[1])


def test_spread_out_separates_where_inner_products_would_throw_all_to_one_place() -> None:
    W = torch.nn.functional.normalize(torch.ones(40, 16) + 0.05 * torch.randn(40, 16, generator=torch.manual_seed(0)))
    close = off_diagonal(W)[0]
    apart = off_diagonal(spread_out(W, SpreadOut(weight=10.0)))[0]
    inner = W - 10 * (2 * -2 * (0.7 - distance(W @ W.t(), "cosine")).clamp_min(0) * -1).fill_diagonal_(0) @ W / 39
    assert close > 0.95
    assert apart < 0.3
    assert off_diagonal(inner)[0] > close, "that is why the gradient along a row is taken out"


def test_nothing_moves_without_weight_and_a_single_row_has_no_pairs() -> None:
    W = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(spread_out(W, SpreadOut()), torch.tensor([[0.6, 0.8]]))
    assert off_diagonal(W) == (0.0, 0.0)
    two = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert torch.equal(spread_out(two, SpreadOut(weight=0.0)), two)
    assert off_diagonal(two) == (1.0, 1.0)


def test_feature_variance() -> None:
    assert variance(torch.tensor([[1.0, 0.0], [5.0, 0.0]])) == pytest.approx(0)
    assert variance(torch.tensor([[1.0, 0.0], [0.0, 2.0]])) == pytest.approx(0.5)
    assert variance(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == pytest.approx(1)


def slow_client(
    client: Client, theta: Tensor, w: Tensor | None, m: float, lr: float, lr_w: float
) -> tuple[Tensor, Tensor, float]:
    """Lines 2 and 6 of one client in plain numbers: A, w and the loss."""
    view = client.data.train
    x = to_float(view.batch(range(len(view)))).double().mean(dim=(2, 3))
    A = theta.double().clone().requires_grad_()
    if w is None:
        f = x @ A.t()
        rows = [torch.stack([a / a.norm() for a in f[view.labels == k]]).mean(0) for k in range(view.n_classes)]
        w = torch.stack([r / r.norm() for r in rows])
    rows_of = w.double().detach().clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for j in range(len(view)):
        f, own = A @ x[j], rows_of[view.labels[j]]
        cos = torch.dot(f, own) / f.norm() / own.norm()
        loss = loss + torch.clamp(m - cos, min=0) ** 2 / len(view)  # Eqs. 2 and 7
    loss.backward()  # type: ignore[no-untyped-call]
    assert A.grad is not None
    assert rows_of.grad is not None
    A, rows_of = (p.detach() - by * p.grad for p, by in ((A, lr), (rows_of, lr_w)))  # Eqs. 3 and 4
    return A, torch.stack([r / r.norm() for r in rows_of]), float(loss.detach())


@pytest.mark.parametrize("lr_w", [None, 3.0], ids=["one rate", "a rate of class vectors"])
@pytest.mark.parametrize("together", [True, False], ids=["cohort", "client by client"])
def test_algorithm_1_line_by_line(tmp_path: Path, together: bool, lr_w: float | None) -> None:
    """Two clients, two rounds, against a loop that follows the box."""
    net = toy_engine(tmp_path, linear_world(tmp_path))
    if not together:
        net.replies_together = lambda step, requests, _: LocalNetwork.replies(net, step, requests)  # type: ignore[method-assign]
    spread = SpreadOut(weight=0.3, margin=1.2, reduction="sum")
    method = FedFace(rounds=2, training=STILL, margin=1.0, spread=spread, vectors_lr=lr_w)
    s = method.start(net.world.setup())
    theta, W = s.theta["A.weight"].double(), dict[str, Tensor]()  # line 1
    for r in range(2):  # line 3
        net.begin("federate", r)
        s = method.round(s, net)
        sizes, thetas, losses = {}, {}, {}
        for c in net.clients:  # lines 4 to 8
            party = enter(net.world, Request(client=c, stage="federate", round=r, ask=1), {})
            thetas[c], W[c], losses[c] = slow_client(party, theta, W.get(c), 1.0, 0.2, lr_w or 0.2)
            sizes[c] = len(party.data.train)
        n = sum(sizes.values())
        theta = sum((sizes[c] / n * thetas[c] for c in net.clients), torch.zeros(8, 3))  # line 9, Eq. 5
        stacked = torch.cat([W[c] for c in net.clients]).requires_grad_()  # Eq. 8
        reg = torch.zeros((), dtype=torch.float64)
        for a in range(len(stacked)):
            for b in range(len(stacked)):
                if a != b:
                    cos = torch.dot(stacked[a], stacked[b]) / stacked[a].norm() / stacked[b].norm()
                    reg = reg + torch.clamp(1.2 - (1 - cos), min=0) ** 2  # Eq. 9
        (slope,) = torch.autograd.grad(reg, stacked)
        moved = stacked.detach() - 0.3 * slope  # line 10
        moved = moved / moved.norm(dim=1, keepdim=True)
        W = dict(zip(net.clients, moved.split([len(W[c]) for c in net.clients]), strict=True))  # type: ignore[no-untyped-call]
        torch.testing.assert_close(s.theta["A.weight"].double(), theta, rtol=1e-4, atol=1e-6)
        for c in net.clients:
            torch.testing.assert_close(s.W[c].double(), W[c], rtol=1e-4, atol=1e-5)
        loss = sum(sizes[c] * losses[c] for c in net.clients) / n
        assert net.traffic.figures["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-9)
        cosines = moved @ moved.t()
        off = cosines[~torch.eye(len(moved), dtype=torch.bool)]
        logged = net.traffic.figures
        assert logged["Mean class cosine after spread-out"] == pytest.approx(float(off.mean()), abs=1e-4)
        assert logged["Largest class cosine after spread-out"] == pytest.approx(float(off.max()), abs=1e-4)


def test_two_clients_with_literal_numbers(tmp_path: Path) -> None:
    """Line 9 with n = (3, 1): the average of theta is three parts of one and one part of the other."""
    net = toy_engine(tmp_path, linear_world(tmp_path))
    a, b = net.clients
    sizes = {a: 3, b: 1}
    for c in net.clients:
        data = net.world.clients[c]
        net.world.clients[c] = replace(data, train=data.train.take(list(range(sizes[c]))))
    method = FedFace(rounds=1, training=STILL, margin=1.0)
    s = method.start(net.world.setup())
    alone = {c: first_step(net.world, method.local, c, Down(s.theta, None, 0.2))[0] for c in net.clients}
    assert [alone[c].n for c in net.clients] == [3, 1]
    net.begin("federate", 0)
    after: Server = method.round(s, net)
    expected = 0.75 * alone[a].theta["A.weight"] + 0.25 * alone[b].theta["A.weight"]
    torch.testing.assert_close(after.theta["A.weight"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["cosface", "arcface", "softmax"])
def test_a_softmax_over_one_class_has_no_gradient(kind: str) -> None:
    """Section 4.2: what FedAvg (Eqs. 1 to 5) makes of clients with one person."""
    head = build_head(kind, 1, 8)  # type: ignore[arg-type]
    features = torch.randn(5, 8, generator=torch.manual_seed(0)).requires_grad_()
    loss = head.loss(features, torch.zeros(5, dtype=torch.int64))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0
    assert features.grad is not None
    assert not features.grad.any()


def test_positives_alone_separate_nothing_and_spread_out_does(tmp_path: Path) -> None:
    """Features that start close together stay so under the hinge alone: it is content at once."""
    cosine = {}
    world = toy_world(tmp_path, 4)
    world.start_from = world.new_weights()
    for weight in (0.0, 1.0):
        (tmp_path / str(weight)).mkdir()
        net = toy_engine(tmp_path / str(weight), world)
        method = FedFace(rounds=10, training=STILL, spread=SpreadOut(weight=weight, margin=1.0))
        s = method.start(net.world.setup())
        for r in range(10):
            net.begin("federate", r)
            s = method.round(s, net)
        cosine[weight] = net.traffic.figures["Mean class cosine before spread-out"]
    assert cosine[0.0] > 0.5
    assert cosine[1.0] < 0.2
