"""Import pictures from outside into a face set: decoded in parallel, bad ones skipped and listed."""

import inspect
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.decoding import Container, Crop, decode_file
from visard.data.faces import FaceSetWriter
from visard.data.sources import SOURCES, Listing
from visard.errors import UsageError, VisardError
from visard.names import did_you_mean

CHUNK = 256  # pictures a worker decodes at a time
LISTED = 1000  # skipped files that the set itself remembers
Progress = Callable[[int, int], None]
Decoded = tuple[npt.NDArray[np.uint8], list[str | None]]  # readable pictures; for each file None or why not


@dataclass(frozen=True)
class ImportReport:
    """What an import did."""

    path: Path
    pictures: int
    identities: int
    skipped: list[tuple[str, str]]  # file, reason


def import_faces(
    kind: str,
    source: Path | str,
    out: Path | str,
    *,
    size: int = 64,
    min_images: int = 1,
    limit_identities: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    **options: Any,
) -> ImportReport:
    """Import `source` with importer `kind` into a new face set at `out`.

    Identities with fewer than `min_images` readable pictures are left out; `limit_identities` keeps the first
    so many. `workers` processes decode (one per core by default) and `progress(done, total)` follows them.
    """
    if size < 8 or min_images < 1 or (limit_identities is not None and limit_identities < 1):
        raise UsageError("an import needs size >= 8, min_images >= 1 and limit_identities >= 1")
    listing = _read(kind, Path(source), options)
    chosen = _choose(listing, min_images, limit_identities)
    if not chosen:
        raise UsageError(f"{source}: no identity has {min_images} pictures")
    domains = sorted(set(listing.domains)) if listing.domains else [kind]
    writer = FaceSetWriter(
        Path(out),
        count=len(chosen),
        size=size,
        names=sorted({printable(listing.identity[i]) for i in chosen}),
        domains=domains,
        attributes=listing.attribute_names,
        info={"kind": kind, "source": printable(Path(source).name), **listing.info},
        overwrite=overwrite,
    )
    with writer:
        keeper = _Keeper(writer, listing, domains, min_images)
        files = [listing.files[i] for i in chosen]
        done = 0
        for pictures, reasons in _decode_all(listing.container, files, size, listing.crop, workers):
            keeper.add(chosen[done : done + len(reasons)], pictures, reasons)
            done += len(reasons)
            if progress is not None:
                progress(done, len(files))
        return keeper.finish(source)


def _read(kind: str, source: Path, options: dict[str, Any]) -> Listing:
    if kind not in SOURCES:
        raise UsageError(f"no importer {kind!r}{did_you_mean(kind, SOURCES)}")
    known = [name for name in inspect.signature(SOURCES[kind]).parameters if name != "source"]
    for name in options:
        if name not in known:
            raise UsageError(f"importer {kind} has no option {name!r}{did_you_mean(name, known)}")
    return SOURCES[kind](source, **options)


def _choose(listing: Listing, min_images: int, limit: int | None) -> list[int]:
    """Items of the identities that are wanted, one identity after the other."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(listing.identity):
        groups.setdefault(name, []).append(i)
    wanted = [items for items in groups.values() if len(items) >= min_images][:limit]
    return [i for items in wanted for i in items]


class _Keeper:
    """Writes readable pictures one after the other, and takes an identity back if too few were readable."""

    def __init__(self, writer: FaceSetWriter, listing: Listing, domains: list[str], min_images: int) -> None:
        self.writer, self.listing, self.min_images = writer, listing, min_images
        self.domain_of = {name: number for number, name in enumerate(domains)}
        self.names: list[str] = []
        self.files: list[str] = []  # kept so far; row = position
        self.start = 0  # first row of the identity at hand
        self.skipped: list[tuple[str, str]] = []

    def add(self, items: list[int], pictures: npt.NDArray[np.uint8], reasons: list[str | None]) -> None:
        """Store what was decoded of `items`, which continue where the last call ended."""
        at = 0
        for run in _runs([self.listing.identity[i] for i in items]):
            if not self.names or self.names[-1] != self.listing.identity[items[run.start]]:
                self._end_identity()
                self.names.append(self.listing.identity[items[run.start]])
                self.start = len(self.files)
            good = [items[j] for j in range(run.start, run.stop) if reasons[j] is None]
            for j in range(run.start, run.stop):
                reason = reasons[j]
                if reason is not None:
                    self.skipped.append((printable(self.listing.files[items[j]]), reason))
            self._write(good, pictures[at : at + len(good)])
            at += len(good)

    def _write(self, items: list[int], pictures: npt.NDArray[np.uint8]) -> None:
        if not items:
            return
        marks = self.listing.attributes
        domains = self.listing.domains
        self.writer.write(
            len(self.files),
            pictures,
            np.full(len(items), len(self.names) - 1),
            [self.domain_of[domains[i]] if domains else 0 for i in items],
            marks[items] if marks is not None else np.zeros((len(items), 0), np.int8),
            [self.listing.files[i] for i in items],
        )
        self.files += [self.listing.files[i] for i in items]

    def _end_identity(self) -> None:
        kept = len(self.files) - self.start
        if self.names and kept < self.min_images:
            reason = f"only {kept} readable pictures of {printable(self.names.pop())}"
            self.skipped += [(printable(file), reason) for file in self.files[self.start :]]
            del self.files[self.start :]

    def finish(self, source: Path | str) -> ImportReport:
        """Close the set with what is left."""
        self._end_identity()
        if not self.files:
            file, reason = self.skipped[0]
            raise VisardError(
                f"{source}: not one of {len(self.skipped)} pictures could be used ({file}: {reason})"
            )
        if self.listing.extras is not None:
            rows = {file: row for row, file in enumerate(self.files)}
            for name, values in self.listing.extras(rows).items():
                self.writer.attach(name, values)
        self.writer.info.update(self.listing.info)
        self.writer.info["skipped_count"] = len(self.skipped)
        self.writer.info["skipped"] = [list(entry) for entry in self.skipped[:LISTED]]
        path = self.writer.close(len(self.files), [printable(name) for name in self.names])
        return ImportReport(path, len(self.files), len(self.names), self.skipped)


def _runs(names: list[str]) -> Iterator[slice]:
    """Slices of equal neighbours."""
    start = 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i] != names[start]:
            yield slice(start, i)
            start = i


def printable(name: str) -> str:
    """A file name as text that JSON can hold, also where its bytes are no UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_open: dict[Path, Container] = {}  # of a worker process: a zip's directory is read once, not for every chunk


def _decode_chunk(path: Path, files: list[str], size: int, crop: Crop) -> Decoded:
    container = _open.get(path) or _open.setdefault(path, Container(path))
    results = [decode_file(container, name, size, crop) for name in files]
    good = [result for result in results if not isinstance(result, str)]
    pictures = np.stack(good) if good else np.zeros((0, size, size, 3), np.uint8)
    return pictures, [result if isinstance(result, str) else None for result in results]


def _decode_all(
    path: Path, files: list[str], size: int, crop: Crop, workers: int | None
) -> Iterator[Decoded]:
    """Decode in order, a few chunks ahead of what is taken, so that memory stays bounded."""
    chunks = [files[i : i + CHUNK] for i in range(0, len(files), CHUNK)]
    workers = min(workers or os.cpu_count() or 1, len(chunks))
    if workers <= 1 or not _main_can_be_imported():
        try:
            for chunk in chunks:
                yield _decode_chunk(path, chunk, size, crop)
        finally:
            _close(path)
        return
    start = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(start))
    waiting: deque[Future[Decoded]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_decode_chunk, path, chunk, size, crop))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise VisardError(
            f"{path}: a decoding process died (a script must import under `if __name__ == '__main__'`); "
            "workers = 1 decodes without other processes"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _close(path: Path) -> None:
    container = _open.pop(path, None)
    if container is not None:
        container.close()


def _main_can_be_imported() -> bool:
    """Worker processes load the main module again, which a program from standard input does not have."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file is None or Path(file).exists()
