"""Light: normals from depth, soft Lambert, sky and fill, highlights, the shadow of the nose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .head import Surface, nose
from .shapes import Plane, Traits, ramp, slope


@dataclass(frozen=True)
class Normals:
    """Unit normals in the camera frame."""

    x: Plane
    y: Plane
    z: Plane


def normals(z: Plane, pixel: Plane, steepest: float = 3.0) -> Normals:
    """Normals of a depth plane; slopes are bounded because depth jumps at outlines."""
    dx, dy = slope(z, pixel)
    dx, dy = np.clip(dx, -steepest, steepest), np.clip(dy, -steepest, steepest)
    inverse = 1.0 / np.sqrt(dx * dx + dy * dy + 1.0)
    return Normals(-dx * inverse, -dy * inverse, inverse)


def rounded(n: Normals, margin: Plane, pixel: Plane) -> Normals:
    """Normals that turn outwards on the outline, where those from depth are unreliable; `margin` as in Surface."""
    gx, gy = slope(margin, pixel)
    w = ramp(margin, 0.02 + 1.5 * pixel, 0.0)
    keep = 1.0 - w
    x, y, z = n.x * keep - gx * w, n.y * keep - gy * w, n.z * keep + 0.3 * w
    inverse = 1.0 / np.sqrt(x * x + y * y + z * z)
    return Normals(x * inverse, y * inverse, z * inverse)


def level(t: Traits) -> Plane:
    """Light (B, 1, 1) on something that faces the camera: for parts without normals of their own."""
    return np.asarray(t["ambient"] + t["fill"] + t["key"] * (0.25 + 0.5 * t["light_z"]), dtype=np.float32)


def lit(t: Traits, n: Normals, wrap: float, shadow: Plane | None = None) -> Plane:
    """Light on a surface (B, S, S): wrapped Lambert + sky from above + fill from the camera."""
    toward = n.x * t["light_x"] + n.y * t["light_y"] + n.z * t["light_z"]
    key = np.maximum((toward + wrap) * (1.0 / (1.0 + wrap)), 0.0) * t["key"]
    if shadow is not None:
        key = key * shadow
    return np.asarray(key + t["ambient"] * (0.9 - 0.35 * n.y) + t["fill"] * n.z, dtype=np.float32)


def gloss(t: Traits, n: Normals) -> Plane:
    """Blinn highlight (n·h)^16 of the main light, by repeated squaring."""
    hx, hy, hz = t["light_x"], t["light_y"], t["light_z"] + 1.0
    inverse = 1.0 / np.sqrt(hx * hx + hy * hy + hz * hz)
    s = np.maximum((n.x * hx + n.y * hy + n.z * hz) * inverse, 0.0)
    s = s * s
    s = s * s
    s = s * s
    return np.asarray(s * s * t["key"], dtype=np.float32)


def nose_shadow(t: Traits, f: Surface) -> Plane:
    """Share of the main light that passes the nose: is the nose higher than the ray a short way to the light?"""
    step = np.float32(0.16)
    rise = step * t["light_z"] / np.sqrt(1.0 - t["light_z"] * t["light_z"] + 0.08)
    flat = 1.0 / np.sqrt(t["light_x"] * t["light_x"] + t["light_y"] * t["light_y"] + 0.02)
    there = nose(t, f.u + step * t["light_x"] * flat, f.v + step * t["light_y"] * flat)
    there -= nose(t, f.u, f.v)
    return np.asarray(1.0 - 0.6 * ramp(there - 0.55 * rise, 0.0, 0.13), dtype=np.float32)


def shade_skin(t: Traits, albedo: Plane, n: Normals, shadow: Plane, shine: Plane | float) -> Plane:
    """Skin under light: red light wraps further round a terminator than green and blue (scattering)."""
    red = lit(t, n, 0.38, shadow)
    rest = lit(t, n, 0.20, shadow)
    out = np.empty_like(albedo)
    out[:, 0] = albedo[:, 0] * red
    out[:, 1:] = albedo[:, 1:] * rest[:, None]
    out += (gloss(t, n) * shadow * shine)[:, None]
    out *= t["warm_rgb"]
    return out
