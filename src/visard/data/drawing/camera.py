"""The camera: exposure, lens blur, contrast, sensor noise, block compression, eight bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .head import View
from .shapes import Plane, Traits

BLURRIEST = 1.3  # no domain blurs more, in 64ths of the width: fixes the length of the kernel


def expose(t: Traits, view: View, canvas: Plane, grain: Plane) -> NDArray[np.uint8]:
    """uint8 (B, S, S, 3) from linear light (B, 3, S, S) and unit noise of the same shape."""
    size = canvas.shape[-1]
    fall = np.maximum(1.0 - 0.16 * t["vignette"] * (view.x * view.x + view.y * view.y), 0.3)
    canvas *= (fall * (1.25 * t["exposure"]))[:, None]
    canvas *= t["cast_rgb"]
    canvas = blur(canvas, t["blur"] * np.float32(size / 64.0), size)
    # shoulder instead of clipping: x (1 + x/4) / (1 + x), then gamma 2
    bent = canvas * 0.25
    bent += 1.0
    bent *= canvas
    canvas += 1.0
    bent /= canvas
    canvas = np.sqrt(bent, out=bent)
    canvas *= 1.12
    grey = 0.30 * canvas[:, 0] + 0.59 * canvas[:, 1] + 0.11 * canvas[:, 2]
    # saturation and contrast at once: k c (x - grey) + k (grey - 0.45) + 0.45
    canvas -= grey[:, None]
    canvas *= (t["contrast"] * t["colour"])[:, None]
    canvas += ((grey - 0.45) * t["contrast"] + 0.45)[:, None]
    np.clip(grey, 0.0, 1.0, out=grey)
    canvas += grain * (t["grain"] * (1.35 - 0.7 * grey))[:, None]
    np.clip(canvas, 0.0, 1.0, out=canvas)
    canvas *= 255.0
    pick = np.flatnonzero(t["blocks"][:, 0, 0] > 0.5)
    if len(pick):
        canvas[pick] = compress(canvas[pick], t["quality"][pick])
    return np.ascontiguousarray(np.rint(np.clip(canvas, 0.0, 255.0)).astype(np.uint8).transpose(0, 2, 3, 1))


def blur(canvas: Plane, sigma: Plane, size: int) -> Plane:
    """Gaussian blur with one sigma (pixels) per picture, borders replicated."""
    radius = max(2, math.ceil(2.3 * BLURRIEST * size / 64.0))
    steps = np.arange(radius + 1, dtype=np.float64)
    weights = np.exp(-0.5 * (steps / np.maximum(sigma.astype(np.float64).reshape(-1, 1), 1e-3)) ** 2)
    weights /= weights[:, :1] + 2.0 * weights[:, 1:].sum(axis=1, keepdims=True)
    w = weights.astype(np.float32)[:, :, None, None, None]
    for axis in (2, 3):
        pad = [(0, 0)] * 4
        pad[axis] = (radius, radius)
        wide = np.pad(canvas, pad, mode="edge")
        lanes = [wide[:, :, k : k + size] if axis == 2 else wide[:, :, :, k : k + size] for k in range(2 * radius + 1)]
        canvas = lanes[radius] * w[:, 0]
        for k in range(1, radius + 1):
            canvas += (lanes[radius - k] + lanes[radius + k]) * w[:, k]
    return canvas


_BASIS = np.array(
    [
        [(0.125 if k == 0 else 0.25) ** 0.5 * math.cos(math.pi * (2 * j + 1) * k / 16) for j in range(8)]
        for k in range(8)
    ]
)


def _sum4(rows: NDArray[np.float64], x: Plane | Sequence[Plane]) -> Plane:
    """Σ rows[k] x[k] over four planes."""
    a, b, c, d = (float(weight) for weight in rows)
    out = x[0] * a
    out += x[1] * b
    out += x[2] * c
    out += x[3] * d
    return out


def _dct(x: Plane, inverse: bool) -> Plane:
    """8-point DCT-II (or its inverse) along axis 0, by even and odd halves."""
    out = np.empty_like(x)
    if inverse:
        for j in range(4):
            even, odd = _sum4(_BASIS[::2, j], x[::2]), _sum4(_BASIS[1::2, j], x[1::2])
            out[j], out[7 - j] = even + odd, even - odd
        return out
    plus, minus = [x[j] + x[7 - j] for j in range(4)], [x[j] - x[7 - j] for j in range(4)]
    for k in range(8):
        out[k] = _sum4(_BASIS[k, :4], minus if k % 2 else plus)
    return out


def _quantise(plane: Plane, step: Plane, slope: float) -> Plane:
    """Round the 8 x 8 DCT coefficients of (B, H, W) planes to multiples of step · (1 + slope (i + j))."""
    b, h, w = plane.shape
    blocks = np.ascontiguousarray(plane.reshape(b, h // 8, 8, w // 8, 8).transpose(2, 4, 0, 1, 3))
    co = _dct(_dct(blocks, False).swapaxes(0, 1), False)  # axes: (column frequency, row frequency, ...)
    order = np.arange(8, dtype=np.float32)
    table = 1.0 + slope * (order[:, None] + order[None, :])
    grid = table[:, :, None, None, None] * step.reshape(1, 1, b, 1, 1)
    co = np.rint(co / grid) * grid
    back = _dct(_dct(np.asarray(co, dtype=np.float32), True).swapaxes(0, 1), True)
    return np.ascontiguousarray(back.transpose(2, 3, 0, 4, 1)).reshape(b, h, w)


def compress(rgb: Plane, quality: Plane) -> Plane:
    """JPEG-like loss on (B, 3, S, S) in 0..255: half-resolution colour, quantised 8 x 8 cosine blocks."""
    size = rgb.shape[-1]
    full = -(-size // 16) * 16
    rgb = np.pad(rgb, ((0, 0), (0, 0), (0, full - size), (0, full - size)), mode="edge")
    luma = 0.299 * rgb[:, 0] + 0.587 * rgb[:, 1] + 0.114 * rgb[:, 2]
    colour = rgb[:, ::2] - luma[:, None]  # red and blue differences
    small = 0.25 * (
        colour[:, :, ::2, ::2] + colour[:, :, 1::2, ::2] + colour[:, :, ::2, 1::2] + colour[:, :, 1::2, 1::2]
    )
    step = (2.0 + 14.0 * (1.0 - quality)).astype(np.float32)
    luma = _quantise(luma - 128.0, step, 0.35) + 128.0
    red, blue = (_quantise(small[:, k], 1.5 * step, 0.6).repeat(2, axis=1).repeat(2, axis=2) for k in (0, 1))
    green = -(0.299 * red + 0.114 * blue) * (1.0 / 0.587)
    out = np.stack([luma + red, luma + green, luma + blue], axis=1)
    return np.asarray(out[:, :, :size, :size], dtype=np.float32)
