"""Block compression: what a JPEG of low quality does to a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .shapes import Plane

_BASIS = np.array(
    [
        [(0.125 if k == 0 else 0.25) ** 0.5 * math.cos(math.pi * (2 * j + 1) * k / 16) for j in range(8)]
        for k in range(8)
    ]
)
_ORDER = np.add.outer(np.arange(8), np.arange(8)).astype(np.float32)[:, :, None]  # frequency across + down


def compress(images: NDArray[np.uint8], quality: NDArray[np.float64]) -> NDArray[np.uint8]:
    """JPEG-like loss on uint8 (B, S, S, 3), quality (B,) in 0..1: half-resolution colour, 8 x 8 cosine blocks."""
    count, size = images.shape[:2]
    more = -size % 16
    rgb = images.transpose(3, 0, 1, 2).astype(np.float32)
    if more:
        rgb = np.pad(rgb, ((0, 0), (0, 0), (0, more), (0, more)), mode="edge")
    luma = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]
    colour = rgb[::2] - luma  # red and blue differences
    small = colour[..., ::2, ::2] + colour[..., 1::2, ::2] + colour[..., ::2, 1::2] + colour[..., 1::2, 1::2]
    small *= 0.25
    luma -= 128.0
    bright, tint = _blocks(luma), _blocks(small.reshape(2 * count, *small.shape[2:]))
    step = (2.0 + 14.0 * (1.0 - quality)).astype(np.float32)
    grids = (
        np.repeat(step, bright.shape[2] // count) * (1.0 + 0.35 * _ORDER),
        np.repeat(np.tile(1.5 * step, 2), tint.shape[2] // (2 * count)) * (1.0 + 0.6 * _ORDER),
    )
    both = _quantise(np.concatenate([bright, tint], axis=2), np.concatenate(grids, axis=2))
    luma = _planes(both[:, :, : bright.shape[2]], luma.shape)
    tints = _planes(both[:, :, bright.shape[2] :], (2 * count, *small.shape[2:])).reshape(small.shape)
    red, blue = tints.repeat(2, axis=2).repeat(2, axis=3)
    luma += 128.5  # half a step: casting to integers cuts off
    out = np.empty_like(images)
    for k, change in enumerate((red, (red * 0.299 + blue * 0.114) * (-1.0 / 0.587), blue)):
        change += luma
        np.clip(change, 0.5, 255.5, out=change)
        np.copyto(out[..., k], change[:, :size, :size], casting="unsafe")
    return out


def _blocks(planes: Plane) -> Plane:
    """(8, 8, blocks) from (B, H, W)."""
    b, h, w = planes.shape
    return np.ascontiguousarray(planes.reshape(b, h // 8, 8, w // 8, 8).transpose(2, 4, 0, 1, 3)).reshape(8, 8, -1)


def _planes(blocks: Plane, shape: tuple[int, ...]) -> Plane:
    """The inverse of `_blocks`."""
    b, h, w = shape
    return np.ascontiguousarray(blocks.reshape(8, 8, b, h // 8, w // 8).transpose(2, 3, 0, 4, 1)).reshape(b, h, w)


def _quantise(blocks: Plane, grid: Plane) -> Plane:
    """Round the cosine coefficients of (8, 8, N) blocks to multiples of `grid`."""
    co = _dct(_dct(blocks, False).swapaxes(0, 1), False)  # axes: (column frequency, row frequency, ...)
    co /= grid
    np.rint(co, out=co)
    co *= grid
    return _dct(_dct(co, True).swapaxes(0, 1), True)


def _dct(x: Plane, inverse: bool) -> Plane:
    """8-point DCT-II (or its inverse) along axis 0, by even and odd halves."""
    out = np.empty(x.shape, dtype=np.float32)
    if inverse:
        for j in range(4):
            even, odd = _sum4(_BASIS[::2, j], x[::2]), _sum4(_BASIS[1::2, j], x[1::2])
            np.add(even, odd, out=out[j])
            np.subtract(even, odd, out=out[7 - j])
        return out
    plus, minus = [x[j] + x[7 - j] for j in range(4)], [x[j] - x[7 - j] for j in range(4)]
    for k in range(8):
        out[k] = _sum4(_BASIS[k, :4], minus if k % 2 else plus)
    return out


def _sum4(rows: NDArray[np.float64], x: Plane | Sequence[Plane]) -> Plane:
    """Σ rows[k] x[k] over four planes."""
    a, b, c, d = (float(weight) for weight in rows)
    out: Plane = x[0] * a
    out += x[1] * b
    out += x[2] * c
    out += x[3] * d
    return out
