"""Every value round-trips; mutated bytes are refused with one line and never crash."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from visard.engines.codec import CodecError, decode, encode, own, size_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@dataclass(frozen=True)
class Inner:
    w: Tensor
    note: str | None = None


@dataclass(frozen=True)
class Message:
    theta: dict[str, Tensor]
    n: int
    loss: float
    raw: bytes
    pair: tuple[int, str]
    many: list[Inner]
    W: Tensor | None = None


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    return (torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 9).to(dtype)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    names = st.text(max_size=8)
    return Message(
        theta=draw(st.dictionaries(names, tensors(), max_size=4)),
        n=draw(st.integers(-(2**62), 2**62)),
        loss=draw(st.floats(allow_nan=False)),
        raw=draw(st.binary(max_size=40)),
        pair=(draw(st.integers(0, 9)), draw(names)),
        many=[Inner(draw(tensors()), draw(st.none() | names)) for _ in range(draw(st.integers(0, 3)))],
        W=draw(st.none() | tensors()),
    )


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Message | Inner):
        return type(a) is type(b) and all(same(v, getattr(b, k)) for k, v in vars(a).items())
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(messages())
def test_round_trip_keeps_every_bit_and_the_order(message: Message) -> None:
    data = encode(message)
    assert same(decode(data, Message), message)
    assert encode(decode(data, Message)) == data


@given(messages(), st.data())
@settings(max_examples=300)
def test_mutated_bytes_never_crash(message: Message, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        decode(bytes(raw), Message)
    except CodecError as error:
        assert "\n" not in str(error)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(CodecError):
        decode(raw, Message)


@given(messages())
def test_own_shares_no_memory(message: Message) -> None:
    copy = own(message)
    assert same(copy, message)
    for key, value in copy.theta.items():
        assert value.numel() == 0 or value.data_ptr() != message.theta[key].data_ptr()


def test_size_counts_content() -> None:
    inner = Inner(torch.zeros(3, dtype=torch.float32), "é")
    assert size_of(inner) == 12 + 2
    assert size_of({"a": 1, "b": [b"xyz", 2.0, None]}) == 8 + 3 + 8
