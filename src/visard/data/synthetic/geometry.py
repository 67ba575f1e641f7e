"""Smooth shapes on pixel grids, made of + - * / sqrt alone: the same bits on every machine.

Planes are float32 (B, S, S), per-picture numbers (B, 1, 1), colours (B, 3, 1, 1), canvases (B, 3, S, S).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
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


# ----------
# Shells made of ellipses, and where rays meet their sections.

CENTRE = -0.05  # height of the widest ellipse
ROUND = 0.45  # squareness above the centre


@dataclass(frozen=True)
class View:
    """Pixel coordinates (x right, y down) in head units after roll, scale and shift, and the pose's sines."""

    x: Plane
    y: Plane
    pixel: Plane
    sin_yaw: Plane
    cos_yaw: Plane
    sin_pitch: Plane
    cos_pitch: Plane


@dataclass(frozen=True)
class Shell:
    """A stack of ellipses: half-axes at the centre, ends, squareness and taper below the centre."""

    width: Plane
    depth: Plane
    top: Plane
    bottom: Plane
    square: Plane
    taper: Plane
    forward: Plane  # how far the lowest ellipse sits in front


def ellipsoid(view: View, shell: Shell, base: Plane, sink: Plane) -> Plane:
    """Depth z in the yawed frame of the ellipsoid with the shell's axes, about that of the shell.

    At height base + z sink. With z = m x + w and e = base + m x sink, w is the larger root of
    w² (1 + P sink²) + 2 P sink e w + P e² = K (A - x²), where A = W² c² + D² s², m = s c (D² - W²) / A,
    K = W² D² / A² and P = K A / H².
    """
    s, c = view.sin_yaw, view.cos_yaw
    ww, dd = shell.width * shell.width, shell.depth * shell.depth
    area = ww * c * c + dd * s * s
    m = s * c * (dd - ww) / area
    k = ww * dd / (area * area)
    height = 0.5 * (shell.bottom - shell.top)
    p = k * area / (height * height)
    whole = 1.0 + p * sink * sink
    e = view.x * (m * sink)
    e += base
    e -= 0.5 * (shell.bottom + shell.top)
    w = view.x * view.x
    w *= -whole * k
    w += whole * k * area
    w -= (e * e) * p
    at_least(w, 0.0)
    np.sqrt(w, out=w)
    e *= p * sink
    w -= e
    w *= 1.0 / whole
    w += view.x * m
    return w


class Section:
    """Where rays x meet the ellipses at heights v: depth z1 in the yawed frame, and u across the face.

    In the yawed frame the section at height v is an ellipse (W, D), so the depth is the larger root of a
    quadratic: z = (x s c (D² - W²) + W D sqrt(A - x²)) / A with A = W² c² + D² s².
    """

    def __init__(self, view: View, shell: Shell, v: Plane, x: Plane):
        s, c = view.sin_yaw, view.cos_yaw
        self.v = v
        low = v - CENTRE
        far = low * (1.0 / (CENTRE - shell.top))
        low *= 1.0 / (shell.bottom - CENTRE)
        at_least(low, 0.0)
        at_most(far, 0.0)
        # squared width (1 - f) (1 + q f) W² (1 - taper low)², f = squared share of the way to either end
        ww = low * low
        far *= far
        far += ww
        rest = 1.0 - far
        ww *= shell.square - ROUND
        ww += ROUND * far
        ww += 1.0
        ww *= rest
        lean = low * (-shell.taper * shell.width)
        lean += shell.width
        lean *= lean
        ww *= lean
        # squared depth (1 - f²) (1 - low / 2) D²
        dd = far
        dd += 1.0
        dd *= rest
        np.multiply(low, -0.5 * shell.depth * shell.depth, out=lean)
        lean += shell.depth * shell.depth
        dd *= lean
        at_least(dd, 0.02)
        at_most(low, 1.0)  # past the chin the axis stays, or the outline would catch light from above
        low *= low
        middle = low
        middle *= shell.forward
        wide = np.clip(ww, 0.003, np.inf)
        self.x0 = x0 = x - middle * s
        area = wide * (c * c)
        area += dd * (s * s)
        gap = x0 * x0
        np.subtract(area, gap, out=gap)
        at_least(gap, 0.0)
        gap *= wide
        gap *= dd
        np.sqrt(gap, out=gap)
        z1 = dd - wide
        z1 *= x0
        z1 *= s * c
        z1 += gap
        z1 /= area
        middle *= c
        z1 += middle
        self.z1, self.wide, self.raw, self.deep = z1, wide, ww, dd
        self.u = x * c
        self.u -= z1 * s

    def outline(self, view: View) -> tuple[Plane, Plane, Plane]:
        """Distance to the outline, positive inside, and its gradient: A - x² over the length of its own gradient."""
        s, c = view.sin_yaw, view.cos_yaw
        edge = self.raw * 8.0  # the width before it was bounded below
        np.clip(edge, 0.0, 1.0, out=edge)
        edge *= self.deep
        edge *= s * s
        edge += self.raw * (c * c)
        edge -= self.x0 * self.x0
        gx, gy = slope(edge, view.pixel)
        length = gx * gx
        length += gy * gy
        np.sqrt(length, out=length)
        length += 0.05
        edge /= length
        gx /= length
        gy /= length
        return edge, gx, gy


# ----------
# Windows: small features are painted in a part of the picture that follows the pose, not in all of it.


@dataclass(frozen=True)
class Window:
    """A box of `height` x `width` pixels with its own corner in each picture."""

    row: list[int]
    column: list[int]
    height: int
    width: int

    def cut(self, plane: Plane) -> Plane:
        """The box of each picture, from (B, ..., S, S)."""
        out = np.empty((*plane.shape[:-2], self.height, self.width), dtype=plane.dtype)
        for box, one, r, c in zip(out, plane, self.row, self.column, strict=True):
            box[...] = one[..., r : r + self.height, c : c + self.width]
        return out

    def paste(self, plane: Plane, boxes: Plane) -> None:
        """Put the boxes back."""
        for one, box, r, c in zip(plane, boxes, self.row, self.column, strict=True):
            one[..., r : r + self.height, c : c + self.width] = box

    def add(self, plane: Plane, boxes: Plane) -> None:
        """Add the boxes to what is there."""
        for one, box, r, c in zip(plane, boxes, self.row, self.column, strict=True):
            one[..., r : r + self.height, c : c + self.width] += box


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
    row = np.rint((down / t["scale"] + 1.0) * (0.5 * size) - 0.5 * height)[:, 0, 0]
    column = np.rint((across / t["scale"] + 1.0) * (0.5 * size) - 0.5 * width)[:, 0, 0]
    rows = np.clip(row, 0, size - height).astype(np.int64).tolist()
    return Window(rows, np.clip(column, 0, size - width).astype(np.int64).tolist(), height, width)


# ----------
# Relief of a face over the skull: nose, eyes and brows, lips and chin, cheeks.


def nose_box(t: Traits, size: int) -> Window:
    """The part of the picture that holds the nose and its shadow."""
    return window(t, (0.0, t["nose_v"] - 0.16, 0.95), (0.48, 0.44), size)


def nose(t: Traits, u: Plane, v: Plane) -> Plane:
    """Height of the nose over the skull at face coordinates (u, v)."""
    along = v - t["bridge_v"]
    along *= 1.0 / (t["nose_v"] - t["bridge_v"])
    run = np.clip(along, 0.0, 1.0)
    rise: Plane = run * run
    rise *= t["nose_height"] * (1.0 - t["nose_bridge"])
    rise += t["nose_height"] * t["nose_bridge"]
    rise *= ramp(along, -0.7, 0.1)
    rise *= ramp(along, 1.34, 1.02)
    across = u - t["nose_skew"] * run
    run *= 0.55 * t["nose_width"]
    run += 0.86 * t["nose_width"]
    q = across / run
    q *= q
    rise *= bump(q)
    dv = v - t["nose_v"]
    rise += t["nose_tip"] * spot(across, dv + 0.03, 0.15, 0.15)
    dv -= 0.01
    np.abs(across, out=across)
    across -= t["nose_width"] * 0.68
    wings = spot(across, dv, 0.09, 0.09)
    wings *= t["ala"]
    np.maximum(rise, wings, out=rise)
    return rise


def relief(t: Traits, u: Plane, v: Plane, box: Window) -> tuple[Plane, Plane]:
    """Height of all features over the skull at face coordinates (u, v), and of the nose alone in its box."""
    h = np.zeros_like(u)
    for part, height, w, share in (
        (_cheeks, 0.14, 0.75, (0.38, 0.84)),
        (_eyes, -0.22, 0.85, (0.36, 0.76)),
        (_mouth, 0.62, 0.85, (0.42, 0.38)),
    ):
        place = window(t, (0.0, height, w), share, u.shape[-1])
        place.add(h, part(t, place.cut(u), place.cut(v)))
    ridge = nose(t, box.cut(u), box.cut(v))
    box.add(h, ridge)
    return h, ridge


def _eyes(t: Traits, u: Plane, v: Plane) -> Plane:
    """Height of sockets, eyeballs and the ridge of the brows."""
    side = np.abs(u)
    h = spot(side - 0.27, v - (t["brow_v"] + 0.02), 0.4, 0.12)
    h *= t["brow_ridge"]
    side -= t["eye_u"]
    down = v - t["eye_v"]
    h -= t["socket"] * spot(side, down, 0.26, 0.2)
    h += 0.05 * spot(side, down, 0.17, 0.1)
    return h


def _mouth(t: Traits, u: Plane, v: Plane) -> Plane:
    """Height of lips and chin."""
    q = v - t["mouth_v"]
    up, low, gap = t["lip_up"], t["lip_low"], t["gap"]
    h = spot(u, q + (0.5 * up + 0.2 * gap), t["mouth_w"], up + 0.05)
    h += spot(u, q - (0.5 * low + 0.6 * gap), t["mouth_w"] * 0.8, low + 0.05)
    h *= 0.055
    h -= 0.05 * spot(u, q - (low + gap + 0.1), 0.25, 0.07)
    h += t["chin_bump"] * spot(u, v - (t["chin"] - 0.17), 0.24, 0.17)
    return h


def _cheeks(t: Traits, u: Plane, v: Plane) -> Plane:
    side = np.abs(u)
    side -= 0.42
    h = spot(side, v - (0.16 - 0.06 * t["smile"]), 0.32, 0.3)
    h *= t["cheek"]
    return h


# ----------
# The head as a surface: a stack of ellipses with relief, and where each pixel's ray meets it under any pose.


@dataclass(frozen=True)
class Surface:
    """Where each pixel's ray meets a shell: face coordinates, camera depth, coverage, outline."""

    u: Plane  # to the picture's right on the face
    v: Plane  # down
    z: Plane  # depth towards the camera
    margin: Plane  # distance to the outline, positive inside
    inward_x: Plane  # gradient of the margin
    inward_y: Plane
    wide: Plane  # squared half width of the ellipse at this height


@dataclass(frozen=True)
class Patch:
    """Face coordinates of the pixels in a window."""

    u: Plane
    v: Plane
    side: Plane  # |u|


def patch(box: Window, f: Surface) -> Patch:
    """The part of a surface that is seen through a window."""
    u = box.cut(f.u)
    return Patch(u, box.cut(f.v), np.abs(u))


def view(t: Traits, size: int) -> View:
    """Camera of each picture: orthographic, pixel centres."""
    axis = ((np.arange(size, dtype=np.float32) + 0.5) * (2.0 / size) - 1.0).astype(np.float32)
    px = axis[None, None, :] * t["scale"] - t["shift_x"]
    py = axis[None, :, None] * t["scale"] - t["shift_y"]
    c, s = t["cos_roll"], t["sin_roll"]
    return View(
        x=px * c + py * s,
        y=py * c - px * s,
        pixel=t["scale"] * np.float32(2.0 / size),
        sin_yaw=t["sin_yaw"],
        cos_yaw=t["cos_yaw"],
        sin_pitch=t["sin_pitch"],
        cos_pitch=t["cos_pitch"],
    )


def skull(t: Traits) -> Shell:
    """The head without relief."""
    return Shell(
        width=t["half_width"],
        depth=t["half_depth"],
        top=t["top"],
        bottom=t["chin"],
        square=t["jaw_square"],
        taper=t["jaw_taper"],
        forward=t["chin_forward"],
    )


def meet(view: View, shell: Shell, t: Traits | None = None) -> Surface:
    """First point of the shell on each pixel's ray; with traits `t`, of the shell with its relief.

    Height and relief depend on the depth that they decide in turn. An ellipsoid's depth is close enough for the
    heights of the sections. Relief moves what is seen: the nose, the highest of it, is looked up a second time
    where the first look has moved it.
    """
    sink = view.sin_pitch / view.cos_pitch
    base = view.y / view.cos_pitch
    z1 = ellipsoid(view, shell, base, sink)
    z1 *= sink
    z1 += base
    section = Section(view, shell, z1, view.x)
    z1 = section.z1
    if t is not None:
        h = _heights(view, t, section, base, sink)
        raised = h * view.cos_yaw
        z1 += raised
        z1 *= sink
        z1 += base
        section = Section(view, shell, z1, view.x - h * view.sin_yaw)
        z1 = section.z1
        z1 += raised
    margin, inward_x, inward_y = section.outline(view)
    z1 *= view.cos_pitch
    z1 += section.v * view.sin_pitch
    return Surface(section.u, section.v, z1, margin, inward_x, inward_y, section.wide)


def _heights(view: View, t: Traits, seen: Section, base: Plane, sink: Plane) -> Plane:
    """Relief of what each ray meets, from where the rays meet the bare skull."""
    box = nose_box(t, view.x.shape[-1])
    h, ridge = relief(t, seen.u, seen.v, box)
    near, z1 = box.cut(h), box.cut(seen.z1)
    u = (box.cut(view.x) - near * view.sin_yaw) * view.cos_yaw
    u -= z1 * view.sin_yaw
    near *= view.cos_yaw
    near += z1
    near *= sink
    near += box.cut(base)
    again = nose(t, u, near)
    again -= ridge
    again *= 0.5
    box.add(h, again)
    return h


# ----------
# Painting some pictures of a batch: most have no hat, no beard and no mole.


class Some(Mapping[str, Plane]):
    """The traits of some of the pictures, taken when asked for."""

    def __init__(self, whole: Traits, pick: NDArray[np.intp]):
        self.whole, self.pick = whole, pick

    def __getitem__(self, name: str) -> Plane:
        return self.whole[name][self.pick]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def _take(value: Any, pick: NDArray[np.intp]) -> Any:
    """Rows `pick` of a plane, of traits, or of each field of a dataclass of planes; other things as they are."""
    if isinstance(value, np.ndarray):
        return value[pick]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _take(getattr(value, f.name), pick) for f in fields(value)})
    return Some(value, pick) if isinstance(value, Mapping) else value


def paint_where(on: Plane, paint: Callable[..., None], canvas: Plane, *args: Any) -> None:
    """Call paint(*args, canvas) for the pictures with `on` (B, 1, 1) above 0.5 only."""
    pick = np.flatnonzero(on[:, 0, 0] > 0.5)
    if len(pick) == len(canvas):
        paint(*args, canvas)
    elif len(pick):
        part = canvas[pick]
        paint(*(_take(a, pick) for a in args), part)
        canvas[pick] = part
