"""Who is in the picture: an identity's latent vector and what it means for face, colours and habits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import streams
from .domains import KNOWN, Domain

Column = NDArray[Any]  # float64, one number a picture
Person = dict[str, Column]

GENES: tuple[str, ...] = (
    "width", "jaw_square", "jaw_taper", "chin_len", "chin_bump", "cheek", "forehead", "depth", "weight",
    "eye_gap", "eye_height", "eye_width", "eye_open", "eye_tilt", "eye_skew", "lid_crease", "eye_depth",
    "iris_size", "iris_hue", "iris_light", "brow_height", "brow_arch", "brow_slope", "brow_thick", "brow_len",
    "brow_gap", "brow_dark", "nose_len", "nose_width", "nose_bridge", "nose_height", "nose_tip", "ala",
    "mouth_height", "mouth_width", "lip_upper", "lip_lower", "mouth_curve", "cupid", "lip_dark", "ear_size",
    "ear_out", "neck", "melanin", "redness", "sallow", "hair_dark", "hair_warm", "hairline", "volume", "curl",
    "part", "skew_eyes", "skew_mouth", "skew_nose", "bags", "cheek_fold", "roughness",
)  # fmt: skip
"""Standard-normal directions of the latent vector."""

CHOICES: tuple[str, ...] = (
    "sex", "age", "hair", "gray", "bald", "long", "fringe", "iris", "beard", "vandyke", "glasses", "hat",
    "smile", "lipstick", "rosy", "freckles", "mole1", "mole1_u", "mole1_v", "mole2", "mole2_u", "mole2_v",
    "flow",
)  # fmt: skip
"""Uniform directions of the latent vector: kinds and habits."""

BLACK, BROWN, BLOND, RED, GRAY = range(5)
SHAVEN, STUBBLE, MUSTACHE, GOATEE, BEARD = range(5)


def latents(seed: int, index: int, identities: list[int]) -> Column:
    """The latent vectors (B, G + C) of identities, still uniform: genes, then choices."""
    words = streams.raw(seed, streams.PERSON, index, [(i, 0) for i in identities], len(GENES) + len(CHOICES))
    return streams.uniform(words)


def people(domain: str, vectors: Column) -> Person:
    """Named traits (B,) of identities of a domain from their latent vectors (B, G + C)."""
    d = KNOWN[domain]
    genes, choices = streams.normal(vectors[:, : len(GENES)]), vectors[:, len(GENES) :]
    p: Person = {name: genes[:, k] * d.spread.get(name, 1.0) + d.shift.get(name, 0.0) for k, name in enumerate(GENES)}
    c = {name: choices[:, k] for k, name in enumerate(CHOICES)}
    male = c["sex"] < 0.45
    p["male"] = male.astype(np.float64)
    p["age"] = 20.0 + 55.0 * c["age"] ** 2.4
    p["old"] = smooth(p["age"], 34.0, 68.0)
    _colours(p, c, d)
    _habits(p, c)
    sign = 2.0 * p["male"] - 1.0
    for gene, by in SEXED.items():
        p[gene] = p[gene] + sign * by
    p["weight"] = p["weight"] + 0.35 * p["old"]
    p["oval"] = (
        -0.65 * p["width"] - 0.6 * p["jaw_square"] + 0.3 * p["chin_len"] - 0.35 * p["weight"] - 0.2 * sign > 0.55
    ).astype(np.float64)
    p["bushy"] = (p["brow_thick"] > 1.15).astype(np.float64)
    return p


SEXED: dict[str, float] = {
    "jaw_square": 0.55, "jaw_taper": -0.5, "chin_bump": 0.5, "brow_thick": 0.45, "brow_height": -0.5,
    "brow_arch": -0.45, "eye_open": -0.4, "eye_depth": 0.4, "nose_width": 0.3, "nose_height": 0.35,
    "lip_upper": -0.45, "lip_lower": -0.4, "neck": 0.8, "forehead": 0.1, "cheek": -0.3, "lip_dark": -0.3,
}  # fmt: skip
"""Half the mean difference between men and women, in deviations."""


def smooth(x: Column, low: float, high: float) -> Column:
    """Smooth step for columns."""
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return np.asarray(t * t * (3.0 - 2.0 * t), dtype=np.float64)


def _colours(p: Person, c: Person, d: Domain) -> None:
    """Skin, hair and iris: kinds from the choices, shades from the genes."""
    p["melanin"] = np.clip(d.melanin[0] + d.melanin[1] * p["melanin"], 0.0, 1.0)
    p["hair_kind"] = np.searchsorted(np.cumsum(d.hair)[:3], c["hair"]).astype(np.float64)
    grayed = c["gray"] < 0.85 * smooth(p["age"], 38.0, 62.0)
    p["hair_kind"] = np.where(grayed, GRAY, p["hair_kind"])
    p["dark_iris"] = (c["iris"] < np.where(p["hair_kind"] == BLACK, 0.7 + 0.3 * d.dark_iris, d.dark_iris)) * 1.0
    p["curl"] = np.clip(d.curl + 0.16 + 0.2 * p["curl"], 0.0, 1.0)
    p["freckles"] = np.where(c["freckles"] < 0.16 * (1.0 - p["melanin"]) ** 2 + 0.02, 1.0, 0.0)
    for mole in ("mole1", "mole2"):
        p[mole] = np.where(c[mole] < 0.3, 1.0, 0.0)
        p[mole + "_u"] = (c[mole + "_u"] - 0.5) * 0.95
        p[mole + "_v"] = 0.05 + c[mole + "_v"] * 0.75


def _habits(p: Person, c: Person) -> None:
    """Hair style, beard and how often this person wears or does things."""
    male = p["male"] > 0.5
    p["bald"] = np.where(male & (c["bald"] < 0.05 + 0.3 * p["old"]), 1.0, 0.0)
    p["recede"] = np.where(male, 0.08 + 0.5 * p["old"], 0.05) * (0.5 + c["bald"])
    p["length"] = np.where(male, np.where(c["long"] < 0.05, 0.9, 0.10 + 0.22 * c["long"]), 0.25 + 1.1 * c["long"])
    p["fringe"] = (c["fringe"] < np.where(male, 0.08, 0.20)) * 1.0
    style = np.searchsorted([0.52, 0.68, 0.78, 0.89], c["beard"]).astype(np.float64)
    p["beard"] = np.where(male, style, SHAVEN)
    p["vandyke"] = (c["vandyke"] < 0.5) * 1.0
    p["glasses_rate"] = np.select([c["glasses"] < 0.12, c["glasses"] < 0.35], [0.75, 0.22], 0.03)
    p["glasses_rate"] = np.clip(p["glasses_rate"] + 0.12 * p["old"], 0.0, 0.9)
    p["hat_rate"] = np.where(c["hat"] < 0.2, 0.28, 0.04)
    p["smile_rate"] = 0.2 + 0.6 * c["smile"]
    p["lipstick_rate"] = np.where(male, 0.0, np.select([c["lipstick"] < 0.3], [0.12], 0.78))
    p["rosy_rate"] = np.where(male, 0.02, np.select([c["rosy"] < 0.25], [0.6], 0.07))
    p["flow"] = c["flow"]
