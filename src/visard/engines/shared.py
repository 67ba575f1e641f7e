"""Messages between the processes of one machine: a small frame over a socket, tensors in shared memory.

A tensor that many messages of one ask carry (the global weights) is written once. Nothing is pickled.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from visard.engines.codec import build, flatten
from visard.engines.frames import receive, send

__all__ = ["Bundle", "Mapped", "memory_folder", "read", "receive", "send"]

MEMORY = Path("/dev/shm")


def memory_folder() -> Path:
    """A private folder in shared memory, or in the temporary folder where there is none."""
    where = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="visard-", dir=where))


class Bundle:
    """Tensors of many messages in one file, each tensor once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def tree(self, value: object) -> Any:
        """The header of a message; its tensors go into the bundle."""
        found: dict[str, Tensor] = {}
        tree = flatten(value, found)
        names = {key: self._intern(tensor) for key, tensor in found.items()}
        return _rename(tree, names)

    def _intern(self, tensor: Tensor) -> str:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) if tensor.numel() else (id(tensor),)
        if key not in self._known:
            self._known[key] = str(len(self._tensors))
            self._tensors[self._known[key]] = tensor
        return self._known[key]

    def write(self) -> None:
        """Write the file; the tensors may change afterwards."""
        seen: set[int] = set()
        for name, tensor in self._tensors.items():
            if tensor.data_ptr() in seen:  # another view of memory that is already there
                self._tensors[name] = tensor.clone()
            seen.add(tensor.data_ptr())
        save_file(self._tensors, self.path)
        self._tensors.clear()


class Mapped(Mapping[str, Tensor]):
    """The tensors of a bundle, read when asked for."""

    def __init__(self, path: Path) -> None:
        self._file = cast(Any, safe_open(path, framework="pt"))
        self._keys = set(self._file.keys())

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def read(tree: Any, kind: Any, path: Path) -> Any:
    """The value of a header whose tensors are in the bundle at `path`."""
    return build(tree, kind, Mapped(path))


def _rename(tree: Any, names: dict[str, str]) -> Any:
    if isinstance(tree, list):
        return [_rename(v, names) for v in tree]
    if isinstance(tree, dict):
        ((mark, body),) = tree.items()
        if mark in ("t", "b"):
            return {mark: names[body]}
        if mark in ("d", "m"):
            return {mark: {k: _rename(v, names) for k, v in body.items()}}
    return tree
