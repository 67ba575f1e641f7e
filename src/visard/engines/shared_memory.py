"""Messages between the processes of one machine: a small frame over a socket, tensors in shared memory.

A tensor that many messages of one ask carry (the global weights) is written once. Nothing is pickled.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visard.engines.codec import flatten, identity
from visard.errors import UsageError, VisardError
from visard.files import open_handle, private

MEMORY = Path("/dev/shm")
OWN = re.compile(r"visard-[a-z0-9_]{8}")  # as tempfile names the folders of `memory_folder`
ENOUGH = 1 << 28  # bytes; containers often get 64 MB of shared memory: then files in the temporary folder are better
ALIGN = 64
DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool, torch.complex64,
    )
}  # fmt: skip


_held: dict[Path, int] = {}  # locks of this process's folders, held until it ends


def memory_folder() -> Path:
    """A private folder in shared memory, or in the temporary folder where there is none or little."""
    good = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ENOUGH
    return _new_folder(MEMORY if good else None)


def _new_folder(where: Path | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="visard-", dir=where))
    _held[folder] = lock = open_handle(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _sweep(folder.parent)
    return folder


def in_memory() -> Path:
    """A folder as `memory_folder`, for files that must not be on a disk."""
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        raise UsageError(f"model.cache_in = memory: there is no {MEMORY} here to write to; set it to disk")
    return _new_folder(MEMORY)


def remove_folder(folder: Path) -> None:
    """Give a folder of `memory_folder` back."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that were killed: their locks are free."""
    for path in (p for p in parent.glob("visard-*/lock") if OWN.fullmatch(p.parent.name)):
        with suppress(OSError):
            if time.time() - path.parent.stat().st_mtime < 60:  # another process may be about to take its lock
                continue
            with open(path, "r+b", opener=private) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)


class Bundle:
    """Tensors of many messages in one file, written where the file is mapped.

    A tensor stands in a message's header as "float32/128/2x3": type, place and shape. With `once` a tensor that
    several messages hold is written once.
    """

    def __init__(self, path: Path, once: bool = True) -> None:
        self.path = path
        self._once = once
        self._file = open_handle(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._memory: mmap.mmap | None = None
        self._size = self._end = 0
        self._known: dict[
            tuple[Any, ...], tuple[str, Tensor]
        ] = {}  # keeps tensors alive, so that their addresses stay unique
        self._trees: dict[tuple[Any, ...], tuple[Any, object]] = {}  # holds messages, for the same reason

    def tree(self, value: object) -> Any:
        """The header of a message; its tensors go into the bundle. Messages with the same content share a header."""
        key = identity(value) if self._once else ()
        if self._once and key in self._trees:
            return self._trees[key][0]
        if not self._size and (rooms := _rooms(value)):
            self._grow(rooms)  # at once, for large models
        tree = flatten(value, self._intern)
        if self._once:
            self._trees[key] = tree, value
        return tree

    def clear(self) -> None:
        """Start again at the beginning of the file, whose content has been read."""
        self._end = 0
        self._known.clear()
        self._trees.clear()

    def close(self) -> None:
        """Close the file; other processes that have mapped it keep it."""
        self.clear()
        self._memory = None
        os.close(self._file)

    def _intern(self, tensor: Tensor) -> str:
        if not self._once:
            return self._put(tensor)
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) if tensor.numel() else (id(tensor),)
        if key not in self._known:
            self._known[key] = self._put(tensor), tensor
        return self._known[key][0]

    def _put(self, tensor: Tensor) -> str:
        place, count = self._end, tensor.numel()
        self._end = place + _room(tensor)
        if self._end > self._size:
            self._grow(self._end)
        if count:
            assert self._memory is not None
            torch.frombuffer(self._memory, dtype=tensor.dtype, count=count, offset=place).copy_(tensor.view(-1))
        return f"{str(tensor.dtype)[6:]}/{place}/{'x'.join(map(str, tensor.shape))}"

    def _grow(self, needed: int) -> None:
        size = max(needed, self._size + self._size // 4)
        try:  # a full disk is an error here, and would be a crash when it is written to
            os.posix_fallocate(self._file, self._size, size - self._size)
        except OSError as error:
            raise VisardError(f"cannot share {size} bytes in {self.path.parent}: {error.strerror}") from None
        self._size = size
        self._memory = mmap.mmap(self._file, self._size)


class Mapped:
    """Finds the tensors of a bundle by their keys; `copied` ones share no memory with it."""

    def __init__(self, path: Path, copied: bool = False) -> None:
        self._path, self._copied = path, copied
        self._memory: mmap.mmap | None = None
        self._found: dict[str, Tensor] = {}

    def __call__(self, key: str) -> Tensor:
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def forget(self) -> None:
        """Forget what was found: the file will be overwritten."""
        self._found.clear()

    def _find(self, key: str) -> Tensor:
        name, place, sizes = key.split("/")
        dtype, offset, shape = DTYPES[name], int(place), [int(n) for n in sizes.split("x") if n]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if self._memory is None or offset + count * dtype.itemsize > len(self._memory):
            # where tensors are not copied the map is private: writing to one changes a copy of its page
            access = mmap.ACCESS_WRITE if self._copied else mmap.ACCESS_COPY
            with open(self._path, "r+b", opener=private) as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=access)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)
        return tensor.clone() if self._copied else tensor


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN


def _rooms(value: object) -> int:
    """The room of all tensors of a message."""
    found: list[Tensor] = []
    flatten(value, lambda tensor: found.append(tensor) or "")  # type: ignore[func-returns-value]
    return sum(map(_room, found))
