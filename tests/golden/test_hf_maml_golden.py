"""HF-MAML: Eqs. 1 to 4 against analytic Hessians, torch.func and plain loops, and one round of Algorithm 1."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import first_step, toy_engine, toy_network, toy_world
from torch import Tensor, nn

from visard.config import load
from visard.data.augment import Augment, augment, to_float
from visard.engines.local import LocalNetwork
from visard.engines.world import derive, generator
from visard.errors import UsageError
from visard.learning.heads import CosFace, HeadSettings
from visard.learning.objective import Drift, still_statistics
from visard.methods.fedavg import Down, Server
from visard.methods.hf_maml import HFMaml, MetaTrained, MetaTraining, Order, meta_step, meta_train, three_batches
from visard.numerics import Numerics

ALPHA, BETA = 0.3, 0.2
Quadratic = tuple[Tensor, Tensor]


def quadratics(n: int = 5) -> list[Quadratic]:
    """F(p; D) = p'Ap/2 + b'p with a symmetric A and a b for each batch."""
    torch.manual_seed(1)
    A = torch.randn(3, n, n, dtype=torch.float64)
    return [(a + a.T, b) for a, b in zip(A, torch.randn(3, n, dtype=torch.float64), strict=True)]


def quadratic(p: Tensor, batch: Quadratic) -> Tensor:
    A, b = batch
    return p @ A @ p / 2 + b @ p


@pytest.mark.parametrize("delta", [1e-3, 1.0])
@pytest.mark.parametrize("scale_delta", [False, True])
@pytest.mark.parametrize("order", ["hessian-free", "exact"])
def test_exact_on_a_quadratic(delta: float, scale_delta: bool, order: Order) -> None:
    D, D1, D2 = quadratics()
    p = torch.randn(5, dtype=torch.float64, requires_grad=True)
    old = p.detach().clone()
    adapted = old - ALPHA * (D[0] @ old + D[1])
    g = D1[0] @ adapted + D1[1]
    expected = old - BETA * (g - ALPHA * D2[0] @ g)
    before = meta_step(
        [p], lambda b: quadratic(p, b), (D, D1, D2),
        alpha=ALPHA, beta=BETA, delta=delta, order=order, scale_delta=scale_delta,
    )  # fmt: skip
    torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(before, quadratic(old, D))


def test_momentum_of_the_update_on_a_quadratic() -> None:
    D, D1, D2 = quadratics()
    p = torch.randn(5, dtype=torch.float64, requires_grad=True)
    slow, v, velocity = p.detach().clone(), torch.zeros(5, dtype=torch.float64), [torch.zeros(5, dtype=torch.float64)]
    for _ in range(3):
        g = D1[0] @ (slow - ALPHA * (D[0] @ slow + D[1])) + D1[1]
        v = 0.9 * v + g - ALPHA * D2[0] @ g
        slow = slow - BETA * v
        meta_step(
            [p], lambda b: quadratic(p, b), (D, D1, D2), alpha=ALPHA, beta=BETA, delta=0.01, momentum=0.9,
            velocity=velocity,
        )  # fmt: skip
    torch.testing.assert_close(p.detach(), slow, rtol=1e-9, atol=1e-9)


def test_first_order_and_clipping_on_a_quadratic() -> None:
    D, D1, D2 = quadratics()
    old = torch.randn(5, dtype=torch.float64)
    g = D1[0] @ (old - ALPHA * (D[0] @ old + D[1])) + D1[1]

    def after(**settings: float | bool | str) -> Tensor:
        p = old.clone().requires_grad_()
        loss = lambda b: quadratic(p, b)  # noqa: E731
        meta_step([p], loss, (D, D1, D2), alpha=ALPHA, beta=BETA, delta=0.01, **settings)  # type: ignore[arg-type]
        return p.detach()

    torch.testing.assert_close(after(order="first"), old - BETA * g)
    short = 0.5 * g / g.norm()
    torch.testing.assert_close(after(clip=0.5), old - BETA * (short - ALPHA * D2[0] @ short))
    torch.testing.assert_close(after(clip=0.5, order="exact"), after(clip=0.5))
    torch.testing.assert_close(after(clip=1e6), after())


def smooth_network() -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], nn.Module]:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batches = [(torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))) for _ in range(3)]
    return list(net.parameters()), batches, net


def flat_loss(net: nn.Module, flat: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    parts = torch.split(flat, [p.numel() for p in net.parameters()])
    shaped = {n: part.view_as(p) for (n, p), part in zip(net.named_parameters(), parts, strict=True)}
    return nn.functional.cross_entropy(torch.func.functional_call(net, shaped, (batch[0],)), batch[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of torch.func itself
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(("order", "error"), [("hessian-free", 1e-7), ("exact", 1e-13)])
def test_a_network_against_torch_func(same: bool, order: Order, error: float) -> None:
    p, (D, D1, D2), net = smooth_network()
    D2 = D if same else D2
    flat = torch.cat([x.detach().flatten() for x in p])
    gradient = torch.func.grad(flat_loss, argnums=1)
    adapted = flat - ALPHA * gradient(net, flat, D)
    g = gradient(net, adapted, D1)
    hessian = torch.func.hessian(flat_loss, argnums=1)(net, flat, D2)
    product = torch.func.jvp(lambda q: gradient(net, q, D2), (flat,), (g,))[1]
    torch.testing.assert_close(hessian @ g, product)
    meta_step(
        p, lambda b: nn.functional.cross_entropy(net(b[0]), b[1]), (D, D1, D2),
        alpha=ALPHA, beta=BETA, delta=1e-4, order=order,
    )  # fmt: skip
    after = torch.cat([x.detach().flatten() for x in p])
    torch.testing.assert_close(after, flat - BETA * (g - ALPHA * hessian @ g), rtol=error, atol=error)
    if same:  # then the step is the gradient of the loss after adaptation: MAML itself
        whole = torch.func.grad(lambda q: flat_loss(net, q - ALPHA * gradient(net, q, D), D1))(flat)
        torch.testing.assert_close(after, flat - BETA * whole, rtol=error, atol=error)


def test_equation_4_and_that_it_starts_at_zero() -> None:
    torch.manual_seed(3)
    model, x = toy_network().train(), torch.randn(6, 3, 32, 32)
    drift, start = Drift(model, C=0.7), copy.deepcopy(model)
    with still_statistics(model):
        assert float(drift(x, model(x)).detach()) == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    features = model(x)
    with torch.no_grad(), still_statistics(start):
        reference = start(x)
    slow = [1 - torch.dot(a / a.norm(), b / b.norm()) for a, b in zip(features, reference, strict=True)]
    expected = 0.7 * torch.stack(slow).mean()
    torch.testing.assert_close(drift(x, features), expected)
    for got, want in zip(
        torch.autograd.grad(drift(x, features), features, retain_graph=True),
        torch.autograd.grad(expected, features),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    assert all(torch.equal(a, b) for a, b in zip(drift.model.buffers(), start.buffers(), strict=True))


def slow_loss(features: Tensor, W: Tensor, y: Tensor, rows: list[int]) -> Tensor:
    """ArcFace s = 8, m = 0.5 over the classes in `rows`, written out."""
    losses = []
    for f, k in zip(features, y.tolist(), strict=True):
        cos = torch.stack([torch.dot(f / f.norm(), W[j] / W[j].norm()) for j in rows])
        theta = torch.arccos(own := cos[rows.index(k)])
        own = torch.cos(theta + 0.5) if theta + 0.5 < math.pi else own - 0.5 * math.sin(0.5)
        logits = 8 * torch.where(torch.tensor(rows) == k, own, cos)
        losses.append(torch.logsumexp(logits, 0) - logits[rows.index(k)])
    return torch.stack(losses).mean()


def slow_local(net: LocalNetwork, method: HFMaml, client: str, s: Server) -> tuple[dict[str, Tensor], Tensor]:
    """Algorithm 1 at one client: each gradient on a fresh copy of the network."""
    place = ("federate", 0, 1, client)
    torch.manual_seed(derive(net.world.seed, *place, "default"))
    rng, view = generator(net.world.seed, *place), net.world.clients[client].train
    head = method.head.build(view.n_classes if s.W is None else len(s.W), 8)
    W = head.weight.detach().clone() if s.W is None else s.W.clone()
    rows = list(range(view.n_classes)) if s.W is None else view.classes.tolist()
    labels = torch.from_numpy(view.labels if s.W is None else view.identity)
    w = {k: v.clone() for k, v in s.theta.items()}
    t = method.training

    def gradient(w: dict[str, Tensor], W: Tensor, x: Tensor, y: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        model, first = toy_network(), toy_network()
        model.load_state_dict(w)
        first.load_state_dict(s.theta)
        a = W.clone().requires_grad_()
        loss = slow_loss(features := model.train()(x), a, y, rows)
        if method.regularisation:
            cos = nn.functional.cosine_similarity(features, first.train()(x).detach())
            loss = loss + method.regularisation * (1 - cos).mean()
        return list(torch.autograd.grad(loss, [*model.parameters(), a])), model.state_dict()

    def moved(along: list[Tensor], by: float) -> tuple[dict[str, Tensor], Tensor]:
        names = [n for n, _ in toy_network().named_parameters()]
        return w | {n: w[n] + by * d for n, d in zip(names, along, strict=False)}, W + by * along[-1]

    def curvature(g: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        """h, at w and W: by torch.func, or by Eq. 3."""
        if t.order == "exact":
            model = toy_network().train()
            names = [n for n, _ in model.named_parameters()]

            def loss(p: tuple[Tensor, ...]) -> Tensor:
                with still_statistics(model):
                    features = torch.func.functional_call(model, dict(zip(names, p, strict=False)), (x,))
                return slow_loss(features, p[-1], y, rows)

            at = tuple(w[n] for n in names)
            return list(torch.func.jvp(torch.func.grad(loss), ((*at, W),), (tuple(g),))[1])
        d = t.delta / math.sqrt(sum(float((x * x).sum()) for x in g)) if t.scale_delta else t.delta
        above, _ = gradient(*moved(g, d), x, y)
        below, _ = gradient(*moved(g, -d), x, y)
        return [(a - b) / (2 * d) for a, b in zip(above, below, strict=True)]

    for _ in range(t.steps):
        drawn = three_batches(len(view), t.batch_size, rng)
        D, D1, D2 = [(augment(to_float(view.batch(c)), rng, t.augment), labels[c]) for c in drawn]
        first, after = gradient(w, W, *D)
        w |= {k: after[k] for k in after if "running" in k or "tracked" in k}  # statistics of the pass on D alone
        g, _ = gradient(*moved(first, -t.alpha), *D1)
        if t.clip:
            g = [x * min(1.0, t.clip / math.sqrt(sum(float((x * x).sum()) for x in g))) for x in g]
        h = curvature(g, *D2)
        w, W = moved([a - t.alpha * b for a, b in zip(g, h, strict=True)], -t.beta)
    return w, W


def assert_moved_alike(found: Tensor, expected: Tensor, start: Tensor) -> None:
    """To a thousandth of the way, and not number by number: processors round differently, and a ReLU whose input is
    rounded to the other side of 0 changes single numbers by more."""
    way, error = (expected - start).norm(), (found.double() - expected).norm()
    assert float(error) <= 1e-3 * float(way) + 1e-5


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of torch.func itself
@pytest.mark.parametrize(
    ("share_head", "C", "extra"),
    [
        (False, 0.0, {}),
        (True, 0.0, {}),
        (False, 2.0, {}),
        (False, 0.0, {"order": "exact"}),
        (False, 0.0, {"clip": 0.5}),
        (False, 0.0, {"scale_delta": True, "delta": 1.0}),
    ],
)
def test_one_round_of_algorithm_1(tmp_path: Path, share_head: bool, C: float, extra: dict[str, Any]) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    settings = {"alpha": 0.1, "beta": 0.2, "delta": 0.05, "steps": 3, "batch_size": 3} | extra
    training = MetaTraining(**settings, augment=Augment(flip=True))
    method = HFMaml(rounds=2, training=training, share_head=share_head, regularisation=C)
    start = method.start(net.world.setup())
    net.begin("federate", 0)
    after = method.round(start, net)
    slow = [slow_local(net, method, c, start) for c in net.clients]
    sizes = [len(net.world.clients[c].train) for c in net.clients]
    for key, value in after.theta.items():
        if value.is_floating_point():
            expected = sum(n * w[key].double() for n, (w, _) in zip(sizes, slow, strict=True)) / sum(sizes)
            assert_moved_alike(value, expected, start.theta[key])
        else:
            assert value == start.theta[key] + training.steps
    if after.W is not None:
        expected = sum(n * W.double() for n, (_, W) in zip(sizes, slow, strict=True)) / sum(sizes)
        assert start.W is not None
        assert_moved_alike(after.W, expected, start.W)
    assert net.traffic.figures["gradients"] == 4 * 3 * len(net.clients)
    assert net.traffic.figures["samples"] == 3 * 3 * 3 * len(net.clients)


def test_absent_classes_of_a_global_head_do_not_move(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    method = HFMaml(training=MetaTraining(steps=2, batch_size=4), share_head=True)
    s = method.start(net.world.setup())
    assert s.W is not None
    up, state = first_step(net.world, method.local, net.clients[0], Down(s.theta, s.fixed, s.W, 0.1))
    present = set(net.world.clients[net.clients[0]].train.classes.tolist())
    assert up.W is not None
    for row in range(len(s.W)):
        assert torch.equal(up.W[row], s.W[row]) == (row not in present)
    assert "head" not in state


@pytest.mark.parametrize(
    ("order", "alpha", "gradients"),
    [("hessian-free", 0.01, 4), ("exact", 0.01, 4), ("first", 0.01, 2), ("exact", 0, 2)],
)
def test_one_pass_a_step_writes_statistics(tmp_path: Path, order: Order, alpha: float, gradients: int) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    training = MetaTraining(alpha=alpha, steps=5, batch_size=4, order=order)
    method = HFMaml(training=training, head=HeadSettings("cosface", 8.0, 0.1))
    s = method.start(net.world.setup())
    up, _ = first_step(net.world, method.local, net.clients[0], Down(s.theta, {}, None, 0.1))
    assert up.theta["1.num_batches_tracked"] == 5
    assert up.gradients == 5 * gradients
    assert up.samples == 5 * 4 * (3 if gradients == 4 else 2)
    assert all(m.track_running_stats for m in net.world.network().modules() if isinstance(m, nn.BatchNorm2d))


def test_three_different_batches() -> None:
    rng = torch.Generator().manual_seed(0)
    for n, size, expected in ((100, 8, 8), (24, 8, 8), (20, 8, 6), (7, 64, 2), (4, 64, 2), (1, 64, 1)):
        rows = three_batches(n, size, rng)
        assert [len(r) for r in rows] == [expected] * 3
        assert all(len(set(r.tolist())) == expected for r in rows)
        if n >= 6:
            assert len({row for r in rows for row in r.tolist()}) == 3 * expected


def trained(tmp_path: Path, numerics: Numerics, order: Order, C: float = 0.0) -> MetaTrained:
    """One step of `meta_train` at a client of the toy world."""
    world = toy_world(tmp_path)
    torch.manual_seed(4)
    model, view = toy_network(), world.clients[world.training[0]].train
    head = HeadSettings("cosface", 8.0, 0.1).build(view.n_classes, 8)
    if C:
        drift = Drift(toy_network(), C)  # from other weights: not 0
    training = MetaTraining(alpha=0.5, steps=1, batch_size=4, order=order, augment=Augment(flip=False))
    return meta_train(
        model, head, view, training, torch.Generator().manual_seed(5), numerics,
        beta=0.1, labels=torch.from_numpy(view.labels), drift=drift if C else None,
    )  # fmt: skip


def test_a_round_has_the_momentum_of_its_settings(tmp_path: Path) -> None:
    """From 0 in every round: it changes nothing in the first step, and something in the second."""
    view = toy_world(tmp_path).clients["client-000"].train

    def after(steps: int, momentum: float) -> Tensor:
        torch.manual_seed(4)
        model, head = toy_network(), HeadSettings("cosface", 8.0, 0.1).build(view.n_classes, 8)
        training = MetaTraining(alpha=0.1, steps=steps, batch_size=4, momentum=momentum)
        rng = torch.Generator().manual_seed(5)
        meta_train(model, head, view, training, rng, Numerics(), beta=0.1, labels=torch.from_numpy(view.labels))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(after(1, 0.0), after(1, 0.9))
    assert not torch.allclose(after(2, 0.0), after(2, 0.9), atol=1e-4)


@pytest.mark.parametrize("order", ["hessian-free", "exact"])
def test_the_passes_on_probes_are_float32_in_a_run_of_bfloat16(
    tmp_path: Path, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    plain = CosFace.loss

    def spied(self: CosFace, features: Tensor, *rest: Any) -> Tensor:
        seen.append(not bool((features.detach().bfloat16().float() != features.detach()).any()))
        return plain(self, features, *rest)

    monkeypatch.setattr(CosFace, "loss", spied)
    trained(tmp_path, Numerics(precision="bf16"), order)
    assert seen == [True, True, False, False][: 4 if order == "hessian-free" else 3]


def test_the_loss_that_is_reported_is_without_the_drift(tmp_path: Path) -> None:
    alone = trained(tmp_path / "a", Numerics(), "hessian-free")
    drifting = trained(tmp_path / "b", Numerics(), "hessian-free", C=3.0)
    assert drifting.loss == alone.loss


@pytest.mark.parametrize("name", ["alpha", "beta", "delta", "clip"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_settings_are_finite(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"training.{name}"):
        load("hf-maml", [f"method.training.{name}={value}"])
