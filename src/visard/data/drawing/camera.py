"""The camera: exposure, lens blur, contrast, sensor noise, eight bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .section import View
from .shapes import Plane, Traits, at_least

SHARPEST = 1e-3  # least sigma of a blur, pixels


def expose(t: Traits, view: View, canvas: Plane, grain: Plane) -> NDArray[np.uint8]:
    """uint8 (B, S, S, 3) from linear light (B, 3, S, S) and unit noise of the same shape."""
    size = canvas.shape[-1]
    fall = view.x * view.x
    fall += view.y * view.y
    fall *= -0.16 * t["vignette"]
    fall += 1.0
    at_least(fall, 0.3)
    canvas *= fall[:, None]
    # exposure and colour cast ride on the weights of the blur
    canvas = blur(canvas, t["blur"][:, 0, 0] * np.float32(size / 64.0), 1.25 * t["exposure"][:, None] * t["cast_rgb"])
    for k in range(3):
        _develop(canvas[:, k])
    grey = 0.30 * canvas[:, 0]
    grey += 0.59 * canvas[:, 1]
    grey += 0.11 * canvas[:, 2]
    # saturation and contrast at once, in 255ths: k c (x - grey) + k (grey - 0.45) + 0.45
    contrast = 255.0 * t["contrast"]
    base = grey * contrast
    base += 255.0 * 0.45 - 0.45 * contrast + 0.5  # half a step: casting to integers cuts off
    vivid = t["colour"] * contrast
    rough = np.clip(grey, 0.0, 1.0)
    rough *= -0.7
    rough += 1.35
    rough *= 255.0 * t["grain"]
    out = np.empty((len(canvas), size, size, 3), dtype=np.uint8)
    for k in range(3):
        plane = canvas[:, k]
        plane -= grey
        plane *= vivid
        plane += base
        plane += rough * grain[:, k]
        np.clip(plane, 0.5, 255.5, out=plane)
        np.copyto(out[..., k], plane, casting="unsafe")
    return out


def _develop(x: Plane) -> None:
    """A shoulder instead of clipping, x (1 + x/4) / (1 + x), then gamma 2 and 1.12 times that; in place."""
    bent = x * (0.25 * 1.12**2)
    bent += 1.12**2
    bent *= x
    x += 1.0
    bent /= x
    np.sqrt(bent, out=x)


def blur(canvas: Plane, sigma: Plane, gain: Plane) -> Plane:
    """Gaussian blur times gain (B, 3, 1, 1), with one sigma (B,) in pixels per picture, borders replicated.

    Weights end at 2.3 sigma. The widest picture of a batch decides how many neighbours are added; the others have
    weight 0 there, which changes no bit of them.
    """
    wide = np.maximum(sigma.astype(np.float64), SHARPEST)[:, None]
    reach = np.ceil(2.3 * wide)
    radius = max(1, int(reach.max()))
    steps = np.arange(radius + 1, dtype=np.float64)
    weights = np.where(steps <= reach, np.exp(-0.5 * (steps / wide) ** 2), 0.0)
    weights /= weights[:, :1] + 2.0 * weights[:, 1:].sum(axis=1, keepdims=True)
    w = weights.astype(np.float32)[:, :, None, None]
    size, shape = canvas.shape[-1], (len(canvas), canvas.shape[-1])
    tall = np.empty((shape[0], size + 2 * radius, size), dtype=np.float32)
    broad = np.empty((shape[0], size, size + 2 * radius), dtype=np.float32)
    out = np.empty_like(canvas)
    for k in range(3):
        tall[:, radius:-radius] = canvas[:, k]
        tall[:, :radius], tall[:, -radius:] = canvas[:, k, :1], canvas[:, k, -1:]
        middle = broad[:, :, radius:-radius]
        np.multiply(canvas[:, k], w[:, 0], out=middle)
        for step in range(1, radius + 1):
            pair = tall[:, radius - step : radius - step + size] + tall[:, radius + step : radius + step + size]
            pair *= w[:, step]
            middle += pair
        broad[:, :, :radius], broad[:, :, -radius:] = middle[:, :, :1], middle[:, :, -1:]
        plane = out[:, k]
        np.multiply(middle, w[:, 0] * gain[:, k], out=plane)
        for step in range(1, radius + 1):
            pair = broad[:, :, radius - step : radius - step + size] + broad[:, :, radius + step : radius + step + size]
            pair *= w[:, step] * gain[:, k]
            plane += pair
    return out
