"""One batch of pictures, from measures to pixels: the order of painting, the camera, and compression."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from visard.data.synthetic import face, scene
from visard.data.synthetic.head import Surface, View, camera, meet, nose_box, patch, skull
from visard.data.synthetic.planes import (
    Plane,
    Traits,
    at_least,
    between,
    cover,
    dim,
    over,
    paint_where,
    ramp,
    spot,
    window,
)  # fmt: skip

GRID = 16  # side of the random grids that textures are made from
SHARPEST = 1e-3  # least sigma of a blur, pixels
_BASIS = np.array([
    [(0.125 if k == 0 else 0.25) ** 0.5 * math.cos(math.pi * (2 * j + 1) * k / 16) for j in range(8)] for k in range(8)
])  # fmt: skip
_ORDER = np.add.outer(np.arange(8), np.arange(8)).astype(np.float32)[:, :, None]  # frequency across + down


def draw(t: Traits, texture: Plane, walls: Plane, grain: Plane, size: int) -> NDArray[np.uint8]:
    """uint8 (B, S, S, 3): pictures with measures `t`; textures, walls and noise as `render.textures` makes them."""
    eye = camera(t, size)
    canvas = scene.background(t, eye, walls)
    head = meet(eye, skull(t), t)
    hair = scene.grow(t, eye, texture)
    over(canvas, hair.colour, hair.behind, 0.6)
    scene.body(t, eye, canvas)
    scene.ears(t, eye, canvas)
    over(canvas, _face(t, head, texture, eye.pixel, size), cover(head.margin, eye.pixel))
    scene.near_ear(t, eye, canvas)
    paint_where(t["glasses"], scene.glasses, canvas, t, eye, head)
    dim(canvas, 0.32 * hair.shade)
    over(canvas, hair.colour, hair.front)
    paint_where(t["hat"], scene.hat, canvas, t, eye, hair, texture)
    paint_where(t["cover"], scene.covers, canvas, t, eye, head)
    return expose(t, eye, canvas, grain)


def _face(t: Traits, head: Surface, texture: Plane, pixel: Plane, size: int) -> Plane:
    """Lit skin with all features (B, 3, S, S)."""
    albedo = face.paint_skin(t, head, texture)
    gleam, shine, shadow = np.zeros_like(head.u), np.zeros_like(head.u), np.ones_like(head.u)

    box = window(t, (0.0, 0.08, 0.85), (0.90, 0.70), size)  # from the forehead's lines to the chin
    f, part = patch(box, head), box.cut(albedo)
    face.paint_blush(t, f, part)
    paint_where(t["freckles"], face.paint_freckles, part, f, texture)
    for mole in ("mole1", "mole2"):
        paint_where(t[mole], face.paint_mole, part, f, t[mole + "_u"], t[mole + "_v"], pixel)
    face.paint_wrinkles(t, f, part)
    paint_where(1.0 - t["shaven"], face.paint_beard, part, t, f, texture)
    box.paste(albedo, part)

    box = window(t, (0.0, t["eye_v"] - 0.10, 0.85), (0.40, 0.66), size)
    f, part = patch(box, head), box.cut(albedo)
    box.paste(gleam, face.paint_eyes(t, f, part, pixel))
    face.paint_brows(t, f, texture, part, pixel)
    box.paste(albedo, part)

    box = window(t, (0.0, t["mouth_v"] - 0.06, 0.85), (0.40, 0.44), size)
    f, part = patch(box, head), box.cut(albedo)
    face.paint_nose(t, f, part)
    box.paste(shine, face.paint_mouth(t, f, part, pixel))
    box.paste(albedo, part)

    box = nose_box(t, size)
    box.paste(shadow, scene.nose_shadow(t, patch(box, head)))
    shine = shine * (0.13 + 0.25 * t["lipstick"]) + 0.09
    paint_where(t["bald"], _crown, shine, head.v)
    shine *= ramp(head.margin, 0.0, 0.06)
    n = scene.rounded(scene.normals(head.z, pixel), head, pixel)
    scene.shade_skin(t, albedo, n, shadow, shine)
    for k in range(3):
        albedo[:, k] += gleam * (0.3 + t["key"])
    # ambient light hardly reaches the inner corners of the eyes and the underside of the jaw
    corners = spot(np.abs(head.u) - 0.16, head.v - (t["eye_v"] - 0.02), 0.13, 0.15)
    dim(albedo, corners * 0.20 + 0.30 * ramp(head.v, t["chin"] - 0.12, t["chin"] + 0.06))
    return albedo


def _crown(v: Plane, shine: Plane) -> None:
    """A bald head shines."""
    shine += 0.10 * ramp(v, -0.4, -0.8)


def expose(t: Traits, view: View, canvas: Plane, grain: Plane) -> NDArray[np.uint8]:
    """The camera, exposure to sensor noise: uint8 (B, S, S, 3) from linear light (B, 3, S, S) and unit noise alike."""
    size = canvas.shape[-1]
    canvas *= at_least((view.x * view.x + view.y * view.y) * (-0.16 * t["vignette"]) + 1.0, 0.3)[:, None]
    # exposure and colour cast ride on the weights of the blur
    canvas = blur(canvas, t["blur"][:, 0, 0] * np.float32(size / 64.0), 1.25 * t["exposure"][:, None] * t["cast_rgb"])
    red, green, blue = (_develop(canvas[:, k]) for k in range(3))
    grey = 0.30 * red + 0.59 * green + 0.11 * blue
    # saturation and contrast at once, in 255ths: k c (x - grey) + k (grey - 0.45) + 0.45
    contrast = 255.0 * t["contrast"]
    base = grey * contrast + (255.0 * 0.45 - 0.45 * contrast + 0.5)  # half a step: casting to integers cuts off
    vivid = t["colour"] * contrast
    rough = (np.clip(grey, 0.0, 1.0) * -0.7 + 1.35) * (255.0 * t["grain"])
    out = np.empty((len(canvas), size, size, 3), dtype=np.uint8)
    for k, plane in enumerate((red, green, blue)):
        out[..., k] = between((plane - grey) * vivid + base + rough * grain[:, k], 0.5, 255.5)
    return out


def _develop(x: Plane) -> Plane:
    """A shoulder instead of clipping, x (1 + x/4) / (1 + x), then gamma 2 and 1.12 times that."""
    return np.sqrt((x * (0.25 * 1.12**2) + 1.12**2) * x / (x + 1.0))


def blur(canvas: Plane, sigma: Plane, gain: Plane) -> Plane:
    """Gaussian blur times gain (B, 3, 1, 1), with one sigma (B,) in pixels per picture, borders replicated.

    Weights end at 2.3 sigma. The widest picture of a batch decides how many neighbours are added; the others have
    weight 0 there, which changes no bit of them.
    """
    wide = np.maximum(sigma.astype(np.float64), SHARPEST)[:, None]
    reach = np.ceil(2.3 * wide)
    steps = np.arange(max(1, int(reach.max())) + 1, dtype=np.float64)
    weights = np.where(steps <= reach, np.exp(-0.5 * (steps / wide) ** 2), 0.0)
    weights /= weights[:, :1] + 2.0 * weights[:, 1:].sum(axis=1, keepdims=True)
    w = weights.astype(np.float32)[:, :, None, None]
    out = np.empty_like(canvas)
    for k in range(3):
        down = _weighted(canvas[:, k], 1, w)
        out[:, k] = _weighted(down, 2, w * gain[:, k, None])
    return out


def _weighted(plane: Plane, axis: int, w: Plane) -> Plane:
    """Each pixel times w[:, 0] plus its two neighbours at each distance d along `axis` times w[:, d]."""
    size, radius = plane.shape[axis], w.shape[1] - 1
    padded = np.pad(plane, [(radius, radius) if k == axis else (0, 0) for k in range(3)], mode="edge")
    moved = [padded[:, d : d + size] if axis == 1 else padded[:, :, d : d + size] for d in range(2 * radius + 1)]
    out: Plane = plane * w[:, 0]
    for d in range(1, radius + 1):
        out += (moved[radius - d] + moved[radius + d]) * w[:, d]
    return out


def compress(images: NDArray[np.uint8], quality: NDArray[np.float64]) -> NDArray[np.uint8]:
    """JPEG-like loss on uint8 (B, S, S, 3), quality (B,) in 0..1: half-resolution colour, 8 x 8 cosine blocks."""
    count, size = images.shape[:2]
    more = -size % 16
    rgb = images.transpose(3, 0, 1, 2).astype(np.float32)
    if more:
        rgb = np.pad(rgb, ((0, 0), (0, 0), (0, more), (0, more)), mode="edge")
    luma = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]
    colour = rgb[::2] - luma  # red and blue differences
    small = colour[..., ::2, ::2] + colour[..., 1::2, ::2] + colour[..., ::2, 1::2] + colour[..., 1::2, 1::2]
    small *= 0.25
    bright, tint = _blocks(luma - 128.0), _blocks(small.reshape(2 * count, *small.shape[2:]))
    step = (2.0 + 14.0 * (1.0 - quality)).astype(np.float32)
    grids = (
        np.repeat(step, bright.shape[2] // count) * (1.0 + 0.35 * _ORDER),
        np.repeat(np.tile(1.5 * step, 2), tint.shape[2] // (2 * count)) * (1.0 + 0.6 * _ORDER),
    )
    both = _quantise(np.concatenate([bright, tint], axis=2), np.concatenate(grids, axis=2))
    luma = _planes(both[:, :, : bright.shape[2]], luma.shape) + 128.5  # half a step: casting to integers cuts off
    tints = _planes(both[:, :, bright.shape[2] :], (2 * count, *small.shape[2:])).reshape(small.shape)
    red, blue = tints.repeat(2, axis=2).repeat(2, axis=3)
    out = np.empty_like(images)
    for k, change in enumerate((red, (red * 0.299 + blue * 0.114) * (-1.0 / 0.587), blue)):
        out[..., k] = between(change + luma, 0.5, 255.5)[:, :size, :size]
    return out


def _blocks(planes: Plane) -> Plane:
    """(8, 8, blocks) from (B, H, W)."""
    b, h, w = planes.shape
    return np.ascontiguousarray(planes.reshape(b, h // 8, 8, w // 8, 8).transpose(2, 4, 0, 1, 3)).reshape(8, 8, -1)


def _planes(blocks: Plane, shape: tuple[int, ...]) -> Plane:
    """The inverse of `_blocks`."""
    b, h, w = shape
    return np.ascontiguousarray(blocks.reshape(8, 8, b, h // 8, w // 8).transpose(2, 3, 0, 4, 1)).reshape(b, h, w)


def _quantise(blocks: Plane, grid: Plane) -> Plane:
    """Round the cosine coefficients of (8, 8, N) blocks to multiples of `grid`."""
    co = _dct(_dct(blocks, False).swapaxes(0, 1), False)  # axes: (column frequency, row frequency, ...)
    return _dct(_dct(np.rint(co / grid) * grid, True).swapaxes(0, 1), True)


def _dct(x: Plane, inverse: bool) -> Plane:
    """8-point DCT-II (or its inverse) along axis 0, by even and odd halves."""
    out = np.empty(x.shape, dtype=np.float32)
    if inverse:
        for j in range(4):
            even, odd = _sum4(_BASIS[::2, j], x[::2]), _sum4(_BASIS[1::2, j], x[1::2])
            np.add(even, odd, out=out[j])
            np.subtract(even, odd, out=out[7 - j])
        return out
    plus, minus = [x[j] + x[7 - j] for j in range(4)], [x[j] - x[7 - j] for j in range(4)]
    for k in range(8):
        out[k] = _sum4(_BASIS[k, :4], minus if k % 2 else plus)
    return out


def _sum4(rows: NDArray[np.float64], x: Plane | Sequence[Plane]) -> Plane:
    """Σ rows[k] x[k] over four planes."""
    a, b, c, d = (float(weight) for weight in rows)
    return np.asarray(x[0] * a + x[1] * b + x[2] * c + x[3] * d)
