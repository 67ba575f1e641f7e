"""Light: normals from depth, soft Lambert, sky and fill, highlights, the shadow of the nose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .head import Patch, Surface
from .relief import nose
from .shapes import Plane, Traits, at_least, ramp, slope


@dataclass(frozen=True)
class Normals:
    """Unit normals in the camera frame."""

    x: Plane
    y: Plane
    z: Plane

    def along(self, x: Plane, y: Plane, z: Plane) -> Plane:
        """Scalar product with one vector per picture."""
        out = self.x * x
        out += self.y * y
        out += self.z * z
        return out


def normals(z: Plane, pixel: Plane, steepest: float = 3.0) -> Normals:
    """Normals of a depth plane; slopes are bounded because depth jumps at outlines."""
    dx, dy = slope(z, pixel)
    np.clip(dx, -steepest, steepest, out=dx)
    np.clip(dy, -steepest, steepest, out=dy)
    return _unit(dx, dy, np.full((1, 1, 1), -1.0, dtype=np.float32))


def _unit(dx: Plane, dy: Plane, dz: Plane) -> Normals:
    """-(dx, dy, dz) with length 1, in place."""
    inverse = dx * dx
    inverse += dy * dy
    inverse += dz * dz
    np.sqrt(inverse, out=inverse)
    np.divide(-1.0, inverse, out=inverse)
    dx *= inverse
    dy *= inverse
    return Normals(dx, dy, dz * inverse)


def rounded(n: Normals, f: Surface, pixel: Plane) -> Normals:
    """Normals that turn outwards on the outline, where those from depth are unreliable."""
    w = ramp(f.margin, 0.02 + 1.5 * pixel, 0.0)
    keep = w - 1.0
    x, y, z = n.x * keep, n.y * keep, n.z * keep
    x += f.inward_x * w
    y += f.inward_y * w
    w *= 0.3
    z -= w
    return _unit(x, y, z)


def level(t: Traits) -> Plane:
    """Light (B, 1, 1) on something that faces the camera: for parts without normals of their own."""
    return np.asarray(t["ambient"] + t["fill"] + t["key"] * (0.25 + 0.5 * t["light_z"]), dtype=np.float32)


def _main(t: Traits, toward: Plane, wrap: float) -> Plane:
    """Main light on a surface whose normals have the scalar product `toward` with it: wrapped Lambert."""
    out = toward + wrap
    at_least(out, 0.0)
    out *= t["key"] * (1.0 / (1.0 + wrap))
    return out


def _soft(t: Traits, n: Normals) -> Plane:
    """Sky from above and fill from the camera."""
    out = n.z * t["fill"]
    out += t["ambient"] * (0.9 - 0.35 * n.y)
    return out


def lit(t: Traits, n: Normals, wrap: float) -> Plane:
    """Light on a surface (B, S, S)."""
    out = _main(t, n.along(t["light_x"], t["light_y"], t["light_z"]), wrap)
    out += _soft(t, n)
    return out


def gloss(t: Traits, n: Normals) -> Plane:
    """Blinn highlight (n·h)^16 of the main light, by repeated squaring."""
    hx, hy, hz = t["light_x"], t["light_y"], t["light_z"] + 1.0
    inverse = 1.0 / np.sqrt(hx * hx + hy * hy + hz * hz)
    s = n.along(hx * inverse, hy * inverse, hz * inverse)
    at_least(s, 0.0)
    for _ in range(4):
        s *= s
    s *= t["key"]
    return s


def nose_shadow(t: Traits, f: Patch) -> Plane:
    """Share of the main light that passes the nose: is the nose higher than the ray a short way to the light?"""
    step = np.float32(0.16)
    rise = step * t["light_z"] / np.sqrt(1.0 - t["light_z"] * t["light_z"] + 0.08)
    flat = 1.0 / np.sqrt(t["light_x"] * t["light_x"] + t["light_y"] * t["light_y"] + 0.02)
    there = nose(t, f.u + step * t["light_x"] * flat, f.v + step * t["light_y"] * flat)
    there -= nose(t, f.u, f.v)
    there -= 0.55 * rise
    out = ramp(there, 0.0, 0.13)
    out *= -0.6
    out += 1.0
    return out


def shade_skin(t: Traits, albedo: Plane, n: Normals, shadow: Plane, shine: Plane) -> None:
    """Skin under light, in place: red light wraps further round a terminator than green and blue (scattering)."""
    toward = n.along(t["light_x"], t["light_y"], t["light_z"])
    soft = _soft(t, n)
    bright = gloss(t, n)
    bright *= shadow
    bright *= shine
    red, rest = (_main(t, toward, wrap) for wrap in (0.38, 0.20))
    for light in (red, rest):
        light *= shadow
        light += soft
    for k, light in enumerate((red, rest, rest)):
        skin = albedo[:, k]
        skin *= light
        skin += bright
        skin *= t["warm_rgb"][:, k]
