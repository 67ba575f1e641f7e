"""What the server holds of messages: long payloads of parties in files of their own, the rest in memory up to a bound,
and beyond it in one more file. No file has a name."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from visard.deployment.flower.part import MOST_PARTS
from visard.engines.frame import ALIGNED, largest_at
from visard.engines.records import PART, cuts, head_of, name_of_pieces
from visard.processes import Data, Filed

IN_MEMORY = 2**29  # bytes
SMALL = 2**16  # bytes of a part that always stays in memory
HEAD = 200  # bytes that the head of a part has at most, if it is a chunk of an array
ELSEWHERE = b"\0"  # the content of a part, as Flower has it
MOST_FILES = 64  # of payloads at once: as many as a run asks for replies
LONGEST_LIST = 2**18  # bytes of the list of tensors that is looked at
AT_ONCE = 512  # pieces that the system writes at once


Lent = tuple[Filed, Callable[[], None]]  # the file of a payload, and what is called when it is read


@dataclass
class Payload:
    """A file, and which part of it is where."""

    file: Filed
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)  # number -> name, and bytes that are written
    users: int = 0  # of the file: runs that read it, and threads that write to it
    over: bool = False  # no part of it is needed any more

    def free_for(self, number: int, name: str) -> bool:
        """Whether a part may be written at the place of that number: it is free, or has this part already."""
        return self.parts.setdefault(number, (name, 0))[0] == name

    def write(self, number: int, pieces: Sequence[memoryview]) -> None:
        """Write the bytes of a part to the place that is free for it."""
        place, rest, size = self.file.start + number * PART, list(pieces), sum(map(len, pieces))
        while rest:
            written = os.pwritev(self.file.handle, rest[:AT_ONCE], place)
            place += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][written:]
        self.parts[number] = self.parts[number][0], size


class Payloads:
    """Long payloads that come from parties, each in a file of its own that has no name.

    A party uploads a payload in parts. Here they are written one after the other, without what Flower puts before each,
    so that the file is the payload: a run on this machine gets the file and not the bytes. When the run has read it
    the file serves the next payload, which is written over it: a new file would cost more than the bytes in it. `lock`
    is held by who calls anything but `write`, which does without it while it writes.
    """

    def __init__(self, folder: Path, lock: AbstractContextManager[Any]) -> None:
        self.folder, self._lock = folder, lock
        self._turns: dict[str, tuple[str, int]] = {}  # part -> the payload that it belongs to, and its number there
        self._files: dict[str, Payload] = {}  # by the name of the payload
        self._left: Counter[str] = Counter()  # how many parts of a payload are known
        self._spare: list[Filed] = []  # files that have served

    def announced(self, tree: ObjectTree) -> None:
        """A message is going to come: note which parts its payloads have, in which order."""
        for node in iterate_object_tree(tree):
            if len(node.children) > 1 and not any(child.children for child in node.children):
                for number, child in enumerate(node.children):
                    if child.object_id not in self._turns:
                        self._turns[child.object_id] = node.object_id, number
                        self._left[node.object_id] += 1

    def write(self, name: str, pieces: Sequence[Data]) -> bool:
        """Write a part, whose content has been checked, where it belongs; False if it is to be kept elsewhere."""
        data = _bare(pieces)
        size = sum(map(len, data))
        with self._lock:
            of, number = self._turns.get(name, ("", 0))
            payload = self._files.get(of)
            if of and payload is None and number == 0 and size == PART and len(self._files) < MOST_FILES:
                payload = self._files[of] = self._new(b"".join(data))
            if payload is None or size > PART or not payload.free_for(number, name):
                return False
            payload.users += 1
        try:
            payload.write(number, data)
        finally:
            self.free(payload)
        return True

    def _new(self, first: bytes) -> Payload:
        """A file in which the largest tensor of a message lies as torch wants it, by the first part."""
        start = -largest_at(first, LONGEST_LIST) % ALIGNED
        if self._spare:
            served = self._spare.pop()
            return Payload(Filed(os.dup(served.handle), 0, start))
        with tempfile.TemporaryFile(dir=self.folder, buffering=0) as made:
            return Payload(Filed(os.dup(made.fileno()), 0, start))

    def free(self, payload: Payload) -> None:
        """One of those that use the file of a payload has ended."""
        with self._lock:
            payload.users -= 1
            self._keep(payload)

    def _keep(self, payload: Payload) -> None:
        if payload.over and not payload.users:
            self._spare.append(payload.file)

    def shrink(self) -> None:
        """Give the room of files that have served back to the disk."""
        self._spare.clear()

    def adopt(self, names: Sequence[str], file: Filed) -> bool:
        """A file that a run has written is the payload with these parts; False where it cannot be."""
        of = self._turns.get(names[0], ("", 0))[0]
        places = [self._turns.get(name) for name in names]
        if of in self._files or places != [(of, number) for number in range(len(names))]:
            return False
        sizes = [stop - start for start, stop in cuts(len(file))]
        # the run is a user of it for ever: another payload is not written over its file
        self._files[of] = Payload(file, dict(enumerate(zip(names, sizes, strict=True))), users=1)
        return True

    def has(self, name: str) -> bool:
        """Whether a part is written in the file of its payload."""
        of, number = self._turns.get(name, ("", 0))
        there, size = self._files[of].parts.get(number, ("", 0)) if of in self._files else ("", 0)
        return there == name and size > 0

    def pieces(self, name: str) -> list[bytes]:
        """A part that was written, as it came."""
        of, number = self._turns[name]
        file, length = self._files[of].file, self._files[of].parts[number][1]
        return [head_of(length), os.pread(file.handle, length, file.start + number * PART)]

    def whole(self, names: Sequence[str], get: Callable[[str], Sequence[bytes]]) -> Lent | None:
        """The file of a payload with these parts, all of which are here; None if it has none.

        Parts that lie elsewhere, as those that another payload has too, come from `get` and are written to it.
        """
        payload = self._files.get(self._turns.get(names[0], ("", 0))[0])
        size = 0
        for number, name in enumerate(names):
            if payload is None or size != number * PART or not payload.free_for(number, name):
                return None
            if not payload.parts[number][1]:
                payload.write(number, _bare(get(name)))
            size += payload.parts[number][1]
        if payload is None:
            return None
        payload.users += 1
        return Filed(os.dup(payload.file.handle), size, payload.file.start), partial(self.free, payload)

    def dropped(self, name: str) -> None:
        """A part is not needed any more; a file goes with the last part of its payload."""
        of, _ = self._turns.pop(name, ("", 0))
        self._left[of] -= 1
        if self._left[of] <= 0:
            del self._left[of]
            if (payload := self._files.pop(of, None)) is not None:
                payload.over = True
                self._keep(payload)


class Store(InMemoryObjectStore):
    """Flower's parts of messages. The file is in `folder`, goes with the process, and is emptied when nothing is in it.

    A request to many clients is here once; a reply comes in parts and stays until the run has fetched it, so without a
    bound the memory of the server would grow with the number of parties that send at the same time.
    """

    def __init__(self, folder: Path, most: int = IN_MEMORY) -> None:
        super().__init__()
        self._folder, self.most = folder, most
        self.say: Callable[[str], None] = lambda text: None
        self.held = 0  # bytes in memory
        self._file: IO[bytes] | None = None
        self._places: dict[str, tuple[int, int]] = {}  # in the file: part -> where it begins, and its length
        self._free: dict[int, list[int]] = {}  # places for parts of a length: nearly all have the same
        self._end = 0
        self._pieces: dict[str, Sequence[bytes]] = {}  # in memory
        self._coming = threading.local()
        self._payloads, self._filed = Payloads(folder, self.lock_store), set[str]()  # and parts that are in their files
        self._sizes: dict[str, int] = {}  # of what was announced: parts in the tree below a part

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Announce a message. Refused if it has too many parts, counted as often as they are named.

        Flower writes the tree of a message out in full. Names that occur twice at each level would double it each time.
        """
        with self.lock_store:
            sizes: dict[str, int] = {}
            for count, node in enumerate(iterate_object_tree(object_tree), 1):
                name, known = node.object_id, node.object_id in self.store
                if name not in sizes:
                    sizes[name] = self._sizes[name] if known else 1 + sum(sizes[c.object_id] for c in node.children)
                if max(count, sizes[name]) > MOST_PARTS:
                    raise ValueError(f"a message has more than {MOST_PARTS} parts")
            new = super().preregister(run_id, object_tree)
            self._sizes |= sizes
            self._payloads.announced(object_tree)
            return new

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    @property
    def in_file(self) -> int:
        """Bytes in the file."""
        return sum(length for _, length in self._places.values())

    @contextmanager
    def coming(self, object_id: str, given: Sequence[Data], filed: bool = False) -> Iterator[None]:
        """Within this, what this thread puts in under a name are these pieces, which the caller has hashed.

        `filed`: parts of a long payload go into its file, which is not written under the locks of Flower. The memory
        of other parts is used again by the caller, so that they are copied.
        """
        pieces = _headed(given)
        written, length = False, sum(map(len, pieces))
        if filed and length >= SMALL and _is_chunk(pieces, length):
            with suppress(OSError):  # then it is put where there is room
                written = self._payloads.write(object_id, pieces)
        self._coming.part = object_id, pieces if written else [bytes(piece) for piece in pieces], written
        try:
            yield
        finally:
            del self._coming.part

    def adopt(self, names: Sequence[str], file: Filed) -> bool:
        """Take the payload with these parts in the file that a run has written; False where that cannot be."""
        with self.lock_store:
            return self._payloads.adopt(names, file)

    @contextmanager
    def adopted(self, object_id: str) -> Iterator[None]:
        """Within this, this thread puts in a part of a file that was adopted."""
        self._coming.part = object_id, (), True
        try:
            yield
        finally:
            del self._coming.part

    def put(self, object_id: str, object_content: bytes) -> None:
        name, pieces, filed = getattr(self._coming, "part", ("", (), False))
        if name == object_id:
            return self._put(object_id, pieces, filed)
        if name_of_object([object_content]) != object_id:
            raise ValueError(f"the content of part {object_id} is another one")
        return self._put(object_id, [object_content])

    def _put(self, object_id: str, pieces: Sequence[bytes], filed: bool = False) -> None:
        length = sum(map(len, pieces))
        if not filed and not _is_chunk(pieces, length):
            validate_object_content(b"".join(pieces))
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry is None:
                raise NoObjectInStoreError(f"part {object_id} was not announced")
            if entry.is_available:
                return
            if filed and not self._payloads.has(object_id):
                if not pieces:
                    raise NoObjectInStoreError(f"the file of part {object_id} is gone")
                filed, pieces = False, [bytes(piece) for piece in pieces]
            entry.content, entry.is_available = ELSEWHERE, True
            if filed:
                self._filed.add(object_id)
                return
            if length < SMALL or self.held + length <= self.most:
                self.held += length
                self._pieces[object_id] = pieces
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (as long as this is)
            places = self._free.get(length)
            place = places.pop() if places else self._end
            self._end = max(self._end, place + length)
            self._places[object_id] = place, length
            try:
                self._write(place, pieces)
            except OSError as error:  # the disk is full: the part did not come, and its sender tries again
                self.say(f"a part of a message cannot be kept: {error.strerror}")
                entry.content, entry.is_available = b"", False
                self._free.setdefault(length, []).append(self._places.pop(object_id)[0])
                raise

    def _write(self, place: int, pieces: Sequence[bytes]) -> None:
        assert self._file is not None
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                written = os.pwrite(self._file.fileno(), rest, place)
                place, rest = place + written, rest[written:]

    def get(self, object_id: str) -> bytes | None:
        pieces = self.get_pieces(object_id)
        return super().get(object_id) if pieces is None else b"".join(pieces)

    def get_pieces(self, object_id: str) -> Sequence[bytes] | None:
        """The content of a part in pieces; None where it is not here, or not yet."""
        with self.lock_store:
            if object_id in self._filed:
                return self._payloads.pieces(object_id)
            if object_id in self._places and self._file is not None:
                place, length = self._places[object_id]
                return [os.pread(self._file.fileno(), length, place)]
            return self._pieces.get(object_id)

    def is_here(self, object_id: str) -> bool:
        """Whether a part has come and is still held."""
        return (entry := self.store.get(object_id)) is not None and entry.is_available

    def shrink(self) -> None:
        """A run has ended: what its payloads needed on the disk is given back."""
        with self.lock_store:
            self._payloads.shrink()

    def whole(self, names: Sequence[str]) -> Lent | None:
        """The file of the payload that has these parts; None if it is not in one, or not all of it is here."""
        with self.lock_store, suppress(OSError):
            if all((entry := self.store.get(name)) is not None and entry.is_available for name in names):
                return self._payloads.whole(names, lambda name: self.get_pieces(name) or [])
        return None

    def delete(self, object_id: str) -> None:
        with self.lock_store:
            entry = self.store.get(object_id)
            super().delete(object_id)
            if entry is None or object_id in self.store:
                return
            self._sizes.pop(object_id, None)
            self._payloads.dropped(object_id)
            if object_id in self._filed:
                self._filed.discard(object_id)
                return
            if object_id not in self._places:
                self.held -= sum(map(len, self._pieces.pop(object_id, ())))
                return
            place, length = self._places.pop(object_id)
            self._free.setdefault(length, []).append(place)
            if not self._places and self._file is not None:
                self._file.truncate(0)
                self._free, self._end = {}, 0


def name_of_object(pieces: Sequence[Data]) -> str:
    """The name of what Flower calls an object, by its content: of a chunk ours, of anything else Flower's."""
    content = _headed(pieces)
    if _is_chunk(content, sum(map(len, content))):
        return name_of_pieces(content)
    return str(get_object_id(b"".join(content)))


def _headed(pieces: Sequence[Data]) -> list[Data]:
    """The same bytes, so that the first piece has all of the head."""
    first, rest = b"", [memoryview(piece) for piece in pieces]
    while rest and len(first) < HEAD:
        lacking = HEAD - len(first)
        first, rest[0] = first + bytes(rest[0][:lacking]), rest[0][lacking:]
        rest = rest if rest[0] else rest[1:]
    return [first, *rest]


def _head(pieces: Sequence[Data]) -> bytes:
    """What stands before the bytes of a part."""
    first = bytes(pieces[0][:HEAD]) if pieces else b""
    return first[: first.find(HEAD_BODY_DIVIDER) + 1]


def _is_chunk(pieces: Sequence[Data], length: int) -> bool:
    """Whether this is a chunk of an array, as nearly all long parts of messages are: its head says it."""
    head = _head(pieces)
    return head == head_of(length - len(head))


def _bare(pieces: Sequence[Data]) -> list[memoryview]:
    """The bytes of a part without its head."""
    return [memoryview(pieces[0])[len(_head(pieces)) :], *(memoryview(piece) for piece in pieces[1:])]
