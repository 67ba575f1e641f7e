"""What the codec refuses, by name."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from visard.engines.codec import CodecError, decode, encode


@dataclass(frozen=True)
class Reply:
    w: Tensor
    n: int


def craft(tree: object, tensors: dict[str, Tensor] | None = None, version: int = 1, magic: bytes = b"VSRD") -> bytes:
    header = json.dumps(tree).encode()
    return struct.pack("<4sBI", magic, version, len(header)) + header + save(tensors or {})


FORMS = [bytes, bytearray, lambda data: memoryview(bytearray(data))]  # in which a message can be in memory
W = {"0": torch.zeros(2)}
GOOD = {"m": {"w": {"t": "0"}, "n": 3}}


def test_hand_made_bytes_are_read() -> None:
    reply = decode(craft(GOOD, W), Reply)
    assert reply.n == 3
    assert torch.equal(reply.w, torch.zeros(2))


@dataclass(frozen=True)
class Later:
    w: Tensor
    n: int
    seen: dict[str, int] = field(default_factory=dict)


def test_a_state_from_before_a_field_has_its_default() -> None:
    assert decode(craft(GOOD, W), Later).seen == {}
    with pytest.raises(CodecError, match="lacks the field 'n'"):
        decode(craft({"m": {"w": {"t": "0"}, "seen": {"d": {}}}}, W), Later)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "too short"),
        (craft(GOOD, W, magic=b"PICK"), "not a visard message"),
        (craft(GOOD, W, version=9), "format 9"),
        (craft({"m": {"w": {"t": "0"}, "n": 3, "face": 1}}, W), "undeclared field 'face'"),
        (craft({"m": {"w": {"t": "0"}}}, W), "lacks the field 'n'"),
        (craft({"m": {"w": {"t": "0"}, "n": True}}, W), "n is not a int"),
        (craft({"m": {"w": {"t": "7"}, "n": 3}}, W), "not there"),
        (craft(GOOD, {**W, "1": torch.zeros(9)}), "no field declares"),
        (craft({"m": {"w": 3, "n": 3}}), "w is not a Tensor"),
        (craft([1, 2]), "not a Reply"),
        (struct.pack("<4sBI", b"VSRD", 1, 2**20) + b"x", "does not fit"),
        (struct.pack("<4sBI", b"VSRD", 1, 2**31) + b"x", "over the limit"),
        (craft(GOOD)[: -len(save({}))] + (2**40).to_bytes(8, "little") + bytes(64), "over the limit"),
        (craft(GOOD, W)[:-1], "cannot be read"),
        (craft({"m": {"w": {"t": "0"}, "n": 1e400}}, W), "cannot be read|n is not"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_refuses(data: bytes, says: str, form: Any) -> None:
    with pytest.raises(CodecError, match=says):
        decode(form(data), Reply)


SOME = encode({"a": torch.randn(40), "b": torch.arange(3), "c": torch.zeros(0, 4), "d": torch.tensor([True, False])})


@pytest.mark.parametrize("form", FORMS)
def test_a_message_is_the_same_in_every_form(form: Any) -> None:
    found, expected = decode(form(SOME), dict), decode(SOME, dict)
    assert list(found) == list(expected)
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in expected.items())


def entry(begin: int, end: int, shape: object = None, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"0": entry(0, 8), "1": entry(4, 12)}),  # one over the other
        json.dumps({"0": entry(0, 4), "1": entry(8, 12)}),  # a gap
        json.dumps({"0": entry(0, 8)}),  # and bytes that belong to none
        json.dumps({"0": entry(0, 16)}),  # beyond the end
        json.dumps({"0": entry(0, 12, [2])}),
        json.dumps({"0": entry(0, 12, [-3])}),
        json.dumps({"0": entry(0, 12, [3.0])}),
        json.dumps({"0": entry(0, 12, 3)}),
        json.dumps({"0": entry(0, 12, [True, 3])}),
        json.dumps({"0": entry(0, 12, dtype=7)}),
        json.dumps({"0": [0, 12]}),
        json.dumps({"0": {"shape": [3], "data_offsets": [0, 12]}}),
        json.dumps({"0": {**entry(0, 12), "data_offsets": [0, 6, 12]}}),
        json.dumps({"0": {**entry(0, 12), "data_offsets": [12, 0]}}),
        json.dumps([entry(0, 12)]),
        "{",
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_list_of_tensors_that_is_wrong_is_refused_in_every_form(text: str, form: Any) -> None:
    listing = text.encode()
    data = headed({"d": {"w": {"t": "0"}}}, len(listing).to_bytes(8, "little") + listing + bytes(12))
    with pytest.raises(CodecError, match="cannot be read"):
        decode(form(data), dict)


def test_a_name_that_stands_there_twice_is_refused_where_bytes_are_shared() -> None:
    one = json.dumps(entry(0, 12))
    listing = f'{{"0": {one}, "0": {one}}}'.encode()
    data = headed({"d": {"w": {"t": "0"}}}, len(listing).to_bytes(8, "little") + listing + bytes(12))
    with pytest.raises(CodecError, match="twice"):
        decode(bytearray(data), dict)


def test_deep_nesting_is_refused_both_ways() -> None:
    tree: object = 1
    for _ in range(40):
        tree = {"a": tree}
    with pytest.raises(CodecError, match="nested deeper"):
        encode(tree)
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    header = ("[" * 50000 + "]" * 50000).encode()
    with pytest.raises(CodecError):
        decode(struct.pack("<4sBI", b"VSRD", 1, len(header)) + header + save({}), dict)


def test_unknown_types_are_not_sent() -> None:
    with pytest.raises(CodecError, match="is a set"):
        encode({"a": {1, 2}})
    with pytest.raises(CodecError, match="keys that are not text"):
        encode({1: 2})


def test_shared_and_strided_memory_round_trips() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    value = {
        "a": base,
        "b": base,
        "t": base.T,
        "cl": torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last),
    }
    back = decode(encode(value), dict)
    assert all(torch.equal(back[k], v) for k, v in value.items())


@dataclass(frozen=True)
class Raw:
    raw: bytes


def listed(dtype: str, shape: list[int], count: int) -> bytes:
    """Safetensors bytes of one tensor of zeros, whatever its type."""
    header = json.dumps({"0": {"dtype": dtype, "shape": shape, "data_offsets": [0, count]}}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(count)


def headed(tree: object, tensors: bytes) -> bytes:
    header = json.dumps(tree).encode()
    return struct.pack("<4sBI", b"VSRD", 1, len(header)) + header + tensors


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("U16", 2), ("U32", 4), ("U64", 8), ("F4", 1), ("X", 1)],
)
@pytest.mark.parametrize("form", FORMS)
def test_only_types_that_are_written_are_read(dtype: str, size: int, form: Any) -> None:
    with pytest.raises(CodecError, match="cannot be read"):
        decode(form(headed(GOOD, listed(dtype, [2], 2 * size))), Reply)


@pytest.mark.parametrize(("dtype", "shape", "size"), [("BF16", [2], 4), ("F32", [1], 4), ("U8", [2, 2], 4)])
def test_bytes_are_a_row_of_bytes(dtype: str, shape: list[int], size: int) -> None:
    with pytest.raises(CodecError, match=r"Raw\.raw is a tensor of numbers, not bytes"):
        decode(headed({"m": {"raw": {"b": "0"}}}, listed(dtype, shape, size)), Raw)


@pytest.mark.parametrize("form", FORMS)
def test_a_truth_value_is_0_or_1(form: Any) -> None:
    with pytest.raises(CodecError, match="neither 0 nor 1"):
        decode(form(headed(GOOD, listed("BOOL", [2], 2)[:-1] + b"\x02")), Reply)


@pytest.mark.parametrize("form", FORMS)
def test_shapes_beyond_counting_are_refused(form: Any) -> None:
    for shape in ([0, 2**62, 2**62], [2**64, 0], [2**63, 0], [0] * 17):
        with pytest.raises(CodecError, match="cannot be read"):
            decode(form(headed(GOOD, listed("F32", shape, 0))), Reply)


def test_a_tensor_serves_one_place_whatever_was_tried_before() -> None:
    @dataclass(frozen=True)
    class Either:
        pair: tuple[Tensor, int] | tuple[Tensor, Tensor]

    tree: object = {"m": {"pair": [{"t": "0"}, {"t": "1"}]}}
    two = {"0": torch.zeros(1), "1": torch.ones(1)}
    assert decode(craft(tree, two), Either).pair[1] == 1
    with pytest.raises(CodecError, match="no allowed type"):
        decode(craft({"m": {"pair": [{"t": "0"}, {"t": "0"}]}}, W), Either)
