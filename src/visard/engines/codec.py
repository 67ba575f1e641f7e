"""Messages and states to bytes and back: canonical, versioned, checked before anything is allocated.

    b"VSRD" | version u8 | header length u32 | header (canonical JSON) | safetensors payload

The header is a tree; tensors and byte strings stand in it as numbers that point into the payload. The order of
dicts is kept, because sums over a dict of tensors depend on it. Nothing is unpickled, and only types that the
receiver names are built.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from visard.engines.frame import ALIGNED, MAX_HEADER, PREFIX
from visard.errors import PublicError
from visard.processes import Data

T = TypeVar("T")

MAGIC = b"VSRD"
VERSION = 1
MAX_BYTES = 2**31  # of one message
MAX_HEADER_OF_FILES = 2**28  # of states that this machine has written itself
MAX_DEPTH = 16
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
MAX_DIMENSIONS = 16
Shapes = list[tuple[torch.dtype, tuple[int, ...]]]  # of tensors, in the order in which a message names them
KINDS = {name: kind for kind, name in NAMES.items()}


def dump(tensors: Mapping[str, Tensor], before: bytes = b"") -> bytes:
    """The pieces of `dumped` in one."""
    return b"".join(dumped(tensors, before))


def dumped(tensors: Mapping[str, Tensor], before: bytes = b"") -> list[Data]:
    """Tensors as safetensors: 8 bytes of header length, a JSON header padded to 8 bytes, then the numbers, which are
    the memory of the tensors.

    Wide types come first, so all align. For the small states of many clients the library's own writer is slower than
    their training step; reading stays with the library, which checks places, lengths and shapes.
    """
    header, parts, end = {}, [], 0
    for key in sorted(tensors, key=lambda k: -tensors[k].element_size()):
        tensor = tensors[key].detach().cpu().contiguous()
        if tensor.dtype not in NAMES:
            raise TypeError(f"a tensor of {tensor.dtype} cannot be written")
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [end, end + size]}
        if size:
            parts.append(tensor.view(-1).view(torch.uint8).numpy().data)
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [before, len(text).to_bytes(8, "little"), text, *parts]


def parse(data: bytes, limit: int) -> dict[str, Tensor]:
    """The tensors in safetensors bytes of anyone; ValueError where they are not what `dump` writes.

    The JSON header is the one part whose objects take many times its bytes, so its length has a `limit`.
    """
    if (length := int.from_bytes(data[:8], "little")) > limit:
        raise ValueError(f"a list of tensors of {length} bytes is over the limit of {limit}")
    try:
        return {name: _tensor_at(part) for name, part in deserialize(data)}  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def look_up(data: memoryview, limit: int, share: bool) -> dict[str, Tensor]:
    """As `parse`, without a copy of all of it: tensors are copies one by one or, if they may `share` the memory and lie
    in it as torch lays them, none at all."""
    if (length := int.from_bytes(data[:8], "little")) > limit:
        raise ValueError(f"a list of tensors of {length} bytes is over the limit of {limit}")
    if length > len(data) - 8 or bytes(data[8:9]) != b"{":
        raise ValueError("a list of tensors that is none")
    listed = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_once, parse_constant=_no_constant)
    listed.pop("__metadata__", None)
    found, data, places = {}, data[8 + length :], []
    for name, entry in listed.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError("a tensor that is not described as one")
        kind, shape, ends = KINDS.get(str(entry["dtype"])), entry["shape"], entry["data_offsets"]
        if kind is None:
            raise ValueError(f"a tensor of {str(entry['dtype'])[:40]} cannot be read")
        if not (isinstance(shape, list) and isinstance(ends, list) and len(ends) == 2):
            raise ValueError("a tensor without a shape or a place")
        if not all(type(n) is int and n >= 0 for n in (*shape, *ends)):
            raise ValueError("a tensor whose shape or place is no number")
        if ends[1] - ends[0] != math.prod(shape) * kind.itemsize or ends[1] > len(data):
            raise ValueError("a tensor whose place is not as long as its shape says")
        places.append(tuple(ends))
        numbers = _in_place(data[slice(*ends)], share)
        found[name] = _tensor_at({"dtype": entry["dtype"], "shape": shape, "data": numbers})
    ends_of = [0, *(end for _, end in sorted(places))]
    if [start for start, _ in sorted(places)] != ends_of[:-1] or ends_of[-1] != len(data):
        raise ValueError("tensors that lie over one another, or leave a gap")
    return found


def _in_place(numbers: memoryview, share: bool) -> memoryview | bytearray:
    """Numbers where they are, if memory of their own could begin there, or a copy."""
    if share and len(numbers) and torch.frombuffer(numbers, dtype=torch.uint8).data_ptr() % ALIGNED == 0:
        return numbers
    return bytearray(numbers)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _tensor_at(part: Mapping[str, Any]) -> Tensor:
    kind, shape, numbers = KINDS.get(part["dtype"]), part["shape"], part["data"]
    if kind is None:
        raise ValueError(f"a tensor of {part['dtype']} cannot be read")
    if len(shape) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) >= 2**62:
        raise ValueError("a tensor whose shape is beyond counting")  # where a side is 0, the others need no numbers
    if not numbers:
        return torch.empty(shape, dtype=kind)
    if kind is torch.bool and int(torch.frombuffer(numbers, dtype=torch.uint8).max()) > 1:
        raise ValueError("a truth value is neither 0 nor 1")
    return torch.frombuffer(numbers, dtype=kind).reshape(shape)


class CodecError(PublicError):
    """Bytes that are not a message of the expected type, or a value that cannot be one."""


def encode(value: object) -> bytes:
    """Bytes of a dataclass, dict, list, tensor, number, text or bytes, or of any tree of these."""
    return b"".join(encoded(value))


def encoded(value: object) -> list[Data]:
    """The same in pieces, which are the memory of the tensors as long as these are on the CPU and contiguous."""
    tensors: dict[str, Tensor] = {}

    def put(tensor: Tensor) -> str:
        tensors[key := str(len(tensors))] = tensor
        return key

    tree = flatten(value, put)
    header = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    try:
        return dumped(tensors, PREFIX.pack(MAGIC, VERSION, len(header)) + header)
    except TypeError as error:
        raise CodecError(str(error)) from None


def decode(data: Data, kind: type[T], limit: int = MAX_HEADER) -> T:
    """The value of type `kind` in `data`; one clear CodecError on anything else.

    Tensors are copies; of a memoryview they may share its memory.
    """
    if len(data) < PREFIX.size:
        raise CodecError(f"message of {len(data)} bytes is too short")
    if len(data) > MAX_BYTES:
        raise CodecError(f"message of {len(data)} bytes is over the limit of {MAX_BYTES}")
    magic, version, length = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise CodecError("not a visard message")
    if version != VERSION:
        raise CodecError(f"message format {version} is not format {VERSION}: update the older side")
    if length > limit:
        raise CodecError(f"message header of {length} bytes is over the limit of {limit}")
    if length > len(data) - PREFIX.size:
        raise CodecError(f"message header of {length} bytes does not fit into the message")
    start = PREFIX.size
    try:
        tree = json.loads(bytes(data[start : start + length]), parse_constant=_no_constant)
        if isinstance(data, bytes):
            tensors = parse(data[start + length :], limit)
        else:
            tensors = look_up(memoryview(data)[start + length :], limit, isinstance(data, memoryview))
    except (ValueError, RecursionError) as error:
        raise CodecError(f"message cannot be read: {_first_line(error)}") from None
    unused = Unused(tensors)
    value = _Builder(tensors.__getitem__, unused).build(tree, kind, getattr(kind, "__name__", "value"))
    if unused:
        raise CodecError(f"message carries {len(unused)} tensors that no field declares")
    return cast(T, value)


class Unused(set[str]):
    """The tensors of a message that nothing has pointed to yet."""

    def __init__(self, keys: Collection[str]) -> None:
        super().__init__(keys)
        self._taken: list[str] = []

    def take(self, key: str) -> None:
        """A tensor can be taken once; then it is a KeyError."""
        self.remove(key)
        self._taken.append(key)

    @property
    def taken(self) -> int:
        """How many were taken so far."""
        return len(self._taken)

    def back(self, taken: int) -> None:
        """Put back what was taken since there were so many."""
        self.update(self._taken[taken:])
        del self._taken[taken:]


def flatten(value: object, put: Callable[[Tensor], str]) -> Any:
    """The header tree of a value; `put` takes a tensor in and says by which key the tree names it."""
    return _flatten(value, put, 0, "value")


def build(tree: Any, kind: Any, find: Callable[[str], Tensor]) -> Any:
    """The value of a header tree; `find` gives the tensors, and several places may share one."""
    return _Builder(find).build(tree, kind, getattr(kind, "__name__", "value"))


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number that may be sent")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _flatten(value: object, put: Callable[[Tensor], str], depth: int, where: str) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError(f"{where} is nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # JSON has no infinities; a float travels as hexadecimal text so that every bit survives.
        return {"f": "nan" if math.isnan(value) else value.hex()}
    if isinstance(value, Tensor):
        return {"t": put(value.detach().contiguous())}
    if isinstance(value, bytes | bytearray):
        buffer = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.zeros(0, dtype=torch.uint8)
        return {"b": put(buffer)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return {"m": {n: _flatten(getattr(value, n), put, depth + 1, f"{where}.{n}") for n in names}}
    if isinstance(value, dict):
        if not all(isinstance(k, str) for k in value):
            raise CodecError(f"{where} has keys that are not text")
        return {"d": {k: _flatten(v, put, depth + 1, f"{where}[{k}]") for k, v in value.items()}}
    if isinstance(value, list | tuple):
        return [_flatten(v, put, depth + 1, f"{where}[{i}]") for i, v in enumerate(value)]
    raise CodecError(f"{where} is a {type(value).__name__}, which cannot be sent")


class _Builder:
    """Builds values from trees, each checked against a type (Any accepts every tree but builds no dataclass)."""

    def __init__(self, find: Callable[[str], Tensor], unused: Unused | None = None) -> None:
        self.find, self.unused = find, unused  # `unused` is given: every tensor has one place

    def build(self, tree: Any, kind: Any, where: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise CodecError(f"{where} is nested deeper than {MAX_DEPTH}")
        if kind in _PLAIN:  # most entries of a message are these or tensors, so they come first
            if type(tree) is kind:
                return tree
            raise _refused(kind, where)
        if kind is Tensor and isinstance(tree, dict) and len(tree) == 1 and "t" in tree:
            return self._tensor(tree["t"], where)
        origin, inner = _anatomy(kind)
        if origin is typing.Annotated:
            return self.build(tree, inner[0], where, depth)
        if origin in (types.UnionType, typing.Union):
            return self._union(tree, inner, where, depth)
        if isinstance(tree, dict):
            return self._marked(tree, kind, where, depth)
        if isinstance(tree, list):
            return self._list(tree, kind, where, depth)
        if kind is Any or (kind is type(None) and tree is None) or (origin is typing.Literal and tree in inner):
            return tree
        raise _refused(kind, where)

    def _marked(self, tree: dict[str, Any], kind: Any, where: str, depth: int) -> Any:
        """A number, a tensor, bytes, a dict or a dataclass: {mark: content}."""
        if len(tree) != 1:
            raise CodecError(f"{where} is malformed")
        ((mark, body),) = tree.items()
        origin, inner = _anatomy(kind)
        if mark == "f" and kind in (float, Any):
            return _float(body, where)
        if mark == "t" and kind is Any:
            return self._tensor(body, where)
        if mark == "b" and kind in (bytes, Any):
            return _bytes(self._tensor(body, where), where)
        if mark == "d" and isinstance(body, dict) and (kind in (Any, dict) or origin is dict):
            of = inner[1] if origin is dict else Any
            return {k: self.build(v, of, f"{where}[{k:.40}]", depth + 1) for k, v in body.items()}
        if mark == "m" and isinstance(body, dict) and dataclasses.is_dataclass(kind):
            hints = _fields(cast(type, kind))
            if odd := sorted(body.keys() - hints.keys()):
                raise CodecError(f"{where} carries the undeclared field {odd[0]!r}")
            if odd := sorted(hints.keys() - body.keys() - _optional(cast(type, kind))):
                raise CodecError(f"{where} lacks the field {odd[0]!r}")
            return kind(
                **{n: self.build(body[n], of, f"{where}.{n}", depth + 1) for n, of in hints.items() if n in body}
            )  # type: ignore[operator]
        raise _refused(kind, where)

    def _list(self, tree: list[Any], kind: Any, where: str, depth: int) -> Any:
        origin, inner = _anatomy(kind)
        if kind is Any:
            origin, inner = list, (Any,)
        if origin not in (list, tuple):
            raise _refused(kind, where)
        kinds = inner[:1] * len(tree) if origin is list or inner[1:] == (Ellipsis,) else inner
        if len(kinds) != len(tree):
            raise CodecError(f"{where} has {len(tree)} entries, not {len(kinds)}")
        each = enumerate(zip(tree, kinds, strict=True))
        return origin(self.build(v, of, f"{where}[{i}]", depth + 1) for i, (v, of) in each)

    def _union(self, tree: Any, kinds: tuple[Any, ...], where: str, depth: int) -> Any:
        taken = 0 if self.unused is None else self.unused.taken
        for kind in kinds:
            try:
                return self.build(tree, kind, where, depth)
            except CodecError:
                if self.unused is not None:
                    self.unused.back(taken)
        raise CodecError(f"{where} is of no allowed type")

    def _tensor(self, key: Any, where: str) -> Tensor:
        """The tensor of that key; where `unused` is given, for the first time."""
        try:
            if self.unused is not None:
                self.unused.take(key)
            return self.find(key)
        except (LookupError, ValueError, TypeError, AttributeError, OSError):
            raise CodecError(f"{where} points to a tensor that is not there") from None


def _bytes(tensor: Tensor, where: str) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise CodecError(f"{where} is a tensor of numbers, not bytes")
    return tensor.numpy().tobytes()


def _float(body: Any, where: str) -> float:
    try:
        return float("nan") if body == "nan" else float.fromhex(body)
    except (TypeError, ValueError, OverflowError):
        raise CodecError(f"{where} is not a number") from None


def _refused(kind: Any, where: str) -> CodecError:
    return CodecError(f"{where} is not a {getattr(kind, '__name__', kind)}")


_PLAIN = (int, bool, str)


@functools.cache  # taking types apart is slow, and every entry of a message asks for it
def _anatomy(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, in the order of its arguments."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


@functools.cache
def _optional(kind: type) -> frozenset[str]:
    """Fields with a default: a state from before there was one of them has it not."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return frozenset(f.name for f in fields if not (f.default is missing and f.default_factory is missing))


def own(value: T, copies: dict[int, Tensor] | None = None) -> T:
    """A copy on the CPU that shares no memory with `value`: what crosses between server and client is never aliased.

    With `copies` a tensor that several values hold is copied once for all of them.
    """
    if isinstance(value, Tensor):
        if copies is None:
            return cast(T, value.detach().to("cpu", copy=True))
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
        return cast(T, copies[id(value)])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: own(getattr(value, f.name), copies) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    if isinstance(value, dict):
        return cast(T, {k: own(v, copies) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return cast(T, type(value)(own(v, copies) for v in value))
    return value


def identity(value: object) -> tuple[Any, ...]:
    """The same for two living messages whose fields are the same objects: what is made from one serves both."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), *(id(getattr(value, f.name)) for f in dataclasses.fields(value))
    return (id(value),)


def sizes_of(values: Collection[object]) -> int:
    """`size_of` all of them together; messages that share their fields are counted out once."""
    sizes: dict[tuple[Any, ...], tuple[int, object]] = {}  # holds the values, whose identities are taken so long
    total = 0
    for value in values:
        key = identity(value)
        if key not in sizes:
            sizes[key] = size_of(value), value
        total += sizes[key][0]
    return total


def size_of(value: object) -> int:
    """Bytes that a value takes in an encoded message: its part of the tree with the keys of dictionaries, its part of
    the list of tensors, and its numbers. Nothing (None, or a dict or list without entries) takes none."""
    if value is None or (isinstance(value, dict | list | tuple) and not value):
        return 0
    if isinstance(value, dict) and all(isinstance(v, Tensor) for v in value.values()):
        return _size_of_weights(tuple((k, v.dtype, tuple(v.shape)) for k, v in value.items()))
    tensors: Shapes = []
    return _text(value, tensors) + sum(_listed(tensors))


def encoded_size(value: object) -> int:
    """The length of `encode(value)`, without writing it."""
    tensors: Shapes = []
    text, (listed, numbers) = _text(value, tensors), _listed(tensors)
    listed += len("{}")
    return PREFIX.size + text + 8 + listed + -listed % 8 + numbers


@functools.lru_cache(maxsize=256)  # most replies of a run have the same entries, and a network has hundreds
def _size_of_weights(entries: tuple[tuple[Any, torch.dtype, tuple[int, ...]], ...]) -> int:
    text = sum(_quoted(k) + len(f':{{"t":"{n}"}}') for n, (k, _, _) in enumerate(entries))
    return len('{"d":{}}') + text + len(entries) - 1 + sum(_listed([(dtype, shape) for _, dtype, shape in entries]))


def _listed(tensors: Shapes) -> tuple[int, int]:
    """Bytes of so many tensors in what `dump` writes: in its list, without the brackets around it, and of numbers."""
    size, end = max(0, len(tensors) - 1), 0  # commas
    for number, (dtype, shape) in sorted(enumerate(tensors), key=lambda each: -each[1][0].itemsize):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        name, sides = NAMES.get(dtype, str(dtype)), ",".join(map(str, shape))
        size += len(f'"{number}":{{"dtype":"{name}","shape":[{sides}],"data_offsets":[{begin},{end}]}}')
    return size, end


def _text(value: object, tensors: Shapes) -> int:
    """Bytes of a value in the tree of a message; `tensors` grows by those that it points to."""
    if isinstance(value, Tensor | bytes | bytearray):
        of = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (torch.uint8, (len(value),))
        tensors.append(of)
        return len(f'{{"t":"{len(tensors) - 1}"}}')
    if isinstance(value, float):
        return len('{"f":""}') + (3 if math.isnan(value) else len(value.hex()))
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 2**12:
        return value.bit_length() // 3  # such a number is refused, and writing it out takes long
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        inner = sum(_quoted(k) + 1 + _text(v, tensors) for k, v in value.items())
        return len('{"d":{}}') + inner + max(0, len(value) - 1)
    if isinstance(value, list | tuple):
        return len("[]") + sum(_text(v, tensors) for v in value) + max(0, len(value) - 1)
    return len(json.dumps(value)) if value is None or isinstance(value, bool | int | str) else len(repr(value))


def _quoted(key: object) -> int:
    return len(json.dumps(str(key)))
