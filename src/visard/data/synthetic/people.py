"""Counter-based random numbers: the n-th number of a stream is a pure function of its address."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visard.data.synthetic.geometry import Plane

PERSON, PERSON_GRID, SHOT, SHOT_GRID, SENSOR = range(5)


def raw(seed: int, stream: int, domain: int, rows: Iterable[tuple[int, int]], n: int) -> NDArray[np.uint64]:
    """(B, n) raw 64-bit words of Philox-4x64, a row for each (identity, picture).

    Keyed by (seed, stream), counter (0, picture, identity, domain). One generator is set to each address in
    turn: making a generator takes five times as long as a row of numbers.
    """
    key = np.array([seed, stream], dtype=np.uint64)
    bits = np.random.Philox(key=key)
    counter, buffer = np.zeros(4, dtype=np.uint64), np.zeros(4, dtype=np.uint64)
    state: Any = {
        "bit_generator": "Philox", "state": {"counter": counter, "key": key},
        "buffer": buffer, "buffer_pos": len(buffer), "has_uint32": 0, "uinteger": 0,
    }  # fmt: skip
    out = []
    for identity, picture in rows:
        counter[1:] = picture, identity, domain
        bits.state = state
        out.append(bits.random_raw(n))
    return np.stack(out)


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in (0, 1): the top 53 bits, moved by half a step so that neither end occurs."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


BOUND = 2.4


@cache
def _law() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Standard normal numbers in steps of 1/512 up to ±BOUND and their distribution function."""
    z = np.linspace(-BOUND, BOUND, 2 * round(512 * BOUND) + 1)
    return np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in z.tolist()]), z


def normal(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal by inversion, cut at ±BOUND: no monsters.

    Between neighbours of a table on straight lines, at most 6e-6 off: scipy's exact function would cost more
    time to import than a worker takes to start.
    """
    p, z = _law()
    return np.interp(u, p, z)


LOW = np.uint64(0x0000FFFF0000FFFF)
BANK = 1 << 18  # numbers of sensor noise


@cache
def _bank() -> NDArray[np.float32]:
    """Numbers of unit variance, two a word: each the sum of two 16-bit parts (a triangle).

    Integer sums are exact, so the noise is the same on every machine, and far cheaper than a normal law.
    """
    words = raw(0, SENSOR, 0, [(0, 0)], BANK // 2)[0]
    pairs = ((words & LOW) + ((words >> np.uint64(16)) & LOW)).view(np.uint32)
    centred: NDArray[np.float32] = pairs.astype(np.float32)
    centred -= 65535.0
    centred *= np.float32(6.0**0.5 / 65536.0)
    return centred


def grain(words: NDArray[np.uint64], n: int) -> NDArray[np.float32]:
    """(B, n) of sensor noise: for each word a stretch of one long list of noise, from a place that it names."""
    first = (words % np.uint64(BANK - n)).tolist()
    return np.stack([_bank()[k : k + n] for k in first])


# ----------
# The populations: how faces, hair, cameras and light are distributed in each.


@dataclass(frozen=True)
class Domain:
    """One population and the cameras that took its pictures; geometry in standard deviations of `GENES`."""

    melanin: tuple[float, float]  # mean and deviation, 0 = lightest skin, 1 = darkest
    hair: tuple[float, float, float, float]  # shares of black, brown, blond, red
    dark_iris: float  # share of brown eyes
    shift: Mapping[str, float] = field(default_factory=dict)  # mean of a gene
    spread: Mapping[str, float] = field(default_factory=dict)  # deviation of a gene, 1 unless named
    curl: float = 0.0  # mean of hair curl
    yaw: float = 0.32  # deviation, radians
    pitch: tuple[float, float] = (0.0, 0.14)  # mean and deviation, radians
    key: tuple[float, float] = (0.75, 0.25)  # strength of the main light: mean, deviation
    height: tuple[float, float] = (0.5, 0.45)  # elevation of the main light, radians
    warmth: tuple[float, float] = (0.0, 0.12)  # colour of the light, positive = warm
    exposure: tuple[float, float] = (1.0, 0.18)  # mean, deviation in log
    contrast: tuple[float, float] = (1.0, 0.12)
    colour: tuple[float, float] = (1.0, 0.15)  # saturation of the camera
    blur: tuple[float, float] = (0.25, 0.75)  # least and most, in 64ths of the picture's width
    grain: tuple[float, float] = (0.006, 0.028)  # sensor noise, least and most
    blocks: float = 0.35  # share of pictures with visible compression


KNOWN: dict[str, Domain] = {
    "north": Domain(
        melanin=(0.16, 0.10),
        hair=(0.22, 0.40, 0.28, 0.10),
        dark_iris=0.40,
    ),
    "south": Domain(
        melanin=(0.55, 0.14),
        hair=(0.82, 0.13, 0.03, 0.02),
        dark_iris=0.95,
        shift={
            "nose_width": 1.3, "nose_height": -0.7, "lip_upper": 1.2, "lip_lower": 1.0, "eye_gap": 0.7,
            "eye_tilt": 0.9, "chin_len": -0.7, "forehead": 0.5, "brow_arch": -0.5, "width": 0.6,
        },
        spread={"eye_open": 1.2, "nose_len": 1.2, "ear_size": 1.3, "brow_dark": 0.5, "melanin": 0.8},
        curl=0.45,
        yaw=0.40,
        pitch=(-0.14, 0.17),
        key=(0.95, 0.30),
        height=(0.85, 0.40),
        warmth=(0.12, 0.14),
        exposure=(1.22, 0.24),
        contrast=(0.94, 0.14),
        colour=(0.86, 0.18),
        blur=(0.35, 1.10),
        grain=(0.012, 0.040),
        blocks=0.6,
    ),
}  # fmt: skip


# ----------
# Who is in the picture: an identity's latent vector and what it means for face, colours and habits.

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
    words = raw(seed, PERSON, index, [(i, 0) for i in identities], len(GENES) + len(CHOICES))
    return uniform(words)


def people(domain: str, vectors: Column) -> Person:
    """Named traits (B,) of identities of a domain from their latent vectors (B, G + C)."""
    d = KNOWN[domain]
    genes, choices = normal(vectors[:, : len(GENES)]), vectors[:, len(GENES) :]
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


# ----------
# From traits to what is drawn: lengths in head units (half a face is about 1), angles and linear colours.

HAIR = {
    BLACK: (0.018, 0.014, 0.013),
    BROWN: (0.105, 0.055, 0.030),
    BLOND: (0.560, 0.390, 0.190),
    RED: (0.330, 0.110, 0.035),
    GRAY: (0.400, 0.392, 0.385),
}
LIGHT_SKIN = np.array([0.84, 0.60, 0.47])
MELANIN = np.array([1.70, 2.30, 2.75])  # absorption of the darkest skin per channel


def measures(s: Person) -> dict[str, Plane]:
    """Planes (B, 1, 1) and colours (B, 3, 1, 1), float32, of the pictures with traits `s`."""
    m: dict[str, Column] = {}
    _shape(m, s)
    _eyes(m, s)
    _nose_mouth(m, s)
    _hair(m, s)
    for name in ("yaw", "pitch", "roll"):
        m["sin_" + name], m["cos_" + name] = np.sin(s[name]), np.cos(s[name])
    planes = {name: column.astype(np.float32)[:, None, None] for name, column in (s | m).items()}
    tints = {name: rgb.astype(np.float32)[:, :, None, None] for name, rgb in _measured_colours(s).items()}
    return planes | tints


def _shape(m: Person, s: Person) -> None:
    plump = np.clip(s["weight"], -1.5, 2.5) + 0.5 * s["chubby"]
    m["plump"] = plump
    m["half_width"] = 0.69 * (1 + 0.040 * s["width"] + 0.040 * plump - 0.035 * s["oval"])
    m["half_depth"] = 0.93 * (1 + 0.03 * s["depth"])
    m["top"] = -1.21 - 0.03 * s["forehead"]
    m["chin"] = 0.96 + 0.040 * s["chin_len"] + 0.02 * s["male"] + 0.02 * s["oval"]
    m["jaw_square"] = np.clip(0.42 + 0.17 * s["jaw_square"] + 0.12 * plump - 0.2 * s["oval"], 0.0, 1.1)
    m["jaw_taper"] = np.clip(0.27 + 0.055 * s["jaw_taper"] - 0.05 * plump + 0.05 * s["oval"], 0.05, 0.45)
    m["chin_forward"] = 0.40 + 0.03 * s["chin_bump"]
    m["chin_bump"] = np.clip(0.06 + 0.022 * s["chin_bump"], 0.0, 0.14)
    m["cheek"] = np.clip(0.05 + 0.018 * s["cheek"] + 0.018 * plump + 0.03 * s["smile"], 0.0, 0.16)
    m["ear_h"], m["ear_out"] = 0.19 * (1 + 0.11 * s["ear_size"]), 0.055 + 0.018 * s["ear_out"]
    m["neck"] = 0.41 * (1 + 0.06 * s["neck"] + 0.05 * plump)


def _eyes(m: Person, s: Person) -> None:
    m["eye_u"] = 0.325 + 0.020 * s["eye_gap"]
    m["eye_v"] = -0.14 + 0.020 * s["eye_height"]
    m["eye_w"] = 0.158 * (1 + 0.075 * s["eye_width"])
    opening = 0.076 * (1 + 0.15 * s["eye_open"]) * s["lids"]
    m["lid_up"], m["lid_low"] = opening, 0.038 * (1 + 0.1 * s["eye_open"]) * np.minimum(s["lids"], 1.1)
    m["eye_tilt"], m["eye_lean"] = -0.10 - 0.09 * s["eye_tilt"], 0.16 * s["eye_skew"]
    m["crease"] = np.clip(0.036 + 0.014 * s["lid_crease"], 0.004, 0.08)
    m["iris"] = 0.071 * (1 + 0.05 * s["iris_size"])
    m["socket"] = np.clip(0.085 + 0.028 * s["eye_depth"], 0.015, 0.17)
    m["brow_ridge"] = np.clip(0.035 + 0.014 * s["eye_depth"] + 0.015 * s["male"], 0.0, 0.1)
    lift = 0.035 * s["raise"] + 0.012 * s["smile"]
    m["brow_v"] = m["eye_v"] - 0.205 - 0.022 * s["brow_height"] - lift
    m["brow_arch"], m["brow_slope"] = 0.045 + 0.028 * s["brow_arch"], 0.0 - 0.06 * s["brow_slope"]
    thick = np.clip(0.036 + 0.0085 * s["brow_thick"], 0.016, 0.07)
    m["brow_t"] = thick + 0.014 * s["bushy"]
    m["brow_in"] = np.clip(0.135 + 0.03 * s["brow_gap"] - 0.03 * s["bushy"], 0.05, 0.24)
    m["brow_out"] = m["eye_u"] + m["eye_w"] * (1.25 + 0.12 * s["brow_len"])
    m["brow_alpha"] = np.clip(0.72 + 0.1 * s["brow_dark"] + 0.12 * s["male"] + 0.2 * s["bushy"], 0.4, 1.0)


def _nose_mouth(m: Person, s: Person) -> None:
    m["nose_v"] = 0.235 + 0.032 * s["nose_len"]
    m["bridge_v"] = m["eye_v"] - 0.02
    m["nose_width"] = 0.142 * (1 + 0.13 * s["nose_width"])
    m["nose_bridge"] = np.clip(0.34 + 0.11 * s["nose_bridge"], 0.05, 0.75)
    m["nose_height"] = np.clip(0.215 * (1 + 0.16 * s["nose_height"]), 0.10, 0.34)
    m["nose_tip"] = np.clip(0.045 + 0.025 * s["nose_tip"], 0.0, 0.12)
    m["ala"] = np.clip(0.10 + 0.03 * s["ala"], 0.03, 0.18)
    m["nose_skew"] = 0.016 * s["skew_nose"]
    m["gap"] = 0.115 * s["open"] * (1 - 0.25 * s["smile"])
    m["mouth_v"] = 0.515 + 0.026 * s["mouth_height"]
    m["mouth_w"] = (
        0.262 * (1 + 0.085 * s["mouth_width"]) * (1 + 0.22 * np.maximum(s["smile"], -0.1)) * (1 - 0.1 * s["open"])
    )
    m["lip_up"] = np.clip(0.050 * (1 + 0.22 * s["lip_upper"]), 0.018, 0.1) * (1 - 0.22 * np.maximum(s["smile"], 0))
    m["lip_low"] = np.clip(0.072 * (1 + 0.20 * s["lip_lower"]), 0.03, 0.125) * (1 - 0.18 * np.maximum(s["smile"], 0))
    m["corner"] = 0.012 + 0.012 * s["mouth_curve"] - 0.085 * s["smile"]
    m["cupid"] = np.clip(0.32 + 0.14 * s["cupid"], 0.0, 0.7)
    m["mouth_skew"] = 0.022 * s["skew_mouth"]
    m["eye_skew"] = 0.012 * s["skew_eyes"]
    m["fold"] = np.clip(0.07 + 0.36 * s["old"] + 0.06 * s["cheek_fold"] + 0.26 * np.maximum(s["smile"], 0), 0.0, 0.75)
    m["bag"] = np.clip(0.06 + 0.03 * s["bags"], 0.0, 0.12) + 0.34 * s["bagged"]
    m["crow"] = np.clip(0.45 * s["old"] + 0.12 * np.maximum(s["smile"], 0), 0.0, 0.6)
    m["furrow"] = np.clip(0.42 * s["old"] + 0.10 * np.maximum(s["raise"], 0.0), 0.0, 0.5)
    m["rough"] = np.clip(0.05 + 0.015 * s["roughness"] + 0.05 * s["old"], 0.02, 0.13)


def _hair(m: Person, s: Person) -> None:
    bald, hat, fringe = s["bald"] > 0.5, s["hat"], s["fringe"]
    m["shell"] = np.where(bald, 0.03, np.clip(s["volume"], 0.05, 0.34)) * (1 - 0.45 * hat) + 0.05 * hat
    forehead = -0.93 + 0.045 * s["hairline"] - 0.03 * s["forehead"]
    m["front"] = np.where(bald, -1.7, forehead + fringe * (0.38 + 0.03 * s["hairline"]))
    m["temple"] = np.where(bald, 0.0, s["recede"] * 0.5 * (1 - fringe))
    m["side"] = np.where(bald, np.where(s["recede"] > 0.3, -0.10, -2.0), np.maximum(s["length"] - 0.05, 0.02))
    m["side_top"] = np.where(bald, -0.62, -2.0)
    m["hang"] = np.clip((s["length"] - 0.35) / 0.3, 0.0, 1.0) * (1 - s["bald"])
    m["drape"] = (1 - fringe) * (0.12 + m["hang"] * (0.25 + 0.45 * s["flow"]))
    m["sweep"] = np.clip(s["part"], -0.6, 0.6) * (0.12 + 0.3 * fringe)


def _mix(
    base: NDArray[np.float64], factors: list[tuple[float, float, float]], genes: list[Column]
) -> NDArray[np.float64]:
    """base · exp(Σ gene · factor) per channel: shades that stay positive."""
    total = sum(np.outer(gene, factor) for gene, factor in zip(genes, factors, strict=True))
    return np.asarray(base * np.exp(total), dtype=np.float64)


def _wheel(hue: Column, shade: Column, strength: float) -> NDArray[np.float64]:
    """Cloth and wall colours (B, 3) from two numbers in (0, 1): many greys, few bright colours."""
    turn, depth = np.modf(hue * 16.0)
    phase = 2 * np.pi * (turn[:, None] + np.array([0.0, 1 / 3, 2 / 3]))
    colourful = strength * (depth[:, None] / 15.0) ** 1.5
    level = (0.02 + 0.70 * shade**2.2)[:, None]
    return np.asarray(np.clip(level * np.exp(1.3 * colourful * np.cos(phase)), 0.008, 0.92), dtype=np.float64)


def _measured_colours(s: Person) -> dict[str, NDArray[np.float64]]:
    skin = LIGHT_SKIN * np.exp(-np.outer(s["melanin"], MELANIN))
    skin = _mix(skin, [(0.035, -0.035, -0.03), (0.0, 0.015, -0.07)], [s["redness"], s["sallow"]])
    kinds = np.array([HAIR[k] for k in range(5)])
    hair = kinds[s["hair_kind"].astype(int)]
    hair = _mix(
        hair,
        [(-0.22, -0.22, -0.22), (0.09, 0.0, -0.1)],
        [s["hair_dark"], s["hair_warm"] * (s["hair_kind"] != GRAY)],
    )
    natural = np.where((s["hair_kind"] == BLOND)[:, None], hair * [0.45, 0.4, 0.4], hair)
    natural = np.where((s["hair_kind"] == GRAY)[:, None] & (s["old"] < 0.85)[:, None], hair * 0.45, natural)
    lip = skin * np.array([0.86, 0.56, 0.56]) * np.exp(-0.09 * s["lip_dark"][:, None])
    painted = np.stack([0.30 + 0.35 * s["lip_hue"], 0.02 + 0.10 * s["lip_hue"], 0.045 + 0.14 * s["lip_hue"]], axis=1)
    painted = painted * (1 - 0.35 * s["melanin"][:, None])
    lip = np.where((s["lipstick"] > 0.5)[:, None], painted, lip)
    pale = _mix(
        np.array([0.10, 0.17, 0.215]),
        [(0.35, 0.05, -0.42), (0.3, 0.3, 0.3)],
        [s["iris_hue"], s["iris_light"]],
    )
    dark = _mix(np.array([0.085, 0.036, 0.015]), [(0.1, 0.05, 0.0), (0.4, 0.4, 0.4)], [s["iris_hue"], s["iris_light"]])
    iris = np.where((s["dark_iris"] > 0.5)[:, None], dark, pale)
    return {
        "skin": skin,
        "hair_rgb": hair,
        "brow_rgb": np.minimum(natural, skin * 0.5),
        "beard_rgb": np.minimum(natural, skin * 0.62),
        "lip_rgb": lip,
        "iris_rgb": np.minimum(iris, 0.6),
        "warm_rgb": _mix(np.ones(3), [(0.75, 0.05, -0.85)], [s["warmth"]]),
        "frame_rgb": _wheel(s["frame_dark"] * 7.0 % 1.0, s["frame_dark"] ** 3, 0.5) * 0.55,
        "cloth_rgb": _wheel(s["cloth_hue"], s["cloth_shade"], 0.55),
        "hat_rgb": _wheel(s["hat_hue"], s["hat_shade"], 0.6),
        "back_rgb": _wheel(s["back_hue"], s["back_shade"], 0.35),
        "cover_rgb": _wheel(s["cover_hue"], s["cover_x"], 0.5),
        "cast_rgb": _mix(np.ones(3), [(0.22, 0.0, -0.22)], [s["cast"] - 0.5]),
    }
