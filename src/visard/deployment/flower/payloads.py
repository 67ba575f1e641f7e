"""Long payloads that come from parties, each in a file of its own that has no name.

A party uploads a payload in parts. Here they are written one after the other, without what Flower puts before each, so
that the file is the payload: a run on this machine gets the file and not the bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from visard.engines.frame import ALIGNED, largest_at
from visard.engines.records import PART, head_of
from visard.processes import Filed

MOST = 64  # files at once: as many as a run asks for replies
LONGEST_LIST = 2**18  # bytes of the list of tensors that is looked at
AT_ONCE = 512  # pieces that the system writes at once


@dataclass
class Payload:
    """A file, and which part of it is where."""

    file: Filed
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)  # number -> name, and bytes that are written

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
    """The files. `lock` is held by who calls anything but `write`, which does without it while it writes."""

    def __init__(self, folder: Path, lock: AbstractContextManager[Any]) -> None:
        self.folder, self._lock = folder, lock
        self._turns: dict[str, tuple[str, int]] = {}  # part -> the payload that it belongs to, and its number there
        self._files: dict[str, Payload] = {}  # by the name of the payload
        self._left: Counter[str] = Counter()  # how many parts of a payload are known

    def announced(self, tree: ObjectTree) -> None:
        """A message is going to come: note which parts its payloads have, in which order."""
        for node in iterate_object_tree(tree):
            if len(node.children) > 1 and not any(child.children for child in node.children):
                for number, child in enumerate(node.children):
                    if child.object_id not in self._turns:
                        self._turns[child.object_id] = node.object_id, number
                        self._left[node.object_id] += 1

    def write(self, name: str, pieces: Sequence[bytes]) -> bool:
        """Write a part, whose content has been checked, where it belongs; False if it is to be kept elsewhere."""
        data = _bare(pieces)
        size = sum(map(len, data))
        with self._lock:
            of, number = self._turns.get(name, ("", 0))
            payload = self._files.get(of)
            if of and payload is None and number == 0 and size == PART and len(self._files) < MOST:
                payload = self._files[of] = self._new(b"".join(data))
            if payload is None or size > PART or not payload.free_for(number, name):
                return False
        payload.write(number, data)
        return True

    def _new(self, first: bytes) -> Payload:
        """A file in which the largest tensor of a message lies as torch wants it, by the first part."""
        with tempfile.TemporaryFile(dir=self.folder, buffering=0) as made:
            return Payload(Filed(os.dup(made.fileno()), 0, -largest_at(first, LONGEST_LIST) % ALIGNED))

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

    def whole(self, names: Sequence[str], get: Callable[[str], Sequence[bytes]]) -> Filed | None:
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
        return None if payload is None else Filed(os.dup(payload.file.handle), size, payload.file.start)

    def dropped(self, name: str) -> None:
        """A part is not needed any more; a file goes with the last part of its payload."""
        of, _ = self._turns.pop(name, ("", 0))
        self._left[of] -= 1
        if self._left[of] <= 0:
            del self._left[of]
            self._files.pop(of, None)


def _bare(pieces: Sequence[bytes]) -> list[memoryview]:
    """The bytes of a part without its head."""
    head = pieces[0].find(HEAD_BODY_DIVIDER, 0, 200) + 1
    return [memoryview(pieces[0])[head:], *(memoryview(piece) for piece in pieces[1:])]
