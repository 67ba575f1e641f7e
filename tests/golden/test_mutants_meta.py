"""HF-MAML with literal numbers where a quadratic tells nothing, and heads that stay at a client."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.toys import toy_engine, toy_world

from visard.learning.train import Training
from visard.methods.fedavg import FedAvg
from visard.methods.hf_maml import meta_step


def test_probes_are_delta_apart_whatever_the_length_of_g() -> None:
    """F = p^4 at p = 1, alpha = 0.1, delta = 0.5, the same batch three times.

    F' = 4, adapted 0.6, g = 4 * 0.216 = 0.864. Probes at 1.5 and 0.5: F' is 13.5 and 0.5, and 2 d = 2 * 0.5 / 0.864,
    so h = 13 * 0.864 = 11.232 and p = 1 - 0.2 (0.864 - 1.1232) = 1.05184.
    """
    p = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    meta_step([p], lambda _: (p**4).sum(), (0, 0, 0), alpha=0.1, beta=0.2, delta=0.5, scale_delta=True)
    assert float(p.detach()) == pytest.approx(1.05184, abs=1e-12)


def test_probes_are_delta_g_apart() -> None:
    """As above with probes at 1 + 0.5 * 0.864 and 1 - 0.432: h = 4 (1.432^3 - 0.568^3) / 1."""
    p = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    meta_step([p], lambda _: (p**4).sum(), (0, 0, 0), alpha=0.1, beta=0.2, delta=0.5)
    h = 4 * (1.432**3 - 0.568**3)
    assert float(p.detach()) == pytest.approx(1 - 0.2 * (0.864 - 0.1 * h), abs=1e-12)


def test_a_head_of_its_own_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """At a learning rate of next to nothing the second round leaves the head of the first one as it was."""
    method = FedAvg(rounds=2, training=Training(lr=1e-12, weight_decay=0.0))
    net = toy_engine(tmp_path, toy_world(tmp_path))
    server = method.start(net.world.setup())
    kept = []
    for r in range(2):
        net.begin("federate", r)
        server = method.round(server, net)
        kept.append({c: net.states.client_state(c)["head"]["weight"].clone() for c in net.clients})
    for c in net.clients:
        torch.testing.assert_close(kept[1][c], kept[0][c], rtol=0, atol=1e-6)
    first, second, *_ = kept[0].values()
    assert not torch.allclose(first, second, atol=0.1), "heads are random, each its own"
