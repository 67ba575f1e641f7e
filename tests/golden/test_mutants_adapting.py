"""DAN and DANN inside a run: how much their penalty counts, what it sees, and when."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.test_adapting_golden import pool_world
from tests.golden.test_fedfr_da_golden import HEAD
from tests.toys import first_step, toy_network
from torch import Tensor

from visard.core import Weights
from visard.data.augment import Augment
from visard.engines.world import World
from visard.learning.heads import Head, HeadSettings
from visard.learning.train import Training
from visard.methods.domain_adaptation import DAN, DANN, Adapting, Down, Penalty

LR = 0.05
ONE = Training(lr=LR, batch_size=6, clip=0.0, momentum=0.0, weight_decay=0.0, unit="iterations", amount=1,
               augment=Augment(flip=False))  # fmt: skip


@dataclass(frozen=True)
class Plain(Adapting):
    """A penalty that is easy by hand: all entries of source features less three times those of the target."""

    name = "plain"
    title = "a toy"
    seen: list[float] = field(default_factory=list)  # the progress at each call

    def penalty(self, head: Head, progress: Callable[[], float]) -> Penalty:
        def gap(source: Tensor, target: Tensor) -> Tensor:
            self.seen.append(progress())
            return source.sum() - 3 * target.sum()

        return gap


def adapted(world: World, method: Adapting, theta: Weights) -> tuple[Weights, Weights, Tensor]:
    """One step at the pool in the middle of a run: the network and the head after it, and the pictures it saw."""
    seen: list[Tensor] = []
    hook = world.network().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    up, state = first_step(world, method.adapt, "pool", Down(theta, {}, LR, 0.5, 0.25), "adapt")
    hook.remove()
    return up.theta, state["head"], seen[0]


def test_the_penalty_counts_weight_times(tmp_path: Path) -> None:
    """One step of plain SGD: what the penalty adds to it is -lr * weight * its gradient, by autograd."""
    world = pool_world(tmp_path, Plain())
    theta = world.new_weights()
    without, _, x = adapted(world, Plain(rounds=1, training=ONE, head=HEAD, weight=0.0), theta)
    moved, _, same = adapted(world, Plain(rounds=1, training=ONE, head=HEAD, weight=0.3), theta)
    assert torch.equal(x, same)
    assert len(x) == 12, "six of the source, six of the targets"
    model = toy_network()
    model.load_state_dict(theta)
    f = model.train()(x)
    slopes = torch.autograd.grad(f[:6].sum() - 3 * f[6:].sum(), list(model.parameters()))
    # the bias before batch norm has no slope but rounding; of all others the smallest change is 4.6e-4
    for (name, _), slope in zip(model.named_parameters(), slopes, strict=True):
        torch.testing.assert_close(moved[name] - without[name], -LR * 0.3 * slope, rtol=1e-3, atol=5e-6)
    assert max(float(s.abs().max()) for s in slopes) * LR * 0.3 > 1e-2, "a step that shows"


@pytest.mark.parametrize("kind", [DAN, DANN])
def test_the_penalty_counts_weight_times_in_dan_and_dann(tmp_path: Path, kind: type[Adapting]) -> None:
    """A step is linear in the weight: with 1.6 the penalty moves everything twice as far as with 0.8."""
    world = pool_world(tmp_path, kind())
    theta = world.new_weights()
    ends: dict[float, Any] = {}
    for weight in (0.0, 0.8, 1.6):
        network, head, _ = adapted(world, kind(rounds=1, training=ONE, head=HEAD, weight=weight), theta)
        ends[weight] = {k: v for k, v in (network | head).items() if v.is_floating_point() and "running" not in k}
    changes = {k: float((ends[0.8][k] - v).abs().max()) for k, v in ends[0.0].items()}
    assert max(changes[k] for k in theta if k in changes) > 1e-5, "the network feels it"
    assert kind is DAN or changes["critic.out.weight"] > 1e-4, "and the critic"
    for key, start in ends[0.0].items():
        once, twice = ends[0.8][key] - start, ends[1.6][key] - start
        torch.testing.assert_close(twice, 2 * once, rtol=0.02, atol=2e-6)  # the bias before batch norm: rounding alone


def test_the_reversal_grows_within_a_round(tmp_path: Path) -> None:
    """Half of the run is over and the round is a quarter of it: 0.5 + 0.25 i / 4 before step i of 4."""
    training = Training(lr=1e-6, batch_size=6, unit="iterations", amount=4)
    method = Plain(rounds=4, training=training, head=HEAD)
    adapted(world := pool_world(tmp_path, method), method, world.new_weights())
    assert method.seen == pytest.approx([0.5, 0.5625, 0.625, 0.6875])


def test_dan_compares_directions() -> None:
    """Directions (1, 0), (0, 1) against (0, 1), (-1, 0); one kernel exp(-d / 2), since the mean of d is 2."""
    source, target = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 3.0], [-0.5, 0.0]])
    gap = DAN(kernels=1).penalty(HeadSettings("arcface", 30.0, 0.5).build(2, 2), lambda: 0.0)(source, target)
    e = math.exp(-1)
    assert float(gap) == pytest.approx(e + e - 2 * (1 + 2 * e + e * e) / 4, abs=1e-6)
