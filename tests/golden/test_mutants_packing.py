"""The slots of a packed answer hold the largest sum that the bounds of the protocol allow: 30 times 2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.crypto.moments import Moments
from visard.crypto.packed import Packed, Slots
from visard.crypto.paillier import generate
from visard.learning.mmd import Polynomial

LINEAR, QUADRATIC = Polynomial((1.0, -1.0)), Polynomial((1.0, -1.0, 0.5))
LARGEST = 29.9
WEIGHTS = (1.0, 0.99)  # pooled sources: the target counts 1, all other sources together less than 1


def extreme(B1: Tensor, B3: Tensor) -> Moments:
    zero = torch.zeros((), dtype=torch.float64)
    return Moments(B1, torch.zeros(len(B1), len(B1), dtype=torch.float64), B3, zero)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_largest_sum_of_answers_fits_its_slots() -> None:
    """Degree 1: the means themselves; both signs, so that slots borrow from each other."""
    private, plan = generate(512, insecure=True), Packed(LINEAR, 4, 512)
    m = extreme(numbers(LARGEST, -LARGEST, LARGEST, -LARGEST), numbers(0, 0, 0, 0))
    answers = [plan.answer(private.public, [], 5, m, w) for w in WEIGHTS]
    total = plan.values(private, plan.total(private.public, answers), 5)
    torch.testing.assert_close(total[0], sum(WEIGHTS) * m.B1, rtol=0, atol=1e-9)
    assert float(total.abs().max()) > 59


def test_the_largest_sum_of_answers_fits_its_slots_of_degree_2() -> None:
    """z of a feature at the origin is -B3 (c1 / 2 c2 B1 is 0), times the public factor min(1, |2 c2 / c1|) = 1."""
    private, plan = generate(512, insecure=True), Packed(QUADRATIC, 3, 512)
    m = extreme(numbers(0, 0, 0), numbers(LARGEST, -LARGEST, LARGEST))
    a = torch.zeros(7, 3, dtype=torch.float64)
    offer = plan.offer(private.public, a)
    answers = [plan.answer(private.public, offer, 7, m, w) for w in WEIGHTS]
    values = plan.values(private, plan.total(private.public, answers), 7)
    expected = -sum(WEIGHTS) * torch.cat([m.B3, numbers(0)]).expand(7, 4)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-9)


def test_the_largest_sum_of_answers_fits_under_ckks() -> None:
    pytest.importorskip("tenseal", reason="needs the extra ckks")
    from visard.crypto.ckks import generate as generate_ckks
    from visard.crypto.packed import PackedCkks

    (private, public), plan = generate_ckks(8), PackedCkks(LINEAR, 4, 8)
    m = extreme(numbers(LARGEST, -LARGEST, LARGEST, -LARGEST), numbers(0, 0, 0, 0))
    answers = [plan.answer(public, [], 8, m, w) for w in WEIGHTS]
    total = plan.values(private, plan.total(public, answers), 8)
    torch.testing.assert_close(total[0], sum(WEIGHTS) * m.B1, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("width", "capacity"), [(64, 7), (47, 10), (51, 10), (85, 6), (128, 3), (255, 2)])
def test_a_full_plaintext_stays_below_half_the_modulus(width: int, capacity: int) -> None:
    """n has 512 bits, so n / 2 is above 2^510: as many slots as fit there, each at its limit, come back unharmed."""
    private, slots = generate(512, insecure=True), Slots(width, 512)
    assert slots.capacity == capacity
    limit = (1 << (width - 1)) - 1
    for values in ([limit] * capacity, [-limit] * capacity, [limit, -limit] * (capacity // 2)):
        (packed,) = slots.pack(values)
        assert abs(packed) < 1 << 510
        assert slots.unpack([private.decrypt(private.public.encrypt(packed))], len(values)) == values
