"""What is around the face: background, ears, neck and clothes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .head import View
from .light import Normals, level, lit
from .shapes import Plane, Traits, cover, dim, over, ramp, stretch, stroke, wave
from .some import paint_where
from .window import window

WALL = 6  # side of the random grids behind a face


def background(t: Traits, view: View, grid: Plane) -> Plane:
    """Canvas (B, 3, S, S) of walls, gradients, panels and blurred lights; `grid` (B, 2, WALL, WALL)."""
    size = view.x.shape[-1]
    turn = (t["back_turn"] - 0.5) * 2.0
    along = view.x * turn + view.y * (1.0 - np.abs(turn) * 0.5)
    other = np.roll(t["back_rgb"], 1, axis=1) * (0.5 + 0.9 * t["back_turn"][:, None])
    kind = t["back_kind"]
    tone = stretch(grid[:, 0, :4, :4], size) * (0.35 * ramp(kind, 0.0, 0.5)) + (1.0 + 0.12 * along)
    canvas = np.asarray(t["back_rgb"] * tone[:, None], dtype=np.float32)
    over(canvas, other, 0.8 * ramp(along, -0.7, 0.9) * (kind > 0.3))
    paint_where((kind > 0.55) & (kind < 0.8), _panels, canvas, t, view, along, other)
    paint_where(kind >= 0.8, _lights, canvas, grid[:, 1], other)
    canvas *= (0.55 + 0.5 * level(t))[:, None]
    return canvas


def _panels(t: Traits, view: View, along: Plane, other: Plane, canvas: Plane) -> None:
    stripes = wave(view.x * (0.5 + t["back_hue"]) + t["back_turn"] * 3.0 + 0.1 * along)
    over(canvas, other * 0.6, 0.75 * ramp(stripes, -0.1, 0.1))


def _lights(grid: Plane, other: Plane, canvas: Plane) -> None:
    over(canvas, np.minimum(other * 2.2 + 0.05, 0.95), 0.55 * ramp(stretch(grid, canvas.shape[-1]), 0.05, 0.75))


def body(t: Traits, view: View, canvas: Plane) -> None:
    """Neck with the chin's shadow, shoulders and collar: in the lower part of the picture only."""
    first = canvas.shape[-1] * 9 // 16
    lower = canvas[:, :, first:]
    s, k = view.sin_yaw, view.sin_pitch
    x = view.x[:, first:] + 0.10 * s
    y = view.y[:, first:] - 0.25 * k
    half = t["neck"] * (1.0 + 0.30 * ramp(y, 0.9, 1.35))
    across = np.clip(x / half, -1.0, 1.0)
    n = Normals(across * 0.95, np.full_like(across, 0.25), np.sqrt(1.0 - across * across * 0.9))
    glow = lit(t, n, 0.25) * (0.44 + 0.48 * ramp(y, 0.85, 1.4))
    skin = t["skin"] * t["warm_rgb"] * glow[:, None]
    over(lower, skin, cover(half - np.abs(x), view.pixel))
    vee = np.maximum(0.32 - np.abs(x) * (0.75 + 0.5 * t["collar"]), 0.0)
    shoulder = 1.05 + 0.12 * t["collar"] + vee + 0.30 * np.maximum(np.abs(x) - t["neck"], 0.0)
    wide = np.clip(x * 0.6, -0.9, 0.9)
    cloth_n = Normals(wide, np.full_like(wide, -0.3), np.sqrt(1.0 - wide * wide * 0.9))
    fold = 1.0 + 0.12 * wave(x * 1.7 + y * 0.8 + t["cloth_hue"])
    fold *= lit(t, cloth_n, 0.3) * (1.0 - 0.35 * stroke(y - shoulder, 0.05))
    over(lower, t["cloth_rgb"] * t["warm_rgb"] * fold[:, None], cover(y - shoulder, view.pixel))


def ears(t: Traits, view: View, canvas: Plane, near_only: bool) -> None:
    """Both ears behind the head (each half of the picture has one), or the near one on top of it."""
    box = window(t, np.zeros_like(t["yaw"]), 0.0, (0.44, 1.0), canvas.shape[-1])
    whole, canvas = canvas, box.cut(canvas)
    view = replace(view, x=box.cut(view.x), y=box.cut(view.y))
    s, c = view.sin_yaw, view.cos_yaw
    w = np.float32(-0.02)
    one, other = np.float32(1.0), np.float32(-1.0)
    side = np.where(s < 0.0, one, other) if near_only else np.where(view.x > w * s, one, other)
    facing = np.maximum(-side * s, 0.0)
    u = side * (t["half_width"] * 0.97)
    y = view.y + (w * c - u * s) * view.sin_pitch - 0.02
    x = view.x - (u * c + w * s) - side * (c * (0.6 * t["ear_out"] - 0.09 * y))
    half = t["ear_out"] + 0.03 + 0.10 * facing
    b = y / t["ear_h"]
    a = x / half * (1.0 + 0.22 * b)
    r = np.sqrt(a * a + b * b + 1e-6)
    alpha = cover((1.0 - r) * half, view.pixel)
    light = level(t) * (0.86 + 0.22 * side * t["light_x"])
    inner = 0.42 * ramp(r, 0.80, 0.45) * ramp(a * side, -0.9, 0.2)
    if near_only:
        turned = ramp(facing, 0.12, 0.40)
        alpha *= turned
        dim(canvas, 0.25 * turned * ramp(np.abs(r - 1.0), 0.14, 0.0))
    colour = t["skin"] * EAR * t["warm_rgb"] * (light * (1.0 - inner))[:, None]
    over(canvas, np.asarray(colour, dtype=np.float32), alpha)
    box.paste(whole, canvas)


EAR = np.array([1.02, 0.90, 0.88], dtype=np.float32)[None, :, None, None]
