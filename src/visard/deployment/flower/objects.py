"""Messages in parts, which Flower calls objects: a part is hashed once, moved once, and never held beside a copy.

Flower cuts the payload of a message into chunks of 5 MB, each of which has the digest of its content as its name, and
moves them one by one. So what is there already, from another message or from before the connection broke, need not
be moved again. Flower's own functions hold a message up to four times while they put it together or take it apart.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flwr.app import Array, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, inflate_object_from_contents

from visard.deployment.flower.part import MOST_PARTS
from visard.engines.codec import MAX_BYTES
from visard.engines.frame import ALIGNED, largest_at
from visard.engines.records import cuts, head_of, name_of
from visard.errors import VisardError
from visard.processes import SHORT, Data, Filed

AT_ONCE = 2  # parts of one message on their way
SOON, LATER = 0.05, 1.0  # seconds before a part that is not there yet is asked for again: at first, and at most
Put = Callable[[str, Sequence[Data]], None]  # sends a part: its name, and its content in pieces
A = TypeVar("A")
B = TypeVar("B")


class Piece(ArrayChunk):
    """A chunk that knows its name: Flower hashes a copy of its chunks each time it needs their names.

    What is in a file is read there when it is needed.
    """

    def __init__(self, payload: memoryview | Filed, start: int, stop: int) -> None:
        self._place = payload, start, stop
        self._name = name_of(self._bytes())

    def _bytes(self) -> Data:
        payload, start, stop = self._place
        return payload.read(start, stop) if isinstance(payload, Filed) else payload[start:stop]

    def deflate(self) -> bytes:
        return b"".join(self.content())

    def content(self) -> tuple[bytes, Data]:
        """The head of the part and its bytes, of which nothing is copied."""
        data = self._bytes()
        return head_of(len(data)), data

    @property
    def object_id(self) -> str:
        return self._name


Piece.__qualname__ = ArrayChunk.__qualname__  # which Flower writes into the content


def array(payload: Data | Filed) -> Array:
    """Bytes as an array of Flower, cut into chunks that are hashed here and never again."""
    made, size = Array("uint8", (len(payload),), "visard", b""), len(payload)
    made.data = payload  # type: ignore[assignment]
    view = payload if isinstance(payload, Filed) else memoryview(payload)
    pieces = [Piece(view, start, stop) for start, stop in cuts(size)]
    made.__dict__["_chunks"] = [(piece.object_id, piece) for piece in pieces]
    return made


def names_in(made: Array) -> list[str]:
    """The names of the parts of an array that was made or fetched here."""
    return [name for name, _ in made.__dict__.get("_chunks", ())] or list(made.__dict__.get("names", ()))


class Buffer(Protocol):
    """Where the chunks of a payload go, in their order."""

    def add(self, data: memoryview) -> None:
        """The next bytes."""

    def again(self, start: int, count: int) -> None:
        """Bytes that were added before, once more."""

    def done(self) -> Any:
        """All of them as one object with the interface of a buffer."""


class InMemory:
    """A payload in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, data: memoryview) -> None:
        self.data += data

    def again(self, start: int, count: int) -> None:
        self.data += self.data[start : start + count]

    def done(self) -> bytearray:
        return self.data


class InFile:
    """A payload in memory or, if it is long, in a file without a name.

    In the file it lies so that decoded tensors need no copy. `mapped`: it is memory that can be let go and is read
    again; else it stays the file that it is. It is written over the file of a payload that has `served`, where there is
    one: new pages would cost more than the bytes in them.
    """

    def __init__(self, folder: Path | None = None, mapped: bool = True, served: Filed | None = None) -> None:
        self._folder, self._short, self._size, self._pad = folder, bytearray(), 0, 0
        self._file: Any = None
        self._mapped, self._served = mapped, served

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()  # a payload that never came whole; what is mapped stays

    def add(self, data: memoryview) -> None:
        self._size += len(data)
        if self._file is None:
            self._short += data
            if self._size <= SHORT:
                return
            if self._served is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            else:
                self._file = os.fdopen(os.dup(self._served.handle), "r+b", buffering=0)
                self._file.seek(0)
            self._pad = -largest_at(self._short) % ALIGNED
            data, self._short = memoryview(bytes(self._pad) + self._short), bytearray()
        while data:
            data = data[self._file.write(data) :]

    def again(self, start: int, count: int) -> None:
        if self._file is None:
            self.add(memoryview(self._short[start : start + count]))
        else:
            self.add(memoryview(os.pread(self._file.fileno(), count, self._pad + start)))

    def done(self) -> bytes | memoryview | Filed:
        if self._file is None:
            return bytes(self._short)
        filed = Filed(os.dup(self._file.fileno()), self._size, self._pad)
        return filed.map() if self._mapped else filed


@dataclass
class Coming:
    """A payload that is on its way."""

    buffer: Buffer
    size: int = 0
    parts: int = 0  # that are here
    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # of parts, by name


@dataclass
class Shelf:
    """What a receiver has of payloads: whole ones and others that have begun to come, by the name of their array.

    It holds on to those of the message that it was last used for.
    """

    new: Callable[[Filed | None], Buffer] = lambda served: InMemory()
    whole: dict[str, Any] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)  # of the parts of whole ones
    coming: dict[str, Coming] = field(default_factory=dict)
    given: Callable[[list[str]], Any] = lambda _: None  # the payload with these parts, if it need not come in parts
    served: Filed | None = None  # the file of a payload that is not needed any more

    def keep(self, names: Collection[str]) -> None:
        """Let go of everything that is not part of a message."""
        gone = [payload for name, payload in self.whole.items() if name not in names and isinstance(payload, Filed)]
        self.served = next(iter(gone), self.served) if names else None
        self.whole = {name: payload for name, payload in self.whole.items() if name in names}
        self.coming = {name: coming for name, coming in self.coming.items() if name in names}
        self.names = {name: parts for name, parts in self.names.items() if name in names}


def fetched(number: str, tree: ObjectTree, pull: Callable[[str], bytes], shelf: Shelf) -> Message:
    """A message, of which `pull` gives the parts by name; those on the shelf are not pulled."""
    nodes = list(iterate_object_tree(tree))
    if len(nodes) > MOST_PARTS:
        raise VisardError(f"it has {len(nodes)} parts, more than {MOST_PARTS}")
    shelf.keep([node.object_id for node in nodes])
    contents: dict[str, bytes] = {}
    arrays: dict[str, InflatableObject] = {}

    pending = [tree]  # and no function that calls itself: such a one would hold the payload until it is collected
    while pending:
        node = pending.pop()
        name = node.object_id
        if name in contents or name in arrays:
            continue
        if name not in shelf.whole:
            content = pull(name)
            kind, children, _ = get_object_head_values_from_object_content(content)
            if kind != Array.__qualname__:
                contents[name] = content
                pending += node.children
                continue
            shelf.whole[name] = _payload(name, content, children, pull, shelf)
        arrays[name] = Array(name, (0,), "visard", b"")  # its bytes follow: Flower would make copies
    message = inflate_object_from_contents(number, contents, objects=arrays)
    if not isinstance(message, Message):
        raise VisardError("it is not a message")
    if message.has_content():
        for made in (made for found in message.content.array_records.values() for made in found.values()):
            made.__dict__["names"] = shelf.names.get(made.dtype, [])
            made.data = shelf.whole[made.dtype]
    return message


def _payload(name: str, content: bytes, children: list[str], pull: Callable[[str], bytes], shelf: Shelf) -> Any:
    """The bytes of an array; as far as they come they stay on the shelf."""
    body = json.loads(content[content.find(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :])
    names = [children[int(place)] for place in body["arraychunk_ids"]]
    if (given := shelf.given(names) if len(names) > 1 else None) is not None:
        _check_size(len(given))
        shelf.names[name] = names
        return given
    if (coming := shelf.coming.get(name)) is None:
        coming = shelf.coming[name] = Coming(shelf.new(shelf.served))
        shelf.served = None
    new = list(dict.fromkeys(n for n in names[coming.parts :] if n not in coming.places))
    parts = in_order(lambda part: _bare(pull(part)), new)
    try:
        for part in names[coming.parts :]:
            if part in coming.places:
                start, count = coming.places[part]
                _check_size(coming.size + count)
                coming.buffer.again(start, count)
            else:
                count = len(data := next(parts))
                _check_size(coming.size + count)
                coming.buffer.add(data)
                coming.places[part] = coming.size, count
            coming.size, coming.parts = coming.size + count, coming.parts + 1
    finally:
        parts.close()
    del shelf.coming[name]
    shelf.names[name] = names
    return coming.buffer.done()


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise VisardError(f"its payload is longer than {MAX_BYTES} bytes")


def _bare(content: bytes) -> memoryview:
    """The bytes in a chunk."""
    at = content.find(HEAD_BODY_DIVIDER, 0, 200)
    kind = get_object_head_values_from_object_content(content[: at + 1])[0] if at >= 0 else ""
    if kind != ArrayChunk.__qualname__:
        raise VisardError("it has a payload whose parts are none")
    return memoryview(content)[at + len(HEAD_BODY_DIVIDER) :]


def in_order(do: Callable[[A], B], items: Collection[A], at_once: int = AT_ONCE) -> Generator[B]:
    """`do` of every item, in order, some of them at once, and no more ahead than that."""
    threads = ThreadPoolExecutor(at_once)
    begun: deque[Future[B]] = deque()
    try:
        for item in items:
            if len(begun) >= at_once:
                yield begun.popleft().result()
            begun.append(threads.submit(do, item))
        while begun:
            yield begun.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


def puller(
    part: Callable[[str], bytes], limit: float, over: Callable[[], bool] = lambda: False
) -> Callable[[str], bytes]:
    """`part` gives a part of a message; here it is waited for, until `limit` seconds from now, unless it is `over`.

    Flower shows a message as soon as its sender begins to upload it, and keeps it until it is confirmed.
    """
    end = time.monotonic() + limit

    def pull(name: str) -> bytes:
        wait = SOON
        while True:
            if over():
                raise VisardError("it was given up")
            try:
                return part(name)
            except ObjectUnavailableError:
                if time.monotonic() > end:
                    raise VisardError(f"it did not come whole within {limit:g} s") from None
                time.sleep(wait)
                wait = min(2 * wait, LATER)

    return pull


def push(objects: dict[str, InflatableObject], names: Collection[str], put: Put) -> None:
    """Send those of the objects that are asked for."""
    wanted = set(names)
    for _ in in_order(lambda name: put(name, _pieces(objects[name])), [n for n in objects if n in wanted]):
        pass


def _pieces(part: InflatableObject) -> Sequence[Data]:
    return part.content() if isinstance(part, Piece) else (part.deflate(),)
