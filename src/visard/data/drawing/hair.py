"""Hair: a shell over the skull, seen behind the neck, over the forehead and beside the face."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .head import Shell, Surface, View, meet
from .light import Normals, gloss, lit, normals
from .shapes import Plane, Traits, cover, noise, ramp


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
    hang = t["hang"]
    thick = t["shell"]
    shell = Shell(
        width=t["half_width"] + thick * (0.75 + 0.25 * hang),
        depth=t["half_depth"] + thick,
        top=t["top"] - thick,
        bottom=t["chin"] + 0.25 + 1.1 * hang,
        square=np.float32(0.5) + 0.4 * hang,
        taper=0.16 * (1.0 - hang),
        forward=np.float32(0.1) * (1.0 - hang),
    )
    f = meet(view, shell, None, 2)
    r = np.abs(f.u) / f.half
    curl = t["curl"]
    apart = f.u - 0.6 * t["part"]
    fan = apart / (np.maximum(f.v - t["top"], 0.0) + 0.45)
    strands = noise(texture, fan * (9.0 - 3.0 * curl) + 4.0, f.v * (1.3 + 5.0 * curl) + 2.0)
    fine = noise(texture, fan * 21.0 + 1.0, f.v * (2.0 + 12.0 * curl))
    tousle = 0.6 * strands + 0.4 * fine
    # the hairline: fringe or forehead in the middle, bare temples, locks falling from the parting, the sides
    line = t["front"] + 0.10 * ramp(r, 0.0, 0.75) + t["sweep"] * f.u
    line -= t["temple"] * ramp(r, 0.15, 0.5) * (1.0 - ramp(r, 0.72, 0.86))
    line += t["drape"] * np.minimum(np.abs(apart), 0.7)
    line += (t["side"] - line) * ramp(r, 0.80 - 0.06 * hang, 0.97 - 0.05 * hang)
    line += (0.05 + 0.03 * curl) * tousle
    edge = cover(f.margin + (0.012 + 0.05 * curl) * (tousle - 0.4), view.pixel * 1.2)
    depth = line - f.v
    soft = 0.045 + 0.4 * view.pixel
    front = ramp(depth, -soft, soft) * ramp(f.v, t["side_top"] - 0.05, t["side_top"] + 0.08) * edge
    shade = ramp(depth, -0.22, 0.0) * edge * (1.0 - t["bald"])
    behind = edge * ramp(t["length"] + 0.12 + 0.06 * tousle - f.v, -0.08, 0.08) * (1.0 - t["bald"])
    n = normals(f.z, view.pixel)
    glow = lit(t, n, 0.5)
    band = gloss(t, Normals(n.x * 0.6, n.y, n.z))
    # blocked light near the hairline and lower down between the locks
    deep = 1.0 - 0.28 * ramp(f.v, -0.6, 0.6)
    value = glow * deep * (1.0 + 0.5 * tousle)
    colour = t["hair_rgb"] * value[:, None]
    colour = colour + (t["hair_rgb"] * 0.9 + 0.012) * (band * (0.55 + 0.6 * fine) * (1.0 - 0.6 * curl))[:, None]
    colour = np.asarray(colour * t["warm_rgb"], dtype=np.float32)
    return Hair(f, n, colour, behind, front, shade)
