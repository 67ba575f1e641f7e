"""Embedded synthetic faces: procedural identities, any number of them, fully determined by a seed.

Picture k of identity i of a domain is the same pixels whatever else is rendered, in whatever batch and by
however many processes: its random numbers are a pure function of (seed, domain, i, k), and the arithmetic on
pixels is element by element. Growing a set keeps the identities that it had.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visard.data.faces import FaceSetWriter
from visard.data.synthetic.render import DOMAINS, SyntheticSpec, render, render_rows
from visard.data.synthetic.traits import ATTRIBUTES
from visard.errors import UsageError, VisardError
from visard.files import cache_folder
from visard.processes import ChildError, compute, cores

__all__ = ["ATTRIBUTES", "DOMAINS", "VERSION", "SyntheticSpec", "cached", "make", "render", "render_rows"]

VERSION = "2"
"""Version of the renderer: goes up whenever any pixel of any picture changes."""

BATCH = 64  # pictures of one job
ALONE = 600  # sets up to this size are drawn in this process: starting others would take longer


def make(
    spec: SyntheticSpec, out: Path, *, workers: int | None = None, progress: Callable[[int], None] | None = None
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
        for start, images, marks in _batches(spec, workers or (1 if spec.count <= ALONE else cores())):
            rows = np.arange(start, start + len(images))
            identity, picture = rows // spec.images_per_identity, rows % spec.images_per_identity
            files = [f"{names[i]}/{k:04d}" for i, k in zip(identity.tolist(), picture.tolist(), strict=True)]
            writer.write(start, images, identity, spec.domain_of(identity), marks, files)
            done += len(images)
            if progress is not None:
                progress(done)
    return Path(out)


def _batches(spec: SyntheticSpec, workers: int) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.int8]]]:
    """First row, pictures and attributes of each batch, in any order."""
    first = range(0, spec.count, BATCH)
    jobs: list[dict[str, Any]] = [{"spec": asdict(spec), "start": s, "stop": min(s + BATCH, spec.count)} for s in first]
    if workers == 1:
        for job in jobs:
            yield job["start"], *render_rows(spec, np.arange(job["start"], job["stop"]))
        return
    try:
        for number, data in compute("visard.data.synthetic.render:draw_job", jobs, workers):
            n = jobs[number]["stop"] - jobs[number]["start"]
            split = n * spec.size * spec.size * 3
            images = np.frombuffer(data, dtype=np.uint8, count=split).reshape(n, spec.size, spec.size, 3)
            marks = np.frombuffer(data, dtype=np.int8, offset=split).reshape(n, len(ATTRIBUTES))
            yield jobs[number]["start"], images, marks
    except ChildError as error:
        raise VisardError(f"a drawing process failed: {error}") from None


def folder_name(spec: SyntheticSpec) -> str:
    """A name that can be read, with a hash of the spec and of the renderer's version that makes it unique."""
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
