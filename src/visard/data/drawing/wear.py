"""What hides parts of a face: glasses, hats, and things in front of the camera."""

from __future__ import annotations

import numpy as np

from .hair import Hair
from .head import Surface
from .light import level, lit
from .section import View
from .shapes import Plane, Traits, at_most, cover, dim, noise, over, ramp, stroke, wave

GLASS = np.array([0.90, 0.94, 1.0], dtype=np.float32)[None, :, None, None]
DARK = np.array([0.020, 0.018, 0.020], dtype=np.float32)[None, :, None, None]


def plane_at(view: View, depth: Plane) -> tuple[Plane, Plane]:
    """Face coordinates (u, v) of each pixel on the plane w = depth in front of the face."""
    u = (view.x - depth * view.sin_yaw) / view.cos_yaw
    z1 = depth * view.cos_yaw - u * view.sin_yaw
    v = (view.y + z1 * view.sin_pitch) / view.cos_pitch
    return u, v


def glasses(t: Traits, view: View, f: Surface, canvas: Plane) -> None:
    """Frames of many shapes, clear or dark lenses, arms along the temples, a reflection."""
    u, v = plane_at(view, t["half_depth"] + 0.06)
    side = np.abs(u)
    half_w, half_h = 0.215 + 0.05 * t["frame_size"], 0.135 + 0.075 * t["frame"]
    centre = np.maximum(t["eye_u"], half_w + 0.055)
    x, y = (side - centre) / half_w, (v - t["eye_v"] - 0.025) / half_h
    xx, yy = x * x, y * y
    boxy = t["frame_size"]
    # between an ellipse (x² + y²) and a rounded box (x⁴ + y⁴)
    form = np.sqrt((1.0 - boxy) * (xx + yy) * (xx + yy) + boxy * (xx * xx + yy * yy) * 1.15)
    gap = (np.sqrt(form) - 1.0) * half_h
    thick = 0.012 + 0.022 * t["frame_dark"] * t["frame_dark"] + 0.3 * view.pixel
    rim = cover(thick - np.abs(gap), view.pixel)
    lens = cover(-gap, view.pixel)
    bridge = cover(thick - np.abs(v - t["eye_v"] + 0.03 - 0.5 * u * u), view.pixel) * cover(
        centre - half_w - side, view.pixel
    )
    arm = cover(thick * 0.9 - np.abs(f.v - t["eye_v"] + 0.04), view.pixel) * ramp(
        np.abs(f.u), centre + half_w - 0.02, centre + half_w + 0.02
    )
    light = level(t)
    dim(canvas, 0.10 * cover(0.03 - np.abs(gap - 0.03), view.pixel) * ramp(y, -0.2, 0.6))
    tint = lens * (0.06 + 0.86 * t["shaded"])
    over(canvas, DARK + GLASS * 0.02, tint)
    streak = stroke(x - 0.5 * y - 1.2 * (t["glare"] - 0.5), 0.45) * ramp(t["glare"], 0.55, 1.0)
    over(canvas, GLASS * light[:, None], lens * 0.40 * streak * ramp(y, 0.6, -0.8))
    metal = light * (1.0 + 0.8 * ramp(y, -0.3, -1.2))
    frame = np.maximum(np.maximum(rim, bridge), arm * cover(f.margin, view.pixel))
    over(canvas, t["frame_rgb"] * t["warm_rgb"], frame, metal)


def hat(t: Traits, view: View, hair: Hair, texture: Plane, canvas: Plane) -> None:
    """A knitted cap, a cap with a peak or a hat with a wide brim."""
    knit, peaked, wide = ((t["hat_kind"] == kind).astype(np.float32) for kind in (0.0, 1.0, 2.0))
    f = hair.surface
    inside = cover(f.margin, view.pixel)
    hem = -0.60 + 0.05 * (t["hat_shade"] - 0.5) - 0.06 * knit
    dome = inside * cover(hem - f.v, view.pixel * 1.3)
    ribs = knit * (0.14 * wave(f.u * 9.0) + 0.10 * wave(f.v * 7.0)) + 0.05 * noise(texture, f.u * 9.0, f.v * 9.0)
    band = ramp(f.v, hem - 0.20, hem - 0.17)
    tone = (1.0 + ribs - 0.38 * band * (1.0 - 0.6 * knit)) * lit(t, hair.normals, 0.3)
    cloth = t["hat_rgb"] * t["warm_rgb"]
    # shadow of the brim on the forehead
    brim_shadow = ramp(f.v, hem - 0.05, hem) * (1.0 - ramp(f.v, hem + 0.06, hem + 0.36)) * inside
    dim(canvas, brim_shadow * (0.18 * knit + 0.5 * peaked + 0.55 * wide))
    over(canvas, cloth, dome, tone)
    u, v = plane_at(view, 0.55 + 0.55 * peaked)
    reach = 0.62 * peaked + 1.20 * wide + 0.01
    drop = 0.115 * peaked + 0.13 * wide + 0.01
    x, y = u / reach, (v - hem + 0.10 * peaked - 0.16 * x_squared(u, reach) * peaked - 0.05) / drop
    brim = cover((1.0 - np.sqrt(x * x + y * y + 1e-6)) * drop, view.pixel) * (peaked + wide)
    light = level(t) * (1.0 - 0.45 * ramp(y, -0.6, 0.9))
    over(canvas, cloth, brim, 0.85 * light)


def x_squared(u: Plane, reach: Plane) -> Plane:
    """Bow of a cap's peak: falls off to the sides."""
    q = at_most(np.abs(u) / reach, 1.0)
    return q * q


def covers(t: Traits, view: View, f: Surface, canvas: Plane) -> None:
    """Now and then a mask, a hand-high object or a rod hides part of the face."""
    kind = t["cover_kind"]
    mask, block, bar = kind < 0.4, (kind >= 0.4) & (kind < 0.75), kind >= 0.75
    light = level(t)
    colour = np.asarray(t["cover_rgb"] * light[:, None] * t["warm_rgb"], dtype=np.float32)
    upper = 0.16 + 0.5 * f.u * f.u
    fabric = (
        cover(f.margin, view.pixel) * cover(f.v - upper, view.pixel) * cover(t["chin"] + 0.02 - f.v, view.pixel * 1.5)
    )
    pleat = 1.0 + 0.08 * wave(f.v * 6.0) - 0.25 * np.abs(f.u)
    over(canvas, colour, fabric * mask, pleat)
    turn = (t["cover_turn"] - 0.5) * 1.6
    x, y = view.x - (t["cover_x"] - 0.5) * 1.5, view.y - 0.75 + 0.9 * t["cover_y"]
    a, b = x + turn * y, y - turn * x
    side = np.maximum(np.abs(a) - 0.30, np.abs(b) - 0.24)
    over(canvas, colour, cover(-side, view.pixel * 1.5) * block, 0.9 + 0.3 * b)
    rod = 0.07 - np.abs(a + 0.15 * (t["cover_y"] - 0.5))
    over(canvas, colour, cover(rod, view.pixel * 1.5) * bar)
