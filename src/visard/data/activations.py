"""Activations of a frozen trunk on the pictures of a face set: computed once, kept on disk, read instead of pictures.

activations/<key>/          in the cache folder; mode 700, files 600: an activation is as personal as its picture
  about.json                the set, trunk, shape and type
  plain.bin, mirror.bin     a row for each picture of the set, and for its mirror image; only needed rows take room
  plain.done, mirror.done   a byte for each CHUNK rows: 1 where they are complete
  .lock                     held by the process that fills it

A row is computed with the other rows of its chunk, one thread each: the same bits whichever run needs it first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from visard.data.augment import Augment, to_float
from visard.data.faces import ClientData, FaceSet, FaceView, Skipped
from visard.data.joined import Joined, Resized
from visard.data.storage import array_path
from visard.errors import UsageError, VisardError
from visard.files import PRIVATE, cache_folder, file_digest, open_handle, read_json, write_atomically
from visard.numerics import device
from visard.processes import cores

CHUNK = 64  # pictures that go through the trunk together
SYNC_SECONDS = 5.0  # between two times that finished chunks are marked as such: so much is lost by a kill
SPARE = 1 << 28  # bytes of the disk that stay free
PLAIN, MIRROR = "plain", "mirror"
ABOUT = "about.json"

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Network = Callable[[Tensor], Tensor]
Progress = Callable[[int, int], None]


class Store:
    """Activations of pictures of one set, mapped from disk."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.count = int(about["count"])
        shape = tuple(int(n) for n in about["shape"])
        # the channels last, as networks here compute and as a batch then needs no transposition
        self.planes = len(shape) == 3
        self.stored = (*shape[1:], shape[0]) if self.planes else shape
        self.dtype = np.dtype(about["dtype"])
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._done: dict[str, npt.NDArray[np.uint8]] = {}

    @classmethod
    def open(cls, root: Path, about: dict[str, Any]) -> Store:
        """The store of what `about` describes, made on first use."""
        key = hashlib.sha256(json.dumps({k: about[k] for k in sorted(about) if k != "path"}).encode()).hexdigest()[:32]
        folder = root / key
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not (folder / ABOUT).exists():
                write_atomically(folder / ABOUT, json.dumps(about, indent=1) + "\n", PRIVATE)
        except OSError as error:
            raise VisardError(f"cannot write {folder}: {error.strerror}") from None
        return cls(folder, about)

    @property
    def chunks(self) -> int:
        """How many there are of the whole set."""
        return -(-self.count // CHUNK)

    @property
    def row_bytes(self) -> int:
        """Bytes of one activation."""
        return int(math.prod(self.stored)) * int(self.dtype.itemsize)

    def missing(self, rows: Rows, kind: str) -> Rows:
        """The chunks of these rows that are not complete."""
        chunks: Rows = np.unique(rows // CHUNK)
        found: Rows = chunks[self._flags(kind)[chunks] == 0]
        return found

    def complete(self, kind: str) -> int:
        """How many pictures are."""
        path = self.folder / f"{kind}.done"
        done = np.fromfile(path, np.uint8).sum() if path.is_file() else 0
        return min(int(done) * CHUNK, self.count)

    def read(self, rows: Rows, mirrored: Mask | None = None) -> npt.NDArray[Any]:
        """Activations (n, ...) of complete rows, of the mirror image where `mirrored` is true."""
        found = self.as_stored(rows, mirrored)
        return found.transpose(0, 3, 1, 2) if self.planes else found

    def as_stored(self, rows: Rows, mirrored: Mask | None = None) -> npt.NDArray[Any]:
        """The same in the memory order of the store."""
        if mirrored is None or not mirrored.any():
            found = np.take(self._array(PLAIN), rows, axis=0)
        elif mirrored.all():
            found = np.take(self._array(MIRROR), rows, axis=0)
        else:
            found = np.empty((len(rows), *self.stored), self.dtype)
            found[~mirrored] = self._array(PLAIN)[rows[~mirrored]]
            found[mirrored] = self._array(MIRROR)[rows[mirrored]]
        return found

    def fill(self, faces: FaceSet, wanted: dict[str, Rows], trunk: Network, progress: Progress | None = None) -> None:
        """Compute what is missing of the wanted rows of each kind, on every core.

        One process fills; another one waits for it and then computes the rest. A kill loses the last seconds.
        """
        if not any(len(self.missing(rows, kind)) for kind, rows in wanted.items()):
            return
        with _locked(self.folder):
            jobs = [(kind, int(chunk)) for kind, rows in wanted.items() for chunk in self.missing(rows, kind)]
            if not jobs:
                return
            self._check_room(len(jobs))
            with (
                _marking(self) as finished,
                _one_thread_each() as begin,
                ThreadPoolExecutor(cores(), initializer=begin) as pool,
            ):
                try:
                    tasks = {pool.submit(self._compute, faces, trunk, *job): job for job in jobs}
                    for number, task in enumerate(as_completed(tasks), 1):
                        task.result()
                        finished(*tasks[task])
                        if progress is not None:
                            progress(number * CHUNK, len(jobs) * CHUNK)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise

    def _compute(self, faces: FaceSet, trunk: Network, kind: str, chunk: int) -> None:
        rows = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, self.count))
        found = through(faces, rows, trunk, kind == MIRROR)
        values = found.permute(0, 2, 3, 1) if self.planes else found
        if tuple(values.shape[1:]) != self.stored:
            raise VisardError(f"{self.folder}: the trunk gives {tuple(found.shape[1:])}, not {self.about['shape']}")
        if not torch.isfinite(values).all():
            raise VisardError(
                f"the trunk gives NaN or infinity for pictures {rows[0]} to {rows[-1]} of {faces.path.name}"
            )
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(values.cpu().numpy().astype(self.dtype, copy=False))
        if self.dtype == np.float16 and not np.isfinite(data).all():
            raise VisardError("activations are too large for fp16: set model.cache = fp32")
        handle = open_handle(self._file(kind), os.O_WRONLY)
        try:
            os.pwrite(handle, data.tobytes(), int(rows[0]) * self.row_bytes)
        except OSError as error:
            raise VisardError(f"cannot write {self._file(kind)}: {error.strerror}") from None
        finally:
            os.close(handle)

    def _check_room(self, chunks: int) -> None:
        needed, free = chunks * CHUNK * self.row_bytes, shutil.disk_usage(self.folder).free
        if needed + SPARE > free:
            raise VisardError(
                f"activations need {needed / 1e9:.1f} GB in {self.folder.parent}, {free / 1e9:.1f} GB are free there: "
                "visard data cache clear removes old ones, model.cache = fp16 needs half, model.cache = off none"
            )

    def mark(self, kind: str, chunks: Sequence[int]) -> None:
        """Say that chunks are complete, after their content is durable."""
        if chunks:
            handle = open_handle(self._file(kind), os.O_WRONLY)
            try:
                os.fdatasync(handle)
            finally:
                os.close(handle)
            self._flags(kind)[np.asarray(chunks)] = 1

    def _file(self, kind: str) -> Path:
        return self.folder / f"{kind}.bin"

    def _array(self, kind: str) -> npt.NDArray[Any]:
        if kind not in self._arrays:
            _sized(self._file(kind), self.count * self.row_bytes)
            mapped = np.memmap(self._file(kind), self.dtype, "r", shape=(self.count, *self.stored))
            self._arrays[kind] = mapped.view(np.ndarray)
        return self._arrays[kind]

    def _flags(self, kind: str) -> npt.NDArray[np.uint8]:
        if kind not in self._done:
            _sized(self._file(kind), self.count * self.row_bytes)
            path = self.folder / f"{kind}.done"
            _sized(path, self.chunks)
            self._done[kind] = np.memmap(path, np.uint8, "r+", shape=(self.chunks,)).view(np.ndarray)
        return self._done[kind]


class JoinedStore:
    """The stores of sets that a run has joined: every set keeps its own, whatever other sets a run has."""

    def __init__(self, faces: Joined, stores: Sequence[Store]) -> None:
        self.faces, self.stores = faces, tuple(stores)

    def missing(self, rows: Rows, kind: str) -> list[tuple[int, Rows]]:
        """The chunks of these rows that are not complete, by set; no set where all are."""
        parts = [(k, self.stores[k].missing(inside, kind)) for k, _, inside in self.faces.parts(rows)]
        return [(k, chunks) for k, chunks in parts if len(chunks)]

    def read(self, rows: Rows, mirrored: Mask | None = None) -> npt.NDArray[Any]:
        """As `Store.read`."""
        one = self.stores[0]
        found = np.empty((len(rows), *one.stored), one.dtype)
        for k, here, inside in self.faces.parts(rows):
            found[here] = self.stores[k].as_stored(inside, None if mirrored is None else mirrored[here])
        return found.transpose(0, 3, 1, 2) if one.planes else found

    def fill(self, faces: FaceSet, wanted: dict[str, Rows], trunk: Network, progress: Progress | None = None) -> None:
        """As `Store.fill`, one set after the other."""
        ahead = {kind: dict(self.missing(rows, kind)) for kind, rows in wanted.items()}
        total, before = sum(len(chunks) for part in ahead.values() for chunks in part.values()) * CHUNK, 0
        for k, (store, member) in enumerate(zip(self.stores, self.faces.members, strict=True)):
            here = sum(len(part.get(k, ())) for part in ahead.values()) * CHUNK
            if here:
                own = {kind: self._inside(k, rows) for kind, rows in wanted.items()}
                said = None if progress is None else _ahead(progress, before, total)
                store.fill(member.faces, own, trunk, said)
                before += here

    def _inside(self, number: int, rows: Rows) -> Rows:
        return next((inside for k, _, inside in self.faces.parts(rows) if k == number), rows[:0])


def _ahead(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


def _sized(path: Path, size: int) -> None:
    """A file of this length, created sparse if it does not exist, so that only written parts take space."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == size:
            return
    try:
        handle = open_handle(path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(handle, size)
        finally:
            os.close(handle)
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = open_handle(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _marking(store: Store) -> Iterator[Callable[[str, int], None]]:
    """A function that hears of finished chunks and marks them now and then, and at the end, however it comes."""
    waiting: dict[str, list[int]] = {PLAIN: [], MIRROR: []}
    last = time.monotonic()

    def flush() -> None:
        for kind, chunks in waiting.items():
            store.mark(kind, chunks)
            chunks.clear()

    def finished(kind: str, chunk: int) -> None:
        nonlocal last
        waiting[kind].append(chunk)
        if time.monotonic() - last > SYNC_SECONDS:
            flush()
            last = time.monotonic()

    try:
        yield finished
    finally:
        flush()


@contextmanager
def _one_thread_each() -> Iterator[Callable[[], None]]:
    """Called first in every thread of a pool, so that torch does not split its work again."""
    before = torch.get_num_threads()
    try:
        yield lambda: torch.set_num_threads(1)
    finally:
        torch.set_num_threads(before)


def through(faces: FaceSet, rows: Rows, trunk: Network, mirrored: bool = False) -> Tensor:
    """Activations of pictures, in float32; as networks take them, in [-1, 1] and in their own memory order."""
    x = to_float(faces.read(rows), channels_last=True)
    return trunk(x.flip(3) if mirrored else x)


class Activations(FaceSet):
    """A face set behind a trunk: views of it give activations instead of pictures, with the same labels.

    From a store, which is filled when the first one is read; or, without a store, from pictures that go through the
    trunk whenever they are needed, after they were changed at random.
    """

    def __init__(self, faces: FaceSet, trunk: Callable[[], Network], store: Store | JoinedStore | None) -> None:
        self.__dict__.update(faces.__dict__)
        self.faces, self.store = faces, store
        self.wanted: dict[str, Rows] = {}  # all rows that will be read, and of which the mirror images
        self._make = trunk
        self._trunk: Network | None = None
        self._ready = False

    def __reduce__(self) -> Any:
        raise TypeError("activations do not travel: the other process makes its own from the run's settings")

    @property
    def synthetic(self) -> bool:
        return self.faces.synthetic

    def file(self, row: int) -> str:
        return self.faces.file(row)

    def quality(self, rows: Rows) -> npt.NDArray[np.float32]:
        return self.faces.quality(rows)

    def skipped(self) -> Skipped | None:
        return self.faces.skipped()

    @property
    def trunk(self) -> Network:
        """The network in front, made when it is first needed."""
        if self._trunk is None:
            self._trunk = self._make()
        return self._trunk

    @property
    def stored(self) -> bool:
        return self.store is not None

    def prepare(self, progress: Progress | None = None) -> None:
        """Fill the store with all that is wanted."""
        if not self._ready:
            self._ensure(self.wanted, progress)
            self._ready = True

    def _ensure(self, wanted: dict[str, Rows], progress: Progress | None = None) -> None:
        if self.store is not None and any(len(self.store.missing(rows, kind)) for kind, rows in wanted.items()):
            self.store.fill(self.faces, wanted, self.trunk, progress)

    def read(self, rows: Rows, mirrored: Mask | None = None) -> npt.NDArray[Any]:
        if self.store is None:
            return self.faces.read(rows)
        self.prepare()
        if mirrored is None:
            self._ensure({PLAIN: rows})
        else:
            self._ensure({PLAIN: rows[~mirrored], MIRROR: rows[mirrored]})
        return self.store.read(rows, mirrored)

    def through(self, x: Tensor) -> Tensor:
        return self.trunk(x)

    def behind(self, view: FaceView) -> FaceView:
        """The view with activations instead of pictures."""
        return replace(view, faces=self)


def seen(data: ClientData, activations: Activations) -> ClientData:
    """A client's pictures as the trunk sees them."""
    parts = {name: activations.behind(view) for name, view in data.parts.items()}
    see = activations.behind
    return ClientData(see(data.train), see(data.val), see(data.test), parts)


def refuse_random(path: str, how: Augment) -> None:
    """Only mirror images are in a store: other random changes have no activation there."""
    for name in ("shift", "jitter", "erase"):
        if getattr(how, name):
            raise UsageError(
                f"{path}.{name} = {getattr(how, name)}: stored activations are of pictures as they are and mirrored; "
                f"set it to 0, or model.cache = off, which runs the frozen part at every step"
            )


def store_of(
    faces: FaceSet, trunk: str, shape: Sequence[int], dtype: str, root: Path | None = None
) -> Store | JoinedStore:
    """The store of a set's activations behind a trunk with this digest, in the cache folder or in `root`."""
    if isinstance(faces, Joined):
        return JoinedStore(faces, [_store_of(member.faces, trunk, shape, dtype, root) for member in faces.members])
    return _store_of(faces, trunk, shape, dtype, root)


def _store_of(faces: FaceSet, trunk: str, shape: Sequence[int], dtype: str, root: Path | None) -> Store:
    root = activations_folder() if root is None else root
    pictures = pictures_digest(faces, root)
    sweep(root)
    about = {
        "version": 1, "trunk": trunk, "faces": pictures, "count": len(faces),
        "shape": list(shape), "dtype": {"fp32": "float32", "fp16": "float16"}[dtype],
        "chunk": CHUNK, "torch": torch.__version__, "path": str(faces.path),
        **({"size": faces.size} if isinstance(faces, Resized) else {}),
        **({} if device().type == "cpu" else {"device": device().type}),  # whose bits are others
    }  # fmt: skip
    return Store.open(root, about)


def activations_folder() -> Path:
    """Where stores are: in $VISARD_CACHE or the user's cache folder."""
    return cache_folder() / "activations"


def _pictures_file(folder: Path) -> Path:
    for name in ("images", "values"):
        if (path := array_path(folder, name)).is_file():
            return path
    raise VisardError(f"{folder} holds no pictures")


def pictures_digest(faces: FaceSet, root: Path) -> str:
    """SHA-256 of all pictures of a set; remembered as long as their file is the same one."""
    path = _pictures_file(faces.path)
    now = _stamp(path)
    memo = root / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.digest"
    with suppress(VisardError, AttributeError, KeyError):
        known = read_json(memo)
        if known["stamp"] == now and known["path"] == str(path):
            return str(known["digest"])
    digest = file_digest(path)
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(memo, json.dumps({"path": str(path), "stamp": now, "digest": digest}), PRIVATE)
    return digest


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


@dataclass(frozen=True)
class Entry:
    """A store, as a listing shows it."""

    folder: Path
    about: dict[str, Any]
    bytes: int  # on disk
    complete: dict[str, int]  # pictures, by kind


def entries(root: Path | None = None) -> list[Entry]:
    """All stores of the cache folder."""
    root = activations_folder() if root is None else root
    found = []
    for file in sorted(root.glob(f"*/{ABOUT}")):
        try:
            store = Store(file.parent, read_json(file))
            whole = {kind: store.complete(kind) for kind in (PLAIN, MIRROR)}
        except (VisardError, KeyError, TypeError, ValueError, AttributeError):
            continue
        used = sum(path.stat().st_blocks * 512 for path in file.parent.iterdir())
        found.append(Entry(file.parent, store.about, used, whole))
    return found


def sweep(root: Path) -> None:
    """Remove stores whose face set is gone or has other pictures now, as it has after a person was taken out."""
    for entry in entries(root):
        if not _is_current(entry.about, root):
            remove(entry.folder)


def _is_current(about: dict[str, Any], root: Path) -> bool:
    folder = Path(str(about.get("path")))
    try:
        path = _pictures_file(folder)
        memo = read_json(root / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.digest")
        return bool(memo["stamp"] == _stamp(path) and memo["digest"] == about["faces"])
    except (VisardError, OSError, KeyError, TypeError):
        return False


def remove(folder: Path) -> None:
    """Remove a store; a process that has it mapped reads on."""
    shutil.rmtree(folder, ignore_errors=True)


def forget(faces: Path, root: Path | None = None) -> int:
    """Remove stored activations of the set in this folder, when it or a person in it is removed; returns how many."""
    path = str(Path(faces).absolute())
    gone = [entry for entry in entries(root) if entry.about.get("path") == path]
    for entry in gone:
        remove(entry.folder)
    return len(gone)
