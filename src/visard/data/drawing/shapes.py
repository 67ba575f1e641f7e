"""Smooth shapes on pixel grids, made of + - * / sqrt alone: the same bits on every machine.

Planes are float32 (B, S, S), per-picture numbers (B, 1, 1), colours (B, 3, 1, 1), canvases (B, 3, S, S).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[Any]  # float32: numpy's own types call the product with a Python float a float64
Traits = Mapping[str, Plane]


def at_least(x: Plane, low: float) -> Plane:
    """max(x, low), in place: np.clip is vectorised, np.maximum with a plain number is not (4 times slower)."""
    return np.clip(x, low, np.inf, out=x)


def at_most(x: Plane, high: float) -> Plane:
    """min(x, high), in place; see `at_least`."""
    return np.clip(x, -np.inf, high, out=x)


_TOP = 2.0 ** (1 / 3)  # with p = _TOP t the smooth step t² (3 - 2 t) is p² (_ARM - p): one pass less
_ARM = 3.0 / _TOP**2


def ramp(x: Plane, low: Plane | float, high: Plane | float) -> Plane:
    """Smooth step: 0 below `low`, 1 above `high` (reversed when high < low)."""
    k = _TOP / (high - low)
    p = x * k
    p -= low * k
    np.clip(p, 0.0, _TOP, out=p)
    out = _ARM - p
    out *= p
    out *= p
    return out


def cover(distance: Plane, pixel: Plane) -> Plane:
    """Share of a pixel inside a shape, from the signed distance (positive inside) to its edge."""
    t = distance * (1.0 / pixel)
    t += 0.5
    return np.clip(t, 0.0, 1.0, out=t)


def bump(q: Plane) -> Plane:
    """(1 - q)², 0 beyond q = 1, in place: a bell over a squared radius, cheaper than exp and of compact support."""
    at_most(q, 1.0)
    q -= 1.0
    q *= q
    return q


def spot(x: Plane, y: Plane, rx: Plane | float, ry: Plane | float) -> Plane:
    """Bell of half-axes (rx, ry) around the origin."""
    a = x * (1.0 / rx)
    b = y * (1.0 / ry)
    a *= a
    b *= b
    a += b
    return bump(a)


def stroke(distance: Plane, width: Plane | float) -> Plane:
    """Soft line: a bell across, `width` half wide."""
    q = distance * (1.0 / width)
    q *= q
    return bump(q)


def wave(x: Plane) -> Plane:
    """Sine-like wave of period 1 in [-1, 1] from two parabolas."""
    f = x - np.floor(x)
    f *= 2.0
    f -= 1.0
    out: Plane = np.abs(f)
    out -= 1.0
    out *= f
    out *= -4.0
    return out


FINE = 4  # texture samples per cell of a random grid


def weave(grid: Plane) -> Plane:
    """Smooth texture (B, FINE G, FINE G) that tiles, from random numbers (B, G, G)."""
    side = grid.shape[1]
    at = np.arange(side * FINE) // FINE
    f = ((np.arange(side * FINE) % FINE + 0.5) / FINE).astype(np.float32)
    f = f * f * (3.0 - 2.0 * f)
    rows = grid[:, at] + (grid[:, (at + 1) % side] - grid[:, at]) * f[None, :, None]
    return np.ascontiguousarray(rows[:, :, at] + (rows[:, :, (at + 1) % side] - rows[:, :, at]) * f)


def noise(texture: Plane, x: Plane, y: Plane) -> Plane:
    """A woven texture (side a power of two) read at (x, y), in cells, |x|, |y| < 250; nearest sample."""
    count, side, _ = texture.shape
    first = (np.arange(count, dtype=np.int32) * (side * side))[:, None, None]
    # truncation rounds towards zero: a positive offset (a whole number of tiles) makes it a floor
    ix = (x * FINE + 1024.0).astype(np.int32)
    at = (y * FINE + 1024.0).astype(np.int32)
    ix &= side - 1
    at &= side - 1
    at *= side
    at += ix
    at += first
    return texture.reshape(-1).take(at, mode="clip")  # no index is outside: "clip" only skips a second check


def stretch(grid: Plane, size: int) -> Plane:
    """Random numbers (B, G, G) as a smooth plane (B, size, size) from corner to corner."""
    side = grid.shape[1]
    x = (np.arange(size) + 0.5) * ((side - 1) / size)
    at = x.astype(np.int64)
    f = (x - at).astype(np.float32)
    f = f * f * (3.0 - 2.0 * f)
    left, right = grid[:, :, at], grid[:, :, at + 1]
    rows = left + (right - left) * f
    upper = rows[:, at]
    step: Plane = rows[:, at + 1]
    step -= upper
    step *= f[None, :, None]
    step += upper
    return step


def over(canvas: Plane, colour: Plane, alpha: Plane, value: Plane | float | None = None) -> None:
    """Lay `colour` (B, 3, 1|S, 1|S), times `value` (B, S, S), on the canvas in place with opacity `alpha` (B, S, S).

    A channel at a time: its planes stay in a core's own cache.
    """
    for k in range(3):
        under = canvas[:, k]
        if value is None:
            step = colour[:, k] - under
        else:
            step = value * colour[:, k]
            step -= under
        step *= alpha
        under += step


def dim(canvas: Plane, amount: Plane) -> None:
    """Darken the canvas in place by the share `amount` (B, S, S)."""
    keep = 1.0 - amount
    for k in range(3):
        canvas[:, k] *= keep


def slope(z: Plane, pixel: Plane) -> tuple[Plane, Plane]:
    """Central differences (dz/dx, dz/dy) of a plane, one-sided at the border."""
    dx, dy = np.empty_like(z), np.empty_like(z)
    np.subtract(z[:, :, 2:], z[:, :, :-2], out=dx[:, :, 1:-1])
    np.subtract(z[:, 2:, :], z[:, :-2, :], out=dy[:, 1:-1, :])
    dx[:, :, 0], dx[:, :, -1] = dx[:, :, 1], dx[:, :, -2]
    dy[:, 0, :], dy[:, -1, :] = dy[:, 1, :], dy[:, -2, :]
    half = 0.5 / pixel
    dx *= half
    dy *= half
    return dx, dy
