"""Embedded synthetic faces: procedural people, any number of them, fully determined by a seed.

Picture k of identity i of a domain is the same pixels whatever else is rendered, in whatever batch and by
however many processes: its random numbers are a pure function of (seed, domain, i, k), and the arithmetic on
pixels is element by element. Growing a set keeps the people that it had.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visard.data.drawing import pool
from visard.data.drawing.batch import Rows, pictures
from visard.data.drawing.domains import KNOWN
from visard.data.drawing.shot import ATTRIBUTES
from visard.data.faces import FaceSetWriter
from visard.errors import UsageError
from visard.names import did_you_mean

__all__ = ["ATTRIBUTES", "DOMAINS", "VERSION", "SyntheticSpec", "cached", "make", "render"]

VERSION = "1"
"""Version of the renderer: goes up whenever any pixel of any picture changes."""

DOMAINS: tuple[str, ...] = tuple(KNOWN)
SMALLEST, LARGEST = 32, 112
BATCH = 64  # pictures of one job
ALONE = 600  # sets up to this size are drawn in this process: starting others would take longer


@dataclass(frozen=True)
class SyntheticSpec:
    """A set of synthetic faces; identities are split evenly over the domains, in their order."""

    identities: int = 200
    images_per_identity: int = 20
    size: int = 64
    domains: tuple[str, ...] = ("north",)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "domains", tuple(self.domains))
        if not self.domains:
            raise UsageError(f"synthetic faces need at least one domain of {', '.join(DOMAINS)}")
        for name in self.domains:
            if name not in KNOWN:
                raise UsageError(f"no domain {name!r} of synthetic faces{did_you_mean(name, DOMAINS)}")
        if len(set(self.domains)) < len(self.domains):
            raise UsageError(f"synthetic faces: a domain is named twice in {', '.join(self.domains)}")
        if self.identities < len(self.domains):
            raise UsageError(f"synthetic faces: {self.identities} identities for {len(self.domains)} domain(s)")
        if self.images_per_identity < 1:
            raise UsageError(f"synthetic faces: {self.images_per_identity} pictures per identity")
        if not SMALLEST <= self.size <= LARGEST:
            raise UsageError(f"synthetic faces are {SMALLEST} to {LARGEST} pixels wide, not {self.size}")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"synthetic faces: seed {self.seed} is not between 0 and 2**64 - 1")

    @property
    def count(self) -> int:
        """How many pictures the set has."""
        return self.identities * self.images_per_identity

    @property
    def starts(self) -> Rows:
        """The first identity of each domain."""
        return np.arange(len(self.domains), dtype=np.int64) * self.identities // len(self.domains)

    def domain_of(self, identity: Rows) -> Rows:
        """The number of the domain of each identity."""
        return np.asarray(np.searchsorted(self.starts, identity, side="right") - 1, dtype=np.int64)

    def names(self) -> list[str]:
        """A name for each identity: its domain and its number there."""
        every = np.arange(self.identities)
        domain = self.domain_of(every)
        local = every - self.starts[domain]
        return [f"{self.domains[d]}-{i:05d}" for d, i in zip(domain.tolist(), local.tolist(), strict=True)]


def render(
    spec: SyntheticSpec, identity: NDArray[np.integer[Any]], picture: NDArray[np.integer[Any]]
) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """uint8 (B, size, size, 3) RGB and int8 attributes (B, A) in {-1, 1} of picture[k] of identity[k]."""
    who, which = np.asarray(identity, dtype=np.int64), np.asarray(picture, dtype=np.int64)
    if who.shape != which.shape or who.ndim != 1:
        raise UsageError(f"render: identities {who.shape} and pictures {which.shape} are not two equal lists")
    for what, values, limit in (
        ("identity", who, spec.identities),
        ("picture", which, spec.images_per_identity),
    ):
        if len(values) and not (values.min() >= 0 and values.max() < limit):
            raise UsageError(f"render: {what} {values.min()} to {values.max()}, but the set has {limit}")
    images = np.empty((len(who), spec.size, spec.size, 3), dtype=np.uint8)
    marks = np.empty((len(who), len(ATTRIBUTES)), dtype=np.int8)
    domain = spec.domain_of(who)
    for number in np.unique(domain).tolist():
        rows = np.flatnonzero(domain == number)
        local = who[rows] - spec.starts[number]
        images[rows], marks[rows] = pictures(spec.seed, spec.domains[number], local, which[rows], spec.size)
    return images, marks


def render_rows(spec: SyntheticSpec, rows: Rows) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """The pictures at rows of the whole set: all of identity 0, then all of identity 1, ..."""
    return render(spec, rows // spec.images_per_identity, rows % spec.images_per_identity)


def make(
    spec: SyntheticSpec,
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Render everything into a FaceSet folder at `out`; `progress` hears how many pictures are done."""
    if workers is not None and workers < 1:
        raise UsageError(f"synthetic faces cannot be drawn by {workers} processes")
    info = {"kind": "synthetic", "name": folder_name(spec), "spec": asdict(spec), "renderer": VERSION}
    names = spec.names()
    writer = FaceSetWriter(
        Path(out), count=spec.count, size=spec.size, names=names, domains=list(spec.domains),
        attributes=list(ATTRIBUTES), info=info,
    )  # fmt: skip
    done = 0
    with writer:
        for start, images, marks in _batches(spec, _processes(spec, workers)):
            rows = np.arange(start, start + len(images))
            identity, picture = rows // spec.images_per_identity, rows % spec.images_per_identity
            files = [f"{names[i]}/{k:04d}" for i, k in zip(identity.tolist(), picture.tolist(), strict=True)]
            writer.write(start, images, identity, spec.domain_of(identity), marks, files)
            done += len(images)
            if progress is not None:
                progress(done)
    return Path(out)


def _processes(spec: SyntheticSpec, workers: int | None) -> int:
    if workers is not None:
        return workers
    if spec.count <= ALONE:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _batches(spec: SyntheticSpec, workers: int) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.int8]]]:
    """First row, pictures and attributes of each batch, in any order."""
    first = range(0, spec.count, BATCH)
    jobs: list[pool.Job] = [{"spec": asdict(spec), "start": s, "stop": min(s + BATCH, spec.count)} for s in first]
    if workers == 1:
        for job in jobs:
            yield job["start"], *render_rows(spec, np.arange(job["start"], job["stop"]))
        return
    for number, data in pool.run("visard.data.drawing.worker", jobs, workers):
        n = jobs[number]["stop"] - jobs[number]["start"]
        split = n * spec.size * spec.size * 3
        images = np.frombuffer(data, dtype=np.uint8, count=split).reshape(n, spec.size, spec.size, 3)
        marks = np.frombuffer(data, dtype=np.int8, offset=split).reshape(n, len(ATTRIBUTES))
        yield jobs[number]["start"], images, marks


def folder_name(spec: SyntheticSpec) -> str:
    """A name for people, with a hash of the spec and of the renderer's version for machines."""
    text = json.dumps({"spec": asdict(spec), "renderer": VERSION}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"synthetic-{'+'.join(spec.domains)}-{spec.identities}x{spec.images_per_identity}-{spec.size}px-{digest}"


def cached(spec: SyntheticSpec, root: Path | None = None, progress: Callable[[int], None] | None = None) -> Path:
    """The folder of this set, rendered on first use, in $VISARD_CACHE or the user's cache folder."""
    out = (cache_folder() if root is None else Path(root)) / folder_name(spec)
    if not out.is_dir():
        try:
            make(spec, out, progress=progress)
        except UsageError:
            if not out.is_dir():  # else another process finished the same set first
                raise
    return out


def cache_folder() -> Path:
    """$VISARD_CACHE, or visard in the user's cache folder."""
    if own := os.environ.get("VISARD_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "visard"
