"""Sizes in a Parquet file, which its reader believes: 2 GB are allocated before a byte is read.

The footer and the header of each page are structs of Thrift's compact protocol. pyarrow does not show the headers, and
its view of a column ends the process where the statistics of a column do not fit, so both are read here.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from visard.files import open_file

LARGEST = 2**28  # bytes of a page, unpacked, ...
RATIO = 8  # ... and more only up to so many times its packed ones: pages of a thousand photographs are large too
PAGES = 100_000  # of one column in one group of rows
DEEPEST = 8  # structs and lists inside each other
LONGEST = 2**20  # entries of a list
END = 8  # bytes of the length of the footer and of the mark after it
# fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData, in the order of the way to a column
GROUPS, COLUMNS, ABOUT = 4, 1, 3
PATH, VALUES, PACKED, FIRST, DICTIONARY = 3, 5, 7, 9, 11
Struct = dict[int, Any]


def check_pages(path: Path, column: str) -> None:
    """Raise ValueError where a page of a column says that it is large and little of it is there, or makes no sense."""
    with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[-END : -END + 4], "little")
        if length > len(data) - END:
            raise ValueError("the footer is cut off")
        footer = Compact(data, len(data) - END - length).struct()
        for group in _structs(footer.get(GROUPS)):
            for chunk in _structs(group.get(COLUMNS)):
                about = chunk.get(ABOUT)
                if not isinstance(about, dict):
                    raise ValueError("the footer says nothing of a column")
                names = about.get(PATH)
                if isinstance(names, list) and names[:1] == [column.encode()] and _number(about, VALUES) > 0:
                    _check_chunk(data, about)


def _structs(value: Any) -> list[Struct]:
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("the footer has no groups of rows")
    return value


def _number(about: Struct, field: int) -> int:
    value = about.get(field, 0)
    if not isinstance(value, int):
        raise ValueError("the footer has no number where one belongs")
    return value


def _check_chunk(data: mmap.mmap, about: Struct) -> None:
    at = _number(about, FIRST)
    if 0 < _number(about, DICTIONARY) < at:
        at = _number(about, DICTIONARY)
    end = at + _number(about, PACKED)
    if not 0 <= at <= end <= len(data):
        raise ValueError("a column is said to be outside of the file")
    for _ in range(PAGES):
        if at >= end:
            return
        header = Compact(data, at)
        fields = header.struct()
        unpacked, packed = fields.get(2), fields.get(3)
        if not isinstance(unpacked, int) or not isinstance(packed, int) or unpacked < 0 or packed < 0:
            raise ValueError("the header of a page has no sizes")
        if unpacked > LARGEST and unpacked > RATIO * min(packed, len(data) - header.at):
            raise ValueError(f"a page of {min(packed, len(data))} bytes is said to become {unpacked}")
        at = header.at + packed
    raise ValueError(f"a column has more than {PAGES} pages")


class Compact:
    """Reads values of Thrift's compact protocol: numbers, bytes, lists, and structs by the numbers of their fields."""

    def __init__(self, data: mmap.mmap | bytes, at: int) -> None:
        self.data, self.at = data, at

    def struct(self, depth: int = 0) -> Struct:
        """The fields of a struct."""
        if depth > DEEPEST:
            raise ValueError("a header is nested too deeply")
        found, field = Struct(), 0
        while kind := self._byte():
            step, kind = kind >> 4, kind & 15
            field = field + step if step else self._signed()
            found[field] = self._value(kind, depth, inside=False)
        return found

    def _value(self, kind: int, depth: int, inside: bool) -> Any:
        """One value; None for truths, bytes, fractions and maps. A truth is part of its kind unless `inside` a list."""
        match kind:
            case 1 | 2:
                self.at += inside
            case 3:
                self.at += 1
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                self.at += 8
            case 8:
                length = self._unsigned()
                self.at += length
                if self.at > len(self.data):
                    raise ValueError("a header is cut off")
                return self.data[self.at - length : self.at]
            case 9 | 10:
                head = self._byte()
                count = head >> 4 if head >> 4 < 15 else self._unsigned()
                return self._values(count, (head & 15,), depth)
            case 11:
                if count := self._unsigned():
                    kinds = self._byte()
                    self._values(count, (kinds >> 4, kinds & 15), depth)
            case 12:
                return self.struct(depth + 1)
            case _:
                raise ValueError("a header has a value of an unknown kind")
        return None

    def _values(self, count: int, kinds: tuple[int, ...], depth: int) -> list[Any]:
        if count > LONGEST:
            raise ValueError("a header has a list that is too long")
        if depth > DEEPEST:
            raise ValueError("a header is nested too deeply")
        return [self._value(kind, depth + 1, inside=True) for _ in range(count) for kind in kinds]

    def _byte(self) -> int:
        if not 0 <= self.at < len(self.data):
            raise ValueError("a header is cut off")
        self.at += 1
        return self.data[self.at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number of a header is too long")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
