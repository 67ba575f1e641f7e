"""A step of centralised alignment is a gradient step on the one loss of Eqs. 2 and 18 (or 16), in slow loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.golden.test_encrypted_mmd_golden import slow_information
from torch import Tensor

from visard.core import Client
from visard.data.augment import Augment
from visard.data.faces import ClientData, FaceView
from visard.data.partition import partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.sensors import Readings, draw, write_readings
from visard.learning.heads import HeadSettings
from visard.learning.mmd import Compare, median_alpha
from visard.learning.train import Training
from visard.learning.weights import weights_of
from visard.methods.central_mmd import SOURCES, CentralMMD, client_within
from visard.methods.encrypted_mmd import Begin
from visard.methods.encrypted_mmd_party import Learner
from visard.models import build
from visard.numerics import Numerics

USERS = ("a", "b", "c")
LR, LAMBDA = 0.1, 0.7


@pytest.fixture
def pool(tmp_path: Path) -> Client:
    values, labels, owners = draw(3, 8, 6, USERS, 1)
    faces = Readings(write_readings(tmp_path / "set", values, list("xyz"), labels, USERS, owners, {}))
    settings = PartitionSettings(kind="one_domain", target_domain="c", split=(1.0, 0.0, 0.0))
    clients = partition(faces, settings, 0).federation(faces).clients
    assert list(clients) == ["a", "b", "target"]
    views = {c: data.train for c, data in clients.items()}
    train = FaceView.of(faces, np.concatenate([v.index for v in views.values()]))
    none = train.take([])
    torch.manual_seed(0)
    net = build("mlp", embedding=4, size=6)
    data = ClientData(train, none, none, parts=views)
    return Client("pool", data, {}, torch.Generator().manual_seed(5), lambda: net, 4, Numerics(channels_last=False))


def slow_mmd(a: list[Tensor], b: Tensor, alpha: float) -> Tensor:
    """Eq. 18: (1/S) (L_p1 + L_p3) over the sources, and L_p2; one source is Eq. 3."""

    def k(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-alpha * ((x - y) ** 2).sum())

    def inside(v: Tensor) -> Tensor:
        n = len(v)
        terms = [k(v[i], v[j]) for i in range(n) for j in range(n) if i != j]
        return torch.stack(terms).sum() / (n * (n - 1))

    def across(u: Tensor, v: Tensor) -> Tensor:
        return -2 / (len(u) * len(v)) * torch.stack([k(x, y) for x in u for y in v]).sum()

    return torch.stack([inside(v) + across(v, b) for v in a]).mean() + inside(b)


@pytest.mark.parametrize(("pooled", "target_batch", "entropy", "dropout"), [
    (False, 0, 0.0, True), (False, 5, 0.0, True), (True, 0, 0.0, True), (True, 5, 0.0, True), (False, 0, 0.6, True),
    (False, 0, 0.0, False), (True, 5, 0.6, False),
])  # fmt: skip
def test_a_step_is_gradient_descent_on_one_loss(
    pool: Client, pooled: bool, target_batch: int, entropy: float, dropout: bool
) -> None:
    """Two sources in one place draw as many as in two places; the target may draw another number.

    It may be asked to be sure of its samples under the classifier it began with, and to drop no units."""
    training = Training(
        lr=LR, momentum=0.0, weight_decay=0.0, clip=0.0, batch_size=6, augment=Augment(flip=False)
    )  # fmt: skip
    compare, head = Compare(unit=False, radius=3.0), HeadSettings("softmax")
    how = CentralMMD(
        rounds=1, exchanges=1, weight=LAMBDA, pooled=pooled, compare=compare, training=training, head=head,
        tested="all", target_batch=target_batch, target_entropy=entropy, target_dropout=dropout,
    )  # fmt: skip
    theta = weights_of(pool.network())
    torch.manual_seed(1)
    W = weights_of(head.build(3, 4))
    names = [SOURCES] if pooled else ["a", "b"]

    again = torch.Generator()
    again.set_state(pool.rng.get_state())
    up = CentralMMD.steps()["align"].function(how, pool, Begin(theta, W, LR))
    assert {"balanced_accuracy", "weighted_f1", "task", "mmd"} <= set(up.figures)

    pool.rng = again
    learners: dict[str, Learner] = {}
    for name in (*names, "target"):
        state: dict[str, Any] = {"theta": theta, "head": W}
        n = {SOURCES: 12, "target": target_batch or 6}.get(name, 6)
        learners[name] = Learner(
            client_within(pool, name, "target", state), replace(training, batch_size=n), compare, head,
            name != "target", LR,
        )  # fmt: skip
    seen = [learners[c].look(learners[c].draw(4)).flatten(0, 1) for c in names]
    alpha = float(np.mean([median_alpha(v) for v in seen]))
    batches = {c: learners[c].draw(1)[0] for c in ("target", *names)}
    if not dropout:
        learners["target"].model.layers[4].eval()
        assert isinstance(learners["target"].model.layers[4], torch.nn.Dropout)
    raw = {c: learners[c].forward(batch) for c, batch in batches.items()}
    v = {c: compare.inside(x).double() for c, x in raw.items()}
    task = torch.stack([learners[c].head.loss(raw[c], learners[c].labels(batches[c])) for c in names]).mean()
    loss = task + LAMBDA * slow_mmd([v[c] for c in names], v["target"], alpha)
    if entropy:
        loss = loss + entropy * slow_information(raw["target"] @ W["weight"].t() + W["bias"])
    loss.backward()  # type: ignore[no-untyped-call]
    for c, learner in learners.items():
        # the common factor 1 / S of a source's loss is left to its learning rate
        rate = LR if c == "target" else LR * len(names)
        got = pool.state["parties"][c]["theta"]
        for key, p in learner.model.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(got[key], p.detach() - rate * p.grad, atol=1e-6, rtol=1e-5)
            assert not torch.equal(got[key], theta[key])
