"""Pictures to tensors, and augmentation: exact values, independence of pictures, determinism."""

import numpy as np
import pytest
import torch

from visard.config import load
from visard.data.augment import Augment, augment, to_float
from visard.errors import UsageError

NOTHING = Augment(flip=False)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(n: int = 32, size: int = 12) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=rng(99)) * 2 - 1


@pytest.mark.parametrize("channels_last", [False, True])
def test_to_float_values_and_axes(channels_last: bool) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    images[0, 0, 0] = [0, 255, 128]
    x = to_float(images, channels_last)
    assert x.shape == (4, 3, 5, 6)
    assert x.dtype == torch.float32
    expected = (images.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(x.numpy(), expected, atol=2e-7)
    assert x.min() >= -1
    assert x.max() <= 1
    memory = torch.channels_last if channels_last else torch.contiguous_format
    assert x.is_contiguous(memory_format=memory)


def test_to_float_takes_views_and_leaves_them_alone() -> None:
    images = np.full((6, 4, 4, 3), 9, np.uint8)
    part = images[::2, :, ::-1]
    assert to_float(part).shape == (3, 3, 4, 4)
    assert (images == 9).all()


def test_off_means_unchanged() -> None:
    x = batch()
    assert torch.equal(augment(x, rng(), NOTHING), x)
    assert augment(x[:0], rng()).shape == (0, 3, 12, 12)


def test_flip_mirrors_the_width_of_about_half() -> None:
    x = batch(400)
    y = augment(x, rng(), Augment())
    same = (y == x).flatten(1).all(1)
    mirrored = (y == x.flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 140 < int(mirrored.sum()) < 260


def test_shift_moves_each_picture_by_at_most_k() -> None:
    x, k = batch(200), 2
    y = augment(x, rng(), Augment(flip=False, shift=k))
    padded = torch.nn.functional.pad(x, (k, k, k, k), mode="replicate")
    seen = set()
    for before, after in zip(padded, y, strict=True):
        fits = [
            (dy, dx)
            for dy in range(2 * k + 1)
            for dx in range(2 * k + 1)
            if torch.equal(before[:, dy : dy + 12, dx : dx + 12], after)
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) == (2 * k + 1) ** 2


def test_jitter_is_affine_and_bounded() -> None:
    x = batch() * 0.2
    y = augment(x, rng(), Augment(flip=False, jitter=0.3))
    for before, after in zip(x.double(), y.double(), strict=True):
        design = torch.stack([before.flatten(), torch.ones(before.numel()).double()], 1)
        slope, offset = torch.linalg.lstsq(design, after.flatten()[:, None]).solution.flatten().tolist()
        assert 0.7 - 1e-4 <= slope <= 1.3 + 1e-4
        shift = float(after.mean() - before.mean())
        assert abs(shift) <= 0.3 + 1e-4
        np.testing.assert_allclose(design @ torch.tensor([slope, offset]).double(), after.flatten(), atol=1e-5)
    assert augment(torch.ones(8, 3, 4, 4), rng(), Augment(jitter=0.9)).abs().max() <= 1


def test_erase_greys_one_rectangle() -> None:
    x = batch(300, 24).abs() + 0.01
    y = augment(x, rng(), Augment(flip=False, erase=0.5))
    hit = 0
    for before, after in zip(x, y, strict=True):
        gone = (after == 0).all(0)
        assert torch.equal(after[:, ~gone], before[:, ~gone])
        if gone.any():
            hit += 1
            rows, columns = torch.where(gone.any(1))[0], torch.where(gone.any(0))[0]
            box = gone[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert box.all()
            assert box.numel() <= 0.2 * 24 * 24
    assert 110 < hit < 190


def test_the_generator_decides_everything() -> None:
    x, full = batch(), Augment(flip=True, shift=3, jitter=0.2, erase=0.5)
    before = x.clone()
    first, again, other = (augment(x, rng(seed), full) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(x, before)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    augment(x, rng(1), full)
    assert torch.equal(state, torch.get_rng_state())


def test_memory_order_stays() -> None:
    x = batch().to(memory_format=torch.channels_last)
    y = augment(x, rng(), Augment(flip=True, jitter=0.2, erase=0.5))
    assert y.is_contiguous(memory_format=torch.channels_last)
    plain = augment(x.contiguous(), rng(), Augment(flip=True, jitter=0.2, erase=0.5))
    torch.testing.assert_close(y, plain)


@pytest.mark.parametrize("wrong", [{"shift": -1}, {"jitter": 1.0}, {"jitter": -0.1}, {"erase": 1.5}])
def test_wrong_options(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=rf"augment\.{next(iter(wrong))}"):
        load("fedavg", [f"method.training.augment.{name}={value}" for name, value in wrong.items()])
