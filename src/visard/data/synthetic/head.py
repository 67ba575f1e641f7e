"""A head: its measures, and its surface, a stack of ellipses with relief that each pixel's ray meets under any pose.

Measures are made of traits: lengths in head units (half a face is about 1), angles, linear colours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from visard.data.synthetic.planes import (
    Plane,
    Traits,
    Window,
    at_least,
    at_most,
    between,
    bump,
    ramp,
    slope,
    spot,
    window,
)
from visard.data.synthetic.traits import BLACK, BLOND, BROWN, GRAY, RED, Column, Columns

HAIR = {
    BLACK: (0.018, 0.014, 0.013),
    BROWN: (0.105, 0.055, 0.030),
    BLOND: (0.560, 0.390, 0.190),
    RED: (0.330, 0.110, 0.035),
    GRAY: (0.400, 0.392, 0.385),
}
LIGHT_SKIN = np.array([0.84, 0.60, 0.47])
MELANIN = np.array([1.70, 2.30, 2.75])  # absorption of the darkest skin per channel
CENTRE = -0.05  # height of the widest ellipse
ROUND = 0.45  # squareness above the centre


def measures(s: Columns) -> dict[str, Plane]:
    """Planes (B, 1, 1) and colours (B, 3, 1, 1), float32, of the pictures with traits `s`."""
    m: dict[str, Column] = {}
    _shape(m, s)
    _eye_measures(m, s)
    _nose_mouth(m, s)
    _hair(m, s)
    for name in ("yaw", "pitch", "roll"):
        m["sin_" + name], m["cos_" + name] = np.sin(s[name]), np.cos(s[name])
    planes = {name: column.astype(np.float32)[:, None, None] for name, column in (s | m).items()}
    tints = {name: rgb.astype(np.float32)[:, :, None, None] for name, rgb in _colours(s).items()}
    return planes | tints


def _shape(m: Columns, s: Columns) -> None:
    plump = np.clip(s["weight"], -1.5, 2.5) + 0.5 * s["chubby"]
    m["plump"] = plump
    m["half_width"] = 0.69 * (1 + 0.040 * s["width"] + 0.040 * plump - 0.035 * s["oval"])
    m["half_depth"] = 0.93 * (1 + 0.03 * s["depth"])
    m["top"] = -1.21 - 0.03 * s["forehead"]
    m["chin"] = 0.96 + 0.040 * s["chin_len"] + 0.02 * s["male"] + 0.02 * s["oval"]
    m["jaw_square"] = np.clip(0.42 + 0.17 * s["jaw_square"] + 0.12 * plump - 0.2 * s["oval"], 0.0, 1.1)
    m["jaw_taper"] = np.clip(0.27 + 0.055 * s["jaw_taper"] - 0.05 * plump + 0.05 * s["oval"], 0.05, 0.45)
    m["chin_forward"] = 0.40 + 0.03 * s["chin_bump"]
    m["chin_bump"] = np.clip(0.06 + 0.022 * s["chin_bump"], 0.0, 0.14)
    m["cheek"] = np.clip(0.05 + 0.018 * s["cheek"] + 0.018 * plump + 0.03 * s["smile"], 0.0, 0.16)
    m["ear_h"], m["ear_out"] = 0.19 * (1 + 0.11 * s["ear_size"]), 0.055 + 0.018 * s["ear_out"]
    m["neck"] = 0.41 * (1 + 0.06 * s["neck"] + 0.05 * plump)


def _eye_measures(m: Columns, s: Columns) -> None:
    m["eye_u"] = 0.325 + 0.020 * s["eye_gap"]
    m["eye_v"] = -0.14 + 0.020 * s["eye_height"]
    m["eye_w"] = 0.158 * (1 + 0.075 * s["eye_width"])
    opening = 0.076 * (1 + 0.15 * s["eye_open"]) * s["lids"]
    m["lid_up"], m["lid_low"] = opening, 0.038 * (1 + 0.1 * s["eye_open"]) * np.minimum(s["lids"], 1.1)
    m["eye_tilt"], m["eye_lean"] = -0.10 - 0.09 * s["eye_tilt"], 0.16 * s["eye_skew"]
    m["crease"] = np.clip(0.036 + 0.014 * s["lid_crease"], 0.004, 0.08)
    m["iris"] = 0.071 * (1 + 0.05 * s["iris_size"])
    m["socket"] = np.clip(0.085 + 0.028 * s["eye_depth"], 0.015, 0.17)
    m["brow_ridge"] = np.clip(0.035 + 0.014 * s["eye_depth"] + 0.015 * s["male"], 0.0, 0.1)
    lift = 0.035 * s["raise"] + 0.012 * s["smile"]
    m["brow_v"] = m["eye_v"] - 0.205 - 0.022 * s["brow_height"] - lift
    m["brow_arch"], m["brow_slope"] = 0.045 + 0.028 * s["brow_arch"], 0.0 - 0.06 * s["brow_slope"]
    thick = np.clip(0.036 + 0.0085 * s["brow_thick"], 0.016, 0.07)
    m["brow_t"] = thick + 0.014 * s["bushy"]
    m["brow_in"] = np.clip(0.135 + 0.03 * s["brow_gap"] - 0.03 * s["bushy"], 0.05, 0.24)
    m["brow_out"] = m["eye_u"] + m["eye_w"] * (1.25 + 0.12 * s["brow_len"])
    m["brow_alpha"] = np.clip(0.72 + 0.1 * s["brow_dark"] + 0.12 * s["male"] + 0.2 * s["bushy"], 0.4, 1.0)


def _nose_mouth(m: Columns, s: Columns) -> None:
    m["nose_v"] = 0.235 + 0.032 * s["nose_len"]
    m["bridge_v"] = m["eye_v"] - 0.02
    m["nose_width"] = 0.142 * (1 + 0.13 * s["nose_width"])
    m["nose_bridge"] = np.clip(0.34 + 0.11 * s["nose_bridge"], 0.05, 0.75)
    m["nose_height"] = np.clip(0.215 * (1 + 0.16 * s["nose_height"]), 0.10, 0.34)
    m["nose_tip"] = np.clip(0.045 + 0.025 * s["nose_tip"], 0.0, 0.12)
    m["ala"] = np.clip(0.10 + 0.03 * s["ala"], 0.03, 0.18)
    m["nose_skew"] = 0.016 * s["skew_nose"]
    m["gap"] = 0.115 * s["open"] * (1 - 0.25 * s["smile"])
    m["mouth_v"] = 0.515 + 0.026 * s["mouth_height"]
    broad = 1 + 0.22 * np.maximum(s["smile"], -0.1)
    m["mouth_w"] = 0.262 * (1 + 0.085 * s["mouth_width"]) * broad * (1 - 0.1 * s["open"])
    m["lip_up"] = np.clip(0.050 * (1 + 0.22 * s["lip_upper"]), 0.018, 0.1) * (1 - 0.22 * np.maximum(s["smile"], 0))
    m["lip_low"] = np.clip(0.072 * (1 + 0.20 * s["lip_lower"]), 0.03, 0.125) * (1 - 0.18 * np.maximum(s["smile"], 0))
    m["corner"] = 0.012 + 0.012 * s["mouth_curve"] - 0.085 * s["smile"]
    m["cupid"] = np.clip(0.32 + 0.14 * s["cupid"], 0.0, 0.7)
    m["mouth_skew"] = 0.022 * s["skew_mouth"]
    m["eye_skew"] = 0.012 * s["skew_eyes"]
    m["fold"] = np.clip(0.07 + 0.36 * s["old"] + 0.06 * s["cheek_fold"] + 0.26 * np.maximum(s["smile"], 0), 0.0, 0.75)
    m["bag"] = np.clip(0.06 + 0.03 * s["bags"], 0.0, 0.12) + 0.34 * s["bagged"]
    m["crow"] = np.clip(0.45 * s["old"] + 0.12 * np.maximum(s["smile"], 0), 0.0, 0.6)
    m["furrow"] = np.clip(0.42 * s["old"] + 0.10 * np.maximum(s["raise"], 0.0), 0.0, 0.5)
    m["rough"] = np.clip(0.05 + 0.015 * s["roughness"] + 0.05 * s["old"], 0.02, 0.13)


def _hair(m: Columns, s: Columns) -> None:
    bald, hat, fringe = s["bald"] > 0.5, s["hat"], s["fringe"]
    m["shell"] = np.where(bald, 0.03, np.clip(s["volume"], 0.05, 0.34)) * (1 - 0.45 * hat) + 0.05 * hat
    forehead = -0.93 + 0.045 * s["hairline"] - 0.03 * s["forehead"]
    m["front"] = np.where(bald, -1.7, forehead + fringe * (0.38 + 0.03 * s["hairline"]))
    m["temple"] = np.where(bald, 0.0, s["recede"] * 0.5 * (1 - fringe))
    m["side"] = np.where(bald, np.where(s["recede"] > 0.3, -0.10, -2.0), np.maximum(s["length"] - 0.05, 0.02))
    m["side_top"] = np.where(bald, -0.62, -2.0)
    m["hang"] = np.clip((s["length"] - 0.35) / 0.3, 0.0, 1.0) * (1 - s["bald"])
    m["drape"] = (1 - fringe) * (0.12 + m["hang"] * (0.25 + 0.45 * s["flow"]))
    m["sweep"] = np.clip(s["part"], -0.6, 0.6) * (0.12 + 0.3 * fringe)


def _mix(base: Column, factors: list[tuple[float, float, float]], genes: list[Column]) -> Column:
    """base · exp(Σ gene · factor) per channel: shades that stay positive."""
    total = sum(np.outer(gene, factor) for gene, factor in zip(genes, factors, strict=True))
    return np.asarray(base * np.exp(total), dtype=np.float64)


def _wheel(hue: Column, shade: Column, strength: float) -> NDArray[np.float64]:
    """Cloth and wall colours (B, 3) from two numbers in (0, 1): many greys, few bright colours."""
    turn, depth = np.modf(hue * 16.0)
    phase = 2 * np.pi * (turn[:, None] + np.array([0.0, 1 / 3, 2 / 3]))
    colourful = strength * (depth[:, None] / 15.0) ** 1.5
    level = (0.02 + 0.70 * shade**2.2)[:, None]
    return np.asarray(np.clip(level * np.exp(1.3 * colourful * np.cos(phase)), 0.008, 0.92), dtype=np.float64)


def _colours(s: Columns) -> dict[str, NDArray[np.float64]]:
    skin = LIGHT_SKIN * np.exp(-np.outer(s["melanin"], MELANIN))
    skin = _mix(skin, [(0.035, -0.035, -0.03), (0.0, 0.015, -0.07)], [s["redness"], s["sallow"]])
    kinds = np.array([HAIR[k] for k in range(5)])
    warm = s["hair_warm"] * (s["hair_kind"] != GRAY)
    hair = kinds[s["hair_kind"].astype(int)]
    hair = _mix(hair, [(-0.22, -0.22, -0.22), (0.09, 0.0, -0.1)], [s["hair_dark"], warm])
    natural = np.where((s["hair_kind"] == BLOND)[:, None], hair * [0.45, 0.4, 0.4], hair)
    natural = np.where((s["hair_kind"] == GRAY)[:, None] & (s["old"] < 0.85)[:, None], hair * 0.45, natural)
    lip = skin * np.array([0.86, 0.56, 0.56]) * np.exp(-0.09 * s["lip_dark"][:, None])
    painted = np.stack([0.30 + 0.35 * s["lip_hue"], 0.02 + 0.10 * s["lip_hue"], 0.045 + 0.14 * s["lip_hue"]], axis=1)
    painted = painted * (1 - 0.35 * s["melanin"][:, None])
    lip = np.where((s["lipstick"] > 0.5)[:, None], painted, lip)
    genes = [s["iris_hue"], s["iris_light"]]
    pale = _mix(np.array([0.10, 0.17, 0.215]), [(0.35, 0.05, -0.42), (0.3, 0.3, 0.3)], genes)
    dark = _mix(np.array([0.085, 0.036, 0.015]), [(0.1, 0.05, 0.0), (0.4, 0.4, 0.4)], genes)
    iris = np.where((s["dark_iris"] > 0.5)[:, None], dark, pale)
    return {
        "skin": skin,
        "hair_rgb": hair,
        "brow_rgb": np.minimum(natural, skin * 0.5),
        "beard_rgb": np.minimum(natural, skin * 0.62),
        "lip_rgb": lip,
        "iris_rgb": np.minimum(iris, 0.6),
        "warm_rgb": _mix(np.ones(3), [(0.75, 0.05, -0.85)], [s["warmth"]]),
        "frame_rgb": _wheel(s["frame_dark"] * 7.0 % 1.0, s["frame_dark"] ** 3, 0.5) * 0.55,
        "cloth_rgb": _wheel(s["cloth_hue"], s["cloth_shade"], 0.55),
        "hat_rgb": _wheel(s["hat_hue"], s["hat_shade"], 0.6),
        "back_rgb": _wheel(s["back_hue"], s["back_shade"], 0.35),
        "cover_rgb": _wheel(s["cover_hue"], s["cover_x"], 0.5),
        "cast_rgb": _mix(np.ones(3), [(0.22, 0.0, -0.22)], [s["cast"] - 0.5]),
    }


@dataclass(frozen=True)
class View:
    """Pixel coordinates (x right, y down) in head units after roll, scale and shift, and the pose's sines."""

    x: Plane
    y: Plane
    pixel: Plane
    sin_yaw: Plane
    cos_yaw: Plane
    sin_pitch: Plane
    cos_pitch: Plane


@dataclass(frozen=True)
class Shell:
    """A stack of ellipses: half-axes at the centre, ends, squareness and taper below the centre."""

    width: Plane
    depth: Plane
    top: Plane
    bottom: Plane
    square: Plane
    taper: Plane
    forward: Plane  # how far the lowest ellipse sits in front


@dataclass(frozen=True)
class Surface:
    """Where each pixel's ray meets a shell: face coordinates, camera depth, coverage, outline."""

    u: Plane  # to the picture's right on the face
    v: Plane  # down
    z: Plane  # depth towards the camera
    margin: Plane  # distance to the outline, positive inside
    inward_x: Plane  # gradient of the margin
    inward_y: Plane
    wide: Plane  # squared half width of the ellipse at this height


@dataclass(frozen=True)
class Patch:
    """Face coordinates of the pixels in a window."""

    u: Plane
    v: Plane
    side: Plane  # |u|


def patch(box: Window, f: Surface) -> Patch:
    """The part of a surface that is seen through a window."""
    u = box.cut(f.u)
    return Patch(u, box.cut(f.v), np.abs(u))


def camera(t: Traits, size: int) -> View:
    """The view of each picture: orthographic, pixel centres."""
    axis = ((np.arange(size, dtype=np.float32) + 0.5) * (2.0 / size) - 1.0).astype(np.float32)
    px = axis[None, None, :] * t["scale"] - t["shift_x"]
    py = axis[None, :, None] * t["scale"] - t["shift_y"]
    c, s = t["cos_roll"], t["sin_roll"]
    pose = (t[name] for name in ("sin_yaw", "cos_yaw", "sin_pitch", "cos_pitch"))
    return View(px * c + py * s, py * c - px * s, t["scale"] * np.float32(2.0 / size), *pose)


def skull(t: Traits) -> Shell:
    """The head without relief."""
    parts = ("half_width", "half_depth", "top", "chin", "jaw_square", "jaw_taper", "chin_forward")
    return Shell(*(t[name] for name in parts))


def meet(view: View, shell: Shell, t: Traits | None = None) -> Surface:
    """First point of the shell on each pixel's ray; with traits `t`, of the shell with its relief.

    Height and relief depend on the depth that they decide in turn. An ellipsoid's depth is close enough for the
    heights of the sections. Relief moves what is seen: the nose, the highest of it, is looked up a second time
    where the first look has moved it.
    """
    sink = view.sin_pitch / view.cos_pitch
    base = view.y / view.cos_pitch
    section = Section(view, shell, ellipsoid(view, shell, base, sink) * sink + base, view.x)
    z1 = section.z1
    if t is not None:
        h = _heights(view, t, section, base, sink)
        raised = h * view.cos_yaw
        section = Section(view, shell, (z1 + raised) * sink + base, view.x - h * view.sin_yaw)
        z1 = section.z1 + raised
    z = z1 * view.cos_pitch + section.v * view.sin_pitch
    return Surface(section.u, section.v, z, *section.outline(view), section.wide)


def ellipsoid(view: View, shell: Shell, base: Plane, sink: Plane) -> Plane:
    """Depth z in the yawed frame of the ellipsoid with the shell's axes, about that of the shell.

    At height base + z sink. With z = m x + w and e = base + m x sink, w is the larger root of
    w² (1 + P sink²) + 2 P sink e w + P e² = K (A - x²), where A = W² c² + D² s², m = s c (D² - W²) / A,
    K = W² D² / A² and P = K A / H².
    """
    s, c = view.sin_yaw, view.cos_yaw
    ww, dd = shell.width * shell.width, shell.depth * shell.depth
    area = ww * c * c + dd * s * s
    m = s * c * (dd - ww) / area
    k = ww * dd / (area * area)
    height = 0.5 * (shell.bottom - shell.top)
    p = k * area / (height * height)
    whole = 1.0 + p * sink * sink
    e = view.x * (m * sink) + base - 0.5 * (shell.bottom + shell.top)
    w = view.x * view.x * (-whole * k) + whole * k * area - (e * e) * p
    return np.asarray((np.sqrt(at_least(w, 0.0)) - e * (p * sink)) * (1.0 / whole) + view.x * m)


class Section:
    """Where rays x meet the ellipses at heights v: depth z1 in the yawed frame, and u across the face.

    In the yawed frame the section at height v is an ellipse (W, D), so the depth is the larger root of a
    quadratic: z = (x s c (D² - W²) + W D sqrt(A - x²)) / A with A = W² c² + D² s².
    """

    def __init__(self, view: View, shell: Shell, v: Plane, x: Plane):
        s, c = view.sin_yaw, view.cos_yaw
        low = v - CENTRE
        far = at_most(low * (1.0 / (CENTRE - shell.top)), 0.0)
        low = at_least(low * (1.0 / (shell.bottom - CENTRE)), 0.0)
        # squared width (1 - f) (1 + q f) W² (1 - taper low)², f = squared share of the way to either end
        f = far * far + low * low
        lean = low * (-shell.taper * shell.width) + shell.width
        ww = (low * low * (shell.square - ROUND) + ROUND * f + 1.0) * (1.0 - f) * (lean * lean)
        # squared depth (1 - f²) (1 - low / 2) D²
        lean = low * (-0.5 * shell.depth * shell.depth) + shell.depth * shell.depth
        dd = at_least((f + 1.0) * (1.0 - f) * lean, 0.02)
        at_most(low, 1.0)  # past the chin the axis stays, or the outline would catch light from above
        middle = low * low * shell.forward
        wide = np.clip(ww, 0.003, np.inf)
        x0 = x - middle * s
        area = wide * (c * c) + dd * (s * s)
        root = np.sqrt(at_least(area - x0 * x0, 0.0) * wide * dd)
        self.z1 = ((dd - wide) * x0 * (s * c) + root) / area + middle * c
        self.u = x * c - self.z1 * s
        self.v, self.x0, self.wide, self.raw, self.deep = v, x0, wide, ww, dd

    def outline(self, view: View) -> tuple[Plane, Plane, Plane]:
        """Distance to the outline, positive inside, and its gradient: A - x² over the length of its own gradient."""
        s, c = view.sin_yaw, view.cos_yaw
        inside = between(self.raw * 8.0, 0.0, 1.0)  # from the width before it was bounded below
        edge = inside * self.deep * (s * s) + self.raw * (c * c) - self.x0 * self.x0
        gx, gy = slope(edge, view.pixel)
        length = np.sqrt(gx * gx + gy * gy) + 0.05
        return edge / length, gx / length, gy / length


def _heights(view: View, t: Traits, seen: Section, base: Plane, sink: Plane) -> Plane:
    """Relief of what each ray meets, from where the rays meet the bare skull."""
    h = np.zeros_like(seen.u)
    for part, height, w, share in (
        (_cheeks, 0.14, 0.75, (0.38, 0.84)),
        (_eyes, -0.22, 0.85, (0.36, 0.76)),
        (_mouth, 0.62, 0.85, (0.42, 0.38)),
    ):
        place = window(t, (0.0, height, w), share, h.shape[-1])
        place.add(h, part(t, place.cut(seen.u), place.cut(seen.v)))
    box = nose_box(t, h.shape[-1])
    ridge = nose(t, box.cut(seen.u), box.cut(seen.v))
    box.add(h, ridge)
    near, z1 = box.cut(h), box.cut(seen.z1)
    u = (box.cut(view.x) - near * view.sin_yaw) * view.cos_yaw - z1 * view.sin_yaw
    v = (near * view.cos_yaw + z1) * sink + box.cut(base)
    box.add(h, (nose(t, u, v) - ridge) * 0.5)
    return np.asarray(h)


def nose_box(t: Traits, size: int) -> Window:
    """The part of the picture that holds the nose and its shadow."""
    return window(t, (0.0, t["nose_v"] - 0.16, 0.95), (0.48, 0.44), size)


def nose(t: Traits, u: Plane, v: Plane) -> Plane:
    """Height of the nose over the skull at face coordinates (u, v)."""
    height, bridge, width = t["nose_height"], t["nose_bridge"], t["nose_width"]
    along = (v - t["bridge_v"]) * (1.0 / (t["nose_v"] - t["bridge_v"]))
    run = np.clip(along, 0.0, 1.0)
    rise = run * run * (height * (1.0 - bridge)) + height * bridge
    rise = rise * ramp(along, -0.7, 0.1) * ramp(along, 1.34, 1.02)
    across = u - t["nose_skew"] * run
    q = across / (run * (0.55 * width) + 0.86 * width)
    dv = v - t["nose_v"]
    rise = rise * bump(q * q) + t["nose_tip"] * spot(across, dv + 0.03, 0.15, 0.15)
    wings = t["ala"] * spot(np.abs(across) - width * 0.68, dv - 0.01, 0.09, 0.09)
    return np.asarray(np.maximum(rise, wings))


def _eyes(t: Traits, u: Plane, v: Plane) -> Plane:
    """Height of sockets, eyeballs and the ridge of the brows."""
    side, down = np.abs(u), v - t["eye_v"]
    ridge = t["brow_ridge"] * spot(side - 0.27, v - (t["brow_v"] + 0.02), 0.4, 0.12)
    side -= t["eye_u"]
    return np.asarray(ridge - t["socket"] * spot(side, down, 0.26, 0.2) + 0.05 * spot(side, down, 0.17, 0.1))


def _mouth(t: Traits, u: Plane, v: Plane) -> Plane:
    """Height of lips and chin."""
    q = v - t["mouth_v"]
    up, low, gap = t["lip_up"], t["lip_low"], t["gap"]
    h = spot(u, q + (0.5 * up + 0.2 * gap), t["mouth_w"], up + 0.05)
    h += spot(u, q - (0.5 * low + 0.6 * gap), t["mouth_w"] * 0.8, low + 0.05)
    h = h * 0.055 - 0.05 * spot(u, q - (low + gap + 0.1), 0.25, 0.07)
    return np.asarray(h + t["chin_bump"] * spot(u, v - (t["chin"] - 0.17), 0.24, 0.17))


def _cheeks(t: Traits, u: Plane, v: Plane) -> Plane:
    return t["cheek"] * spot(np.abs(u) - 0.42, v - (0.16 - 0.06 * t["smile"]), 0.32, 0.3)
