"""The bench of differential privacy: what a unit sends, what a run spends, and figures that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import dp
from torch.nn import functional as F

from visard import models
from visard.models.files import save_model


@pytest.fixture
def network(tmp_path: Path) -> dp.Recogniser:
    torch.manual_seed(0)
    spec = {"model": "tiny", "embedding": "16", "size": "32"}
    save_model(tmp_path / "m.safetensors", models.build("tiny", embedding=16, size=32).state_dict(), spec)
    return dp.Recogniser(tmp_path / "m.safetensors", 32)


def people(network: dp.Recogniser, count: int) -> torch.Tensor:
    rng = np.random.default_rng(0)
    colour = rng.integers(40, 215, (count, 1, 1, 1, 3)) + rng.integers(-40, 40, (count, dp.PICTURES, 32, 32, 3))
    x = network.behind(colour.clip(0, 255).astype(np.uint8).reshape(-1, 32, 32, 3))
    return x.view(count, dp.PICTURES, *x.shape[1:]).clone()


def test_a_unit_sends_a_step_against_its_own_loss(network: dp.Recogniser) -> None:
    x, plan = people(network, 6), dp.Plan()
    network.begin(x[3:], 0)
    others = dp.class_vectors(network, network.start, x[3:])
    found = dp.updates(network, network.start, x[:3], others, plan)
    for number in range(3):
        theta = {k: v.clone().requires_grad_() for k, v in network.start.items()}
        seen = network(theta, x[number])
        own = F.normalize(seen.detach().mean(0), dim=0)
        losses = []
        for feature in seen:
            scores = [plan.scale * (feature @ own - plan.margin), *(plan.scale * (feature @ v) for v in others)]
            losses.append(torch.logsumexp(torch.stack(scores), 0) - scores[0])
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        for key, value in theta.items():
            assert torch.allclose(found[key][number], -value.grad, atol=1e-5)  # type: ignore[operator]


def test_noise_is_that_of_the_budget_and_figures_are_kept(
    network: dp.Recogniser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dp, "TESTED", 6)
    monkeypatch.setattr(dp, "PUBLIC", 6)
    monkeypatch.setattr(dp, "PLANS", {8: dp.Plan(rounds=2, share=0.5)})
    monkeypatch.setattr(dp, "Recogniser", lambda file: network)
    monkeypatch.setattr(dp, "activations", lambda *_: people(network, 20))
    command = [
        "dp",
        "none",
        "m.safetensors",
        str(tmp_path),
        "--units",
        "8",
        "--epsilon",
        "inf",
        "4",
        "--seeds",
        "1",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", command)
    dp.main()
    first = capsys.readouterr().out
    found = json.loads((tmp_path / "dp.json").read_text())
    assert set(found) == {"8 inf 1", "8 4 1", "8 inf 2", "8 4 2"}
    assert found["8 4 1"]["noise"] == found["8 4 2"]["noise"] > 0.3
    assert found["8 inf 1"]["noise"] == 0
    assert found["8 4 1"]["delta"] == pytest.approx(8**-1.1)
    monkeypatch.setattr(dp, "one", None)  # nothing is done again
    dp.main()
    assert capsys.readouterr().out.splitlines() == first.splitlines()[-4:]
