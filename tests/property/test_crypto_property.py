"""Codec, packing and homomorphism for any numbers."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.crypto.packed import FixedPoint, Slots
from visard.crypto.paillier import FixedBase, PrivateKey, generate
from visard.errors import VisardError

small = st.integers(-(2**60), 2**60)


@functools.cache
def key() -> PrivateKey:
    return generate(512, insecure=True)


@given(small, small, small)
@settings(max_examples=40, deadline=None)
def test_homomorphism(a: int, b: int, k: int) -> None:
    private, public = key(), key().public
    ca, cb = public.encrypt(a), public.encrypt(b)
    assert private.decrypt(public.add(ca, cb)) == a + b
    assert private.decrypt(public.add_plain(ca, b)) == a + b
    assert private.decrypt(public.multiply(ca, k)) == k * a
    assert private.decrypt(public.refresh(public.multiply(ca, -k))) == -k * a


@given(
    st.lists(small, min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 40), st.randoms(use_true_random=False)
)
@settings(max_examples=30, deadline=None)
def test_linear_maps_are_the_plain_ones(values: list[int], rows: int, bits: int, random: object) -> None:
    matrix = [[random.randint(-(2**bits), 2**bits) for _ in values] for _ in range(rows)]  # type: ignore[attr-defined]
    ciphers = [key().public.encrypt(v) for v in values]
    found = [key().decrypt(c) for c in key().public.linear_maps(ciphers, matrix)]
    assert found == [sum(k * v for k, v in zip(row, values, strict=True)) for row in matrix]


@given(st.integers(2, 2**64), st.integers(0, 2**60 - 1))
def test_fixed_base_powers(base: int, exponent: int) -> None:
    assert FixedBase(base, 2**89 - 1, 60).power(exponent) == pow(base, exponent, 2**89 - 1)


@given(st.integers(2, 70), st.data())
def test_packing_round_trip_and_sums(width: int, data: st.DataObject) -> None:
    slots, half = Slots(width, 512), 1 << (width - 1)
    value = st.integers(-half + 1, half - 1)
    values = data.draw(st.lists(value, min_size=1, max_size=3 * slots.capacity))
    packed = slots.pack(values)
    assert len(packed) == slots.plaintexts(len(values))
    assert all(2 * abs(p) < 2**511 for p in packed), "below n / 2"
    assert slots.unpack(packed, len(values)) == values
    quarters = [v // 2 for v in values]
    doubled = [p + q for p, q in zip(slots.pack(quarters), slots.pack(quarters), strict=True)]
    assert slots.unpack(doubled, len(values)) == [2 * q for q in quarters]


@given(st.integers(2, 70), st.booleans())
def test_packing_refuses_what_does_not_fit(width: int, negative: bool) -> None:
    half = 1 << (width - 1)
    with pytest.raises(VisardError, match="does not fit a slot"):
        Slots(width, 512).pack([0, -half if negative else half])
    with pytest.raises(VisardError, match="overflows its slots"):
        Slots(width, 512).unpack([1 << (2 * width)], 2)
    with pytest.raises(VisardError, match="do not fit a key"):
        Slots(511, 512)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(0, 40))
def test_fixed_point_is_within_half_a_unit(values: list[float], bits: int) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    codec = FixedPoint(bits)
    back = codec.decode(codec.encode(x), x.shape)
    assert float((back - x).abs().max()) <= 0.5 / 2**bits + 1e-9


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fixed_point_refuses(bad: float) -> None:
    with pytest.raises(VisardError, match="a value to encrypt is"):
        FixedPoint(20).encode(torch.tensor([0.5, bad]))
