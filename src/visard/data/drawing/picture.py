"""One batch of pictures, from measures to pixels: the order in which things are painted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import scene, skin, wear
from .camera import expose
from .eyes import paint_brows, paint_eyes
from .hair import grow
from .head import Surface, meet, patch, skull, view
from .light import normals, nose_shadow, rounded, shade_skin
from .mouth import paint_mouth, paint_nose
from .relief import nose_box
from .shapes import Plane, Traits, cover, dim, over, ramp, spot
from .some import paint_where
from .window import window

GRID = 16  # side of the random grids that textures are made from


def draw(t: Traits, texture: Plane, walls: Plane, grain: Plane, size: int) -> NDArray[np.uint8]:
    """uint8 (B, S, S, 3): pictures with measures `t`; textures, walls and noise as `batch.textures` makes them."""
    eye = view(t, size)
    canvas = scene.background(t, eye, walls)
    head = meet(eye, skull(t), t)
    hair = grow(t, eye, texture)
    over(canvas, hair.colour, hair.behind, 0.6)
    scene.body(t, eye, canvas)
    scene.ears(t, eye, canvas)
    over(canvas, _face(t, head, texture, eye.pixel, size), cover(head.margin, eye.pixel))
    scene.near_ear(t, eye, canvas)
    paint_where(t["glasses"], wear.glasses, canvas, t, eye, head)
    dim(canvas, 0.32 * hair.shade)
    over(canvas, hair.colour, hair.front)
    paint_where(t["hat"], wear.hat, canvas, t, eye, hair, texture)
    paint_where(t["cover"], wear.covers, canvas, t, eye, head)
    return expose(t, eye, canvas, grain)


def _face(t: Traits, head: Surface, texture: Plane, pixel: Plane, size: int) -> Plane:
    """Lit skin with all features (B, 3, S, S)."""
    albedo = skin.paint_skin(t, head, texture)
    gleam, shine, shadow = np.zeros_like(head.u), np.zeros_like(head.u), np.ones_like(head.u)

    box = window(t, (0.0, 0.08, 0.85), (0.90, 0.70), size)  # from the forehead's lines to the chin
    f, part = patch(box, head), box.cut(albedo)
    skin.paint_blush(t, f, part)
    paint_where(t["freckles"], skin.paint_freckles, part, f, texture)
    for mole in ("mole1", "mole2"):
        paint_where(t[mole], skin.paint_mole, part, f, t[mole + "_u"], t[mole + "_v"], pixel)
    skin.paint_wrinkles(t, f, part)
    paint_where(1.0 - t["shaven"], skin.paint_beard, part, t, f, texture)
    box.paste(albedo, part)

    box = window(t, (0.0, t["eye_v"] - 0.10, 0.85), (0.40, 0.66), size)
    f, part = patch(box, head), box.cut(albedo)
    box.paste(gleam, paint_eyes(t, f, part, pixel))
    paint_brows(t, f, texture, part, pixel)
    box.paste(albedo, part)

    box = window(t, (0.0, t["mouth_v"] - 0.06, 0.85), (0.40, 0.44), size)
    f, part = patch(box, head), box.cut(albedo)
    paint_nose(t, f, part)
    box.paste(shine, paint_mouth(t, f, part, pixel))
    box.paste(albedo, part)

    box = nose_box(t, size)
    box.paste(shadow, nose_shadow(t, patch(box, head)))
    shine *= 0.13 + 0.25 * t["lipstick"]
    shine += 0.09
    paint_where(t["bald"], _crown, shine, head.v)
    shine *= ramp(head.margin, 0.0, 0.06)
    n = rounded(normals(head.z, pixel), head, pixel)
    shade_skin(t, albedo, n, shadow, shine)
    for k in range(3):
        albedo[:, k] += gleam * (0.3 + t["key"])
    # ambient light hardly reaches the inner corners of the eyes and the underside of the jaw
    deep = spot(np.abs(head.u) - 0.16, head.v - (t["eye_v"] - 0.02), 0.13, 0.15)
    deep *= 0.20
    deep += 0.30 * ramp(head.v, t["chin"] - 0.12, t["chin"] + 0.06)
    dim(albedo, deep)
    return albedo


def _crown(v: Plane, shine: Plane) -> None:
    """A bald head shines."""
    shine += 0.10 * ramp(v, -0.4, -0.8)
