"""Skin: tone, blush, freckles, moles, wrinkles, beard."""

from __future__ import annotations

import numpy as np

from .head import Patch, Surface
from .shapes import Plane, Traits, at_least, at_most, bump, cover, dim, noise, over, ramp, spot, stroke

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
