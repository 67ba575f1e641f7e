"""Every value round-trips; mutated bytes are refused with one line and never crash."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from visard.engines.codec import CodecError, decode, encode, encoded_size, own, size_of

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


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 4, 255, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30])
KINDS = st.sampled_from(["F32", "F64", "BF16", "U8", "BOOL", "I64", "C64", "F8_E4M3", "U16", "U64", "F4", "", "x"])
LEAVES = st.sampled_from([
    None, True, 0, -1, 2**70, 1.5, "", "0", "999", [], {}, [[]], {"t": "0"}, {"b": "0"}, {"f": "nan"}, {"f": 1},
    {"f": "0x1p9999"}, {"d": {}}, {"d": {"a": {"t": "0"}}}, {"m": {}}, {"m": {"w": {"t": "0"}, "note": None}},
    {"t": 0}, {"t": []},
])  # fmt: skip


def parts(raw: bytes) -> tuple[Any, Any, bytes]:
    """The tree, the list of tensors and the numbers of a message."""
    at = 9 + int.from_bytes(raw[5:9], "little")
    end = at + 8 + int.from_bytes(raw[at : at + 8], "little")
    return json.loads(raw[9:at]), json.loads(raw[at + 8 : end]), raw[end:]


def joined(tree: Any, listed: Any, numbers: bytes) -> bytes:
    header, names = json.dumps(tree).encode(), json.dumps(listed).encode()
    names += b" " * (-len(names) % 8)
    return b"".join(
        [raw_start(len(header)), header, len(names).to_bytes(8, "little"), names, numbers],
    )


def raw_start(length: int) -> bytes:
    return encode(None)[:5] + length.to_bytes(4, "little")


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    inner = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key, _ in inner] + [place for _, value in inner for place in places(value)]


@given(messages(), st.data())
@settings(max_examples=300, deadline=None)
def test_another_structure_never_crashes_and_takes_little_memory(message: Message, data: st.DataObject) -> None:
    tree, listed, numbers = parts(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        if listed and data.draw(st.booleans()):
            entry = listed[data.draw(st.sampled_from(sorted(listed)))]
            what = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            entry[what] = data.draw(KINDS if what == "dtype" else st.lists(NUMBERS, max_size=4))
        else:
            inside, key = data.draw(st.sampled_from(places(tree)))
            inside[key] = copy.deepcopy(data.draw(LEAVES | NUMBERS))  # the next change may be inside it
    numbers = numbers[: data.draw(st.integers(0, len(numbers)))] if data.draw(st.booleans()) else numbers
    raw = joined(tree, listed, numbers)
    tracemalloc.start()
    try:
        decode(raw, Message)
    except CodecError as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40 * len(raw) + 2**20


HOSTILE = """
import resource
from tests.property.test_codec_property import raw_start
from visard.engines.codec import MAX_HEADER, CodecError, decode

def many(one, room=MAX_HEADER - 100):  # of one JSON value
    return (one + b",") * (room // (len(one) + 1) - 1) + one

def message(tree, listed=b"{}"):
    return raw_start(len(tree)) + tree + len(listed).to_bytes(8, "little") + listed

def named(room):  # a dict of so many bytes, whose values are empty tensors
    empty = b':{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return b"{" + b",".join(b'"%d"' % i + empty for i in range(room // 60)) + b"}"

tensors = named(MAX_HEADER)
keys = b",".join(b'"%d":0' % i for i in range(MAX_HEADER // 24))
for name, kind, raw in (
    ("objects", dict, message(b'{"d":{"x":[' + many(b"{}") + b"]}}")),
    ("lists", dict, message(b'{"d":{"x":[' + many(b"[]", 2**19) + b"]}}")),
    ("tensors", dict, message(b'{"d":{}}', tensors)),
    ("long names", dict, message(b'{"d":{"' + b"k" * (MAX_HEADER // 2) + b'":{"d":{' + keys + b"}}}}")),
    ("unions", list[float | None], message(b"[" + many(b"null", 2**20) + b"]", tensors)),
    ("too long", dict, message(b'{"d":{"x":[' + many(b"{}", 2**25) + b"]}}")),
    ("too many tensors", dict, message(b"{}", named(2**24))),
    ("claims", dict, raw_start(2**32 - 1) + bytes(100)),
):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        decode(raw, kind)
    except CodecError:
        pass
    print(name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_the_worst_messages_take_bounded_memory_and_time() -> None:
    ran = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    grown = {name: int(kilobytes) for name, kilobytes in (line.rsplit(" ", 1) for line in ran.stdout.splitlines())}
    assert len(grown) == 8
    assert max(grown.values()) < 2**17, grown  # 128 MB


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


@given(messages())
def test_sizes_are_those_of_the_encoded_message(message: Message) -> None:
    data = encode(message)
    assert encoded_size(message) == len(data)
    tree = int.from_bytes(data[5:9], "little")
    listed = data[9 + tree + 8 :][: int.from_bytes(data[9 + tree :][:8], "little")]
    numbers = len(data) - 9 - tree - 8 - len(listed)
    assert size_of(message) == tree + len(listed.rstrip()) - len("{}") + numbers
    if message.theta:
        alone = encode(message.theta)
        assert 0 < len(alone) - size_of(message.theta) <= 9 + 8 + 2 + 7, "all but the frame and the padding"


def test_the_keys_of_a_dictionary_are_counted() -> None:
    picture = torch.randint(97, 123, (3072,), generator=torch.Generator().manual_seed(0))
    text = bytes(picture.tolist()).decode()
    assert size_of({text[i : i + 66]: 0.0 for i in range(0, 3072, 66)}) > 3072
    assert size_of({"a": 1}) == len('{"d":{"a":1}}')
    assert size_of([None] * 100) == len("[]") + 4 * 100 + 99, "a list of nothing still says how long it is"
    assert size_of(torch.zeros(0, 5, 7)) > 40, "so does a shape without numbers"
    assert [size_of(nothing) for nothing in (None, {}, [], ())] == [0, 0, 0, 0]
    assert size_of(10**5000) > 4000
