"""Nose details and mouth."""

from __future__ import annotations

import numpy as np

from .head import Patch
from .shapes import Plane, Traits, at_most, bump, cover, dim, over, ramp, spot, stroke
from .some import paint_where

TEETH = np.array([0.72, 0.68, 0.60], dtype=np.float32)[None, :, None, None]
THROAT = np.array([0.055, 0.014, 0.013], dtype=np.float32)[None, :, None, None]


def paint_nose(t: Traits, f: Patch, albedo: Plane) -> None:
    """Nostrils, the crease around the wings and the shade under the tip."""
    u = f.u - t["nose_skew"]
    side = np.abs(u)
    dv = f.v - (t["nose_v"] + 0.01)
    dark = spot(side - t["nose_width"] * 0.40, dv - 0.052, t["nose_width"] * 0.36, 0.030)
    dark *= 0.85
    dark += 0.30 * spot(u, dv - 0.075, t["nose_width"] * 1.05, 0.045)
    wing = dv * dv
    wing *= 9.6
    wing += side
    wing -= t["nose_width"] * 0.98
    crease = stroke(wing, 0.035)
    crease *= stroke(dv - 0.005, 0.0953)
    crease *= 0.34
    dark += crease
    dim(albedo, at_most(dark, 0.88))


def paint_mouth(t: Traits, f: Patch, albedo: Plane, pixel: Plane) -> Plane:
    """Lips, teeth and the dark between; returns the plane of the lower lip for its gloss."""
    u = f.u - t["mouth_skew"] * 0.4
    p = u * (1.0 / t["mouth_w"])
    pp = p * p
    arc = 1.0 - pp
    safe = np.clip(arc, 0.0, np.inf)
    q = f.v - (t["mouth_v"] - 0.35 * t["corner"])
    q -= t["corner"] * pp
    q -= (0.5 * t["mouth_skew"]) * p
    gap = t["gap"] * safe
    pp *= 22.0
    up = bump(pp)  # the bow of the upper lip
    up *= -0.8 * t["cupid"]
    up += 1.0
    up *= safe
    up *= 1.25 - 0.25 * safe
    up *= t["lip_up"]
    up += 0.35 * gap
    low = 1.3 - 0.3 * safe
    low *= safe
    low *= t["lip_low"]
    low += 0.65 * gap
    lips = np.minimum(q + up, low - q)
    lips = cover(lips, pixel * 1.25)
    lips *= ramp(arc, 0.0, 0.12)
    side = np.abs(p)
    middle = q - 0.15 * gap
    tone = middle * 1e9  # 0.80 above the line between the lips, 1.06 below it
    np.clip(tone, 0.0, 1.0, out=tone)
    tone *= 0.26
    tone += 0.80
    tone -= 0.10 * ramp(side, 0.5, 1.0)
    over(albedo, t["lip_rgb"], lips * (t["lipstick"] * 0.12 + 0.80), tone)
    # line between the lips, with dimples at the corners
    line = stroke(middle, 0.018 + 0.25 * pixel)
    line *= ramp(arc, -0.10, 0.10)
    line *= 0.62
    line += 0.18 * spot(side - 1.0, q, 0.16, 0.04)
    dim(albedo, at_most(line, 0.85))
    paint_where(t["gap"] > 0.0, _open, albedo, t, side, q, gap, pixel)
    dim(albedo, 0.22 * spot(u, q - low - 0.035, t["mouth_w"] * 0.75, 0.045))
    lips *= spot(u, q - 0.5 * low - 0.325 * gap, t["mouth_w"] * 0.5, 0.03)
    return lips


def _open(t: Traits, side: Plane, q: Plane, gap: Plane, pixel: Plane, albedo: Plane) -> None:
    """The dark between open lips, and teeth in it."""
    above, below = q + 0.35 * gap, 0.65 * gap - q
    hole = cover(np.minimum(above, below), pixel)
    hole *= ramp(gap, 0.004, 0.02)
    teeth = ramp(below, 0.1 * gap, 0.35 * gap + 0.004)
    teeth *= ramp(side, 0.92, 0.62)
    teeth *= 0.35 + 0.6 * np.clip(t["smile"], 0.0, 1.0)
    inner = np.empty_like(albedo)
    inner[...] = THROAT
    over(inner, TEETH, teeth)
    over(albedo, inner, hole)
