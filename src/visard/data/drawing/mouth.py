"""Nose details and mouth."""

from __future__ import annotations

import numpy as np

from .head import Surface
from .shapes import Plane, Traits, bump, cover, dim, over, ramp, spot, stroke

TEETH = np.array([0.72, 0.68, 0.60], dtype=np.float32)[None, :, None, None]
THROAT = np.array([0.055, 0.014, 0.013], dtype=np.float32)[None, :, None, None]


def paint_nose(t: Traits, f: Surface, albedo: Plane) -> None:
    """Nostrils, the crease around the wings and the shade under the tip."""
    u, v = f.u - t["nose_skew"], f.v
    side = np.abs(u)
    dv = v - t["nose_v"]
    hole = spot(side - t["nose_width"] * 0.40, dv - 0.062, t["nose_width"] * 0.36, 0.030)
    wing = side - t["nose_width"] * 0.98
    crease = stroke(wing + 9.6 * (dv - 0.01) * (dv - 0.01), 0.035) * bump((dv - 0.015) * (dv - 0.015) * 110.0)
    under = spot(u, dv - 0.085, t["nose_width"] * 1.05, 0.045)
    dim(albedo, np.minimum(0.85 * hole + 0.34 * crease + 0.30 * under, 0.88))


def paint_mouth(t: Traits, f: Surface, albedo: Plane, pixel: Plane) -> Plane:
    """Lips, teeth and the dark between; returns the plane of the lower lip for its gloss."""
    u = f.u - t["mouth_skew"] * 0.4
    p = u / t["mouth_w"]
    arc = 1.0 - p * p
    safe = np.maximum(arc, 0.0)
    q = f.v - t["mouth_v"] - t["corner"] * (p * p - 0.35) - t["mouth_skew"] * p * 0.5
    gap = t["gap"] * safe
    bow = 1.0 - t["cupid"] * bump(p * p * 22.0) * 0.8
    up = t["lip_up"] * safe * bow * (1.25 - 0.25 * safe)
    low = t["lip_low"] * safe * (1.3 - 0.3 * safe)
    top, split_up, split_low, bottom = -0.35 * gap - up, -0.35 * gap, 0.65 * gap, 0.65 * gap + low
    inside_lips = cover(np.minimum(q - top, bottom - q), pixel * 1.25) * ramp(arc, 0.0, 0.12)
    upper = q < 0.5 * (split_up + split_low)
    tone = np.where(upper, np.float32(0.80), np.float32(1.06)) - 0.10 * ramp(np.abs(p), 0.5, 1.0)
    edge = t["lipstick"] * 0.12 + 0.80
    over(albedo, t["lip_rgb"] * tone[:, None], inside_lips * edge)
    # line between the lips, with dimples at the corners
    line = stroke(q - 0.15 * gap, 0.018 + 0.25 * pixel) * ramp(arc, -0.10, 0.10)
    pit = spot(np.abs(p) - 1.0, q, 0.16, 0.04)
    dim(albedo, np.minimum(0.62 * line + 0.18 * pit, 0.85))
    # open mouth
    hole = cover(np.minimum(q - split_up, split_low - q), pixel) * ramp(gap, 0.004, 0.02)
    inner = np.zeros_like(albedo) + THROAT
    teeth = ramp(split_low - q, 0.1 * gap, 0.35 * gap + 0.004) * (1.0 - ramp(np.abs(p), 0.62, 0.92))
    over(inner, TEETH, teeth * (0.35 + 0.6 * np.clip(t["smile"], 0.0, 1.0)))
    over(albedo, inner, hole)
    dim(albedo, 0.22 * spot(u, q - bottom - 0.035, t["mouth_w"] * 0.75, 0.045))
    return inside_lips * (1.0 - hole) * spot(u, q - 0.5 * (split_low + bottom), t["mouth_w"] * 0.5, 0.03)
