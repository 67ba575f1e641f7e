"""DAN, DANN, Fine-tune and Target-Only against slow loops and literal numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.e2e.smoke import smoke
from tests.golden.test_fedfr_da_golden import HEAD, LR, TRAINING, domain_world, slow_arcface
from tests.toys import toy_engine, toy_network
from torch import Tensor, nn

from visard.clustering.cluster import Clustering
from visard.core import Disclosure
from visard.data.augment import Augment
from visard.data.faces import FaceView
from visard.engines.world import World, centralised
from visard.errors import UsageError
from visard.learning.mmd import mmd2
from visard.learning.objective import Critic, domain_loss, reverse, strength_at
from visard.learning.train import Training, train
from visard.methods.baselines import TargetOnly
from visard.methods.domain_adaptation import DAN, DANN, Adapting, bandwidths
from visard.methods.finetune import FineTune
from visard.report.run_folder import read_events
from visard.runs.run import run


def test_reversal_is_minus_strength() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (reverse(x, 0.25) ** 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-0.5, 1.0]
    assert torch.equal(reverse(x, 0.25), x)


@pytest.mark.parametrize(("p", "expected"), [(0, 0.0), (0.1, 0.46211716), (0.5, 0.98661430), (1, 0.99990920)])
def test_schedule_of_the_reversal(p: float, expected: float) -> None:
    assert strength_at(p) == pytest.approx(expected, abs=1e-8)


def test_domain_loss_by_hand() -> None:
    """Critic and features get opposite gradients: the critic descends, the features climb."""
    torch.manual_seed(0)
    critic, source, target = Critic(3, 4), torch.randn(2, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    loss = domain_loss(critic, source, target, 0.5)
    logits = [float(critic(x[None].detach())[0].detach()) for x in (*source, *target)]
    slow = sum(math.log1p(math.exp(z)) for z in logits[:2]) + sum(math.log1p(math.exp(-z)) for z in logits[2:])
    assert float(loss.detach()) == pytest.approx(slow / 5, rel=1e-5)
    loss.backward()
    plain = source.detach().clone().requires_grad_(), target.detach().clone().requires_grad_()
    z = critic(torch.cat(plain))
    (torch.log1p(torch.exp(z[:2])).sum() + torch.log1p(torch.exp(-z[2:])).sum()).div(5).backward()
    for a, b in zip((source, target), plain, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, -0.5 * b.grad)


def test_bandwidths_are_around_the_mean_distance() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    mean = (4 + 4 + 8) / 3
    assert [2 * s * s for s in bandwidths(x, 5)] == pytest.approx([mean * f for f in (0.25, 0.5, 1, 2, 4)])


def test_multi_kernel_mmd_by_loops() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    sigmas = [0.5, 1.0, 2.0]

    def k(a: Tensor, b: Tensor) -> float:
        return sum(math.exp(-float(((a - b) ** 2).sum()) / (2 * s * s)) for s in sigmas) / 3

    xx = sum(k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j) / (4 * 3)
    yy = sum(k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j) / (5 * 4)
    xy = sum(k(a, b) for a in x for b in y) / 20
    assert float(mmd2(x, y, sigmas)) == pytest.approx(xx + yy - 2 * xy, rel=1e-9)


def pool_world(folder: Path, method: Adapting | FineTune | TargetOnly) -> World:
    return centralised(domain_world(folder), method)[0]


def test_who_gives_what_to_the_pool(tmp_path: Path) -> None:
    world = domain_world(tmp_path)
    target = {Disclosure.pictures}
    for method, expected in (
        (DAN(), {"source": {Disclosure.pictures, Disclosure.labels}, "target-0": target, "target-1": target}),
        (FineTune(measure=False), {"target-0": target, "target-1": target}),
        (FineTune(), {"target-0": target | {Disclosure.labels}, "target-1": target | {Disclosure.labels}}),
        (
            FineTune(measure=False, clustering=Clustering(method="kmeans")),
            {"target-0": target | {Disclosure.labels}, "target-1": target | {Disclosure.labels}},
        ),
        (TargetOnly(), {"target-0": target | {Disclosure.labels}, "target-1": target | {Disclosure.labels}}),
    ):
        pool, left = centralised(world, method)  # type: ignore[arg-type]
        assert {c: set(sizes) for c, sizes in left.items()} == expected
        assert set(pool.clients["pool"].parts) == set(expected)
        rows = np.concatenate([world.clients[c].train.index for c in expected])
        assert pool.clients["pool"].train.index.tolist() == sorted(rows.tolist())


def test_nothing_to_pool_without_domains(tmp_path: Path) -> None:
    world = domain_world(tmp_path)
    world.training = ("source",)
    with pytest.raises(UsageError, match="domains"):
        centralised(world, TargetOnly())


def test_a_dann_step_by_hand(tmp_path: Path) -> None:
    """One batch: head on the source half, critic on both, theta against the critic, the critic with itself."""
    training = Training(lr=LR, batch_size=6, clip=0.0, momentum=0.0, weight_decay=0.0, unit="iterations", amount=1,
                        augment=Augment(flip=False))  # fmt: skip
    method = DANN(rounds=1, training=training, head=HEAD, weight=0.8, hidden=5, gamma=4.0)
    world = pool_world(tmp_path, method)
    part = world.clients["pool"].parts
    source = part["source"]
    target = FaceView.of(source.faces, np.concatenate([part["target-0"].index, part["target-1"].index]))
    torch.manual_seed(3)
    model, start = toy_network(), {k: v.clone() for k, v in toy_network().state_dict().items()}
    model.load_state_dict(start)
    head = HEAD.build(source.n_classes, 8)
    method.extend(head)
    before = {k: v.clone() for k, v in head.state_dict().items()}
    seen: list[Tensor] = []
    beside = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(9))
    penalty = method.penalty(head, lambda: 0.3)

    def weighted(x: Tensor, f: Tensor) -> Tensor:
        seen.append(x.detach())
        return 0.8 * penalty(f[:6], f[6:])

    train(model, head, source, training, torch.Generator().manual_seed(4), world.numerics,
          penalty=weighted, beside=lambda n: beside[:n])  # fmt: skip
    assert len(target) > 0

    plain, W, critic = toy_network(), nn.Parameter(before["weight"].clone()), Critic(8, 5)
    plain.load_state_dict(start)
    critic.load_state_dict({k.removeprefix("critic."): v for k, v in before.items() if k.startswith("critic.")})
    plain.train()
    (x,) = seen
    labels = _labels_of(x[:6], source)
    f = plain(x)
    unit = 8**0.5 * f / f.norm(dim=1, keepdim=True)
    z = critic(unit)
    domain = (torch.log1p(torch.exp(z[:6])).sum() + torch.log1p(torch.exp(-z[6:])).sum()) / 12
    task = slow_arcface(f[:6], W, labels, HEAD.scale, HEAD.margin)
    weights = list(plain.parameters())
    strength = 2 / (1 + math.exp(-4.0 * 0.3)) - 1
    own = torch.autograd.grad(task, [*weights, W], retain_graph=True)
    against = torch.autograd.grad(0.8 * domain, [*weights, *critic.parameters()])
    for p, g, a in zip(model.parameters(), own, against, strict=False):
        name = next(k for k, q in model.named_parameters() if q is p)
        torch.testing.assert_close(p.detach(), start[name] - LR * (g - strength * a), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head.weight.detach(), before["weight"] - LR * own[-1], rtol=1e-4, atol=1e-6)
    for (name, p), g in zip(critic.named_parameters(), against[len(weights) :], strict=True):
        moved = dict(head.named_parameters())[f"critic.{name}"].detach()
        torch.testing.assert_close(moved, p.detach() - LR * g, rtol=1e-4, atol=1e-6)


def _labels_of(x: Tensor, view: FaceView) -> Tensor:
    """Find pictures of a batch again in their view."""
    pixels = ((x + 1) * 255 / 2).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    every = view.batch(np.arange(len(view)))
    rows = [int(np.flatnonzero((every == p).all(axis=(1, 2, 3)))[0]) for p in pixels]
    return torch.from_numpy(view.labels[rows])


@pytest.mark.parametrize("kind", [DAN, DANN])
def test_rounds_at_the_pool(tmp_path: Path, kind: type[Adapting]) -> None:
    """The head and the critic persist, and both halves of a batch reach the penalty."""
    method = kind(rounds=2, training=TRAINING, head=HEAD)
    net = toy_engine(tmp_path, pool_world(tmp_path, method))
    s = method.start(net.world.setup())
    kept = []
    for r in range(2):
        net.begin("adapt", r)
        s = method.round(s, net)
        kept.append(net.states.client_state("pool")["head"])
        assert math.isfinite(net.traffic.figures["gap"])
    assert kept[0].keys() == kept[1].keys()
    assert ("critic.out.weight" in kept[0]) == (kind is DANN)
    assert all(not torch.equal(kept[0][k], kept[1][k]) for k in kept[0])
    assert len(kept[0]["weight"]) == net.world.clients["source"].n_classes


@pytest.mark.parametrize("cluster_by", ["client", "pool"])
def test_fine_tuning_labels(tmp_path: Path, cluster_by: str) -> None:
    """By client, no cluster holds pictures of two parties; labels are those of each party alone."""
    method = FineTune(rounds=1, training=TRAINING, head=HEAD, clustering=Clustering(d=0.5), cluster_by=cluster_by)  # type: ignore[arg-type]
    net = toy_engine(tmp_path, pool_world(tmp_path, method))
    s = method.start(net.world.setup())
    net.begin("label", 0)
    s = method.label_all(s, net)
    state, data = net.states.client_state("pool"), net.world.clients["pool"]
    labels = state["labels"].numpy()
    party = np.where(np.isin(data.train.index, data.parts["target-0"].index), 0, 1)
    shared = [len(set(party[labels == c])) for c in range(labels.max() + 1)]
    assert cluster_by == "pool" or max(shared) == 1
    assert len(state["start"]["weight"]) == labels.max() + 1 == net.traffic.figures["clusters"]
    assert net.traffic.figures["kept"] == (labels >= 0).sum()
    net.begin("train", 0)
    after = method.round(s, net)
    assert net.traffic.bytes_down == 0, "the pool is at the server"
    assert not torch.equal(after.theta["5.weight"], s.theta["5.weight"])


@pytest.mark.parametrize("measure", [True, False])
def test_the_ledger_names_what_was_pooled(tmp_path: Path, measure: bool) -> None:
    settings = [*smoke("finetune"), "method.rounds=1", "evaluation.every=0", f"method.measure={str(measure).lower()}"]
    done = run("finetune", out=tmp_path / "run", overrides=settings)
    ledger = json.loads((done.folder / "ledger.json").read_text())
    pooled_rows = {row[5] for row in ledger["rows"] if row[3] == "Pooled"}
    assert pooled_rows == set(ledger["pooled"]) == ({"pictures", "labels"} if measure else {"pictures"})
    up, down = (done.metrics["communication"][f"bytes_{way}"] for way in ("up", "down"))
    assert 0 < abs(up - down) < 1e-3 * down, "the weights of the source, and a loss or a rate"
    told = [e for e in read_events(done.folder / "events.jsonl") if e.get("stage") == "label" and "figures" in e]
    assert ("pairwise_f" in told[0]["figures"]) is measure
