"""FedFR-DA with encrypted alignment: a client's step is that of its own loss plus lambda MMD on plain embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.test_fedfr_da_golden import HEAD, LAMBDA, TRAINING, begin, method, slow_arcface
from tests.toys import toy_network
from torch import Tensor, nn

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.config import load
from visard.core import Client
from visard.crypto.exchange import take_packed
from visard.crypto.session import Session
from visard.data.augment import augment, to_float
from visard.engines.local import LocalNetwork
from visard.engines.world import derive, generator
from visard.errors import UsageError, VisardError
from visard.learning import mmd
from visard.learning.mmd import Polynomial
from visard.learning.train import batches
from visard.methods.domain_adaptation import SOURCE
from visard.methods.encrypted_alignment import Align, Draw
from visard.methods.encrypted_mmd import Relayed
from visard.methods.fedfr_da import Down, Server

LR, WEIGHT = 0.05, 3.0
ALIGN = Align(WEIGHT, length=4, batch_size=12, min_batch=4, key_bits=512, insecure_keys=True)


def alone(net: LocalNetwork, c: str) -> Client:
    """A client outside of a step."""
    world, model = net.world, toy_network()
    return Client(c, world.clients[c], net.states.client_state(c), torch.Generator(), lambda: model, 8, world.numerics)


def projected(model: nn.Module, net: LocalNetwork, client: str, batch: Mapping[str, Any]) -> Tensor:
    """Embeddings of a batch in a random projection of 4 dimensions at length 1, as the clients agreed."""
    view = net.world.clients[client].train
    rng = torch.Generator().manual_seed(batch["seed"])
    x = augment(to_float(view.batch(batch["rows"].numpy())), rng, TRAINING.augment)
    basis = torch.linalg.qr(
        torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ).Q.float()
    v = model(x) @ basis
    return (v / v.norm(dim=1, keepdim=True) * (1 - 1e-6)).double()


def slow_client(
    net: LocalNetwork, client: str, theta: dict[str, Tensor], seen: Mapping[str, list[Tensor]], kernel: Polynomial,
    drawn: list[Mapping[str, Any]], state: Mapping[str, Any], ask: int, lr: float,
) -> dict[str, Tensor]:  # fmt: skip
    """Plain PyTorch: the i-th iteration's loss has lambda MMD of the i-th batch against what the peers saw."""
    place = ("federate", 0, ask, client)
    rng, view = generator(net.world.seed, *place), net.world.clients[client].train
    labels = torch.from_numpy(view.labels)
    if client != SOURCE:
        labels = state["labels"]
        view, labels = view.take((labels >= 0).numpy()), labels[labels >= 0]
    model = toy_network()
    model.load_state_dict(theta)
    torch.manual_seed(derive(net.world.seed, *place, "default"))
    W = nn.Parameter(torch.randn(int(labels.max()) + 1, 8) / 8**0.5)
    if client != SOURCE:
        W = nn.Parameter(state["start"]["weight"].clone())
    parameters = [*model.parameters(), W]
    velocity = [torch.zeros_like(p) for p in parameters]
    anchors = [theta[name] for name, _ in model.named_parameters()]
    model.train()
    for i, chosen in enumerate(batches(len(view), TRAINING, rng)):
        x = augment(to_float(view.batch(chosen)), rng, TRAINING.augment)
        loss = slow_arcface(model(x), W, labels[chosen], HEAD.scale, HEAD.margin)
        if client == SOURCE:
            loss = loss + LAMBDA / 2 * sum(
                ((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchors, strict=True)
            )
        if i < len(drawn):
            v = projected(model, net, client, drawn[i])
            peers = [c for c in seen if c != client] if client == SOURCE else [SOURCE]
            parts = [mmd.between(v, seen[p][i], kernel) for p in peers]
            if i:  # the peers answered for the embeddings of the round's first weights: their slope is that old
                at = seen[client][i].clone().requires_grad_()
                (slope,) = torch.autograd.grad(
                    torch.stack([mmd.between(at, seen[p][i], kernel) for p in peers]).mean(), [at]
                )
                parts = [(slope * v).sum()]
            loss = loss + WEIGHT * (mmd.within(v, kernel) + torch.stack(parts).mean())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g, u in zip(parameters, gradients, velocity, strict=True):
                u.mul_(TRAINING.momentum).add_(g + TRAINING.weight_decay * p)
                p.sub_(lr * u)
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("targets", "count", "scheme"), [(1, 1, "paillier"), (2, 1, "paillier"), (2, 3, "paillier"), (2, 1, "ckks")]
)
def test_one_round_with_alignment(tmp_path: Path, targets: int, count: int, scheme: str) -> None:
    if scheme == "ckks":
        pytest.importorskip("tenseal", reason="needs the extra ckks")
    how = method(align=replace(ALIGN, batches=count, scheme=scheme))
    net, s = begin(tmp_path, how, targets)
    net.begin("federate", 0)
    met, posts = how.exchanged(s.met, net, s.theta, s.labelled)
    clients = [SOURCE, *s.labelled]
    assert set(posts) == set(clients)
    assert len(clients) == targets + 1
    states = {c: net.states.client_state(c) for c in clients}
    drawn = {c: states[c]["align"]["batches"] for c in clients}
    kernel = posts[SOURCE].plan.kernel
    first = toy_network()
    first.load_state_dict(s.theta)
    first.train()
    with torch.no_grad():
        seen = {c: [projected(first, net, c, b) for b in drawn[c]] for c in clients}
    lr = TRAINING.lr_at(0, how.rounds)
    slow = {c: slow_client(net, c, s.theta, seen, kernel, drawn[c], states[c], 5, lr) for c in clients}
    ups = net.ask(how.local, {c: Down(s.theta, lr, True, {}, posts[c]) for c in clients})
    without = net.ask(how.local, {c: Down(s.theta, lr, False) for c in clients})
    for c in clients:
        moved = max(float((slow[c][k] - s.theta[k]).abs().max()) for k in s.theta if s.theta[k].is_floating_point())
        for key, value in ups[c].theta.items():
            torch.testing.assert_close(value, slow[c][key], rtol=1e-3, atol=max(1e-4, moved / 300))
        assert any(not torch.equal(v, without[c].theta[k]) for k, v in ups[c].theta.items())
    assert met.exchanges == 1


def test_alignment_is_what_moves_the_gradient(tmp_path: Path) -> None:
    """The gradient of the penalty at the round's weights is that of lambda MMD on plain embeddings (Eqs. 3-6)."""
    how = method(align=ALIGN)
    net, s = begin(tmp_path, how)
    net.begin("federate", 0)
    _, posts = how.exchanged(s.met, net, s.theta, s.labelled)
    clients = [SOURCE, *s.labelled]
    model, kernel = toy_network(), posts[SOURCE].plan.kernel
    model.train()
    found, seen = {}, {}
    for c in clients:
        model.load_state_dict(s.theta)
        batch = net.states.client_state(c)["align"]["batches"][0]
        seen[c] = projected(model, net, c, batch)
    for c in clients:
        client = alone(net, c)
        penalty = how.pull(client, s.theta, posts[c])
        client.network().train()
        slopes = torch.autograd.grad(penalty(torch.zeros(1), torch.zeros(1, 8)), list(client.network().parameters()))
        assert float(penalty(torch.zeros(1), torch.zeros(1, 8))) == 0.0, "one batch, one iteration"
        found[c] = torch.cat([g.flatten() for g in slopes])
    for c in clients:
        peers = s.labelled if c == SOURCE else [SOURCE]
        model.load_state_dict(s.theta)
        v = projected(model, net, c, net.states.client_state(c)["align"]["batches"][0])
        loss = WEIGHT * (
            mmd.within(v, kernel) + torch.stack([mmd.between(v, seen[p].detach(), kernel) for p in peers]).mean()
        )
        exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        assert float(exact.abs().max()) > 0.01
        torch.testing.assert_close(found[c], exact, rtol=1e-3, atol=float(exact.abs().max()) * 1e-4)


def test_no_embedding_moment_or_key_is_readable(tmp_path: Path) -> None:
    how = method(align=ALIGN)
    net, s = begin(tmp_path, how)
    net.begin("federate", 0)
    met, posts = how.exchanged(s.met, net, s.theta, s.labelled)
    assert set(posts[SOURCE].received) == set(s.labelled)
    kept = net.states.client_state(SOURCE)["align"]
    end = Session.from_state(kept["session"])
    part = replace(posts[SOURCE].plan, sources=tuple(s.labelled[:1]))
    with pytest.raises(VisardError, match="overflows its slots"):  # it can read the sum and no part
        take_packed(end, part, kept["features"], posts[SOURCE].received)
    said = b"".join(d for post in posts.values() for d in post.received.values()) + b"".join(met.hellos.values())
    for c in (SOURCE, *s.labelled):
        kept = net.states.client_state(c)["align"]
        for row in kept["features"][0]:
            assert row.numpy().tobytes() not in said
            assert row.float().numpy().tobytes() not in said
        assert not any(secret in said for secret in kept["session"]["secrets"].values())


def test_what_is_refused(tmp_path: Path) -> None:
    how = method(align=ALIGN)
    net, s = begin(tmp_path, how)
    net.begin("federate", 0)
    met, posts = how.exchanged(s.met, net, s.theta, s.labelled)
    plan = posts[SOURCE].plan
    (first, *_) = s.labelled
    client = alone(net, first)
    with pytest.raises(VisardError, match="plan of alignment differs"):
        how.offer(client, Draw(replace(plan, n=1), s.theta, {}, 1))
    with pytest.raises(VisardError, match="plan of alignment differs"):
        method().hello(client, Relayed(plan))
    net.ask(how.local, {c: Down(s.theta, LR, True, {}, posts[c]) for c in posts})
    client = alone(net, first)
    with pytest.raises(VisardError, match="exchange 0 is over: this client is at 1"):
        how.offer(client, Draw(plan, s.theta, {}, 0))
    later = replace(s, met=met)
    net.begin("federate", 1)
    assert how.round(later, net).met.exchanges == 2, "and the next round goes on"


def test_a_target_that_sat_out_comes_back(tmp_path: Path) -> None:
    """Relabelling may leave a target without clusters for a while."""
    how = method(align=ALIGN)
    net, s = begin(tmp_path, how)
    for r, labelled in enumerate((s.labelled[:1], s.labelled, s.labelled[1:], s.labelled)):
        net.begin("federate", r)
        s = how.round(replace(s, labelled=labelled), net)
    assert isinstance(s, Server)
    assert s.met.exchanges == 4
    assert not s.met.secrets


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"with_source": False, "align": ALIGN}, "needs the source"),
        ({"align": {"batch_size": 8}}, "below min_batch"),
        ({"align": {"key_bits": 512}}, "can be broken"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], words: str) -> None:
    align = changes["align"]
    with pytest.raises(UsageError, match=words):
        method(**changes | {"align": Align(**align) if isinstance(align, dict) else align})


@pytest.mark.parametrize("setting", ["weight=-1.0", "noise=inf", "length=-1", "batches=0"])
def test_settings_out_of_bounds(setting: str) -> None:
    with pytest.raises(UsageError, match=f"method.align.{setting.partition('=')[0]}"):
        load("fedfr-da", [f"method.align.{setting}"])


def test_settings_that_do_not_fit_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="align.length = 9: embeddings have 8 dimensions"):
        begin(tmp_path, method(align=replace(ALIGN, length=9)))
    with pytest.raises(UsageError, match="align.batches = 6: a round has 5 iterations"):
        begin(tmp_path / "b", method(align=replace(ALIGN, batches=6)))
