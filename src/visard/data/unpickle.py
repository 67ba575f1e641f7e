"""Reads the plain data of a pickle without running any of it: this file interprets the format, nothing is imported.

Lists, tuples, bytes, text, numbers, booleans and numpy arrays of small integers come out; whatever else a pickle asks
for (a class, a function, a persistent object) is refused by name. Bytes are slices of the input, so memory stays near
the size of the file however it was crafted. Protocols 0 to 5, also as Python 2 wrote them.
"""

from __future__ import annotations

import codecs
import math
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from visard.data.pictures import QUIET
from visard.errors import UsageError

SAFE_TYPES = re.compile(r"[|<=]?(u1|b1|\?|B|bool|uint8|i1|i2|i4|i8)")
LINE = 256  # bytes of the longest line that is not itself data
NAMES = {op.code.encode("latin-1"): op.name for op in pickletools.opcodes}
MARK = object()


def load_plain(data: memoryview, where: str) -> Any:
    """The object in the pickle `data`; `where` is named in errors. Bytes come as `memoryview` or `bytes`."""
    try:
        return _Machine(data, where).run()
    except UsageError:
        raise
    except (Damaged, IndexError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error) if isinstance(error, Damaged) else "it is cut short or not a pickle"
        raise UsageError(f"{where} is damaged: {reason}") from None


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


class _Machine:
    """The stack machine of the pickle format, for plain data alone; it refuses data that would grow without end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.where, self.data, self.at = where, data, 0
        self.allowance = 2 * len(data) + 4096  # bytes that may be copied, so that no small file grows without end
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            code = bytes(self.take(1))
            if code == b".":
                if len(self.stack) != 1:
                    raise Damaged("the pickle ends in the middle of its data")
                return self.stack.pop()
            action = ACTIONS.get(code)
            if action is None:
                raise self.refuse(NAMES.get(code, f"unknown operation {code.hex()}"))
            action(self)

    def refuse(self, what: str) -> UsageError:
        """The error that says what the pickle wanted."""
        plain = what[:80].encode("unicode-escape").decode()  # untrusted text goes to a terminal
        return UsageError(f"{self.where} is refused: its pickle asks for {plain}; nothing of it was run")

    def copied(self, count: int) -> None:
        """Counts bytes that are copied."""
        self.allowance -= count
        if self.allowance < 0:
            raise Damaged("its data would grow without end")

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise Damaged("it is cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def integer(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "little", signed=signed)

    def line(self, limit: int = LINE) -> bytes:
        # searched in pieces: a memoryview has no find, and a copy of the rest for every line would be slow
        end, step = self.at, LINE
        while end < len(self.data) and end - self.at < limit:
            piece = bytes(self.data[end : end + step])
            found = piece.find(b"\n")
            if found >= 0:
                text = bytes(self.take(end + found - self.at))
                self.take(1)
                return text
            end, step = end + len(piece), min(step * 2, 2**20)
        raise Damaged("it is cut short")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is MARK:
            raise Damaged("a value is missing")
        return value

    def to_mark(self) -> list[Any]:
        for start in range(len(self.stack) - 1, -1, -1):
            if self.stack[start] is MARK:
                values = self.stack[start + 1 :]
                del self.stack[start:]
                return values
        raise Damaged("a mark is missing")

    def text(self, data: memoryview | bytes, encoding: str = "utf-8") -> None:
        self.copied(len(data))
        self.push(str(data, encoding, "surrogatepass" if encoding == "utf-8" else "strict"))

    def python2_string(self) -> None:
        """A line with a quoted string of protocol 0, as Python 2 wrote bytes."""
        text = self.line(limit=len(self.data))
        if len(text) < 2 or text[:1] not in (b"'", b'"') or text[:1] != text[-1:]:
            raise Damaged("a string has no quotes")
        self.copied(len(text))
        with QUIET:  # an unknown escape is a warning
            self.push(codecs.escape_decode(text[1:-1])[0])

    def number_line(self) -> None:
        text = self.line()
        if len(text) > 21:
            raise Damaged("a number is too long")
        self.push(text == b"01" if text in (b"00", b"01") else int(text.rstrip(b"L")))

    def long(self, length: int) -> None:
        if length > 8:
            raise Damaged("a number is too long")
        self.push(self.integer(length, signed=True))

    def name(self, module: object, name: object) -> None:
        found = ALLOWED.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if found is None:
            raise self.refuse(f"{module}.{name}" if isinstance(module, str) else "something without a name")
        self.push(found)

    def name_lines(self) -> None:
        self.name(self.line().decode("latin-1"), self.line().decode("latin-1"))

    def instance(self) -> None:
        """Old classes (INST): always refused, by their name."""
        raise self.refuse(f"{self.line().decode('latin-1')}.{self.line().decode('latin-1')}")

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        self.name(module, name)

    def extend(self, values: list[Any]) -> None:
        if not self.stack or not isinstance(self.stack[-1], list):
            raise Damaged("values for something that is no list")
        self.stack[-1].extend(values)

    def put(self, index: int) -> None:
        if not self.stack or self.stack[-1] is MARK:
            raise Damaged("a value is missing")
        self.memo[index] = self.stack[-1]

    def reduce(self) -> None:
        """The result of a function call, if it is one of CALLS."""
        args, function = self.pop(), self.pop()
        make = CALLS.get(function.text) if isinstance(function, Name) else None
        if make is None or not isinstance(args, tuple):
            raise self.refuse(f"a call of {function.text if isinstance(function, Name) else 'no function'}")
        self.push(make(self, *args))

    def build(self) -> None:
        """Fill an array with its state; the state of a type of numbers must say nothing unusual."""
        state, value = self.pop(), self.stack[-1]
        if isinstance(value, Kind):
            # (version, byte order, subarray, names, fields, size, alignment, flags): nothing that matters for these
            if not isinstance(state, tuple) or any(part is not None for part in state[2:5]):
                raise self.refuse("an array of records")
            order = state[1] if len(state) > 1 else "|"
            if (str(order, "latin-1") if isinstance(order, (bytes, memoryview)) else order) not in ("|", "<", "="):
                raise self.refuse("an array with its bytes turned round")
        elif isinstance(value, Array) and isinstance(state, tuple) and len(state) == 5:
            _, shape, kind, columns_first, data = state
            vars(value).update(vars(_array(self, kind, shape, columns_first, data)))
        else:
            raise self.refuse("a change of something that is no array")


Action = Callable[[_Machine], Any]
ACTIONS: dict[bytes, Action] = {
    # the frame of the data: PROTO, FRAME (only a hint for readers of streams), READONLY_BUFFER (ours all are)
    b"\x80": lambda m: m.take(1), b"\x95": lambda m: m.take(8), b"\x98": lambda m: None,
    # the stack
    b"(": lambda m: m.push(MARK), b"0": lambda m: m.pop(), b"1": lambda m: m.to_mark(),
    # none, booleans and numbers
    b"N": lambda m: m.push(None), b"\x88": lambda m: m.push(True), b"\x89": lambda m: m.push(False),
    b"I": _Machine.number_line, b"L": _Machine.number_line, b"J": lambda m: m.push(m.integer(4, signed=True)),
    b"K": lambda m: m.push(m.integer(1)), b"M": lambda m: m.push(m.integer(2)),
    b"\x8a": lambda m: m.long(m.integer(1)), b"\x8b": lambda m: m.long(m.integer(4)),
    # bytes, as which strings of Python 2 (S, U, T) count too
    b"S": _Machine.python2_string,
    b"U": lambda m: m.push(m.take(m.integer(1))), b"T": lambda m: m.push(m.take(m.integer(4))),
    b"C": lambda m: m.push(m.take(m.integer(1))), b"B": lambda m: m.push(m.take(m.integer(4))),
    b"\x8e": lambda m: m.push(m.take(m.integer(8))), b"\x96": lambda m: m.push(m.take(m.integer(8))),
    # text
    b"V": lambda m: m.text(m.line(limit=len(m.data)), "raw-unicode-escape"),
    b"X": lambda m: m.text(m.take(m.integer(4))), b"\x8c": lambda m: m.text(m.take(m.integer(1))),
    b"\x8d": lambda m: m.text(m.take(m.integer(8))),
    # lists and tuples
    b"]": lambda m: m.push([]), b"l": lambda m: m.push(m.to_mark()),
    b"a": lambda m: m.extend([m.pop()]), b"e": lambda m: m.extend(m.to_mark()),
    b")": lambda m: m.push(()), b"t": lambda m: m.push(tuple(m.to_mark())), b"\x85": lambda m: m.push((m.pop(),)),
    b"\x86": lambda m: m.push((m.pop(), m.pop())[::-1]), b"\x87": lambda m: m.push((m.pop(), m.pop(), m.pop())[::-1]),
    # values that are remembered and named again
    b"p": lambda m: m.put(int(m.line()[:20])), b"g": lambda m: m.push(m.memo[int(m.line()[:20])]),
    b"q": lambda m: m.put(m.integer(1)), b"h": lambda m: m.push(m.memo[m.integer(1)]),
    b"r": lambda m: m.put(m.integer(4)), b"j": lambda m: m.push(m.memo[m.integer(4)]),
    b"\x94": lambda m: m.put(len(m.memo)),
    # names of functions and classes, calls, and the state of what was made
    b"c": _Machine.name_lines, b"i": _Machine.instance, b"\x93": _Machine.stack_name,
    b"R": _Machine.reduce, b"b": _Machine.build,
}  # fmt: skip


def _encode(machine: _Machine, text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise machine.refuse(f"the encoding {encoding}")
    machine.copied(len(text))
    return text.encode("latin-1")


def _bytes(machine: _Machine, value: Any = b"", encoding: str | None = None) -> Any:
    if isinstance(value, str):
        return _encode(machine, value, encoding or "")
    if not isinstance(value, (bytes, memoryview)) or encoding is not None:
        raise Damaged("bytes of something else")
    return value


def _kind(machine: _Machine, text: Any, *_: Any) -> Kind:
    name = str(text, "latin-1") if isinstance(text, (bytes, memoryview)) else text
    if not isinstance(name, str) or not SAFE_TYPES.fullmatch(name):
        raise machine.refuse(f"an array of {name}")
    short = {"?": "b1", "bool": "b1", "B": "u1", "uint8": "u1"}
    plain = name.lstrip("|<=")
    return Kind(short.get(plain, plain))


def _scalar(machine: _Machine, kind: Any, data: Any) -> int | bool:
    array = _array(machine, kind, (1,), False, data)
    value = int.from_bytes(array.data, "little", signed=array.kind[0] == "i")
    return bool(value) if array.kind == "b1" else value


def _array(machine: _Machine, kind: Any, shape: Any, columns_first: Any, data: Any) -> Array:
    if not isinstance(kind, Kind) or not isinstance(data, (bytes, memoryview)) or not isinstance(shape, tuple):
        raise Damaged("an array without type, shape or bytes")
    sizes = tuple(int(size) for size in shape)
    if len(sizes) > 4 or any(size < 0 for size in sizes) or math.prod(sizes) * int(kind.text[1:]) != len(data):
        raise Damaged(f"an array of shape {sizes[:4]} has {len(data)} bytes")
    if columns_first and sum(size > 1 for size in sizes) > 1:
        raise machine.refuse("an array in column order")
    return Array(kind.text, sizes, data)


CALLS: dict[str, Callable[..., Any]] = {
    "encode": _encode, "bytes": _bytes, "dtype": _kind, "reconstruct": lambda machine, *_: Array(),
    "frombuffer": lambda machine, data, kind, shape, order: _array(machine, kind, shape, order == "F", data),
    "scalar": _scalar,
}  # fmt: skip
ALLOWED = {(module, name): Name(text) for modules, name, text in (
    (("_codecs",), "encode", "encode"), (("numpy",), "ndarray", "numpy.ndarray"), (("numpy",), "dtype", "dtype"),
    (("builtins", "__builtin__"), "bytes", "bytes"), (("builtins", "__builtin__"), "bytearray", "bytes"),
    (("numpy.core.multiarray", "numpy._core.multiarray"), "_reconstruct", "reconstruct"),
    (("numpy.core.multiarray", "numpy._core.multiarray"), "scalar", "scalar"),
    (("numpy.core.numeric", "numpy._core.numeric"), "_frombuffer", "frombuffer"),
) for module in modules}  # fmt: skip
