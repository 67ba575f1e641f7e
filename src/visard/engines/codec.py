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
import struct
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from visard.errors import PublicError

# ----------
# Tensors as safetensors bytes, written directly: for the small states of many clients the library's own writer is
# slower than their training step. Reading stays with the library, which checks places, lengths and shapes.

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
MAX_DIMENSIONS = 16
KINDS = {name: kind for kind, name in NAMES.items()}


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """8 bytes of header length, a JSON header padded to 8 bytes, then the numbers; wide types first, so all align."""
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
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


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


T = TypeVar("T")

MAGIC = b"VSRD"
VERSION = 1
_PREFIX = struct.Struct("<4sBI")
MAX_BYTES = 2**31  # of one message
MAX_HEADER = 2**21  # of the tree, and of the list of tensors: what is built from one takes up to 30 times its bytes
MAX_HEADER_OF_FILES = 2**28  # of states that this machine has written itself
MAX_DEPTH = 16


class CodecError(PublicError):
    """Bytes that are not a message of the expected type, or a value that cannot be one."""


def encode(value: object) -> bytes:
    """Bytes of a dataclass, dict, list, tensor, number, text or bytes, or of any tree of these."""
    tensors: dict[str, Tensor] = {}

    def put(tensor: Tensor) -> str:
        tensors[key := str(len(tensors))] = tensor
        return key

    tree = flatten(value, put)
    header = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    try:
        return _PREFIX.pack(MAGIC, VERSION, len(header)) + header + dump(tensors)
    except TypeError as error:
        raise CodecError(str(error)) from None


def decode(data: bytes, kind: type[T], limit: int = MAX_HEADER) -> T:
    """The value of type `kind` in `data`; one clear CodecError on anything else."""
    if len(data) < _PREFIX.size:
        raise CodecError(f"message of {len(data)} bytes is too short")
    if len(data) > MAX_BYTES:
        raise CodecError(f"message of {len(data)} bytes is over the limit of {MAX_BYTES}")
    magic, version, length = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise CodecError("not a visard message")
    if version != VERSION:
        raise CodecError(f"message format {version} is not format {VERSION}: update the older side")
    if length > limit:
        raise CodecError(f"message header of {length} bytes is over the limit of {limit}")
    if length > len(data) - _PREFIX.size:
        raise CodecError(f"message header of {length} bytes does not fit into the message")
    start = _PREFIX.size
    try:
        tree = json.loads(data[start : start + length], parse_constant=_no_constant)
        tensors = parse(data[start + length :], limit)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"message cannot be read: {_first_line(error)}") from None
    unused = Unused(tensors)
    value = _build(tree, kind, tensors, unused, 0, getattr(kind, "__name__", "value"))
    if unused:
        raise CodecError(f"message carries {len(unused)} tensors that no field declares")
    return cast(T, value)


class Unused(set[str]):
    """The tensors of a message that nothing has pointed to yet."""

    def __init__(self, keys: Collection[str]) -> None:
        super().__init__(keys)
        self._taken: list[str] = []

    def take(self, key: str) -> None:
        """A tensor can be taken once."""
        self.discard(key)
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


def build(tree: Any, kind: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value of a header tree; here several places may share a tensor."""
    return _build(tree, kind, tensors, None, 0, getattr(kind, "__name__", "value"))


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


def _build(tree: Any, kind: Any, tensors: Mapping[str, Tensor], unused: Unused | None, depth: int, where: str) -> Any:
    """The value of `tree`, checked against the type `kind` (Any accepts every tree but builds no dataclass)."""
    if depth > MAX_DEPTH:
        raise CodecError(f"{where} is nested deeper than {MAX_DEPTH}")
    if kind in _PLAIN:  # most entries of a message, so these come first
        if type(tree) is kind:
            return tree
        raise _refused(kind, where)
    if isinstance(tree, dict):
        return _build_marked(tree, kind, tensors, unused, depth, where)
    origin, inner = _anatomy(kind)
    if origin is typing.Annotated:
        return _build(tree, inner[0], tensors, unused, depth, where)
    if origin in (types.UnionType, typing.Union):
        return _build_union(tree, inner, tensors, unused, depth, where)
    if isinstance(tree, list):
        return _build_list(tree, kind, tensors, unused, depth, where)
    if kind is Any or (kind is type(None) and tree is None) or (origin is typing.Literal and tree in inner):
        return tree
    raise _refused(kind, where)


def _build_marked(
    tree: dict[str, Any], kind: Any, tensors: Mapping[str, Tensor], unused: Unused | None, depth: int, where: str
) -> Any:
    """A number, a tensor, bytes, a dict or a dataclass: {mark: content}."""
    if len(tree) != 1:
        raise CodecError(f"{where} is malformed")
    ((mark, body),) = tree.items()
    if mark == "t" and kind is Tensor:
        return _tensor(body, tensors, unused, where)
    origin, inner = _anatomy(kind)
    if origin is typing.Annotated:
        return _build(tree, inner[0], tensors, unused, depth, where)
    if origin in (types.UnionType, typing.Union):
        return _build_union(tree, inner, tensors, unused, depth, where)
    if mark == "f" and kind in (float, Any):
        return _float(body, where)
    if mark == "t" and kind is Any:
        return _tensor(body, tensors, unused, where)
    if mark == "b" and kind in (bytes, Any):
        return _bytes(_tensor(body, tensors, unused, where), where)
    if mark == "d" and isinstance(body, dict) and (kind in (Any, dict) or origin is dict):
        of = inner[1] if origin is dict else Any
        return {k: _build(v, of, tensors, unused, depth + 1, f"{where}[{k:.40}]") for k, v in body.items()}
    if mark == "m" and isinstance(body, dict) and dataclasses.is_dataclass(kind):
        names, hints = _fields(cast(type, kind))
        if body.keys() != hints.keys():
            raise CodecError(f"{where} {_odd_field(names, body)}")
        return kind(*(_build(body[n], hints[n], tensors, unused, depth + 1, f"{where}.{n}") for n in names))  # type: ignore[operator]
    raise _refused(kind, where)


def _build_list(
    tree: list[Any], kind: Any, tensors: Mapping[str, Tensor], unused: Unused | None, depth: int, where: str
) -> Any:
    origin, inner = _anatomy(kind)
    if kind is Any:
        origin, kinds = list, [Any] * len(tree)
    elif origin not in (list, tuple):
        raise _refused(kind, where)
    elif origin is list or (len(inner) == 2 and inner[1] is Ellipsis):
        kinds = [inner[0]] * len(tree)
    elif len(inner) != len(tree):
        raise CodecError(f"{where} has {len(tree)} entries, not {len(inner)}")
    else:
        kinds = list(inner)
    each = enumerate(zip(tree, kinds, strict=True))
    return origin(_build(v, of, tensors, unused, depth + 1, f"{where}[{i}]") for i, (v, of) in each)


def _tensor(key: Any, tensors: Mapping[str, Tensor], unused: Unused | None, where: str) -> Tensor:
    """The tensor of that key; where `unused` is given, for the first time."""
    if not isinstance(key, str) or key not in (tensors if unused is None else unused):
        raise CodecError(f"{where} points to a tensor that is not there")
    if unused is not None:
        unused.take(key)
    return tensors[key]


def _bytes(tensor: Tensor, where: str) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise CodecError(f"{where} is a tensor of numbers, not bytes")
    return tensor.numpy().tobytes()


def _refused(kind: Any, where: str) -> CodecError:
    return CodecError(f"{where} is not a {getattr(kind, '__name__', kind)}")


_PLAIN = (int, bool, str)


@functools.cache  # taking types apart is slow, and every entry of a message asks for it
def _anatomy(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@functools.cache
def _fields(kind: type) -> tuple[list[str], dict[str, Any]]:
    """The names of a dataclass's fields in the order of its arguments, and their types."""
    hints, names = get_type_hints(kind), [f.name for f in dataclasses.fields(kind)]
    return names, {name: hints[name] for name in names}


def _odd_field(names: list[str], body: dict[str, Any]) -> str:
    if extra := sorted(set(body) - set(names)):
        return f"carries the undeclared field {extra[0]!r}"
    return f"lacks the field {sorted(set(names) - set(body))[0]!r}"


def _build_union(
    tree: Any,
    kinds: tuple[Any, ...],
    tensors: Mapping[str, Tensor],
    unused: Unused | None,
    depth: int,
    where: str,
) -> Any:
    taken = 0 if unused is None else unused.taken
    for kind in kinds:
        try:
            return _build(tree, kind, tensors, unused, depth, where)
        except CodecError:
            if unused is not None:
                unused.back(taken)
    raise CodecError(f"{where} is of no allowed type")


def _float(body: Any, where: str) -> float:
    try:
        return float("nan") if body == "nan" else float.fromhex(body)
    except (TypeError, ValueError, OverflowError):
        raise CodecError(f"{where} is not a number") from None


def own(value: T, copies: dict[int, Tensor] | None = None) -> T:
    """A copy that shares no memory with `value`: what crosses between server and client is never aliased.

    With `copies` a tensor that several values hold is copied once for all of them.
    """
    if isinstance(value, Tensor):
        if copies is None:
            return cast(T, value.detach().clone())
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
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
    """Bytes of the content: tensors and byte strings exactly, numbers as 8, text in UTF-8."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(size_of(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(v) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(size_of(getattr(value, f.name)) for f in dataclasses.fields(value))
    return 0 if value is None else 8
