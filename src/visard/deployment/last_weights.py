"""The weights of the last request to each client of a party, by which the next ones are measured.

Large networks are on disk alone, where those of several clients that are the same are one file. It is written while the
step runs; `wait` returns when it is there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from visard.core import Weights
from visard.deployment.policy import digest_of
from visard.deployment.state_folder import StateFolder
from visard.engines.codec import MAX_HEADER_OF_FILES, decode, encoded
from visard.engines.request import Request
from visard.errors import VisardError
from visard.files import PRIVATE, open_file, open_handle, replacing, unfinished
from visard.processes import Data, Filed, mapped_at

PIECE = 2**16  # numbers of a network that are converted to float64 at once
LARGE = 2**26  # bytes of networks that are not kept in memory between two requests, only on disk
SLICE = 2**24  # bytes that are written at once: what is mapped leaves memory then
Seen = dict[str, Weights]  # by the field of a message: entries of the network


class LastWeights:
    """What a party remembers of the weights in requests."""

    def __init__(self, folder: StateFolder) -> None:
        self.folder = folder
        self._seen: tuple[tuple[str, str], Seen] | None = None
        self._written: tuple[tuple[str, str], Path] | None = None  # what was last written, and where
        self._measured: tuple[Filed, int, dict[str, Distance]] | None = None
        self._finite = 0  # the serial of a message in which every number is finite
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def wait(self) -> None:
        """Until what is to be remembered is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except BaseException:
                self._written = None
                raise

    def seen(self, request: Request) -> Seen:
        """The networks in the last requests to this client in this run; empty before the first."""
        self.wait()
        key, path = (request.run, request.client), self._path(request)
        if self._seen is None or self._seen[0] != key:
            self._seen = key, decode(_content(path), dict, MAX_HEADER_OF_FILES) if path.exists() else {}
        return self._seen[1]

    def measured(self, request: Request, serial: int) -> dict[str, Distance]:
        """How far the networks of the message with this serial are from those in the file of a client, as far as that
        is known: the clients of a party often have the same file and get the same message."""
        self.wait()
        path = self._path(request)
        if not serial or not path.exists():
            return {}
        handle = open_handle(path)
        held = Filed(handle, os.fstat(handle).st_size)  # held: so long no other file is the same
        if (
            self._measured is None
            or self._measured[1] != serial
            or not os.path.sameopenfile(self._measured[0].handle, held.handle)
        ):
            self._measured = held, serial, {}
        return self._measured[2]

    def not_finite(self, message: Any, serial: int) -> str | None:
        """Where a message has numbers that are not finite. The clients of a party often get the same bytes, by their
        `serial`, which are looked at once."""
        if serial and serial == self._finite:
            return None
        for path, value in tensors(message):
            if value.is_floating_point() and not math.isfinite(value.sum()) and not bool(torch.isfinite(value).all()):
                return path
        self._finite = serial
        return None

    def remember(self, request: Request, networks: Seen, serial: int = 0) -> None:
        """Keep the networks of a request, to measure the next ones by; of a message with a `serial`, if it has one."""
        before = self.seen(request)
        large = sum(v.nbytes for part in networks.values() for v in part.values()) > LARGE
        if any(_news(before.get(path, {}), part) for path, part in networks.items()):
            # entries that a request leaves out stay known, so that leaving them out does not allow others next time
            known = before | {path: before.get(path, {}) | part for path, part in networks.items()}
            self._write(request, known, networks, serial, large)
            if not large:
                known = {path: {k: v.clone() for k, v in part.items()} for path, part in known.items()}
                self._seen = (request.run, request.client), known
        if large:
            self._seen = None

    def _write(self, request: Request, known: Seen, networks: Seen, serial: int, large: bool) -> None:
        """Keep networks on disk, `large` ones in a thread."""
        path, what = self._path(request), (request.run, "")
        for field, part in known.items():
            sent = serial and part.keys() == networks.get(field, {}).keys()
            what = request.run, f"{what[1]}{field} {f'{serial} {sorted(part)}' if sent else digest_of(part)}\n"
        if self._written is not None and self._written[0] == what and self._written[1] != path:
            with suppress(VisardError), replacing(path, parents=True) as beside:  # else it is written as any other
                beside.unlink()
                os.link(self._written[1], beside)
                return
        if large:
            self._writing = self._thread.submit(_put, path, encoded(known))
        else:
            _put(path, encoded(known))
        self._written = what, path

    def _path(self, request: Request) -> Path:
        return self.folder.states / request.run / f"seen-{quote(request.client, safe='')}.bin"


class Distance(NamedTuple):
    """How far weights are from others."""

    moved: float  # L2 norm of the difference
    length: float  # L2 norm of the others
    vanished: bool  # nothing but zeros is left, by which nothing could be measured

    @classmethod
    def of(cls, weights: Weights, known: Weights) -> Distance:
        """In float64, in pieces that stay in the cache; what is mapped from a file of the others leaves memory."""
        moved = length = 0.0
        change, base = torch.empty(2, PIECE, dtype=torch.float64)
        for key, value in weights.items():
            new, old = value.reshape(-1), known[key].reshape(-1)
            for start in range(0, len(new), PIECE):
                size = len(piece := new[start : start + PIECE])
                before = base[:size].copy_(old[start : start + PIECE])
                after = change[:size].copy_(piece).sub_(before)
                moved += float(after.dot(after))
                length += float(before.dot(before))
            if old.is_contiguous() and (let_go := mapped_at(old.data_ptr(), old.nbytes)) is not None:
                let_go()
        return cls(math.sqrt(moved), math.sqrt(length), bool(weights) and not any_nonzero(weights))


def _put(path: Path, pieces: Sequence[Data]) -> None:
    """Write a file. Pieces that are mapped from files leave memory, where the step needs the room."""
    for left in unfinished(path) if path.parent.is_dir() else ():  # by a process that was killed in a step
        left.unlink(missing_ok=True)
    with replacing(path, parents=True, mode=PRIVATE) as beside, beside.open("wb", buffering=0) as file:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                count = file.write(rest[:SLICE])
                if count == SLICE:
                    let_go = mapped_at(int(np.frombuffer(rest, np.uint8).ctypes.data), count)
                    if let_go is not None:
                        let_go()
                rest = rest[count:]


def _content(path: Path) -> Data:
    """Of a file, so that it is decoded without another copy of all of it; a large one is mapped."""
    if (size := path.stat().st_size) > LARGE:
        return Filed(open_handle(path), size).map()
    data = bytearray(size)
    with open_file(path) as file:
        del data[file.readinto(data) :]
    return data


def any_nonzero(entries: Weights) -> bool:
    """Whether any entry holds anything but zeros, which the first numbers mostly show."""
    return any(bool(value.reshape(-1)[:64].any()) or bool(value.any()) for value in entries.values())


def _news(known: Weights, part: Weights) -> bool:
    return any(k not in known or not torch.equal(known[k], v) for k, v in part.items())


def dicts(value: Any, path: str = "") -> Iterator[tuple[str, Weights]]:
    """(path, entries) of every dictionary of tensors in a message."""
    if isinstance(value, dict) and value and all(isinstance(v, Tensor) for v in value.values()):
        yield path, value
    elif not isinstance(value, Tensor | str | bytes):
        for name, part in _parts(value):
            yield from dicts(part, f"{path}.{name}".lstrip("."))


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in a message."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for name, part in _parts(value):
            yield from tensors(part, f"{path}.{name}".lstrip("."))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in fields(value))
    elif isinstance(value, dict):
        yield from ((str(k), v) for k, v in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(i), v) for i, v in enumerate(value))
