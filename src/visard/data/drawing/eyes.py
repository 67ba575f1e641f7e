"""Eyes and brows."""

from __future__ import annotations

import numpy as np

from .head import Surface
from .shapes import Plane, Traits, cover, dim, noise, over, ramp, spot, stroke

SCLERA = np.array([0.60, 0.57, 0.55], dtype=np.float32)[None, :, None, None]
LASH = np.array([0.022, 0.016, 0.014], dtype=np.float32)[None, :, None, None]
WHITE = np.ones((1, 3, 1, 1), dtype=np.float32)


def paint_eyes(t: Traits, f: Surface, albedo: Plane, pixel: Plane) -> Plane:
    """Lids, whites, iris, pupil and lashes onto the albedo; returns the plane of the eye's own highlight."""
    u, v = f.u, f.v
    hand = np.where(u > 0.0, np.float32(1.0), np.float32(-1.0))
    side = u * hand
    eu = side - t["eye_u"]
    ev = v - t["eye_v"] - t["eye_tilt"] * eu - t["eye_skew"] * hand
    p = eu / t["eye_w"]
    arc = 1.0 - p * p
    lid = t["lid_up"] * np.maximum(arc, -0.4) * (1.0 + t["eye_lean"] * p)
    low = t["lid_low"] * np.maximum(arc, -0.4)
    upper, lower = ev + lid, low - ev
    # eyelid: shade above the opening, crease line, line of the lower lid
    shade = 0.22 * spot(eu, ev + t["lid_up"] + 0.045, t["eye_w"] * 1.35, 0.10)
    line = 0.50 * stroke(upper + t["crease"], 0.022) * ramp(arc, -0.35, 0.25)
    line = line + 0.24 * stroke(lower + 0.012, 0.026) * ramp(arc, -0.1, 0.4)
    dim(albedo, np.minimum(shade + line, 0.7))
    corner = 0.35 * ramp(np.abs(p), 0.5, 1.0) + 0.30 * ramp(upper, 0.05, 0.0)
    opening = cover(np.minimum(upper, lower) * 0.9, pixel) * ramp(arc, 0.0, 0.08)
    eyeball = SCLERA * ((1.0 - 0.3 * t["melanin"]) * (1.0 - corner))[:, None]
    iu, iv = eu - t["gaze_x"] * hand, ev + 0.016 - t["gaze_y"]
    r = np.sqrt(iu * iu + iv * iv)
    rim = ramp(r, 0.62 * t["iris"], t["iris"])
    iris = t["iris_rgb"] * (1.15 - 0.75 * rim - 0.35 * ramp(iv, 0.02, -0.05))[:, None]
    over(eyeball, iris, cover(t["iris"] - r, pixel))
    over(eyeball, LASH * 0.6, cover(t["iris"] * 0.42 - r, pixel))
    over(albedo, eyeball, opening)
    weight = (0.017 + 0.008 * (1.0 - t["male"]) + 0.008 * t["lipstick"]) * (1.0 + 0.5 * np.clip(p, -1.0, 1.0))
    lash = stroke(upper + 0.004, weight + 0.3 * pixel) * ramp(arc, -0.16, 0.1)
    over(albedo, LASH, np.minimum(0.92 * lash, 0.92))
    gu, gv = iu - 0.030 * t["light_x"] * hand, iv - 0.030 * t["light_y"] + 0.004
    return np.asarray(0.7 * opening * spot(gu, gv, 0.034, 0.034), dtype=np.float32)


def paint_brows(t: Traits, f: Surface, texture: Plane, albedo: Plane, pixel: Plane) -> None:
    """Eyebrows: an arched, tapering band of short hairs."""
    u, v = f.u, f.v
    side = np.abs(u)
    run = (side - t["brow_in"]) / (t["brow_out"] - t["brow_in"])
    arch = t["brow_arch"] * (1.0 - 4.0 * (run - 0.6) * (run - 0.6)) + t["brow_slope"] * (run - 0.4) * 0.6
    q = v - t["brow_v"] + arch
    half = t["brow_t"] * (1.0 - 0.62 * ramp(run, 0.45, 1.05)) * ramp(run, -0.25, 0.2)
    hairs = noise(texture, u * 20.0 + 5.0, (v + 0.5 * side) * 20.0)
    band = 1.0 - ramp(np.abs(q) / np.maximum(half + 0.25 * pixel, 0.004), 0.55, 1.25)
    ends = ramp(run, -0.06, 0.10) * (1.0 - ramp(run, 0.93, 1.08))
    over(albedo, t["brow_rgb"], np.clip(band * ends * t["brow_alpha"] * (0.88 + 0.22 * hairs), 0.0, 0.97))
