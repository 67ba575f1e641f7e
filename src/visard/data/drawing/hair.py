"""Hair: a shell over the skull, seen behind the neck, over the forehead and beside the face."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .head import Surface, meet
from .light import Normals, gloss, lit, normals
from .section import Shell, View
from .shapes import Plane, Traits, at_least, at_most, cover, noise, ramp


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
    """Style the hair of each picture."""
    hang, thick, curl = t["hang"], t["shell"], t["curl"]
    shell = Shell(
        width=t["half_width"] + thick * (0.75 + 0.25 * hang),
        depth=t["half_depth"] + thick,
        top=t["top"] - thick,
        bottom=t["chin"] + 0.25 + 1.1 * hang,
        square=0.5 + 0.4 * hang,
        taper=0.16 * (1.0 - hang),
        forward=0.1 * (1.0 - hang),
    )
    f = meet(view, shell)
    apart = f.u - 0.6 * t["part"]
    fan = f.v - t["top"]
    at_least(fan, 0.0)
    fan += 0.45
    np.divide(apart, fan, out=fan)
    tousle = noise(texture, fan * (9.0 - 3.0 * curl) + 4.0, f.v * (1.3 + 5.0 * curl) + 2.0)
    fine = noise(texture, fan * 21.0 + 1.0, f.v * (2.0 + 12.0 * curl))
    tousle *= 0.6
    tousle += 0.4 * fine
    edge = tousle * (0.012 + 0.05 * curl)
    edge += f.margin
    edge -= 0.4 * (0.012 + 0.05 * curl)
    edge = cover(edge, view.pixel * 1.2)
    depth = _line(t, f, apart)
    depth += (0.05 + 0.03 * curl) * tousle
    depth -= f.v
    soft = 0.045 + 0.4 * view.pixel
    front = ramp(depth, -soft, soft)
    front *= ramp(f.v, t["side_top"] - 0.05, t["side_top"] + 0.08)
    front *= edge
    edge *= 1.0 - t["bald"]
    shade = ramp(depth, -0.22, 0.0)
    shade *= edge
    behind = ramp(0.06 * tousle - f.v, -0.20 - t["length"], -0.04 - t["length"])
    behind *= edge
    n = normals(f.z, view.pixel)
    return Hair(f, n, _colour(t, f, n, tousle, fine), behind, front, shade)


def _line(t: Traits, f: Surface, apart: Plane) -> Plane:
    """Height of the hairline: fringe or forehead, bare temples, locks falling from the parting, the sides."""
    hang = t["hang"]
    r = np.abs(f.u)
    r /= np.sqrt(f.wide)
    line = ramp(r, 0.0, 0.75)
    line *= 0.10
    line += t["sweep"] * f.u
    line += t["front"]
    bare = ramp(r, 0.15, 0.5)
    bare *= ramp(r, 0.86, 0.72)
    bare *= t["temple"]
    line -= bare
    line += t["drape"] * at_most(np.abs(apart), 0.7)
    side = ramp(r, 0.80 - 0.06 * hang, 0.97 - 0.05 * hang)
    side *= t["side"] - line
    line += side
    return line


def _colour(t: Traits, f: Surface, n: Normals, tousle: Plane, fine: Plane) -> Plane:
    """Lit hair (B, 3, S, S): less light near the hairline and lower down between the locks, a band of gloss."""
    value = ramp(f.v, -0.6, 0.6)
    value *= -0.28
    value += 1.0
    value *= lit(t, n, 0.5)
    value *= 0.5 * tousle + 1.0
    band = gloss(t, Normals(n.x * 0.6, n.y, n.z))
    shine = fine * 0.6
    shine += 0.55
    shine *= 1.0 - 0.6 * t["curl"]
    band *= shine
    own, bright = t["hair_rgb"] * t["warm_rgb"], (t["hair_rgb"] * 0.9 + 0.012) * t["warm_rgb"]
    colour = np.empty((len(value), 3, *value.shape[1:]), dtype=np.float32)
    for k in range(3):
        np.multiply(value, own[:, k], out=colour[:, k])
        colour[:, k] += band * bright[:, k]
    return colour
