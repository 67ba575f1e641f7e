"""Shells made of ellipses, and where rays meet their sections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .shapes import Plane, at_least, at_most, slope

CENTRE = -0.05  # height of the widest ellipse
ROUND = 0.45  # squareness above the centre


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
    e = view.x * (m * sink)
    e += base
    e -= 0.5 * (shell.bottom + shell.top)
    w = view.x * view.x
    w *= -whole * k
    w += whole * k * area
    w -= (e * e) * p
    at_least(w, 0.0)
    np.sqrt(w, out=w)
    e *= p * sink
    w -= e
    w *= 1.0 / whole
    w += view.x * m
    return w


class Section:
    """Where rays x meet the ellipses at heights v: depth z1 in the yawed frame, and u across the face.

    In the yawed frame the section at height v is an ellipse (W, D), so the depth is the larger root of a
    quadratic: z = (x s c (D² - W²) + W D sqrt(A - x²)) / A with A = W² c² + D² s².
    """

    def __init__(self, view: View, shell: Shell, v: Plane, x: Plane):
        s, c = view.sin_yaw, view.cos_yaw
        self.v = v
        low = v - CENTRE
        far = low * (1.0 / (CENTRE - shell.top))
        low *= 1.0 / (shell.bottom - CENTRE)
        at_least(low, 0.0)
        at_most(far, 0.0)
        # squared width (1 - f) (1 + q f) W² (1 - taper low)², f = squared share of the way to either end
        ww = low * low
        far *= far
        far += ww
        rest = 1.0 - far
        ww *= shell.square - ROUND
        ww += ROUND * far
        ww += 1.0
        ww *= rest
        lean = low * (-shell.taper * shell.width)
        lean += shell.width
        lean *= lean
        ww *= lean
        # squared depth (1 - f²) (1 - low / 2) D²
        dd = far
        dd += 1.0
        dd *= rest
        np.multiply(low, -0.5 * shell.depth * shell.depth, out=lean)
        lean += shell.depth * shell.depth
        dd *= lean
        at_least(dd, 0.02)
        at_most(low, 1.0)  # past the chin the axis stays, or the outline would catch light from above
        low *= low
        middle = low
        middle *= shell.forward
        wide = np.clip(ww, 0.003, np.inf)
        self.x0 = x0 = x - middle * s
        area = wide * (c * c)
        area += dd * (s * s)
        gap = x0 * x0
        np.subtract(area, gap, out=gap)
        at_least(gap, 0.0)
        gap *= wide
        gap *= dd
        np.sqrt(gap, out=gap)
        z1 = dd - wide
        z1 *= x0
        z1 *= s * c
        z1 += gap
        z1 /= area
        middle *= c
        z1 += middle
        self.z1, self.wide, self.raw, self.deep = z1, wide, ww, dd
        self.u = x * c
        self.u -= z1 * s

    def outline(self, view: View) -> tuple[Plane, Plane, Plane]:
        """Distance to the outline, positive inside, and its gradient: A - x² over the length of its own gradient."""
        s, c = view.sin_yaw, view.cos_yaw
        edge = self.raw * 8.0  # the width before it was bounded below
        np.clip(edge, 0.0, 1.0, out=edge)
        edge *= self.deep
        edge *= s * s
        edge += self.raw * (c * c)
        edge -= self.x0 * self.x0
        gx, gy = slope(edge, view.pixel)
        length = gx * gx
        length += gy * gy
        np.sqrt(length, out=length)
        length += 0.05
        edge /= length
        gx /= length
        gy /= length
        return edge, gx, gy
