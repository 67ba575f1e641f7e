"""Pictures by address: (seed, domain, identity of the domain, picture) to pixels and attributes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import streams
from .domains import KNOWN
from .person import Person, latent, people
from .picture import GRID, draw
from .scene import WALL
from .shapes import Plane
from .shot import attributes, draw_shot, shots

Rows = NDArray[np.int64]
CHUNK = 16  # pictures drawn at a time: their planes fit a core's cache


def traits(seed: int, domain: str, person: Rows, picture: Rows) -> Person:
    """Named traits (B,) of pictures of one domain."""
    index = list(KNOWN).index(domain)
    p = people(domain, np.stack([latent(seed, index, int(i)) for i in person]))
    numbers = [draw_shot(seed, index, int(i), int(k)) for i, k in zip(person, picture, strict=True)]
    return shots(domain, p, np.stack(numbers))


def textures(seed: int, domain: str, person: Rows, picture: Rows, size: int) -> tuple[Plane, Plane, Plane]:
    """Random grids in [-1, 1] of the people (B, G, G) and of the walls (B, 2, W, W), unit noise (B, 3, S, S)."""
    index = list(KNOWN).index(domain)
    own, around, grain = [], [], []
    half = -(-3 * size * size // 2)
    for i, k in zip(person.tolist(), picture.tolist(), strict=True):
        own.append(streams.raw(seed, streams.PERSON_GRID, index, i, 0, GRID * GRID))
        around.append(streams.raw(seed, streams.SHOT_GRID, index, i, k, 2 * WALL * WALL))
        grain.append(streams.grain(streams.raw(seed, streams.SENSOR, index, i, k, half))[: 3 * size * size])
    person_grid, shot_grid = (
        (2.0 * streams.uniform(np.stack(words)) - 1.0).astype(np.float32) for words in (own, around)
    )
    return (
        person_grid.reshape(-1, GRID, GRID),
        shot_grid.reshape(-1, 2, WALL, WALL),
        np.stack(grain).reshape(-1, 3, size, size),
    )


def pictures(
    seed: int, domain: str, person: Rows, picture: Rows, size: int
) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """uint8 (B, S, S, 3) and int8 (B, A) of one domain, drawn `CHUNK` at a time."""
    images, marks = [], []
    for start in range(0, len(person), CHUNK):
        rows = slice(start, start + CHUNK)
        s = traits(seed, domain, person[rows], picture[rows])
        images.append(draw(s, *textures(seed, domain, person[rows], picture[rows], size), size))
        marks.append(attributes(s))
    return np.concatenate(images), np.concatenate(marks)
