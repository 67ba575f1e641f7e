"""The parts painted on a face: skin and its lines, beard, eyes and brows, nose and mouth."""

from __future__ import annotations

import numpy as np

from visard.data.synthetic.head import Patch, Surface
from visard.data.synthetic.planes import (
    Plane,
    Traits,
    at_least,
    at_most,
    between,
    bump,
    cover,
    dim,
    noise,
    over,
    paint_where,
    ramp,
    rgb,
    spot,
    stroke,
)  # fmt: skip

BLUSH = (0.10, -0.34, -0.26)  # change per channel where blood shows
CREASE = (0.75, 0.95, 1.0)  # darkening per channel in a line
SCLERA, LASH = rgb(0.60, 0.57, 0.55), rgb(0.022, 0.016, 0.014)
TEETH, THROAT = rgb(0.72, 0.68, 0.60), rgb(0.055, 0.014, 0.013)


def paint_skin(t: Traits, f: Surface, texture: Plane) -> Plane:
    """Albedo (B, 3, S, S) of bare skin."""
    mottle = noise(texture, f.u * 11.0 + 8.0, f.v * 11.0 + 8.0) * (0.8 * t["rough"]) + 1.0
    return np.asarray(mottle[:, None] * t["skin"])


def paint_blush(t: Traits, f: Patch, albedo: Plane) -> None:
    """Blood in cheeks and nose."""
    side = f.side - 0.42
    flush = 0.16 * spot(side, f.v - 0.17, 0.36, 0.32)
    flush += 0.14 * spot(f.u, f.v - (t["nose_v"] - 0.02), 0.22, 0.2)
    flush += (0.85 * t["rosy"]) * spot(side, f.v - (0.15 - 0.04 * t["smile"]), 0.27, 0.23)
    for k, change in enumerate(BLUSH):
        albedo[:, k] *= change * flush + 1.0


def paint_freckles(f: Patch, texture: Plane, albedo: Plane) -> None:
    """Freckles over the nose and cheeks."""
    dots = ramp(noise(texture, f.u * 26.0, f.v * 26.0), 0.25, 0.6) * spot(f.u, f.v - 0.1, 0.75, 0.4)
    dim(albedo, 0.4 * dots)


def paint_mole(f: Patch, u: Plane, v: Plane, pixel: Plane, albedo: Plane) -> None:
    """A mole at the face point (u, v)."""
    du, dv = f.u - u, f.v - v
    dim(albedo, 0.75 * cover(0.026 - np.sqrt(du * du + dv * dv), pixel))


def paint_wrinkles(t: Traits, f: Patch, albedo: Plane) -> None:
    """Lines of age and expression, as darker skin."""
    lines = _fold(t, f) + _forehead(t, f) + _eye_lines(t, f)
    mouth = stroke(f.side - t["mouth_w"] * 1.08, 0.035)  # from the corners of the mouth down
    lines += mouth * spot(f.u, f.v - (t["mouth_v"] + 0.11), 1.0, 0.13) * (0.45 * t["old"])
    at_most(lines, 0.8)
    for k, depth in enumerate(CREASE):
        albedo[:, k] *= 1.0 - depth * lines


def _fold(t: Traits, f: Patch) -> Plane:
    """Nasolabial fold: from the wing of the nose outward past the corner of the mouth."""
    down = f.v - (t["nose_v"] - 0.04)
    line = down * (-0.55 - 0.10 * t["smile"]) + f.side - (t["nose_width"] * 0.95 + 0.045)
    return stroke(line, 0.055) * t["fold"] * ramp(down, -0.03, 0.1) * ramp(down, 0.36, 0.18)


def _forehead(t: Traits, f: Patch) -> Plane:
    """Lines across the forehead and between the brows."""
    rows = (f.u * f.u * 0.10 + f.v - (t["brow_v"] - 0.12)) * 8.5
    rows = rows - np.floor(rows) - 0.5
    top = np.maximum(t["front"], -0.93)
    lines = bump(rows * rows * 12.0) * ramp(f.v, top + 0.05, top + 0.18)
    lines = lines * ramp(f.v, t["brow_v"] - 0.08, t["brow_v"] - 0.16) * ramp(f.side, 0.5, 0.3)
    frown = stroke(f.side - 0.05, 0.025) * spot(f.u, f.v - (t["brow_v"] + 0.03), 0.2, 0.1) * 0.5
    return np.asarray((lines + frown) * t["furrow"])


def _eye_lines(t: Traits, f: Patch) -> Plane:
    """Crow's feet, rays from the outer corner of the eye; bags and dark rings under the eyes."""
    du, dv = f.side - (t["eye_u"] + t["eye_w"]), f.v - t["eye_v"]
    ray = dv / at_least(du + 0.03, 0.02)
    fan = ray * 1.6
    fan = fan - np.floor(fan) - 0.5
    crow = bump(fan * fan * 9.0) * ramp(du, 0.0, 0.03) * ramp(du, 0.16, 0.08)
    crow = crow * ramp(np.abs(ray), 1.2, 0.7) * t["crow"]
    du = du + (t["eye_w"] + 0.01)
    dv = dv - t["lid_low"]
    uu = du * du
    ring = stroke(1.1 * uu + dv - 0.085, 0.035) * 0.75 + 0.35 * spot(du, dv - 0.05, 0.17, 0.08)
    return np.asarray(crow + ring * bump(uu * 26.0) * t["bag"])


def paint_beard(t: Traits, f: Patch, texture: Plane, albedo: Plane) -> None:
    """Stubble, moustache, goatee, full beard."""
    u, v, side = f.u, f.v, f.side
    q = v - t["mouth_v"] - t["corner"] * 0.6 * (u * u) / (t["mouth_w"] * t["mouth_w"])
    hairs = noise(texture, u * 30.0 + 3.0, v * 14.0)
    lips = spot(u, q - 0.3 * t["gap"], t["mouth_w"], t["lip_low"] + t["lip_up"] + 0.5 * t["gap"])
    cheek = v + 0.75 * (side - 0.42) + 0.02 * hairs
    jaw = ramp(cheek, 0.28, 0.40) * ramp(v + 1.5 * at_least(side - 0.4, 0.0), 0.36, 0.46)
    top = t["nose_v"] + 0.085 + 0.18 * side
    bottom = -0.012 - 0.35 * t["gap"]
    lip = ramp(v - top, -0.02, 0.03) * (1.0 - ramp(q, bottom, bottom + 0.04))
    lip *= 1.0 - ramp(side, t["mouth_w"] * 0.85, t["mouth_w"] * 1.3)
    drop = ramp(q, t["lip_low"] + t["gap"] - 0.005, t["lip_low"] + t["gap"] + 0.07)
    tuft = drop * ramp(side, 0.25, 0.13)
    ring = stroke(side - t["mouth_w"] * 1.1, 0.07) * ramp(v - top, -0.02, 0.05)
    below = drop * ramp(side, 0.45, 0.3)
    thick = np.maximum(t["mustache"] * lip, t["beard"] * np.maximum(jaw, below))
    thick = np.maximum(thick, t["goatee"] * np.maximum(tuft, t["mustache"] * ring))
    shadow = np.maximum(np.maximum(jaw, lip), below)
    thin = shadow * (0.46 * t["stubble"])
    alpha = np.maximum(thick * (0.80 + 0.16 * hairs), thin * (0.85 + 0.25 * hairs))
    alpha *= 1.0 - at_most(lips * 3.0, 1.0) * (1.0 - t["mustache"] * lip)
    over(albedo, t["beard_rgb"], between(alpha, 0.0, 0.96), 1.0 + 0.35 * hairs)


def paint_eyes(t: Traits, f: Patch, albedo: Plane, pixel: Plane) -> Plane:
    """Lids, whites, iris, pupil and lashes onto the albedo; returns the plane of the eye's own highlight."""
    hand = between(f.u * 1e9, -1.0, 1.0)  # the sign of u, for the price of a product and a clip
    eu = f.side - t["eye_u"]
    ev = f.v - t["eye_v"] - t["eye_tilt"] * eu - t["eye_skew"] * hand
    p = eu * (1.0 / t["eye_w"])
    arc = 1.0 - p * p
    bow = np.clip(arc, -0.4, np.inf)
    upper = (t["eye_lean"] * p + 1.0) * bow * t["lid_up"] + ev
    lower = bow * t["lid_low"] - ev
    # shade above the opening, the crease of the upper lid, the line of the lower one
    shade = spot(eu, ev + (t["lid_up"] + 0.045), t["eye_w"] * 1.35, 0.10) * 0.22
    shade += stroke(upper + t["crease"], 0.022) * ramp(arc, -0.35, 0.25) * 0.50
    shade += stroke(lower + 0.012, 0.026) * ramp(arc, -0.1, 0.4) * 0.24
    dim(albedo, at_most(shade, 0.7))
    # the eyeball: white that darkens to the corners and under the lid, iris with a dark rim, pupil
    opening = cover(np.minimum(upper, lower) * 0.9, pixel) * ramp(arc, 0.0, 0.08)
    white = 1.0 - 0.35 * ramp(np.abs(p), 0.5, 1.0) - 0.30 * ramp(upper, 0.05, 0.0)
    eyeball = (white * (1.0 - 0.3 * t["melanin"]))[:, None] * SCLERA
    iu, iv = eu - t["gaze_x"] * hand, ev + (0.016 - t["gaze_y"])
    r = np.sqrt(iu * iu + iv * iv)
    tone = 1.15 - 0.75 * ramp(r, 0.62 * t["iris"], t["iris"]) - 0.35 * ramp(iv, 0.02, -0.05)
    over(eyeball, t["iris_rgb"], cover(t["iris"] - r, pixel), tone)
    over(eyeball, LASH * 0.6, cover(t["iris"] * 0.42 - r, pixel))
    over(albedo, eyeball, opening)
    width = 0.017 + 0.008 * (1.0 - t["male"]) + 0.008 * t["lipstick"]
    width = (np.clip(p, -1.0, 1.0) * 0.5 + 1.0) * width + 0.3 * pixel
    over(albedo, LASH, stroke(upper + 0.004, width) * ramp(arc, -0.16, 0.1) * 0.92)
    iu -= 0.030 * t["light_x"] * hand
    iv -= 0.030 * t["light_y"] - 0.004
    return np.asarray(spot(iu, iv, 0.034, 0.034) * opening * 0.7)


def paint_brows(t: Traits, f: Patch, texture: Plane, albedo: Plane, pixel: Plane) -> None:
    """Eyebrows: an arched, tapering band of short hairs."""
    run = (f.side - t["brow_in"]) * (1.0 / (t["brow_out"] - t["brow_in"]))
    q = run - 0.6
    q = q * q * (-4.0 * t["brow_arch"]) + (0.6 * t["brow_slope"]) * run + f.v
    q -= t["brow_v"] - t["brow_arch"] + 0.24 * t["brow_slope"]
    half = (ramp(run, 0.45, 1.05) * -0.62 + 1.0) * ramp(run, -0.25, 0.2) * t["brow_t"] + 0.25 * pixel
    alpha = ramp(np.abs(q) / at_least(half, 0.004), 1.25, 0.55) * ramp(run, -0.06, 0.10) * ramp(run, 1.08, 0.93)
    hairs = noise(texture, f.u * 20.0 + 5.0, (0.5 * f.side + f.v) * 20.0)
    alpha *= hairs * (0.22 * t["brow_alpha"]) + 0.88 * t["brow_alpha"]
    over(albedo, t["brow_rgb"], at_most(alpha, 0.97))


def paint_nose(t: Traits, f: Patch, albedo: Plane) -> None:
    """Nostrils, the crease around the wings and the shade under the tip."""
    u, width = f.u - t["nose_skew"], t["nose_width"]
    side = np.abs(u)
    dv = f.v - (t["nose_v"] + 0.01)
    dark = spot(side - width * 0.40, dv - 0.052, width * 0.36, 0.030) * 0.85
    dark += 0.30 * spot(u, dv - 0.075, width * 1.05, 0.045)
    dark += stroke(dv * dv * 9.6 + side - width * 0.98, 0.035) * stroke(dv - 0.005, 0.0953) * 0.34
    dim(albedo, at_most(dark, 0.88))


def paint_mouth(t: Traits, f: Patch, albedo: Plane, pixel: Plane) -> Plane:
    """Lips, teeth and the dark between; returns the plane of the lower lip for its gloss."""
    u = f.u - t["mouth_skew"] * 0.4
    p = u * (1.0 / t["mouth_w"])
    pp = p * p
    arc = 1.0 - pp
    safe = np.clip(arc, 0.0, np.inf)
    q = f.v - (t["mouth_v"] - 0.35 * t["corner"]) - t["corner"] * pp - (0.5 * t["mouth_skew"]) * p
    gap = t["gap"] * safe
    bow = bump(pp * 22.0) * (-0.8 * t["cupid"]) + 1.0  # of the upper lip
    up = bow * safe * (1.25 - 0.25 * safe) * t["lip_up"] + 0.35 * gap
    low = (1.3 - 0.3 * safe) * safe * t["lip_low"] + 0.65 * gap
    lips = cover(np.minimum(q + up, low - q), pixel * 1.25) * ramp(arc, 0.0, 0.12)
    side = np.abs(p)
    middle = q - 0.15 * gap
    # 0.80 above the line between the lips, 1.06 below it
    tone = between(middle * 1e9, 0.0, 1.0) * 0.26 + 0.80 - 0.10 * ramp(side, 0.5, 1.0)
    over(albedo, t["lip_rgb"], lips * (t["lipstick"] * 0.12 + 0.80), tone)
    # line between the lips, with dimples at the corners
    line = stroke(middle, 0.018 + 0.25 * pixel) * ramp(arc, -0.10, 0.10) * 0.62 + 0.18 * spot(side - 1.0, q, 0.16, 0.04)
    dim(albedo, at_most(line, 0.85))
    paint_where(t["gap"] > 0.0, _open, albedo, t, side, q, gap, pixel)
    dim(albedo, 0.22 * spot(u, q - low - 0.035, t["mouth_w"] * 0.75, 0.045))
    return lips * spot(u, q - 0.5 * low - 0.325 * gap, t["mouth_w"] * 0.5, 0.03)


def _open(t: Traits, side: Plane, q: Plane, gap: Plane, pixel: Plane, albedo: Plane) -> None:
    """The dark between open lips, and teeth in it."""
    above, below = q + 0.35 * gap, 0.65 * gap - q
    hole = cover(np.minimum(above, below), pixel) * ramp(gap, 0.004, 0.02)
    teeth = ramp(below, 0.1 * gap, 0.35 * gap + 0.004) * ramp(side, 0.92, 0.62)
    inner = np.broadcast_to(THROAT, albedo.shape).copy()
    over(inner, TEETH, teeth * (0.35 + 0.6 * np.clip(t["smile"], 0.0, 1.0)))
    over(albedo, inner, hole)
