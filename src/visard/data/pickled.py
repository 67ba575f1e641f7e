"""What a pickle may make: bytes, numbers and numpy arrays of small integers (unpickle.py reads the format)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from visard.errors import UsageError

SAFE_TYPES = re.compile(r"[|<=]?(u1|b1|\?|B|bool|uint8|i1|i2|i4|i8)")


@dataclass(frozen=True)
class Name:
    """A function or class that a pickle may mention; it is never called, only recognised."""

    text: str


@dataclass(frozen=True)
class Kind:
    """The type of an array's numbers, such as u1."""

    text: str


@dataclass
class Array:
    """A numpy array as stored: type, shape and bytes in C order."""

    kind: str = "u1"
    shape: tuple[int, ...] = (0,)
    data: memoryview | bytes = b""


class Damaged(Exception):
    """The pickle is not well formed."""


class Guard:
    """Refuses what is no plain data, and data that would grow without end."""

    def __init__(self, where: str, size: int) -> None:
        self.where = where
        self.allowance = 2 * size + 4096  # bytes that may be copied, so that no small file grows without end

    def refuse(self, what: str) -> UsageError:
        """The error that says what the pickle wanted."""
        plain = what[:80].encode("unicode-escape").decode()  # what a stranger wrote goes to a terminal
        return UsageError(f"{self.where} is refused: its pickle asks for {plain}; nothing of it was run")

    def copied(self, count: int) -> None:
        """Counts bytes that are copied."""
        self.allowance -= count
        if self.allowance < 0:
            raise Damaged("its data would grow without end")


def _names() -> dict[tuple[str, str], Name]:
    known = {("_codecs", "encode"): "encode", ("numpy", "ndarray"): "numpy.ndarray", ("numpy", "dtype"): "dtype"}
    for module in ("builtins", "__builtin__"):
        known |= {(module, "bytes"): "bytes", (module, "bytearray"): "bytes"}
    for core in ("numpy.core", "numpy._core"):
        known[f"{core}.multiarray", "_reconstruct"] = "reconstruct"
        known[f"{core}.multiarray", "scalar"] = "scalar"
        known[f"{core}.numeric", "_frombuffer"] = "frombuffer"
    return {key: Name(text) for key, text in known.items()}


ALLOWED = _names()


def call(guard: Guard, function: object, args: object) -> Any:
    """What a pickle's call of a function makes."""
    make = CALLS.get(function.text) if isinstance(function, Name) else None
    if make is None or not isinstance(args, tuple):
        raise guard.refuse(f"a call of {function.text if isinstance(function, Name) else 'no function'}")
    return make(guard, *args)


def _encode(guard: Guard, text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise guard.refuse(f"the encoding {encoding}")
    guard.copied(len(text))
    return text.encode("latin-1")


def _bytes(guard: Guard, value: Any = b"", encoding: str | None = None) -> Any:
    if isinstance(value, str):
        return _encode(guard, value, encoding or "")
    if not isinstance(value, (bytes, memoryview)) or encoding is not None:
        raise Damaged("bytes of something else")
    return value


def _kind(guard: Guard, text: Any, *_: Any) -> Kind:
    name = str(text, "latin-1") if isinstance(text, (bytes, memoryview)) else text
    if not isinstance(name, str) or not SAFE_TYPES.fullmatch(name):
        raise guard.refuse(f"an array of {name}")
    short = {"?": "b1", "bool": "b1", "B": "u1", "uint8": "u1"}
    plain = name.lstrip("|<=")
    return Kind(short.get(plain, plain))


def _from_buffer(guard: Guard, data: Any, kind: Any, shape: Any, order: str) -> Array:
    return _array(guard, kind, shape, order == "F", data)


def _scalar(guard: Guard, kind: Any, data: Any) -> int | bool:
    array = _array(guard, kind, (1,), False, data)
    value = int.from_bytes(array.data, "little", signed=array.kind[0] == "i")
    return bool(value) if array.kind == "b1" else value


def _array(guard: Guard, kind: Any, shape: Any, columns_first: Any, data: Any) -> Array:
    if not isinstance(kind, Kind) or not isinstance(data, (bytes, memoryview)) or not isinstance(shape, tuple):
        raise Damaged("an array without type, shape or bytes")
    sizes = tuple(int(size) for size in shape)
    if len(sizes) > 4 or any(size < 0 for size in sizes) or math.prod(sizes) * int(kind.text[1:]) != len(data):
        raise Damaged(f"an array of shape {sizes[:4]} has {len(data)} bytes")
    if columns_first and sum(size > 1 for size in sizes) > 1:
        raise guard.refuse("an array in column order")
    return Array(kind.text, sizes, data)


CALLS: dict[str, Callable[..., Any]] = {
    "encode": _encode,
    "bytes": _bytes,
    "dtype": _kind,
    "reconstruct": lambda guard, *_: Array(),
    "frombuffer": _from_buffer,
    "scalar": _scalar,
}


def build(guard: Guard, value: object, state: Any) -> None:
    """Fill an array with its `state`; the state of a type of numbers must say nothing unusual."""
    if isinstance(value, Kind):
        # (version, byte order, subarray, names, fields, size, alignment, flags): nothing that matters for these
        if not isinstance(state, tuple) or any(part is not None for part in state[2:5]):
            raise guard.refuse("an array of records")
        order = state[1] if len(state) > 1 else "|"
        if (str(order, "latin-1") if isinstance(order, (bytes, memoryview)) else order) not in ("|", "<", "="):
            raise guard.refuse("an array with its bytes turned round")
    elif isinstance(value, Array) and isinstance(state, tuple) and len(state) == 5:
        _, shape, kind, columns_first, data = state
        vars(value).update(vars(_array(guard, kind, shape, columns_first, data)))
    else:
        raise guard.refuse("a change of something that is no array")
