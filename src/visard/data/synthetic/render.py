"""Which synthetic faces there are, and their pixels: no more imports than a drawing process needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visard.data.synthetic.head import measures
from visard.data.synthetic.picture import GRID, compress, draw
from visard.data.synthetic.planes import Plane, weave
from visard.data.synthetic.scene import WALL
from visard.data.synthetic.traits import (
    ATTRIBUTES,
    KNOWN,
    SENSOR,
    SKIN_GRID,
    WALL_GRID,
    attributes,
    grain,
    raw,
    traits,
    uniform,
)
from visard.errors import UsageError, did_you_mean

Rows = NDArray[np.int64]
DOMAINS: tuple[str, ...] = tuple(KNOWN)
SMALLEST, LARGEST = 32, 112
CHUNK = 32  # pictures drawn at a time: more would not fit the cache, fewer spend their time in Python
WORK = 30 << 20


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
    for what, values, limit in (("identity", who, spec.identities), ("picture", which, spec.images_per_identity)):
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


def pictures(
    seed: int, domain: str, identity: Rows, picture: Rows, size: int
) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """uint8 (B, S, S, 3) and int8 (B, A) of one domain, drawn `CHUNK` at a time."""
    # glibc gives memory above a limit back to the system at once, and every plane would cost page faults again;
    # freeing one large block moves that limit up (a third less CPU time)
    np.empty(WORK, dtype=np.uint8)
    s = traits(seed, domain, identity, picture)
    t = measures(s)
    images = np.empty((len(identity), size, size, 3), dtype=np.uint8)
    for start in range(0, len(identity), CHUNK):
        rows = slice(start, start + CHUNK)
        some = {name: plane[rows] for name, plane in t.items()}
        images[rows] = draw(some, *textures(seed, domain, identity[rows], picture[rows], size), size)
    lossy = np.flatnonzero(s["blocks"] > 0.5)
    for start in range(0, len(lossy), CHUNK):
        pick = lossy[start : start + CHUNK]
        images[pick] = compress(images[pick], s["quality"][pick])
    return images, attributes(s)


def textures(seed: int, domain: str, identity: Rows, picture: Rows, size: int) -> tuple[Plane, Plane, Plane]:
    """Skin of the identities (B, FINE G, FINE G), random grids of the walls (B, 2, W, W), noise (B, 3, S, S)."""
    index = list(KNOWN).index(domain)
    once, row = np.unique(identity, return_inverse=True)
    own = raw(seed, SKIN_GRID, index, [(i, 0) for i in once.tolist()], GRID * GRID)
    each = list(zip(identity.tolist(), picture.tolist(), strict=True))
    around = raw(seed, WALL_GRID, index, each, 2 * WALL * WALL)
    sensor = raw(seed, SENSOR, index, each, 1)[:, 0]
    skin, walls = ((2.0 * uniform(words) - 1.0).astype(np.float32) for words in (own, around))
    noise = grain(sensor, 3 * size * size)
    return weave(skin.reshape(-1, GRID, GRID))[row], walls.reshape(-1, 2, WALL, WALL), noise.reshape(-1, 3, size, size)


def draw_job(job: dict[str, Any]) -> bytes:
    """The answer of a drawing process: the pictures and then the attributes of rows start .. stop - 1 of a set."""
    images, marks = render_rows(SyntheticSpec(**job["spec"]), np.arange(job["start"], job["stop"]))
    return images.tobytes() + marks.tobytes()
