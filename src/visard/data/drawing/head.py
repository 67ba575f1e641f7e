"""The head as a surface: a stack of ellipses with relief, and where each pixel's ray meets it under any pose."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from .shapes import Plane, Traits, bump, ramp, slope, spot
from .window import Window, window

CENTRE = -0.05  # height of the widest ellipse


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
    """A stack of ellipses: squared half-axes at the centre, ends, squareness and taper below the centre."""

    width: Plane
    depth: Plane
    top: Plane
    bottom: Plane
    square: Plane | float
    taper: Plane | float
    forward: Plane | float  # how far the lowest ellipse sits in front


@dataclass(frozen=True)
class Surface:
    """Where each pixel's ray meets a shell: face coordinates, camera depth, coverage, relief there."""

    u: Plane  # to the picture's right on the face
    v: Plane  # down
    z: Plane  # depth towards the camera
    margin: Plane  # distance to the outline, positive inside
    half: Plane  # half width of the ellipse at this height

    def through(self, box: Window) -> Surface:
        """The part of the surface that is seen through a window."""
        return Surface(*(box.cut(getattr(self, f.name)) for f in fields(self)))


def view(t: Traits, size: int) -> View:
    """Camera of each picture: orthographic, pixel centres."""
    axis = ((np.arange(size, dtype=np.float32) + 0.5) * (2.0 / size) - 1.0).astype(np.float32)
    px = axis[None, None, :] * t["scale"] - t["shift_x"]
    py = axis[None, :, None] * t["scale"] - t["shift_y"]
    c, s = t["cos_roll"], t["sin_roll"]
    return View(
        x=px * c + py * s,
        y=py * c - px * s,
        pixel=t["scale"] * np.float32(2.0 / size),
        sin_yaw=t["sin_yaw"],
        cos_yaw=t["cos_yaw"],
        sin_pitch=t["sin_pitch"],
        cos_pitch=t["cos_pitch"],
    )


def skull(t: Traits) -> Shell:
    """The head without relief."""
    return Shell(
        width=t["half_width"],
        depth=t["half_depth"],
        top=t["top"],
        bottom=t["chin"],
        square=t["jaw_square"],
        taper=t["jaw_taper"],
        forward=t["chin_forward"],
    )


def nose(t: Traits, u: Plane, v: Plane) -> Plane:
    """Height of the nose over the skull at face coordinates (u, v)."""
    along = (v - t["bridge_v"]) * (1.0 / (t["nose_v"] - t["bridge_v"]))
    run = np.clip(along, 0.0, 1.0)
    rise = run * run
    rise *= 1.0 - t["nose_bridge"]
    rise += t["nose_bridge"]
    rise *= ramp(along, -0.7, 0.1)
    rise *= 1.0 - ramp(along, 1.02, 1.34)
    across = u - t["nose_skew"] * run
    q = across / (t["nose_width"] * (0.86 + 0.55 * run))
    ridge = t["nose_height"] * rise * bump(q * q)
    dv = v - t["nose_v"]
    ridge += t["nose_tip"] * spot(across, dv + 0.03, 0.15, 0.15)
    wings = t["ala"] * spot(np.abs(across) - t["nose_width"] * 0.68, dv - 0.01, 0.09, 0.09)
    return np.asarray(np.maximum(ridge, wings), dtype=np.float32)


def relief(t: Traits, u: Plane, v: Plane) -> Plane:
    """Height of all features over the skull at face coordinates (u, v)."""
    h = nose(t, u, v)
    side = np.abs(u)
    eye_u, eye_v = side - t["eye_u"], v - t["eye_v"]
    h -= t["socket"] * spot(eye_u, eye_v, 0.26, 0.2)
    h += 0.05 * spot(eye_u, eye_v - 0.005, 0.17, 0.1)
    h += t["brow_ridge"] * spot(side - 0.27, v - t["brow_v"] - 0.02, 0.4, 0.12)
    h += t["cheek"] * spot(side - 0.42, v - 0.16 + 0.06 * t["smile"], 0.32, 0.3)
    q = v - t["mouth_v"]
    h += 0.055 * spot(u, q + 0.5 * t["lip_up"] + 0.2 * t["gap"], t["mouth_w"], t["lip_up"] + 0.05)
    h += 0.055 * spot(u, q - 0.5 * t["lip_low"] - 0.6 * t["gap"], t["mouth_w"] * 0.8, t["lip_low"] + 0.05)
    h -= 0.05 * spot(u, q - t["lip_low"] - t["gap"] - 0.1, 0.25, 0.07)
    h += t["chin_bump"] * spot(u, v - t["chin"] + 0.17, 0.24, 0.17)
    return h


def face_box(t: Traits, size: int) -> Window:
    """The part of the picture that holds everything from the forehead's lines to the chin."""
    return window(t, 0.08 * np.ones_like(t["yaw"]), 0.85, (0.90, 0.70), size)


def meet(view: View, shell: Shell, t: Traits | None, rounds: int) -> Surface:
    """First point of the shell on each pixel's ray; with traits `t`, of the shell with its relief.

    In the yawed frame the section at height v is an ellipse (W, D), so the depth is the larger root of a
    quadratic: z = (x s c (D² - W²) + W D sqrt(A - x²)) / A with A = W² c² + D² s². Height and relief depend
    on that depth in turn; a few fixed-point rounds settle them.
    """
    s, c = view.sin_yaw, view.cos_yaw
    up, down = 1.0 / (CENTRE - shell.top), 1.0 / (shell.bottom - CENTRE)
    sink = view.sin_pitch / view.cos_pitch
    base = view.y / view.cos_pitch
    z1: Plane = 0.75 * shell.depth * c + np.zeros_like(view.x)
    h: Plane = np.zeros_like(view.x)
    new = np.zeros_like(view.x)
    if t is not None:
        box = face_box(t, view.x.shape[-1])
    for turn in range(rounds):
        v = base + (z1 + h * c) * sink
        below = v - CENTRE
        low = np.maximum(below, 0.0) * down
        far = np.maximum(low, -below * up)
        t2 = far * far
        t4 = t2 * t2
        lean = 1.0 - shell.taper * low
        ww = np.where(below > 0.0, shell.square, np.float32(0.45)) * (t2 - t4)
        ww -= t2
        ww += 1.0
        ww *= lean * lean
        ww *= shell.width * shell.width
        dd = (1.0 - t4) * (1.0 - 0.5 * low)
        dd *= shell.depth * shell.depth
        np.maximum(dd, 0.02, out=dd)
        wide = np.maximum(ww, 0.003)
        area = wide * (c * c) + dd * (s * s)
        tip = np.minimum(low, 1.0)  # past the chin the axis stays, or the outline would catch light from above
        middle = shell.forward * tip * tip
        xr = view.x - h * s
        x0 = xr - middle * s
        gap = area - x0 * x0
        np.maximum(gap, 0.0, out=gap)
        gap *= wide * dd
        z1 = x0 * (s * c)
        z1 *= dd - wide
        z1 += np.sqrt(gap, out=gap)
        z1 /= area
        z1 += middle * c
        u = xr * c - z1 * s
        if t is not None and turn + 1 < rounds:
            box.paste(new, relief(t, box.cut(u), box.cut(v)))
            h = new.copy() if turn == 0 else 0.5 * (h + new)
    z1 = z1 + h * c
    # implicit outline: A - x² with the un-clamped width, over the length of its gradient
    edge = ww * (c * c) + dd * (s * s) * np.clip(ww * 8.0, 0.0, 1.0) - x0 * x0
    gx, gy = slope(edge, view.pixel)
    margin = edge / (np.sqrt(gx * gx + gy * gy) + 0.05)
    z = v * view.sin_pitch + z1 * view.cos_pitch
    return Surface(u, v, z, margin, np.sqrt(wide))
