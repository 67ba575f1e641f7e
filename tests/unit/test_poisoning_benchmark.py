"""The bench of robust rules: hostile clients send what their attack says, and the engine treats it as in any run."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from benchmarks import poisoning
from tests.toys import noise_faces

from visard import models
from visard.aggregation.limits import norms
from visard.data.faces import FaceSet
from visard.models.files import save_model


def test_every_attack_runs_and_changes_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_faces(tmp_path / "faces", 16, 12, 0)
    faces = FaceSet.open(tmp_path / "faces")
    torch.manual_seed(0)
    spec = {"model": "tiny", "embedding": "16", "size": str(faces.size)}
    save_model(tmp_path / "m.safetensors", models.build("tiny", embedding=16, size=faces.size).state_dict(), spec)
    small = copy.deepcopy(poisoning.SETTINGS)
    small["method"] |= {"rounds": 1}
    small["method"]["training"] |= {"amount": 2, "batch_size": 8}
    small["partition"] |= {"clients": 6, "test_identities": 4, "alpha": 100.0, "min_images": 2}
    monkeypatch.setattr(poisoning, "SETTINGS", small)
    monkeypatch.setattr(poisoning, "HOSTILE", 2)
    settings = poisoning.settings_of(faces, tmp_path / "m.safetensors", "last:1", 0)
    world = poisoning.world_of(settings, faces, tmp_path)
    ends: dict[str, list[float]] = {}
    monkeypatch.setattr(poisoning, "tar", lambda _, theta: float(sum(v.double().sum() for v in theta.values())))
    for attack in poisoning.ATTACKS:
        ends[attack] = [poisoning.run(world, settings, poisoning.RULES[rule], attack) for rule in ("mean", "median")]
    assert all(math.isfinite(value) for pair in ends.values() for value in pair), "1e30 is refused by the engine"
    assert len({pair[0] for pair in ends.values()}) == len(poisoning.ATTACKS), "every attack moves the mean elsewhere"


def test_attackers_that_know_the_bound_stay_just_inside_it() -> None:
    rng = torch.Generator().manual_seed(0)
    sent = {"w": torch.randn(50, generator=rng)}
    others = [{"w": sent["w"] + 0.1 * torch.randn(50, generator=rng)} for _ in range(5)]
    lengths = sorted(norms(theta, sent)[""] for theta in others)
    alike = poisoning.crafted("alike", sent, others[0], others)
    assert norms(alike, sent)[""] == pytest.approx(2.99 * lengths[2], rel=1e-4)
    mean = sum(theta["w"] - sent["w"] for theta in others)
    assert float((alike["w"] - sent["w"]) @ mean) < 0, "against the others"
    flipped = poisoning.crafted("flip", sent, others[0], others)
    assert torch.allclose(flipped["w"] - sent["w"], sent["w"] - others[0]["w"])
