"""Import pictures from outside into a face set: decoded in parallel, bad ones skipped and listed."""

import inspect
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data import faces as sets
from visard.data.detection import QUALITY, FiveFraming, open_detector
from visard.data.faces import FaceSetWriter
from visard.data.listing import Listing, Stream, check_length, printable
from visard.data.pictures import (
    ALIGNMENTS,
    LANDMARKS,
    LOW_QUALITY,
    NO_FACE,
    Framed,
    Framing,
    Haar,
    warp_engine,
    why_not,
)
from visard.data.sources import SOURCES
from visard.errors import UsageError, did_you_mean

CHUNK = 64  # pictures a thread decodes at a time
MOST_FACES = 16  # of one picture
LISTED = 1000  # skipped files that the set itself remembers
Progress = Callable[[int, int], None]
Decoded = list[list[Framed] | str]  # the crops of each picture, or why there is none


@dataclass(frozen=True)
class ImportReport:
    """The result of an import."""

    path: Path
    pictures: int
    identities: int
    skipped: list[tuple[str, str]]  # file, reason


def import_faces(
    kind: str,
    source: Path | str,
    out: Path | str,
    *,
    size: int | None = None,
    min_images: int = 1,
    limit_identities: int | None = None,
    align: str | None = None,
    detector: str | None = None,
    every_face: bool = False,
    min_quality: float = 0.0,
    cascade: Path | str | None = None,
    say: Callable[[str], None] = lambda text: None,
    workers: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    **options: Any,
) -> ImportReport:
    """Import `source` with importer `kind` into a new face set at `out`.

    Pictures become squares of `size` pixels, 112 by default. Identities with fewer than `min_images` readable pictures
    are left out; `limit_identities` keeps the first so many. `align` is none, five, landmarks or haar (with another
    `cascade` of those of OpenCV), by default what suits the source: five for raw photographs, by the five
    landmarks that a `detector` finds (see `detection.open_detector`), of the largest and most central face or of
    `every_face`; faces below `min_quality` are left out. `workers` threads decode (one per core by default: decoders
    let other threads run), `progress(done, total)` follows them and `say` gets lines for people.
    """
    if (size is not None and not 8 <= size <= 4096) or min_images < 1 or (limit_identities or 1) < 1:
        raise UsageError("an import needs size >= 8 and <= 4096, min_images >= 1 and limit_identities >= 1")
    listing = _read(kind, Path(source), options)
    try:
        enough = np.bincount(listing.identity, minlength=len(listing.names)) >= min_images
        if limit_identities is not None:
            enough[np.flatnonzero(enough)[limit_identities:]] = False
        chosen = np.flatnonzero(enough[listing.identity])  # in the order of the source
        if not len(chosen):
            raise UsageError(f"{source}: no identity has {min_images} pictures")
        framing = _framing(kind, listing, align, cascade, detector, every_face, min_quality, say)
        domains = sorted(set(listing.domains)) if listing.domains else [kind]
        info = {"kind": kind, "source": printable(Path(source).name), "align": framing.align, **listing.info}
        names, size = [printable(name) for name in listing.names], size or listing.size
        room = len(chosen) * (MOST_FACES if every_face else 1)
        writer = FaceSetWriter(
            Path(out), count=room, size=size, names=names, domains=domains, attributes=listing.attribute_names,
            info=info, overwrite=overwrite,
        )  # fmt: skip
        with writer:
            keeper = _Keeper(writer, listing, domains)
            done = 0
            for results in _decode_all(listing, framing, chosen, size, workers):
                keeper.add(chosen[done : done + len(results)].tolist(), results)
                done += len(results)
                if progress is not None:
                    progress(done, len(chosen))
            return keeper.finish(source, min_images)
    finally:
        listing.pictures.close()


def _read(kind: str, source: Path, options: dict[str, Any]) -> Listing:
    if kind not in SOURCES:
        raise UsageError(f"no importer {kind!r}{did_you_mean(kind, SOURCES)}")
    read = SOURCES[kind]
    known = [name for name in inspect.signature(read).parameters if name != "source"]
    for name in options:
        if name not in known:
            raise UsageError(f"importer {kind} has no option {name!r}{did_you_mean(name, known)}")
    return read(source, **options)


def _framing(
    kind: str,
    listing: Listing,
    align: str | None,
    cascade: Path | str | None,
    detector: str | None,
    every_face: bool,
    min_quality: float,
    say: Callable[[str], None],
) -> Framing | FiveFraming:
    wanted = align or listing.align
    if wanted not in ALIGNMENTS:
        raise UsageError(f"no alignment {wanted!r}{did_you_mean(wanted, ALIGNMENTS)}")
    if cascade is not None and wanted != "haar":
        raise UsageError("a cascade is used only with alignment haar")
    if (detector or every_face or min_quality) and wanted != "five":
        raise UsageError("a detector, every face and a smallest quality are used only with alignment five")
    if not 0 <= min_quality <= 1:
        raise UsageError(f"a smallest quality of {min_quality:g}: must be 0 to 1")
    if wanted == "landmarks" and listing.landmarks is None and listing.boxes is None:
        raise UsageError(f"alignment by landmarks: importer {kind} found no landmarks in this source")
    if wanted in ("landmarks", "five"):
        listing.info["warp"] = warp_engine()
    if wanted == "five":
        found = FiveFraming(open_detector(detector, say), every_face, min_quality)
        listing.info.update(detector=found.detector.name, every_face=every_face, min_quality=min_quality)
        return found
    detect = Haar(Path(cascade) if cascade else None) if wanted == "haar" else None
    return Framing(listing.crop, wanted, listing.landmarks, listing.boxes, detect)


class _Keeper:
    """Writes readable pictures one after the other; at the end takes identities back that have too few."""

    def __init__(self, writer: FaceSetWriter, listing: Listing, domains: list[str]) -> None:
        self.writer, self.listing = writer, listing
        self.domain_of = {name: number for number, name in enumerate(domains)}
        self.items = array("q")  # that were kept; row = position
        self.points: list[npt.NDArray[np.float32]] = []
        self.quality: list[npt.NDArray[np.float32]] = []
        self.skipped: list[tuple[str, str]] = []
        self.left_out: list[tuple[int, int]] = []  # item, reason

    def add(self, items: list[int], results: Decoded) -> None:
        """Store the decoded pictures of `items`."""
        good = []
        for item, result in zip(items, results, strict=True):
            if isinstance(result, str):
                self._skip(item, result)
            else:
                good += [(item, framed) for framed in result[:MOST_FACES]]
        if not good:
            return
        rows = [item for item, _ in good]
        marks, domains = self.listing.attributes, self.listing.domains
        self.writer.write(
            len(self.items),
            np.stack([framed.square for _, framed in good]),
            self.listing.identity[rows],
            [self.domain_of[domains[i]] if domains else 0 for i in rows],
            marks[rows] if marks is not None else np.zeros((len(rows), 0), np.int8),
            [self.listing.files[i] for i in rows],
        )
        self.items.extend(rows)
        if good[0][1].points is not None:
            self.points.append(np.array([framed.points for _, framed in good], np.float32))
        if good[0][1].quality is not None:
            self.quality.append(np.array([framed.quality for _, framed in good], np.float32))

    def _skip(self, item: int, reason: str, kind: int | None = None) -> None:
        self.skipped.append((printable(self.listing.files[item]), reason))
        if kind is None:
            kind = sets.NO_FACE if reason == NO_FACE else sets.UNREADABLE
            kind = sets.LOW_QUALITY if reason.startswith(f"{LOW_QUALITY} ") else kind
        self.left_out.append((item, kind))

    def _left_out(self, left: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        """What is known of the pictures that were skipped; see `FaceSet.skipped`."""
        items, kinds = (np.array(column, np.int64) for column in zip(*self.left_out, strict=True))
        # people who stay have their new numbers, all others follow
        number = np.where(left, np.cumsum(left) - 1, left.sum() + np.cumsum(~left) - 1)
        domains, marks = self.listing.domains, self.listing.attributes
        domain = [self.domain_of[domains[i]] if domains else 0 for i in items.tolist()]
        known = np.zeros((len(items), 0)) if marks is None else marks[items]
        return np.column_stack([number[self.listing.identity[items]], domain, kinds, known]).astype(np.int32)

    def finish(self, source: Path | str, min_images: int) -> ImportReport:
        """Close the set with what is left."""
        items = np.array(self.items, np.int64)
        identity = self.listing.identity[items]
        counts = np.bincount(identity, minlength=len(self.listing.names))
        keep = counts[identity] >= min_images
        for item in items[~keep].tolist():
            k = self.listing.identity[item]
            self._skip(
                item, f"only {counts[k]} readable pictures of {printable(self.listing.names[k])}", sets.TOO_FEW
            )  # fmt: skip
        if not keep.any():
            file, reason = self.skipped[0]
            raise UsageError(f"{source}: not one of {len(self.skipped)} pictures could be used ({file}: {reason})")
        if not keep.all():
            self.writer.drop(keep)
        left = counts >= min_images
        self.writer.renumber(np.cumsum(left) - 1)
        if self.left_out:
            self.writer.attach(sets.SKIPPED, self._left_out(left))
        if self.points:
            self.writer.attach(LANDMARKS, np.concatenate(self.points)[keep])
        if self.quality:
            self.writer.attach("quality", np.concatenate(self.quality)[keep])
            self.writer.info["quality"] = list(QUALITY)
        if self.listing.extras is not None:
            for name, values in self.listing.extras(items[keep]).items():
                self.writer.attach(name, values)
        self.writer.info.update(self.listing.info)
        self.writer.info["skipped_count"] = len(self.skipped)
        self.writer.info["skipped"] = [list(entry) for entry in self.skipped[:LISTED]]
        names = [printable(name) for name, there in zip(self.listing.names, left, strict=True) if there]
        count = int(keep.sum())
        return ImportReport(self.writer.close(count, names), count, len(names), self.skipped)


def _decode_all(
    listing: Listing, framing: Framing | FiveFraming, items: npt.NDArray[np.int64], size: int, workers: int | None
) -> Iterator[Decoded]:
    """Decode in order, a few chunks ahead of what is taken, so that memory stays bounded."""
    pictures = listing.pictures

    def decode_one(item: int, data: bytes | None) -> list[Framed] | str:
        try:
            data = pictures.read(item) if data is None else data
            check_length(len(data))
            return framing(data, item, size)
        except Exception as error:  # the reason goes into the report
            return why_not(error)

    def decode_chunk(chunk: list[tuple[int, bytes | None]]) -> Decoded:
        return [decode_one(item, data) for item, data in chunk]

    numbers = items.tolist()
    # files that are not a stream are read by the threads: a slow disk or network serves several at once
    encoded: Iterator[bytes | None] = pictures.stream(numbers) if isinstance(pictures, Stream) else repeat(None)
    pairs = zip(numbers, encoded, strict=False)
    chunks = iter(lambda: list(islice(pairs, CHUNK)), [])
    workers = workers or os.cpu_count() or 1
    if workers <= 1:
        yield from map(decode_chunk, chunks)
        return
    pool = ThreadPoolExecutor(workers, "visard-decode")
    waiting: deque[Future[Decoded]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(decode_chunk, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
