"""One batch of pictures, from traits to pixels: the order in which things are painted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import scene, skin, wear
from .camera import expose
from .eyes import paint_brows, paint_eyes
from .hair import grow
from .head import Surface, face_box, meet, skull, view
from .light import normals, nose_shadow, rounded, shade_skin
from .measures import measures
from .mouth import paint_mouth, paint_nose
from .person import Person
from .shapes import Plane, Traits, cover, dim, over, ramp, spot, weave
from .some import paint_where
from .window import window

GRID = 16  # side of the random grids that textures are made from


def draw(traits: Person, person_grid: Plane, shot_grid: Plane, grain: Plane, size: int) -> NDArray[np.uint8]:
    """uint8 (B, S, S, 3): pictures of `traits` (B,); grids and noise as `batch.textures` makes them."""
    t = measures(traits)
    texture = weave(person_grid)
    eye = view(t, size)
    canvas = scene.background(t, eye, shot_grid)
    head = meet(eye, skull(t), t, 3)
    hair = grow(t, eye, texture)
    over(canvas, hair.colour * np.float32(0.6), hair.behind)
    scene.body(t, eye, canvas)
    scene.ears(t, eye, canvas, near_only=False)
    over(canvas, _face(t, head, texture, eye.pixel, size), cover(head.margin, eye.pixel))
    scene.ears(t, eye, canvas, near_only=True)
    paint_where(t["glasses"], wear.glasses, canvas, t, eye, head)
    dim(canvas, 0.32 * hair.shade)
    over(canvas, hair.colour, hair.front)
    paint_where(t["hat"], wear.hat, canvas, t, eye, hair, texture)
    paint_where(t["cover"], wear.covers, canvas, t, eye, head)
    return expose(t, eye, canvas, grain)


def _face(t: Traits, head: Surface, texture: Plane, pixel: Plane, size: int) -> Plane:
    """Lit skin with all features (B, 3, S, S)."""
    albedo = skin.paint_skin(t, head, texture)
    gleam, gloss, shadow = np.zeros_like(head.u), np.zeros_like(head.u), np.ones_like(head.u)

    box = face_box(t, size)
    f, part = head.through(box), box.cut(albedo)
    paint_where(t["freckles"], skin.paint_freckles, part, f, texture)
    for mole in ("mole1", "mole2"):
        paint_where(t[mole], skin.paint_mole, part, f, t[mole + "_u"], t[mole + "_v"], pixel)
    skin.paint_wrinkles(t, f, part)
    paint_where(1.0 - t["shaven"], skin.paint_beard, part, t, f, texture)
    box.paste(albedo, part)

    box = window(t, t["eye_v"] - 0.10, 0.85, (0.44, 0.66), size)
    f, part = head.through(box), box.cut(albedo)
    box.paste(gleam, paint_eyes(t, f, part, pixel))
    paint_brows(t, f, texture, part, pixel)
    box.paste(albedo, part)

    box = window(t, t["mouth_v"] - 0.06, 0.85, (0.40, 0.44), size)
    f, part = head.through(box), box.cut(albedo)
    paint_nose(t, f, part)
    box.paste(gloss, paint_mouth(t, f, part, pixel))
    box.paste(albedo, part)

    box = window(t, t["nose_v"] - 0.1, 0.95, (0.40, 0.44), size)
    box.paste(shadow, nose_shadow(t, head.through(box)))
    shine = 0.09 + 0.10 * t["bald"] * ramp(head.v, -0.4, -0.8) + gloss * (0.13 + 0.25 * t["lipstick"])
    n = rounded(normals(head.z, pixel), head.margin, pixel)
    face = shade_skin(t, albedo, n, shadow, shine * ramp(head.margin, 0.0, 0.06))
    face += (gleam * (0.3 + t["key"]))[:, None]
    # ambient light hardly reaches the inner corners of the eyes and the underside of the jaw
    deep = 0.20 * spot(np.abs(head.u) - 0.16, head.v - t["eye_v"] + 0.02, 0.13, 0.15)
    dim(face, deep + 0.30 * ramp(head.v, t["chin"] - 0.12, t["chin"] + 0.06))
    return face
