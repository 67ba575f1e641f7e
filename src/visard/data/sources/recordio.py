"""Training sets as .rec and .idx files (MXNet RecordIO, as InsightFace packs CASIA and MS1M).

A file is records one after the other, with an index beside it. A record is the number 0xced7230a, a word of 3 bits
`part` and 29 bits length, the data, and zeros up to a multiple of 4 bytes. Data that holds the magic number at a
multiple of 4 is cut there into parts (1 first, 2 middle, 3 last; 0 = whole) and the number itself is left out. An image
record begins with flag, label, id, id2; flag > 0 is the count of further labels, which follow. All is little-endian.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from visard.data.listing import Listing, Names, Numbers, Pictures, fields
from visard.data.pictures import MAX_BYTES
from visard.errors import UsageError, VisardError
from visard.files import open_file, replacing

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
LENGTH_BITS = 29
HEADER = struct.Struct("<IfQQ")
MAX_LABELS = 1024
HEAD_BYTES = 8 + HEADER.size + 4  # frame, header and the first of several labels
BLOCK = 4096  # records that are looked at together
WHOLE, FIRST, MIDDLE, LAST = range(4)

Words = npt.NDArray[np.uint32]


def read(source: Path) -> Listing:
    """List the pictures of `source`, a .rec file or a folder with exactly one (train.rec where there are more).

    A first record that has labels and no picture is the header: its first label is the first key after the pictures.
    The identity of a picture is its label, or the first of several. Pictures are read when they are decoded.
    """
    records = RecordFile(_find(source))
    try:
        chosen, header = _pictures(records)
        labels = records.labels()[chosen]
    except ValueError as error:
        raise UsageError(f"{records.path} is damaged: {error}") from None
    with np.errstate(invalid="ignore"):
        whole = np.isfinite(labels) & (labels >= 0) & (labels < 2**31) & (labels == np.floor(labels))
    if not whole.all():
        k = int(np.argmin(whole))
        key = records.keys[chosen[k]]
        raise UsageError(f"{records.path}: record {key} has label {labels[k]}, which is no identity number")
    labels_used, identity = np.unique(labels.astype(np.int64), return_inverse=True)
    files = Names(len(chosen), lambda item: str(records.keys[chosen[item]]))
    pictures, names = _Records(records, chosen), [str(k) for k in labels_used]
    return Listing(pictures, files, identity.astype(np.int32), names, info={"header": header})


def _find(source: Path) -> Path:
    if not source.is_dir():
        return source
    found = sorted(source.glob("*.rec"))
    chosen = [path for path in found if path.name == "train.rec"] or found
    if len(chosen) != 1:
        raise UsageError(f"{source} has {len(found)} .rec files: name one of them")
    return chosen[0]


def _pictures(records: RecordFile) -> tuple[Numbers, list[float]]:
    """Which records are pictures, in the order of the file, and the labels of the header if there is one."""
    order = np.argsort(records.offsets, kind="stable")
    first = records.record(int(np.argmin(records.keys)))
    if first.flag == 0 or first.data:
        return order, []
    keys = records.keys[order]
    end = float(first.label[0])
    chosen = order[(keys > keys.min()) & (keys < end)] if np.isfinite(end) else order[:0]
    if not len(chosen):
        raise UsageError(f"{records.path}: the header announces no pictures")
    return chosen, [float(value) for value in first.label[:8] if np.isfinite(value)]


@dataclass(frozen=True)
class Record:
    """The content of an image record."""

    flag: int
    label: npt.NDArray[np.float32]  # one, or `flag` labels
    data: bytes  # the encoded picture; empty in a header record


class RecordFile:
    """A .rec file, opened without reading its pictures: `len`, `keys`, `labels`, and `record(k)` at any place.

    Uses the .idx file beside it (lines "key offset") if there is one; otherwise the file is walked once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.length = path.stat().st_size
            if self.length < 8:
                raise UsageError(f"{path} is {'empty' if self.length == 0 else 'cut short'}")
        except FileNotFoundError:
            raise UsageError(f"no such file: {path}") from None
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        index = path.with_suffix(".idx")
        if index.is_file():
            self.keys, self.offsets = _read_index(index)
        else:
            self.offsets = self._walk()
            self.keys = np.arange(len(self.offsets))
        self._scan()

    def __len__(self) -> int:
        return len(self.offsets)

    def record(self, k: int) -> Record:
        """Record number k (in the order of the keys), put together from its parts."""
        data = b"".join(self._parts(int(self.offsets[k])))
        if len(data) < HEADER.size:
            raise ValueError(f"a record of {len(data)} bytes has no header")
        flag, label, _, _ = HEADER.unpack_from(data)
        if flag == 0:
            return Record(0, np.array([label], np.float32), data[HEADER.size :])
        start = HEADER.size + 4 * flag
        if flag > MAX_LABELS or start > len(data):
            raise ValueError(f"a record of {len(data)} bytes cannot have {flag} labels")
        return Record(flag, np.frombuffer(data, "<f4", flag, HEADER.size), data[start:])

    def labels(self) -> npt.NDArray[np.float32]:
        """The first label of every record (n,), without reading any picture."""
        first = self._label.copy()
        for k in np.flatnonzero(self._part == FIRST):
            first[k] = self.record(int(k)).label[0]  # a part may end anywhere
        return first

    def _scan(self) -> None:
        """Look at the head of every record: it begins with the magic number and ends inside the file."""
        at = self.offsets
        if not len(at):
            raise UsageError(f"{self.path} has no records")
        self._refuse((at < 0) | (at % 4 != 0) | (at > self.length - 8), np.arange(len(at)))
        self._part, self._label = np.zeros(len(at), np.uint8), np.zeros(len(at), np.float32)
        # a part of the file is mapped at a time: a map of the whole would in the end be all in memory
        order = np.argsort(at, kind="stable")
        for block in np.split(order, range(BLOCK, len(order), BLOCK)):
            start = int(at[block[0]])
            end = min(int(at[block[-1]]) + HEAD_BYTES, self.length // 4 * 4)
            words: Words = np.memmap(self.path, "<u4", "r", start, ((end - start) // 4,)).view(np.ndarray)
            self._look(block, words, (at[block] - start) // 4)

    def _look(self, block: npt.NDArray[np.int64], words: Words, at: npt.NDArray[np.int64]) -> None:
        """Check the records `block`, which begin at `at` in `words`, and note their parts and labels."""
        last = len(words) - 1
        word = words[at + 1]
        part, length = word >> LENGTH_BITS, (word & (2**LENGTH_BITS - 1)).astype(np.int64)
        short = (self.offsets[block] + 8 + length > self.length) | ((length < HEADER.size) & (part == WHOLE))
        self._refuse((words[at] != MAGIC) | (part > FIRST) | short, block)
        flag = words[np.minimum(at + 2, last)]
        # the label itself is the second word of the header; an array of labels begins after the header
        place = np.where(flag == 0, at + 3, at + 2 + HEADER.size // 4)
        self._part[block] = part
        self._label[block] = words[np.minimum(place, last)].view("<f4")

    def _refuse(self, bad: npt.NDArray[np.bool_], block: npt.NDArray[np.int64]) -> None:
        if bad.any():
            k = block[np.argmax(bad)]
            where = f"no whole record {self.keys[k]} at byte {self.offsets[k]}"
            raise UsageError(f"{self.path} is damaged or cut short: {where}")

    def _walk(self) -> npt.NDArray[np.int64]:
        """Where the records begin, from one head to the next."""
        found, at = array("q"), 0
        with open_file(self.path) as file:
            while at < self.length:
                file.seek(at)
                magic, part, length = _head(file.read(8))
                if magic != MAGIC or at + 8 + length > self.length:
                    raise UsageError(f"{self.path} is damaged or cut short: no whole record at byte {at}")
                if part in (WHOLE, FIRST):
                    found.append(at)
                at += 8 + length + -length % 4
        return np.array(found, np.int64)

    def _parts(self, at: int) -> Iterator[bytes]:
        total, expected = 0, (WHOLE, FIRST)
        with open_file(self.path) as file:
            while True:
                file.seek(at)
                magic, part, length = _head(file.read(8))
                total += length
                if magic != MAGIC or part not in expected:
                    raise ValueError(f"no record at byte {at}")
                if total > MAX_BYTES:
                    raise ValueError(f"{total} bytes are too many")
                data = file.read(length)
                if len(data) != length:
                    raise ValueError("the file is cut short")
                yield data
                if part in (WHOLE, LAST):
                    return
                yield MAGIC_BYTES
                expected, at = (MIDDLE, LAST), at + 8 + length + -length % 4


def _head(data: bytes) -> tuple[int, int, int]:
    """Magic number, part and length; zeros if the data is too short."""
    magic, word = struct.unpack("<II", data) if len(data) == 8 else (0, 0)
    return magic, word >> LENGTH_BITS, word & (2**LENGTH_BITS - 1)


def _read_index(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    keys, offsets = [], []
    for where, words in fields(path):
        if len(words) != 2 or not all(word.isdecimal() and len(word) < 19 for word in words):
            raise UsageError(f"{where}: expected a key and an offset")
        keys.append(int(words[0]))
        offsets.append(int(words[1]))
    for what, numbers in (("key", keys), ("offset", offsets)):
        if len(set(numbers)) != len(numbers):
            raise UsageError(f"{path} has a {what} twice")
    if not keys:
        raise UsageError(f"{path} is empty")
    return np.array(keys, np.int64), np.array(offsets, np.int64)


def pack_record(data: bytes) -> bytes:
    """One record with the frame around it, cut into parts where the magic number occurs."""
    cuts = [at for at in range(0, len(data) - 3, 4) if data[at : at + 4] == MAGIC_BYTES] if MAGIC_BYTES in data else []
    starts, ends = [0, *(at + 4 for at in cuts)], [*cuts, len(data)]
    framed = []
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        part = WHOLE if not cuts else FIRST if k == 0 else LAST if k == len(cuts) else MIDDLE
        length = end - start
        if length >= 2**LENGTH_BITS:
            raise VisardError(f"a record of {length} bytes is too long")
        framed.append(struct.pack("<II", MAGIC, part << LENGTH_BITS | length) + data[start:end] + bytes(-length % 4))
    return b"".join(framed)


def write_recordio(path: Path, pictures: Iterable[tuple[bytes, int]]) -> int:
    """Write encoded pictures with their identity numbers as `path`.rec and .idx; returns how many.

    As InsightFace has it: record 0 is a header with the first key after the pictures and the first key after the
    identities, pictures have keys from 1, then one record for each identity says which keys are its own. Pictures must
    come one identity after the other.
    """
    ranges: list[tuple[int, int, int]] = []
    with (
        replacing(path.with_suffix(".idx"), parents=True) as index_beside,
        replacing(path.with_suffix(".rec"), parents=True) as beside,
        index_beside.open("wb") as index,
        beside.open("wb") as file,
    ):
        file.write(bytes(len(pack_record(_header(0, [0.0, 0.0])))))
        key = 1
        for data, identity in pictures:
            if not 0 <= identity < 2**24:
                raise VisardError(f"{path}: identity {identity} is no number that a float32 label can hold")
            if not ranges or ranges[-1][0] != identity:
                ranges.append((identity, key, key))
            ranges[-1] = (identity, ranges[-1][1], key + 1)
            index.write(f"{key}\t{file.tell()}\n".encode())
            file.write(pack_record(HEADER.pack(0, float(identity), key, 0) + data))
            key += 1
        if key == 1:
            raise VisardError(f"{path}: there is no picture to write")
        first = key
        if len({identity for identity, _, _ in ranges}) != len(ranges) or key + len(ranges) >= 2**24:
            raise VisardError(f"{path}: an identity comes twice, or there are more records than a float32 can count")
        for key, (identity, start, end) in enumerate(ranges, first):
            index.write(f"{key}\t{file.tell()}\n".encode())
            file.write(pack_record(_header(identity, [start, end])))
        index.write(b"0\t0\n")
        file.seek(0)
        file.write(pack_record(_header(0, [first, first + len(ranges)])))
    return first - 1


def _header(key: int, labels: Sequence[float]) -> bytes:
    return HEADER.pack(len(labels), 0.0, key, 0) + struct.pack(f"<{len(labels)}f", *labels)


@dataclass(frozen=True, eq=False)
class _Records(Pictures):
    records: RecordFile
    chosen: Numbers

    def read(self, item: int) -> bytes:
        return self.records.record(int(self.chosen[item])).data
