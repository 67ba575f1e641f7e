"""Skin: tone, blush, freckles, moles, wrinkles, beard."""

from __future__ import annotations

import numpy as np

from visard.data.synthetic.geometry import (
    Patch,
    Plane,
    Surface,
    Traits,
    at_least,
    at_most,
    bump,
    cover,
    dim,
    noise,
    over,
    paint_where,
    ramp,
    spot,
    stroke,
)

BLUSH = (0.10, -0.34, -0.26)  # change per channel where blood shows
CREASE = (0.75, 0.95, 1.0)  # darkening per channel in a line


def paint_skin(t: Traits, f: Surface, texture: Plane) -> Plane:
    """Albedo (B, 3, S, S) of bare skin with everything that belongs to it."""
    mottle = noise(texture, f.u * 11.0 + 8.0, f.v * 11.0 + 8.0)
    mottle *= 0.8 * t["rough"]
    mottle += 1.0
    albedo = np.empty((len(mottle), 3, *mottle.shape[1:]), dtype=np.float32)
    for k in range(3):
        np.multiply(mottle, t["skin"][:, k], out=albedo[:, k])
    return albedo


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
    dots = ramp(noise(texture, f.u * 26.0, f.v * 26.0), 0.25, 0.6)
    dots *= spot(f.u, f.v - 0.1, 0.75, 0.4)
    dim(albedo, 0.4 * dots)


def paint_mole(f: Patch, u: Plane, v: Plane, pixel: Plane, albedo: Plane) -> None:
    """A mole at the face point (u, v)."""
    du, dv = f.u - u, f.v - v
    dim(albedo, 0.75 * cover(0.026 - np.sqrt(du * du + dv * dv), pixel))


def paint_wrinkles(t: Traits, f: Patch, albedo: Plane) -> None:
    """Lines of age and expression, as darker skin."""
    lines = _fold(t, f)
    lines += _forehead(t, f)
    lines += _eye_lines(t, f)
    mouth = stroke(f.side - t["mouth_w"] * 1.08, 0.035)  # from the corners of the mouth down
    mouth *= spot(f.u, f.v - (t["mouth_v"] + 0.11), 1.0, 0.13)
    mouth *= 0.45 * t["old"]
    lines += mouth
    at_most(lines, 0.8)
    for k, depth in enumerate(CREASE):
        albedo[:, k] *= 1.0 - depth * lines


def _fold(t: Traits, f: Patch) -> Plane:
    """Nasolabial fold: from the wing of the nose outward past the corner of the mouth."""
    down = f.v - (t["nose_v"] - 0.04)
    line = down * (-0.55 - 0.10 * t["smile"])
    line += f.side
    line -= t["nose_width"] * 0.95 + 0.045
    out = stroke(line, 0.055)
    out *= t["fold"]
    out *= ramp(down, -0.03, 0.1)
    out *= ramp(down, 0.36, 0.18)
    return out


def _forehead(t: Traits, f: Patch) -> Plane:
    """Lines across the forehead and between the brows."""
    rows = f.u * f.u
    rows *= 0.10
    rows += f.v
    rows -= t["brow_v"] - 0.12
    rows *= 8.5
    rows -= np.floor(rows)
    rows -= 0.5
    rows *= rows
    rows *= 12.0
    out = bump(rows)
    top = np.maximum(t["front"], -0.93)
    out *= ramp(f.v, top + 0.05, top + 0.18)
    out *= ramp(f.v, t["brow_v"] - 0.08, t["brow_v"] - 0.16)
    out *= ramp(f.side, 0.5, 0.3)
    frown = stroke(f.side - 0.05, 0.025)
    frown *= spot(f.u, f.v - (t["brow_v"] + 0.03), 0.2, 0.1)
    frown *= 0.5
    out += frown
    out *= t["furrow"]
    return out


def _eye_lines(t: Traits, f: Patch) -> Plane:
    """Crow's feet, rays from the outer corner of the eye; bags and dark rings under the eyes."""
    du, dv = f.side - (t["eye_u"] + t["eye_w"]), f.v - t["eye_v"]
    ray = dv / at_least(du + 0.03, 0.02)
    fan = ray * 1.6
    fan -= np.floor(fan)
    fan -= 0.5
    fan *= fan
    fan *= 9.0
    crow = bump(fan)
    crow *= ramp(du, 0.0, 0.03)
    crow *= ramp(du, 0.16, 0.08)
    crow *= ramp(np.abs(ray, out=ray), 1.2, 0.7)
    crow *= t["crow"]
    du += t["eye_w"] + 0.01
    dv -= t["lid_low"]
    uu = du * du
    ring = 1.1 * uu
    ring += dv
    ring -= 0.085
    ring = stroke(ring, 0.035)
    ring *= 0.75
    dv -= 0.05
    ring += 0.35 * spot(du, dv, 0.17, 0.08)
    uu *= 26.0
    ring *= bump(uu)
    ring *= t["bag"]
    crow += ring
    return crow


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
    over(albedo, t["beard_rgb"], np.clip(alpha, 0.0, 0.96), 1.0 + 0.35 * hairs)


# ----------
# Eyes and brows.

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


# ----------
# Nose details and mouth.

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
