"""The head as a surface: a stack of ellipses with relief, and where each pixel's ray meets it under any pose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .relief import nose, nose_box, relief
from .section import Section, Shell, View, ellipsoid
from .shapes import Plane, Traits
from .window import Window


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


def meet(view: View, shell: Shell, t: Traits | None = None) -> Surface:
    """First point of the shell on each pixel's ray; with traits `t`, of the shell with its relief.

    Height and relief depend on the depth that they decide in turn. An ellipsoid's depth is close enough for the
    heights of the sections. Relief moves what is seen: the nose, the highest of it, is looked up a second time
    where the first look has moved it.
    """
    sink = view.sin_pitch / view.cos_pitch
    base = view.y / view.cos_pitch
    z1 = ellipsoid(view, shell, base, sink)
    z1 *= sink
    z1 += base
    section = Section(view, shell, z1, view.x)
    z1 = section.z1
    if t is not None:
        h = _heights(view, t, section, base, sink)
        raised = h * view.cos_yaw
        z1 += raised
        z1 *= sink
        z1 += base
        section = Section(view, shell, z1, view.x - h * view.sin_yaw)
        z1 = section.z1
        z1 += raised
    margin, inward_x, inward_y = section.outline(view)
    z1 *= view.cos_pitch
    z1 += section.v * view.sin_pitch
    return Surface(section.u, section.v, z1, margin, inward_x, inward_y, section.wide)


def _heights(view: View, t: Traits, seen: Section, base: Plane, sink: Plane) -> Plane:
    """Relief of what each ray meets, from where the rays meet the bare skull."""
    box = nose_box(t, view.x.shape[-1])
    h, ridge = relief(t, seen.u, seen.v, box)
    near, z1 = box.cut(h), box.cut(seen.z1)
    u = (box.cut(view.x) - near * view.sin_yaw) * view.cos_yaw
    u -= z1 * view.sin_yaw
    near *= view.cos_yaw
    near += z1
    near *= sink
    near += box.cut(base)
    again = nose(t, u, near)
    again -= ridge
    again *= 0.5
    box.add(h, again)
    return h
