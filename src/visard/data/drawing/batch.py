"""Pictures by address: (seed, domain, identity of the domain, picture) to pixels and attributes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import streams
from .compression import compress
from .domains import KNOWN
from .measures import measures
from .person import Person, latents, people
from .picture import GRID, draw
from .scene import WALL
from .shapes import Plane, weave
from .shot import attributes, draw_shots, shots

Rows = NDArray[np.int64]
CHUNK = 32  # pictures drawn at a time: more would not fit the cache, fewer spend their time in Python
WORK = 30 << 20


def traits(seed: int, domain: str, person: Rows, picture: Rows) -> Person:
    """Named traits (B,) of pictures of one domain."""
    index = list(KNOWN).index(domain)
    who, row = np.unique(person, return_inverse=True)
    p = people(domain, latents(seed, index, who.tolist()))
    p = {name: column[row] for name, column in p.items()}
    return shots(domain, p, draw_shots(seed, index, person.tolist(), picture.tolist()))


def textures(seed: int, domain: str, person: Rows, picture: Rows, size: int) -> tuple[Plane, Plane, Plane]:
    """Textures of the people (B, FINE G, FINE G), random grids of the walls (B, 2, W, W), noise (B, 3, S, S)."""
    index = list(KNOWN).index(domain)
    who, row = np.unique(person, return_inverse=True)
    own = streams.raw(seed, streams.PERSON_GRID, index, [(i, 0) for i in who.tolist()], GRID * GRID)
    each = list(zip(person.tolist(), picture.tolist(), strict=True))
    around = streams.raw(seed, streams.SHOT_GRID, index, each, 2 * WALL * WALL)
    sensor = streams.raw(seed, streams.SENSOR, index, each, 1)[:, 0]
    skin = weave(_grid(own).reshape(-1, GRID, GRID))
    noise = streams.grain(sensor, 3 * size * size)
    return skin[row], _grid(around).reshape(-1, 2, WALL, WALL), noise.reshape(-1, 3, size, size)


def _grid(words: NDArray[np.uint64]) -> Plane:
    """Numbers in [-1, 1]."""
    return (2.0 * streams.uniform(words) - 1.0).astype(np.float32)


def pictures(
    seed: int, domain: str, person: Rows, picture: Rows, size: int
) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """uint8 (B, S, S, 3) and int8 (B, A) of one domain, drawn `CHUNK` at a time."""
    # glibc gives memory above a limit back to the system at once, and every plane would cost page faults again;
    # freeing one large block moves that limit up (a third less CPU time)
    np.empty(WORK, dtype=np.uint8)
    s = traits(seed, domain, person, picture)
    t = measures(s)
    images = np.empty((len(person), size, size, 3), dtype=np.uint8)
    for start in range(0, len(person), CHUNK):
        rows = slice(start, start + CHUNK)
        some = {name: plane[rows] for name, plane in t.items()}
        images[rows] = draw(some, *textures(seed, domain, person[rows], picture[rows], size), size)
    lossy = np.flatnonzero(s["blocks"] > 0.5)
    for start in range(0, len(lossy), CHUNK):
        pick = lossy[start : start + CHUNK]
        images[pick] = compress(images[pick], s["quality"][pick])
    return images, attributes(s)
