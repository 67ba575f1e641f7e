"""Sizes in the page headers of a Parquet file, which its reader believes: 2 GB are allocated before a byte is read.

A header is a struct of Thrift's compact protocol, before the bytes of its page. pyarrow does not show it.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

LARGEST = 2**28  # bytes of a page, unpacked, ...
RATIO = 8  # ... and more only up to so many times its packed ones: pages of a thousand photographs are large too
PAGES = 100_000  # of one column in one group of rows
DEEPEST = 8  # structs inside each other
LONGEST = 2**20  # entries of a list; those of headers have a few


def check_pages(path: Path, metadata: Any, column: str) -> None:
    """Raise ValueError where a page of a column says that it is large and little of it is there, or makes no sense."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for number in range(row_group.num_columns):
                chunk = row_group.column(number)
                if chunk.path_in_schema.split(".")[0] == column and chunk.num_values > 0:
                    _check_chunk(data, chunk)


def _check_chunk(data: mmap.mmap, chunk: Any) -> None:
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < at:
        at = chunk.dictionary_page_offset
    end = at + chunk.total_compressed_size
    if not 0 <= at <= end <= len(data):
        raise ValueError("a column is said to be outside of the file")
    for _ in range(PAGES):
        if at >= end:
            return
        header = Compact(data, at)
        fields = header.struct()
        unpacked, packed = fields.get(2), fields.get(3)
        if unpacked is None or packed is None or unpacked < 0 or packed < 0:
            raise ValueError("the header of a page has no sizes")
        if unpacked > LARGEST and unpacked > RATIO * min(packed, len(data) - header.at):
            raise ValueError(f"a page of {min(packed, len(data))} bytes is said to become {unpacked}")
        at = header.at + packed
    raise ValueError(f"a column has more than {PAGES} pages")


class Compact:
    """Reads values of Thrift's compact protocol; only whole numbers at the top of a struct are kept."""

    def __init__(self, data: mmap.mmap | bytes, at: int) -> None:
        self.data, self.at = data, at

    def struct(self, depth: int = 0) -> dict[int, int]:
        """The whole numbers among the fields of a struct, by the fields' numbers."""
        if depth > DEEPEST:
            raise ValueError("a header is nested too deeply")
        found, field = dict[int, int](), 0
        while kind := self._byte():
            step, kind = kind >> 4, kind & 15
            field = field + step if step else self._number()
            value = self._value(kind, depth, inside=False)
            if value is not None:
                found[field] = value
        return found

    def _value(self, kind: int, depth: int, inside: bool) -> int | None:
        """One value: None where it is no whole number. A truth is part of its kind, unless it is `inside` a list."""
        match kind:
            case 1 | 2:
                self.at += inside
            case 3:
                self.at += 1
            case 4 | 5 | 6:
                return self._number()
            case 7:
                self.at += 8
            case 8:
                length = self._unsigned()
                self.at += length
            case 9 | 10:
                head = self._byte()
                count = head >> 4 if head >> 4 < 15 else self._unsigned()
                self._values(count, (head & 15,), depth)
            case 11:
                if count := self._unsigned():
                    kinds = self._byte()
                    self._values(count, (kinds >> 4, kinds & 15), depth)
            case 12:
                self.struct(depth + 1)
            case _:
                raise ValueError("a header has a value of an unknown kind")
        return None

    def _values(self, count: int, kinds: tuple[int, ...], depth: int) -> None:
        if count > LONGEST:
            raise ValueError("a header has a list that is too long")
        for _ in range(count):
            for kind in kinds:
                self._value(kind, depth + 1, inside=True)

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

    def _number(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
