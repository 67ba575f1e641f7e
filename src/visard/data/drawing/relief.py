"""Relief of a face over the skull: nose, eyes and brows, lips and chin, cheeks."""

from __future__ import annotations

import numpy as np

from .shapes import Plane, Traits, bump, ramp, spot
from .window import Window, window


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
