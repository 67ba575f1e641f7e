"""What is around the face: background, ears, neck and clothes."""

from __future__ import annotations

import numpy as np

from .light import Normals, level, lit
from .section import View
from .shapes import Plane, Traits, at_least, cover, dim, over, ramp, stretch, stroke, wave
from .some import paint_where
from .window import window

WALL = 6  # side of the random grids behind a face


def background(t: Traits, view: View, grid: Plane) -> Plane:
    """Canvas (B, 3, S, S) of walls, gradients, panels and blurred lights; `grid` (B, 2, WALL, WALL)."""
    size = view.x.shape[-1]
    turn = (t["back_turn"] - 0.5) * 2.0
    along = view.x * turn
    along += view.y * (1.0 - np.abs(turn) * 0.5)
    light = (0.55 + 0.5 * level(t))[:, None]
    wall = t["back_rgb"] * light
    other = np.roll(wall, 1, axis=1) * (0.5 + 0.9 * t["back_turn"][:, None])
    kind = t["back_kind"]
    tone = stretch(grid[:, 0, :4, :4], size)
    tone *= 0.35 * ramp(kind, 0.0, 0.5)
    tone += 1.0 + 0.12 * along
    canvas = np.empty((len(tone), 3, size, size), dtype=np.float32)
    for k in range(3):
        np.multiply(tone, wall[:, k], out=canvas[:, k])
    paint_where(kind > 0.3, _gradient, canvas, along, other)
    paint_where((kind > 0.55) & (kind < 0.8), _panels, canvas, t, view.x, along, other)
    paint_where(kind >= 0.8, _lights, canvas, grid[:, 1], other, light)
    return canvas


def _gradient(along: Plane, other: Plane, canvas: Plane) -> None:
    over(canvas, other, 0.8 * ramp(along, -0.7, 0.9))


def _panels(t: Traits, x: Plane, along: Plane, other: Plane, canvas: Plane) -> None:
    stripes = wave(x * (0.5 + t["back_hue"]) + t["back_turn"] * 3.0 + 0.1 * along)
    over(canvas, other * 0.6, 0.75 * ramp(stripes, -0.1, 0.1))


def _lights(grid: Plane, other: Plane, light: Plane, canvas: Plane) -> None:
    bright = np.minimum(other * 2.2 + 0.05 * light, 0.95 * light)
    over(canvas, bright, 0.55 * ramp(stretch(grid, canvas.shape[-1]), 0.05, 0.75))


def body(t: Traits, view: View, canvas: Plane) -> None:
    """Neck with the chin's shadow, shoulders and collar: in the lower part of the picture only."""
    first = canvas.shape[-1] * 9 // 16
    lower = canvas[:, :, first:]
    x = view.x[:, first:] + 0.10 * view.sin_yaw
    y = view.y[:, first:] - 0.25 * view.sin_pitch
    side = np.abs(x)
    half = ramp(y, 0.9, 1.35)
    half *= 0.30 * t["neck"]
    half += t["neck"]
    across = x / half
    glow = lit(t, _round(across, 1.0, 0.25), 0.25)
    glow *= 0.48 * ramp(y, 0.85, 1.4) + 0.44
    half -= side
    over(lower, t["skin"] * t["warm_rgb"], cover(half, view.pixel), glow)
    shoulder = 0.32 - side * (0.75 + 0.5 * t["collar"])
    at_least(shoulder, 0.0)
    side -= t["neck"]
    shoulder += 0.30 * at_least(side, 0.0)
    y -= shoulder
    y -= 1.05 + 0.12 * t["collar"]
    fold = wave(x * 1.7 + view.y[:, first:] * 0.8 + t["cloth_hue"])
    fold *= 0.12
    fold += 1.0
    fold *= 1.0 - 0.35 * stroke(y, 0.05)
    x *= 0.6
    fold *= lit(t, _round(x, 0.9, -0.3), 0.3)
    over(lower, t["cloth_rgb"] * t["warm_rgb"], cover(y, view.pixel), fold)


def _round(x: Plane, most: float, down: float) -> Normals:
    """Normals, nearly of unit length, of something upright and round, x from -1 to 1 across it; in place."""
    np.clip(x, -most, most, out=x)
    z = x * x
    z *= -0.9
    z += 1.0
    return Normals(x, np.full((1, 1, 1), down, dtype=np.float32), np.sqrt(z, out=z))


EAR = np.array([1.02, 0.90, 0.88], dtype=np.float32)[None, :, None, None]


def ears(t: Traits, view: View, canvas: Plane) -> None:
    """Both ears, behind the head."""
    for side in (-1.0, 1.0):
        _ear(t, view, np.full_like(t["yaw"], side), False, canvas)


def near_ear(t: Traits, view: View, canvas: Plane) -> None:
    """The ear that a turned head shows, on top of the head."""
    side = np.where(view.sin_yaw < 0.0, np.float32(1.0), np.float32(-1.0))
    paint_where(np.abs(view.sin_yaw) - 0.12 > 0.0, _ear, canvas, t, view, side, True)


def _ear(t: Traits, view: View, side: Plane, on_top: bool, canvas: Plane) -> None:
    """An ear on one side (-1, 1) of each head."""
    place = side * (t["half_width"] * 0.97)
    box = window(t, (place + side * (0.6 * t["ear_out"]), 0.02, -0.02), (0.26, 0.24), canvas.shape[-1])
    part = box.cut(canvas)
    s, c = view.sin_yaw, view.cos_yaw
    w = np.float32(-0.02)
    facing = np.maximum(-side * s, 0.0)
    y = box.cut(view.y)
    y += (w * c - place * s) * view.sin_pitch - 0.02
    x = box.cut(view.x)
    x -= place * c + w * s + side * c * (0.6 * t["ear_out"])
    x += y * (side * c * 0.09)
    half = t["ear_out"] + 0.03 + 0.10 * facing
    b = y * (1.0 / t["ear_h"])
    a = 0.22 * b
    a += 1.0
    a *= x
    a *= 1.0 / half
    r = np.sqrt(a * a + b * b + 1e-6)
    alpha = cover((1.0 - r) * half, view.pixel)
    inner = ramp(r, 0.80, 0.45)
    a *= side
    inner *= ramp(a, -0.9, 0.2)
    inner *= -0.42
    inner += 1.0
    inner *= level(t) * (0.86 + 0.22 * side * t["light_x"])
    if on_top:
        turned = ramp(facing, 0.12, 0.40)
        alpha *= turned
        r -= 1.0
        dim(part, 0.25 * turned * ramp(np.abs(r, out=r), 0.14, 0.0))
    over(part, t["skin"] * EAR * t["warm_rgb"], alpha, inner)
    box.paste(canvas, part)
