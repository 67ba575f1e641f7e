"""Batches, schedules and numerics of local training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.toys import noise_faces, toy_network

from visard.config import load
from visard.errors import UsageError, VisardError
from visard.learning.heads import build_head
from visard.learning.train import Trained, Training, batches, train
from visard.learning.weights import load_weights, weights_of
from visard.numerics import Numerics


def rows(n: int, **settings: object) -> list[list[int]]:
    training = Training(**settings)  # type: ignore[arg-type]
    return [r.tolist() for r in batches(n, training, torch.Generator().manual_seed(0))]


def test_epochs_cover_everything_once_each() -> None:
    got = rows(10, batch_size=4, amount=2)
    assert [len(b) for b in got] == [4, 4, 2, 4, 4, 2]
    first, second = ([row for batch in part for row in batch] for part in (got[:3], got[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert got[:3] != got[3:]


def test_iterations_cycle_through_shuffled_passes() -> None:
    got = rows(10, batch_size=4, unit="iterations", amount=7)
    assert [len(b) for b in got] == [4, 4, 2, 4, 4, 2, 4]


@pytest.mark.parametrize(
    ("n", "batch", "sizes"), [(9, 4, [4, 4]), (1, 4, [1]), (3, 1, [1, 1, 1]), (5, 8, [5]), (8, 4, [4, 4])]
)
def test_a_last_batch_of_one_is_dropped_unless_it_is_all(n: int, batch: int, sizes: list[int]) -> None:
    assert [len(b) for b in rows(n, batch_size=batch)] == sizes


@pytest.mark.parametrize(
    ("n", "sizes"), [(10, [4, 4, 4]), (11, [4, 4, 4]), (8, [4, 4, 4]), (3, [3, 3, 3]), (1, [1, 1, 1])]
)
def test_batches_that_are_not_full_are_left_out_unless_they_are_all(n: int, sizes: list[int]) -> None:
    got = rows(n, batch_size=4, unit="iterations", amount=3, partial=False)
    assert [len(b) for b in got] == sizes
    passes = [row for batch in got[: max(1, n // 4)] for row in batch]
    assert len(set(passes)) == len(passes), "within a pass nothing comes twice"


def test_cosine_schedule() -> None:
    training = Training(lr=2.0)
    assert training.lr_at(0, 10) == 2.0
    assert training.lr_at(5, 10) == pytest.approx(2.0 * (0.01 + 0.99 * 0.5))
    assert training.lr_at(9, 10) == pytest.approx(2.0 * (0.01 + 0.99 * 0.5 * (1 + math.cos(0.9 * math.pi))))
    assert Training(lr=2.0, schedule="constant").lr_at(9, 10) == 2.0


@pytest.mark.parametrize(
    "setting", [{"lr": 0.0}, {"batch_size": 0}, {"amount": -1}, {"momentum": -0.1}, {"clip": -1.0}]
)
def test_impossible_settings(setting: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"method.training.{next(iter(setting))}"):
        load("fedavg", [f"method.training.{name}={value}" for name, value in setting.items()])


def trained(folder: Path, numerics: Numerics, **settings: object) -> tuple[Trained, dict[str, torch.Tensor]]:
    faces = noise_faces(folder / "faces", identities=6, images=8) if not (folder / "faces").exists() else None
    from visard.data.faces import FaceSet

    view = (faces or FaceSet.open(folder / "faces")).all()
    torch.manual_seed(0)
    model = numerics.prepare(toy_network())
    if numerics.compile:
        model.compile()
    head = build_head("cosface", 6, 8, scale=16, margin=0.1)
    rng = torch.Generator().manual_seed(1)
    done = train(model, head, view, Training(lr=0.05, batch_size=8, amount=3, **settings), rng, numerics)  # type: ignore[arg-type]
    return done, weights_of(model)


def test_numerics_stay_close_to_plain_float32(tmp_path: Path) -> None:
    """channels-last sums in another order: 1e-4; bfloat16 has 8 bits: 5 % of the loss after 18 steps."""
    plain, theta = trained(tmp_path, Numerics(channels_last=False))
    last, moved = trained(tmp_path, Numerics(channels_last=True))
    assert last.loss == pytest.approx(plain.loss, rel=1e-4)
    for key in theta:
        torch.testing.assert_close(moved[key], theta[key], rtol=1e-3, atol=1e-4)
    half, _ = trained(tmp_path, Numerics(precision="bf16"))
    assert half.loss != plain.loss
    assert half.loss == pytest.approx(plain.loss, rel=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_compiled_training_stays_close(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path, Numerics())
    compiled, weights = trained(tmp_path, Numerics(compile=True))
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-3)
    assert not any("_orig_mod" in key for key in weights)


def test_gradient_clipping_bounds_a_step(tmp_path: Path) -> None:
    _, wild = trained(tmp_path, Numerics(), clip=0.0, momentum=0.0, weight_decay=0.0)
    _, tame = trained(tmp_path, Numerics(), clip=1e-3, momentum=0.0, weight_decay=0.0)
    torch.manual_seed(0)
    start = toy_network().state_dict()
    moved = math.sqrt(sum(float(((tame[k] - start[k]) ** 2).sum()) for k, v in toy_network().named_parameters()))
    assert moved <= 18 * 0.05 * 1e-3 * 1.001
    assert not torch.equal(wild["0.weight"], tame["0.weight"])


def test_weights_that_do_not_fit_are_named() -> None:
    model, weights = toy_network(), toy_network().state_dict()
    with pytest.raises(VisardError, match="'0.weight' is missing"):
        load_weights(model, {k: v for k, v in weights.items() if k != "0.weight"})
    with pytest.raises(VisardError, match=r"'0.bias' has shape \(9,\)"):
        load_weights(model, {**weights, "0.bias": torch.zeros(9)})


def test_gradients_can_be_corrected_before_a_step(tmp_path: Path) -> None:
    """One step without momentum, decay and clipping: p - lr (g + c), with c from outside."""
    view = noise_faces(tmp_path / "faces", identities=6, images=8).all()
    how = Training(lr=0.1, momentum=0.0, weight_decay=0.0, clip=0.0, unit="iterations", amount=1, batch_size=8)

    def step(shift: float, names: list[str]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, head = toy_network(), build_head("cosface", 6, 8, scale=16, margin=0.1)

        def correct(gradients: dict[str, torch.Tensor]) -> None:
            names.extend(gradients)
            for gradient in gradients.values():
                gradient += shift

        train(model, head, view, how, torch.Generator().manual_seed(1), Numerics(), lr=0.1, correct=correct)
        return dict(model.named_parameters())

    names: list[str] = []
    plain, shifted = step(0.0, []), step(2.0, names)
    assert names == list(plain)
    for name, value in plain.items():
        torch.testing.assert_close(shifted[name], value - 0.1 * 2.0)


@pytest.mark.parametrize("part", ["network", "head"])
def test_a_frozen_part_stays_as_it_is(tmp_path: Path, part: str) -> None:
    view = noise_faces(tmp_path / "faces", identities=6, images=8).all()
    torch.manual_seed(0)
    model, head = toy_network(), build_head("cosface", 6, 8, scale=16, margin=0.1)
    kept, moved = (model, head) if part == "network" else (head, model)
    before, others = weights_of(kept), weights_of(moved)
    train(model, head, view, Training(batch_size=8), torch.Generator(), Numerics(), lr=0.1, frozen=[kept])
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items()), "statistics too"
    assert not any(torch.equal(p, others[name]) for name, p in moved.named_parameters())
    assert all(p.requires_grad and p.grad is None for p in kept.parameters()), "as it was handed in"
