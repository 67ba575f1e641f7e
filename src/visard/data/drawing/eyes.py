"""Eyes and brows."""

from __future__ import annotations

import numpy as np

from .head import Patch
from .shapes import Plane, Traits, at_least, at_most, cover, dim, noise, over, ramp, spot, stroke

SCLERA = np.array([0.60, 0.57, 0.55], dtype=np.float32)[None, :, None, None]
LASH = np.array([0.022, 0.016, 0.014], dtype=np.float32)[None, :, None, None]


def paint_eyes(t: Traits, f: Patch, albedo: Plane, pixel: Plane) -> Plane:
    """Lids, whites, iris, pupil and lashes onto the albedo; returns the plane of the eye's own highlight."""
    hand = f.u * 1e9  # the sign of u, for the price of a product and a clip
    np.clip(hand, -1.0, 1.0, out=hand)
    eu = f.side - t["eye_u"]
    ev = f.v - t["eye_v"]
    ev -= t["eye_tilt"] * eu
    ev -= t["eye_skew"] * hand
    p = eu * (1.0 / t["eye_w"])
    arc = p * p
    np.subtract(1.0, arc, out=arc)
    bow = np.clip(arc, -0.4, np.inf)
    upper = t["eye_lean"] * p
    upper += 1.0
    upper *= bow
    upper *= t["lid_up"]
    upper += ev
    lower = bow
    lower *= t["lid_low"]
    lower -= ev
    _lids(t, albedo, (eu, ev), arc, (upper, lower))
    opening = np.minimum(upper, lower)
    opening *= 0.9
    opening = cover(opening, pixel)
    opening *= ramp(arc, 0.0, 0.08)
    # the eyeball: white that darkens to the corners and under the lid, iris with a dark rim, pupil
    white = 1.0 - 0.35 * ramp(np.abs(p), 0.5, 1.0)
    white -= 0.30 * ramp(upper, 0.05, 0.0)
    white *= 1.0 - 0.3 * t["melanin"]
    iu, iv = eu - t["gaze_x"] * hand, ev + (0.016 - t["gaze_y"])
    r = iu * iu
    r += iv * iv
    np.sqrt(r, out=r)
    tone = 1.15 - 0.75 * ramp(r, 0.62 * t["iris"], t["iris"])
    tone -= 0.35 * ramp(iv, 0.02, -0.05)
    iris, pupil = cover(t["iris"] - r, pixel), cover(t["iris"] * 0.42 - r, pixel)
    eyeball = np.empty_like(albedo)
    for k in range(3):
        np.multiply(white, SCLERA[:, k], out=eyeball[:, k])
    over(eyeball, t["iris_rgb"], iris, tone)
    over(eyeball, LASH * 0.6, pupil)
    over(albedo, eyeball, opening)
    width = np.clip(p, -1.0, 1.0)
    width *= 0.5
    width += 1.0
    width *= 0.017 + 0.008 * (1.0 - t["male"]) + 0.008 * t["lipstick"]
    width += 0.3 * pixel
    lash = stroke(upper + 0.004, width)
    lash *= ramp(arc, -0.16, 0.1)
    lash *= 0.92
    over(albedo, LASH, lash)
    iu -= 0.030 * t["light_x"] * hand
    iv -= 0.030 * t["light_y"] - 0.004
    gleam = spot(iu, iv, 0.034, 0.034)
    gleam *= opening
    gleam *= 0.7
    return gleam


def _lids(t: Traits, albedo: Plane, at: tuple[Plane, Plane], arc: Plane, lids: tuple[Plane, Plane]) -> None:
    """Shade above the opening, the crease of the upper lid, the line of the lower one."""
    eu, ev = at
    upper, lower = lids
    shade = spot(eu, ev + (t["lid_up"] + 0.045), t["eye_w"] * 1.35, 0.10)
    shade *= 0.22
    line = stroke(upper + t["crease"], 0.022)
    line *= ramp(arc, -0.35, 0.25)
    line *= 0.50
    shade += line
    line = stroke(lower + 0.012, 0.026)
    line *= ramp(arc, -0.1, 0.4)
    line *= 0.24
    shade += line
    dim(albedo, at_most(shade, 0.7))


def paint_brows(t: Traits, f: Patch, texture: Plane, albedo: Plane, pixel: Plane) -> None:
    """Eyebrows: an arched, tapering band of short hairs."""
    run = f.side - t["brow_in"]
    run *= 1.0 / (t["brow_out"] - t["brow_in"])
    q = run - 0.6
    q *= q
    q *= -4.0 * t["brow_arch"]
    q += (0.6 * t["brow_slope"]) * run
    q += f.v
    q -= t["brow_v"] - t["brow_arch"] + 0.24 * t["brow_slope"]
    half = ramp(run, 0.45, 1.05)
    half *= -0.62
    half += 1.0
    half *= ramp(run, -0.25, 0.2)
    half *= t["brow_t"]
    half += 0.25 * pixel
    at_least(half, 0.004)
    np.abs(q, out=q)
    q /= half
    alpha = ramp(q, 1.25, 0.55)
    alpha *= ramp(run, -0.06, 0.10)
    alpha *= ramp(run, 1.08, 0.93)
    hairs = noise(texture, f.u * 20.0 + 5.0, (0.5 * f.side + f.v) * 20.0)
    hairs *= 0.22 * t["brow_alpha"]
    hairs += 0.88 * t["brow_alpha"]
    alpha *= hairs
    over(albedo, t["brow_rgb"], at_most(alpha, 0.97))
