"""All of a picture but the face: light, hair, glasses and hats, background, ears, neck and clothes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visard.data.synthetic.head import Patch, Shell, Surface, View, meet, nose
from visard.data.synthetic.planes import (
    Plane,
    Traits,
    at_least,
    at_most,
    between,
    cover,
    dim,
    noise,
    over,
    paint_where,
    ramp,
    rgb,
    slope,
    stretch,
    stroke,
    wave,
    window,
)  # fmt: skip

GLASS, DARK = rgb(0.90, 0.94, 1.0), rgb(0.020, 0.018, 0.020)
EAR = rgb(1.02, 0.90, 0.88)
WALL = 6  # side of the random grids behind a face


@dataclass(frozen=True)
class Normals:
    """Unit normals in the camera frame."""

    x: Plane
    y: Plane
    z: Plane

    def along(self, x: Plane, y: Plane, z: Plane) -> Plane:
        """Scalar product with one vector per picture."""
        return np.asarray(self.x * x + self.y * y + self.z * z)


def normals(z: Plane, pixel: Plane) -> Normals:
    """Normals of a depth plane; slopes are bounded because depth jumps at outlines."""
    dx, dy = (between(d, -3.0, 3.0) for d in slope(z, pixel))
    return _unit(dx, dy, np.full((1, 1, 1), -1.0, dtype=np.float32))


def _unit(dx: Plane, dy: Plane, dz: Plane) -> Normals:
    """-(dx, dy, dz) with length 1."""
    inverse = -1.0 / np.sqrt(dx * dx + dy * dy + dz * dz)
    return Normals(dx * inverse, dy * inverse, dz * inverse)


def rounded(n: Normals, f: Surface, pixel: Plane) -> Normals:
    """Normals that turn outwards on the outline, where those from depth are unreliable."""
    w = ramp(f.margin, 0.02 + 1.5 * pixel, 0.0)
    keep = w - 1.0
    return _unit(n.x * keep + f.inward_x * w, n.y * keep + f.inward_y * w, n.z * keep - w * 0.3)


def _round(x: Plane, most: float, down: float) -> Normals:
    """Normals, nearly of unit length, of something upright and round, x from -1 to 1 across it; bounds x in place."""
    between(x, -most, most)
    return Normals(x, np.full((1, 1, 1), down, dtype=np.float32), np.sqrt(x * x * -0.9 + 1.0))


def level(t: Traits) -> Plane:
    """Light (B, 1, 1) on something that faces the camera: for parts without normals of their own."""
    return np.asarray(t["ambient"] + t["fill"] + t["key"] * (0.25 + 0.5 * t["light_z"]), dtype=np.float32)


def _main(t: Traits, toward: Plane, wrap: float) -> Plane:
    """Main light on a surface whose normals have the scalar product `toward` with it: wrapped Lambert."""
    return at_least(toward + wrap, 0.0) * (t["key"] * (1.0 / (1.0 + wrap)))


def _soft(t: Traits, n: Normals) -> Plane:
    """Sky from above and fill from the camera."""
    return np.asarray(n.z * t["fill"] + t["ambient"] * (0.9 - 0.35 * n.y))


def lit(t: Traits, n: Normals, wrap: float) -> Plane:
    """Light on a surface (B, S, S)."""
    return _main(t, n.along(t["light_x"], t["light_y"], t["light_z"]), wrap) + _soft(t, n)


def gloss(t: Traits, n: Normals) -> Plane:
    """Blinn highlight (n·h)^16 of the main light, by repeated squaring."""
    hx, hy, hz = t["light_x"], t["light_y"], t["light_z"] + 1.0
    inverse = 1.0 / np.sqrt(hx * hx + hy * hy + hz * hz)
    s = at_least(n.along(hx * inverse, hy * inverse, hz * inverse), 0.0)
    for _ in range(4):
        s *= s
    return s * t["key"]


def nose_shadow(t: Traits, f: Patch) -> Plane:
    """Share of the main light that passes the nose: is the nose higher than the ray a short way to the light?"""
    step = np.float32(0.16)
    rise = step * t["light_z"] / np.sqrt(1.0 - t["light_z"] * t["light_z"] + 0.08)
    flat = 1.0 / np.sqrt(t["light_x"] * t["light_x"] + t["light_y"] * t["light_y"] + 0.02)
    there = nose(t, f.u + step * t["light_x"] * flat, f.v + step * t["light_y"] * flat)
    return ramp(there - nose(t, f.u, f.v) - 0.55 * rise, 0.0, 0.13) * -0.6 + 1.0


def shade_skin(t: Traits, albedo: Plane, n: Normals, shadow: Plane, shine: Plane) -> None:
    """Skin under light, in place: red light wraps further round a terminator than green and blue (scattering)."""
    toward = n.along(t["light_x"], t["light_y"], t["light_z"])
    soft = _soft(t, n)
    bright = gloss(t, n) * shadow * shine
    red, rest = (_main(t, toward, wrap) * shadow + soft for wrap in (0.38, 0.20))
    for k, light in enumerate((red, rest, rest)):
        albedo[:, k] = (albedo[:, k] * light + bright) * t["warm_rgb"][:, k]


@dataclass(frozen=True)
class Hair:
    """The shell of the hair, its lit colour, and its opacity behind and in front of the head."""

    surface: Surface
    normals: Normals
    colour: Plane
    behind: Plane
    front: Plane
    shade: Plane  # soft shadow on what lies under its edge


def grow(t: Traits, view: View, texture: Plane) -> Hair:
    """Style the hair of each picture: a shell over the skull, seen behind the neck, over the forehead and beside it."""
    hang, thick, curl = t["hang"], t["shell"], t["curl"]
    shell = Shell(
        width=t["half_width"] + thick * (0.75 + 0.25 * hang), depth=t["half_depth"] + thick,
        top=t["top"] - thick, bottom=t["chin"] + 0.25 + 1.1 * hang,
        square=0.5 + 0.4 * hang, taper=0.16 * (1.0 - hang), forward=0.1 * (1.0 - hang),
    )  # fmt: skip
    f = meet(view, shell)
    apart = f.u - 0.6 * t["part"]
    fan = apart / (at_least(f.v - t["top"], 0.0) + 0.45)
    fine = noise(texture, fan * 21.0 + 1.0, f.v * (2.0 + 12.0 * curl))
    tousle = noise(texture, fan * (9.0 - 3.0 * curl) + 4.0, f.v * (1.3 + 5.0 * curl) + 2.0) * 0.6 + 0.4 * fine
    wild = 0.012 + 0.05 * curl
    edge = cover(tousle * wild + f.margin - 0.4 * wild, view.pixel * 1.2)
    depth = _line(t, f, apart) + (0.05 + 0.03 * curl) * tousle - f.v
    soft = 0.045 + 0.4 * view.pixel
    front = ramp(depth, -soft, soft) * ramp(f.v, t["side_top"] - 0.05, t["side_top"] + 0.08) * edge
    edge *= 1.0 - t["bald"]
    shade = ramp(depth, -0.22, 0.0) * edge
    behind = ramp(0.06 * tousle - f.v, -0.20 - t["length"], -0.04 - t["length"]) * edge
    n = normals(f.z, view.pixel)
    return Hair(f, n, _colour(t, f, n, tousle, fine), behind, front, shade)


def _line(t: Traits, f: Surface, apart: Plane) -> Plane:
    """Height of the hairline: fringe or forehead, bare temples, locks falling from the parting, the sides."""
    hang = t["hang"]
    r = np.abs(f.u) / np.sqrt(f.wide)
    line = ramp(r, 0.0, 0.75) * 0.10 + t["sweep"] * f.u + t["front"]
    line -= ramp(r, 0.15, 0.5) * ramp(r, 0.86, 0.72) * t["temple"]
    line += t["drape"] * at_most(np.abs(apart), 0.7)
    return np.asarray(line + ramp(r, 0.80 - 0.06 * hang, 0.97 - 0.05 * hang) * (t["side"] - line))


def _colour(t: Traits, f: Surface, n: Normals, tousle: Plane, fine: Plane) -> Plane:
    """Lit hair (B, 3, S, S): less light near the hairline and lower down between the locks, a band of gloss."""
    value = (ramp(f.v, -0.6, 0.6) * -0.28 + 1.0) * lit(t, n, 0.5) * (0.5 * tousle + 1.0)
    band = gloss(t, Normals(n.x * 0.6, n.y, n.z)) * ((fine * 0.6 + 0.55) * (1.0 - 0.6 * t["curl"]))
    own, bright = t["hair_rgb"] * t["warm_rgb"], (t["hair_rgb"] * 0.9 + 0.012) * t["warm_rgb"]
    return np.asarray(value[:, None] * own + band[:, None] * bright)


def plane_at(view: View, depth: Plane) -> tuple[Plane, Plane]:
    """Face coordinates (u, v) of each pixel on the plane w = depth in front of the face."""
    u = (view.x - depth * view.sin_yaw) / view.cos_yaw
    z1 = depth * view.cos_yaw - u * view.sin_yaw
    v = (view.y + z1 * view.sin_pitch) / view.cos_pitch
    return u, v


def glasses(t: Traits, view: View, f: Surface, canvas: Plane) -> None:
    """Frames of many shapes, clear or dark lenses, arms along the temples, a reflection."""
    u, v = plane_at(view, t["half_depth"] + 0.06)
    side = np.abs(u)
    half_w, half_h = 0.215 + 0.05 * t["frame_size"], 0.135 + 0.075 * t["frame"]
    centre = np.maximum(t["eye_u"], half_w + 0.055)
    x, y = (side - centre) / half_w, (v - t["eye_v"] - 0.025) / half_h
    xx, yy = x * x, y * y
    boxy = t["frame_size"]
    # between an ellipse (x² + y²) and a rounded box (x⁴ + y⁴)
    form = np.sqrt((1.0 - boxy) * (xx + yy) * (xx + yy) + boxy * (xx * xx + yy * yy) * 1.15)
    gap = (np.sqrt(form) - 1.0) * half_h
    thick = 0.012 + 0.022 * t["frame_dark"] * t["frame_dark"] + 0.3 * view.pixel
    rim = cover(thick - np.abs(gap), view.pixel)
    lens = cover(-gap, view.pixel)
    bridge = cover(thick - np.abs(v - t["eye_v"] + 0.03 - 0.5 * u * u), view.pixel)
    bridge *= cover(centre - half_w - side, view.pixel)
    arm = cover(thick * 0.9 - np.abs(f.v - t["eye_v"] + 0.04), view.pixel)
    arm *= ramp(np.abs(f.u), centre + half_w - 0.02, centre + half_w + 0.02)
    light = level(t)
    dim(canvas, 0.10 * cover(0.03 - np.abs(gap - 0.03), view.pixel) * ramp(y, -0.2, 0.6))
    tint = lens * (0.06 + 0.86 * t["shaded"])
    over(canvas, DARK + GLASS * 0.02, tint)
    streak = stroke(x - 0.5 * y - 1.2 * (t["glare"] - 0.5), 0.45) * ramp(t["glare"], 0.55, 1.0)
    over(canvas, GLASS * light[:, None], lens * 0.40 * streak * ramp(y, 0.6, -0.8))
    metal = light * (1.0 + 0.8 * ramp(y, -0.3, -1.2))
    frame = np.maximum(np.maximum(rim, bridge), arm * cover(f.margin, view.pixel))
    over(canvas, t["frame_rgb"] * t["warm_rgb"], frame, metal)


def hat(t: Traits, view: View, hair: Hair, texture: Plane, canvas: Plane) -> None:
    """A knitted cap, a cap with a peak or a hat with a wide brim."""
    knit, peaked, wide = ((t["hat_kind"] == kind).astype(np.float32) for kind in (0.0, 1.0, 2.0))
    f = hair.surface
    inside = cover(f.margin, view.pixel)
    hem = -0.60 + 0.05 * (t["hat_shade"] - 0.5) - 0.06 * knit
    dome = inside * cover(hem - f.v, view.pixel * 1.3)
    ribs = knit * (0.14 * wave(f.u * 9.0) + 0.10 * wave(f.v * 7.0)) + 0.05 * noise(texture, f.u * 9.0, f.v * 9.0)
    band = ramp(f.v, hem - 0.20, hem - 0.17)
    tone = (1.0 + ribs - 0.38 * band * (1.0 - 0.6 * knit)) * lit(t, hair.normals, 0.3)
    cloth = t["hat_rgb"] * t["warm_rgb"]
    # shadow of the brim on the forehead
    brim_shadow = ramp(f.v, hem - 0.05, hem) * (1.0 - ramp(f.v, hem + 0.06, hem + 0.36)) * inside
    dim(canvas, brim_shadow * (0.18 * knit + 0.5 * peaked + 0.55 * wide))
    over(canvas, cloth, dome, tone)
    u, v = plane_at(view, 0.55 + 0.55 * peaked)
    reach = 0.62 * peaked + 1.20 * wide + 0.01
    drop = 0.115 * peaked + 0.13 * wide + 0.01
    bow = at_most(np.abs(u) / reach, 1.0)  # of a cap's peak: falls off to the sides
    x, y = u / reach, (v - hem + 0.10 * peaked - 0.16 * (bow * bow) * peaked - 0.05) / drop
    brim = cover((1.0 - np.sqrt(x * x + y * y + 1e-6)) * drop, view.pixel) * (peaked + wide)
    light = level(t) * (1.0 - 0.45 * ramp(y, -0.6, 0.9))
    over(canvas, cloth, brim, 0.85 * light)


def covers(t: Traits, view: View, f: Surface, canvas: Plane) -> None:
    """Now and then a mask, a hand-high object or a rod hides part of the face."""
    kind = t["cover_kind"]
    mask, block, bar = kind < 0.4, (kind >= 0.4) & (kind < 0.75), kind >= 0.75
    light = level(t)
    colour = np.asarray(t["cover_rgb"] * light[:, None] * t["warm_rgb"], dtype=np.float32)
    upper = 0.16 + 0.5 * f.u * f.u
    fabric = cover(f.margin, view.pixel) * cover(f.v - upper, view.pixel)
    fabric *= cover(t["chin"] + 0.02 - f.v, view.pixel * 1.5)
    pleat = 1.0 + 0.08 * wave(f.v * 6.0) - 0.25 * np.abs(f.u)
    over(canvas, colour, fabric * mask, pleat)
    turn = (t["cover_turn"] - 0.5) * 1.6
    x, y = view.x - (t["cover_x"] - 0.5) * 1.5, view.y - 0.75 + 0.9 * t["cover_y"]
    a, b = x + turn * y, y - turn * x
    side = np.maximum(np.abs(a) - 0.30, np.abs(b) - 0.24)
    over(canvas, colour, cover(-side, view.pixel * 1.5) * block, 0.9 + 0.3 * b)
    rod = 0.07 - np.abs(a + 0.15 * (t["cover_y"] - 0.5))
    over(canvas, colour, cover(rod, view.pixel * 1.5) * bar)


def background(t: Traits, view: View, grid: Plane) -> Plane:
    """Canvas (B, 3, S, S) of walls, gradients, panels and blurred lights; `grid` (B, 2, WALL, WALL)."""
    turn = (t["back_turn"] - 0.5) * 2.0
    along = view.x * turn + view.y * (1.0 - np.abs(turn) * 0.5)
    light = (0.55 + 0.5 * level(t))[:, None]
    wall = t["back_rgb"] * light
    other = np.roll(wall, 1, axis=1) * (0.5 + 0.9 * t["back_turn"][:, None])
    kind = t["back_kind"]
    tone = stretch(grid[:, 0, :4, :4], view.x.shape[-1]) * (0.35 * ramp(kind, 0.0, 0.5)) + (1.0 + 0.12 * along)
    canvas = np.asarray(tone[:, None] * wall)
    paint_where(kind > 0.3, lambda slope, o, part: over(part, o, 0.8 * ramp(slope, -0.7, 0.9)), canvas, along, other)
    paint_where((kind > 0.55) & (kind < 0.8), _panels, canvas, t, view.x, along, other)
    paint_where(kind >= 0.8, _lights, canvas, grid[:, 1], other, light)
    return canvas


def _panels(t: Traits, x: Plane, along: Plane, other: Plane, canvas: Plane) -> None:
    stripes = wave(x * (0.5 + t["back_hue"]) + t["back_turn"] * 3.0 + 0.1 * along)
    over(canvas, other * 0.6, 0.75 * ramp(stripes, -0.1, 0.1))


def _lights(grid: Plane, other: Plane, light: Plane, canvas: Plane) -> None:
    bright = np.minimum(other * 2.2 + 0.05 * light, 0.95 * light)
    over(canvas, bright, 0.55 * ramp(stretch(grid, canvas.shape[-1]), 0.05, 0.75))


def body(t: Traits, view: View, canvas: Plane) -> None:
    """Neck with the chin's shadow, shoulders and collar: in the lower part of the picture only."""
    first = canvas.shape[-1] * 9 // 16
    lower = canvas[:, :, first:]
    x = view.x[:, first:] + 0.10 * view.sin_yaw
    y = view.y[:, first:] - 0.25 * view.sin_pitch
    side = np.abs(x)
    half = ramp(y, 0.9, 1.35) * (0.30 * t["neck"]) + t["neck"]
    glow = lit(t, _round(x / half, 1.0, 0.25), 0.25) * (0.48 * ramp(y, 0.85, 1.4) + 0.44)
    over(lower, t["skin"] * t["warm_rgb"], cover(half - side, view.pixel), glow)
    shoulder = at_least(0.32 - side * (0.75 + 0.5 * t["collar"]), 0.0) + 0.30 * at_least(side - t["neck"], 0.0)
    y = y - shoulder - (1.05 + 0.12 * t["collar"])
    fold = wave(x * 1.7 + view.y[:, first:] * 0.8 + t["cloth_hue"]) * 0.12 + 1.0
    fold = fold * (1.0 - 0.35 * stroke(y, 0.05)) * lit(t, _round(x * 0.6, 0.9, -0.3), 0.3)
    over(lower, t["cloth_rgb"] * t["warm_rgb"], cover(y, view.pixel), fold)


def ears(t: Traits, view: View, canvas: Plane) -> None:
    """Both ears, behind the head."""
    for side in (-1.0, 1.0):
        _ear(t, view, np.full_like(t["yaw"], side), False, canvas)


def near_ear(t: Traits, view: View, canvas: Plane) -> None:
    """The ear that a turned head shows, on top of the head."""
    side = np.where(view.sin_yaw < 0.0, np.float32(1.0), np.float32(-1.0))
    paint_where(np.abs(view.sin_yaw) - 0.12 > 0.0, _ear, canvas, t, view, side, True)


def _ear(t: Traits, view: View, side: Plane, on_top: bool, canvas: Plane) -> None:
    """An ear on one side (-1, 1) of each head."""
    place = side * (t["half_width"] * 0.97)
    box = window(t, (place + side * (0.6 * t["ear_out"]), 0.02, -0.02), (0.26, 0.24), canvas.shape[-1])
    part = box.cut(canvas)
    s, c = view.sin_yaw, view.cos_yaw
    w = np.float32(-0.02)
    facing = np.maximum(-side * s, 0.0)
    y = box.cut(view.y) + ((w * c - place * s) * view.sin_pitch - 0.02)
    x = box.cut(view.x) - (place * c + w * s + side * c * (0.6 * t["ear_out"])) + y * (side * c * 0.09)
    half = t["ear_out"] + 0.03 + 0.10 * facing
    b = y * (1.0 / t["ear_h"])
    a = (0.22 * b + 1.0) * x * (1.0 / half)
    r = np.sqrt(a * a + b * b + 1e-6)
    alpha = cover((1.0 - r) * half, view.pixel)
    inner = ramp(r, 0.80, 0.45) * ramp(a * side, -0.9, 0.2) * -0.42 + 1.0
    if on_top:
        turned = ramp(facing, 0.12, 0.40)
        alpha *= turned
        dim(part, 0.25 * turned * ramp(np.abs(r - 1.0), 0.14, 0.0))
    over(part, t["skin"] * EAR * t["warm_rgb"], alpha, inner * (level(t) * (0.86 + 0.22 * side * t["light_x"])))
    box.paste(canvas, part)
