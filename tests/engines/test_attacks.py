"""A hostile server with crafted weights: what it got before there were policies, and what they leave it.

`python -m benchmarks.attacks` has the same with more people.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks.attacks import BEFORE, SIDE, Victim, build, crafted, grey, statistics, templates, walk

from visard import models
from visard.deployment.policy import Bounds, Policy, Start, digest_of


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return Victim(tmp_path_factory.mktemp("victim"), people=3, images=6, others=6)


def test_crafted_weights_copy_the_picture(victim: Victim) -> None:
    network = models.build("tiny", embedding=SIDE**2, size=64).eval()
    network.load_state_dict(crafted(torch.zeros(SIDE**2)))
    pixels = victim.all.images[:4]
    x = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        assert torch.allclose(network(x).double(), torch.from_numpy(grey(pixels)), atol=1e-4)


def test_templates_are_mean_faces_and_the_default_policy_gives_none(victim: Victim) -> None:
    before = templates(victim, BEFORE)
    assert before.recognised == 3
    assert min(before.correlations) > 0.9
    assert "would send class_vectors" in templates(victim, Policy(methods=("fedface",))).refused


def test_running_means_are_a_mean_face_and_the_default_policy_gives_none(victim: Victim) -> None:
    small = Bounds(pictures=1, batch=1)
    before = statistics(victim, BEFORE)
    assert before.recognised == 3
    assert min(before.correlations) > 0.8
    assert "would send statistic" in statistics(victim, Policy(methods=("fedavg",), bounds=small)).refused
    kinds = ("weights", "metric", "count", "statistic")
    assert "has lr = 0" in statistics(victim, Policy(methods=("fedavg",), kinds=kinds, bounds=small)).refused


def test_pinned_weights_stop_crafted_ones_also_in_later_rounds(victim: Victim) -> None:
    start = build()
    kinds = ("weights", "metric", "count", "class_vectors")
    near = Bounds(distance=0.25)
    pinned = Policy(methods=("fedface",), kinds=kinds, weights=Start(start=(digest_of(start),)), bounds=near)
    assert "which this party has not pinned" in templates(victim, pinned, 0.001).refused
    later = templates(victim, pinned, 0.001, start, 1)
    assert later.refused == ""
    assert max(later.correlations) < 0.8
    loose = pinned.model_copy(update={"bounds": Bounds(distance=100.0)})
    jump = walk(start, crafted(torch.zeros(SIDE**2)), 100.0, 1)[-1]
    assert all(torch.equal(v, start[k]) for k, v in jump.items() if "running" in k)
    assert templates(victim, loose, 0.001, start, 1).refused == "", "the start alone binds no later round"
