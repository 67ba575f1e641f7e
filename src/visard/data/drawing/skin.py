"""Skin: tone, blush, freckles, moles, wrinkles, beard."""

from __future__ import annotations

import numpy as np

from .head import Surface
from .shapes import Plane, Traits, bump, cover, dim, noise, over, ramp, spot, stroke


def paint_skin(t: Traits, f: Surface, texture: Plane) -> Plane:
    """Albedo (B, 3, S, S) of bare skin with everything that belongs to it."""
    u, v = f.u, f.v
    side = np.abs(u)
    mottle = noise(texture, u * 7.0 + 8.0, v * 7.0 + 8.0) * 0.6 + noise(texture, u * 17.0, v * 17.0) * 0.4
    albedo = np.asarray(t["skin"] * (1.0 + t["rough"] * mottle)[:, None], dtype=np.float32)
    flush = 0.16 * spot(side - 0.42, v - 0.17, 0.36, 0.32) + 0.14 * spot(u, v - t["nose_v"] + 0.02, 0.22, 0.2)
    flush = flush + t["rosy"] * 0.85 * spot(side - 0.43, v - 0.15 + 0.04 * t["smile"], 0.27, 0.23)
    albedo *= 1.0 + flush[:, None] * BLUSH
    return albedo


def paint_freckles(f: Surface, texture: Plane, albedo: Plane) -> None:
    """Freckles over the nose and cheeks."""
    dots = ramp(noise(texture, f.u * 26.0, f.v * 26.0), 0.25, 0.6)
    dim(albedo, 0.4 * dots * spot(f.u, f.v - 0.1, 0.75, 0.4))


def paint_mole(f: Surface, u: Plane, v: Plane, pixel: Plane, albedo: Plane) -> None:
    """A mole at the face point (u, v)."""
    du, dv = f.u - u, f.v - v
    dim(albedo, 0.75 * cover(0.026 - np.sqrt(du * du + dv * dv), pixel))


BLUSH = np.array([0.10, -0.34, -0.26], dtype=np.float32)[None, :, None, None]


def paint_wrinkles(t: Traits, f: Surface, albedo: Plane) -> None:
    """Lines of age and expression, as darker skin."""
    u, v = f.u, f.v
    side = np.abs(u)
    # nasolabial fold: from the wing of the nose outward past the corner of the mouth
    down = v - t["nose_v"] + 0.04
    line = side - t["nose_width"] * 0.95 - 0.045 - 0.55 * down - (0.10 * t["smile"]) * down
    lines = t["fold"] * stroke(line, 0.055) * ramp(down, -0.03, 0.1) * (1.0 - ramp(down, 0.18, 0.36))
    # forehead
    rows = (v - t["brow_v"] + 0.12 + 0.10 * u * u) * 8.5
    crest = rows - np.floor(rows) - 0.5
    top = np.maximum(t["front"], -0.93)
    forehead = ramp(v, top + 0.05, top + 0.18) * (1.0 - ramp(v, t["brow_v"] - 0.16, t["brow_v"] - 0.08))
    lines = lines + t["furrow"] * bump(crest * crest * 12.0) * forehead * (1.0 - ramp(side, 0.3, 0.5))
    # crow's feet: rays from the outer corner of the eye
    du, dv = side - t["eye_u"] - t["eye_w"], v - t["eye_v"]
    ray = dv / np.maximum(du + 0.03, 0.02)
    fan = ray * 1.6 - np.floor(ray * 1.6) - 0.5
    near = ramp(du, 0.0, 0.03) * (1.0 - ramp(du, 0.08, 0.16)) * (1.0 - ramp(np.abs(ray), 0.7, 1.2))
    lines = lines + t["crow"] * bump(fan * fan * 9.0) * near
    # between the brows, and from the corners of the mouth down
    lines = lines + 0.5 * t["furrow"] * stroke(side - 0.05, 0.025) * spot(u, v - t["brow_v"] - 0.03, 0.2, 0.1)
    lines = lines + 0.45 * t["old"] * stroke(side - t["mouth_w"] * 1.08, 0.035) * spot(
        u, v - t["mouth_v"] - 0.11, 1.0, 0.13
    )
    # bags and dark rings under the eyes
    eu, ev = side - t["eye_u"] + 0.01, v - t["eye_v"] - t["lid_low"]
    ring = ev - 0.085 + 1.1 * eu * eu
    lines = lines + t["bag"] * (0.75 * stroke(ring, 0.035) + 0.35 * spot(eu, ev - 0.05, 0.17, 0.08)) * bump(
        eu * eu * 26.0
    )
    albedo *= 1.0 - np.minimum(lines, 0.8)[:, None] * CREASE


CREASE = np.array([0.75, 0.95, 1.0], dtype=np.float32)[None, :, None, None]


def paint_beard(t: Traits, f: Surface, texture: Plane, albedo: Plane) -> None:
    """Stubble, moustache, goatee, full beard."""
    u, v = f.u, f.v
    side = np.abs(u)
    q = v - t["mouth_v"] - t["corner"] * 0.6 * (u * u) / (t["mouth_w"] * t["mouth_w"])
    hairs = noise(texture, u * 30.0 + 3.0, v * 14.0)
    lips = spot(u, q - 0.3 * t["gap"], t["mouth_w"], t["lip_low"] + t["lip_up"] + 0.5 * t["gap"])
    cheek = v + 0.75 * (side - 0.42) + 0.02 * hairs
    jaw = ramp(cheek, 0.28, 0.40) * ramp(v + 1.5 * np.maximum(side - 0.4, 0.0), 0.36, 0.46)
    top = t["nose_v"] + 0.085 + 0.18 * side
    bottom = -0.012 - 0.35 * t["gap"]
    lip = ramp(v - top, -0.02, 0.03) * (1.0 - ramp(q, bottom, bottom + 0.04))
    lip *= 1.0 - ramp(side, t["mouth_w"] * 0.85, t["mouth_w"] * 1.3)
    drop = ramp(q, t["lip_low"] + t["gap"] - 0.005, t["lip_low"] + t["gap"] + 0.07)
    tuft = drop * (1.0 - ramp(side, 0.13, 0.25))
    ring = stroke(side - t["mouth_w"] * 1.1, 0.07) * ramp(v - top, -0.02, 0.05)
    below = drop * (1.0 - ramp(side, 0.3, 0.45))
    thick = np.maximum(t["mustache"] * lip, t["beard"] * np.maximum(jaw, below))
    thick = np.maximum(thick, t["goatee"] * np.maximum(tuft, t["mustache"] * ring))
    shadow = np.maximum(np.maximum(jaw, lip), below)
    thin = shadow * (0.46 * t["stubble"])
    alpha = np.maximum(thick * (0.80 + 0.16 * hairs), thin * (0.85 + 0.25 * hairs))
    alpha *= 1.0 - np.minimum(lips * 3.0, 1.0) * (1.0 - t["mustache"] * lip)
    over(albedo, t["beard_rgb"] * (1.0 + 0.35 * hairs[:, None]), np.clip(alpha, 0.0, 0.96))
