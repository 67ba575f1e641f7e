"""Smooth shapes on pixel grids, computed with only + - * / sqrt: the same bits on every machine.

Planes are float32 (B, S, S), per-picture numbers (B, 1, 1), colours (B, 3, 1, 1), canvases (B, 3, S, S). Small features
are painted in a window that follows the pose, and hats, beards or moles only on the pictures that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[Any]  # float32: numpy's own types call the product with a Python float a float64
Traits = Mapping[str, Plane]

FINE = 4  # texture samples per cell of a random grid
_TOP = 2.0 ** (1 / 3)  # with p = _TOP t the smooth step t² (3 - 2 t) is p² (_ARM - p): one pass less
_ARM = 3.0 / _TOP**2


def rgb(*channels: float) -> Plane:
    """A colour (1, 3, 1, 1)."""
    return np.array(channels, dtype=np.float32)[None, :, None, None]


def at_least(x: Plane, low: float) -> Plane:
    """max(x, low), in place: np.clip is vectorised, np.maximum with a plain number is not (4 times slower)."""
    return np.clip(x, low, np.inf, out=x)


def at_most(x: Plane, high: float) -> Plane:
    """min(x, high), in place; see `at_least`."""
    return np.clip(x, -np.inf, high, out=x)


def between(x: Plane, low: float, high: float) -> Plane:
    """x bounded on both sides, in place."""
    return np.clip(x, low, high, out=x)


def ramp(x: Plane, low: Plane | float, high: Plane | float) -> Plane:
    """Smooth step: 0 below `low`, 1 above `high` (reversed when high < low)."""
    k = _TOP / (high - low)
    p = x * k
    p -= low * k
    between(p, 0.0, _TOP)
    out = _ARM - p
    out *= p
    out *= p
    return out


def cover(distance: Plane, pixel: Plane) -> Plane:
    """Share of a pixel inside a shape, from the signed distance (positive inside) to its edge."""
    t = distance * (1.0 / pixel)
    t += 0.5
    return between(t, 0.0, 1.0)


def bump(q: Plane) -> Plane:
    """(1 - q)², 0 beyond q = 1, in place: a bell over a squared radius, cheaper than exp and of compact support."""
    at_most(q, 1.0)
    q -= 1.0
    q *= q
    return q


def spot(x: Plane, y: Plane, rx: Plane | float, ry: Plane | float) -> Plane:
    """Bell of half-axes (rx, ry) around the origin."""
    a, b = x * (1.0 / rx), y * (1.0 / ry)
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
    f = (x - np.floor(x)) * 2.0 - 1.0
    return np.asarray((np.abs(f) - 1.0) * f * -4.0)


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
    ix, iy = ((z * FINE + 1024.0).astype(np.int32) & (side - 1) for z in (x, y))
    out: Plane = texture.reshape(-1).take(iy * side + ix + first, mode="clip")  # none is outside: "clip" skips a check
    return out


def stretch(grid: Plane, size: int) -> Plane:
    """Random numbers (B, G, G) as a smooth plane (B, size, size) from corner to corner."""
    side = grid.shape[1]
    x = (np.arange(size) + 0.5) * ((side - 1) / size)
    at = x.astype(np.int64)
    f = (x - at).astype(np.float32)
    f = f * f * (3.0 - 2.0 * f)
    rows = grid[:, :, at] + (grid[:, :, at + 1] - grid[:, :, at]) * f
    return np.asarray(rows[:, at] + (rows[:, at + 1] - rows[:, at]) * f[None, :, None])


def over(canvas: Plane, colour: Plane, alpha: Plane, value: Plane | float | None = None) -> None:
    """Lay `colour` (B, 3, 1|S, 1|S), times `value` (B, S, S), on the canvas in place with opacity `alpha` (B, S, S).

    A channel at a time: its planes stay in a core's own cache.
    """
    for k in range(3):
        under = canvas[:, k]
        step = (colour[:, k] if value is None else value * colour[:, k]) - under
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
    half = 0.5 / pixel
    dx[:, :, 1:-1] = (z[:, :, 2:] - z[:, :, :-2]) * half
    dy[:, 1:-1, :] = (z[:, 2:, :] - z[:, :-2, :]) * half
    dx[:, :, 0], dx[:, :, -1] = dx[:, :, 1], dx[:, :, -2]
    dy[:, 0, :], dy[:, -1, :] = dy[:, 1, :], dy[:, -2, :]
    return dx, dy


@dataclass(frozen=True)
class Window:
    """A box of `height` x `width` pixels with a different corner in each picture."""

    row: list[int]
    column: list[int]
    height: int
    width: int

    def boxes(self, plane: Plane) -> list[Plane]:
        """The box of each picture, as views of (B, ..., S, S)."""
        corners = zip(plane, self.row, self.column, strict=True)
        return [one[..., r : r + self.height, c : c + self.width] for one, r, c in corners]

    def cut(self, plane: Plane) -> Plane:
        """The boxes as one plane (B, ..., height, width)."""
        return np.stack(self.boxes(plane))

    def paste(self, plane: Plane, boxes: Plane) -> None:
        """Put the boxes back."""
        for there, box in zip(self.boxes(plane), boxes, strict=True):
            there[...] = box

    def add(self, plane: Plane, boxes: Plane) -> None:
        """Add the boxes to what is there."""
        for there, box in zip(self.boxes(plane), boxes, strict=True):
            there += box


def window(
    t: Traits, point: tuple[Plane | float, Plane | float, float], share: tuple[float, float], size: int
) -> Window:
    """Box around the face point (u, v, w); `share` is its height and width in parts of the picture.

    The corner depends on the picture's own traits alone, so it is the same in every batch.
    """
    u, v, w = point
    x = u * t["cos_yaw"] + w * t["sin_yaw"]
    y = v * t["cos_pitch"] - (w * t["cos_yaw"] - u * t["sin_yaw"]) * t["sin_pitch"]
    across = x * t["cos_roll"] - y * t["sin_roll"] + t["shift_x"]
    down = y * t["cos_roll"] + x * t["sin_roll"] + t["shift_y"]
    height, width = (min(size, int(np.ceil(part * size))) for part in share)
    row, column = (
        np.clip(np.rint((middle / t["scale"] + 1.0) * (0.5 * size) - 0.5 * side)[:, 0, 0], 0, size - side)
        for middle, side in ((down, height), (across, width))
    )
    return Window(row.astype(np.int64).tolist(), column.astype(np.int64).tolist(), height, width)


class _Picked(dict[str, Plane]):
    """The traits of some of the pictures, taken when asked for: most are not."""

    def __init__(self, whole: Traits, pick: NDArray[np.intp]) -> None:
        self.whole, self.pick = whole, pick

    def __missing__(self, name: str) -> Plane:
        return self.whole[name][self.pick]


def _take(value: Any, pick: NDArray[np.intp]) -> Any:
    """Rows `pick` of a plane, of traits, or of each field of a dataclass of planes; other things as they are."""
    if isinstance(value, np.ndarray):
        return value[pick]
    if isinstance(value, Mapping):
        return _Picked(value, pick)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _take(getattr(value, f.name), pick) for f in fields(value)})
    return value


def paint_where(on: Plane, paint: Callable[..., None], canvas: Plane, *args: Any) -> None:
    """Call paint(*args, canvas) for the pictures with `on` (B, 1, 1) above 0.5 only."""
    pick = np.flatnonzero(on[:, 0, 0] > 0.5)
    if len(pick) == len(canvas):
        paint(*args, canvas)
    elif len(pick):
        part = canvas[pick]
        paint(*(_take(a, pick) for a in args), part)
        canvas[pick] = part
