"""Who is in a picture and how it was taken: named traits of identities and pictures, and the attributes that result.

All randomness is counter-based: the n-th number of a stream is a pure function of its address (seed, stream, domain,
identity, picture). An identity has a latent vector of genes and choices; a picture adds pose, light, expression, things
worn, and the camera.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]  # float64, one number a picture
Columns = dict[str, Column]

IDENTITY, SKIN_GRID, SHOT, WALL_GRID, SENSOR = range(5)  # streams
LOW = np.uint64(0x0000FFFF0000FFFF)
BANK = 1 << 18  # numbers of sensor noise
BOUND = 2.4  # of normal numbers

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

SEXED: dict[str, float] = {
    "jaw_square": 0.55, "jaw_taper": -0.5, "chin_bump": 0.5, "brow_thick": 0.45, "brow_height": -0.5,
    "brow_arch": -0.45, "eye_open": -0.4, "eye_depth": 0.4, "nose_width": 0.3, "nose_height": 0.35,
    "lip_upper": -0.45, "lip_lower": -0.4, "neck": 0.8, "forehead": 0.1, "cheek": -0.3, "lip_dark": -0.3,
}  # fmt: skip
"""Half the mean difference between men and women, in deviations."""

ATTRIBUTES: tuple[str, ...] = (
    "Bags_Under_Eyes", "Bald", "Black_Hair", "Blond_Hair", "Brown_Hair", "Bushy_Eyebrows", "Chubby",
    "Eyeglasses", "Goatee", "Gray_Hair", "Male", "Mustache", "No_Beard", "Oval_Face", "Rosy_Cheeks",
    "Smiling", "Wearing_Hat", "Wearing_Lipstick", "Young",
)  # fmt: skip
"""CelebA's names, in CelebA's order, of what can be drawn."""

SHOTS: tuple[str, ...] = (
    "yaw", "pitch", "roll", "scale", "shift_x", "shift_y", "azimuth", "height", "key", "ambient", "warmth",
    "fill", "smile", "smile_size", "open", "brow", "lids", "gaze_x", "gaze_y", "age", "weight", "tired", "glasses",
    "frame", "frame_size", "frame_dark", "tint", "glare", "hat", "hat_kind", "hat_hue", "hat_shade",
    "lipstick", "lip_hue", "rosy", "dye", "dye_kind", "beard", "beard_kind", "style", "style_part", "style_volume",
    "cloth_hue", "cloth_shade", "collar", "back_hue", "back_shade", "back_kind", "back_turn",
    "cover", "cover_kind", "cover_x", "cover_y", "cover_hue", "cover_turn", "blur", "grain", "blocks", "quality",
    "exposure", "contrast", "colour", "cast", "vignette",
)  # fmt: skip
"""Uniform numbers of one picture."""

AS_DRAWN: tuple[str, ...] = (
    "cast", "vignette", "back_hue", "back_shade", "back_kind", "back_turn", "cloth_hue", "cloth_shade", "collar",
    "cover_kind", "cover_x", "cover_y", "cover_hue", "cover_turn", "glare", "lip_hue",
)  # fmt: skip
"""Those that are used as they are."""


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
    "north": Domain(melanin=(0.16, 0.10), hair=(0.22, 0.40, 0.28, 0.10), dark_iris=0.40),
    "south": Domain(
        melanin=(0.55, 0.14), hair=(0.82, 0.13, 0.03, 0.02), dark_iris=0.95,
        shift={
            "nose_width": 1.3, "nose_height": -0.7, "lip_upper": 1.2, "lip_lower": 1.0, "eye_gap": 0.7,
            "eye_tilt": 0.9, "chin_len": -0.7, "forehead": 0.5, "brow_arch": -0.5, "width": 0.6,
        },
        spread={"eye_open": 1.2, "nose_len": 1.2, "ear_size": 1.3, "brow_dark": 0.5, "melanin": 0.8},
        curl=0.45, yaw=0.40, pitch=(-0.14, 0.17), key=(0.95, 0.30), height=(0.85, 0.40), warmth=(0.12, 0.14),
        exposure=(1.22, 0.24), contrast=(0.94, 0.14), colour=(0.86, 0.18), blur=(0.35, 1.10), grain=(0.012, 0.040),
        blocks=0.6,
    ),
}  # fmt: skip


def traits(seed: int, domain: str, identity: NDArray[np.int64], picture: NDArray[np.int64]) -> Columns:
    """Named traits (B,) of pictures of one domain."""
    index = list(KNOWN).index(domain)
    once, row = np.unique(identity, return_inverse=True)
    vectors = uniform(raw(seed, IDENTITY, index, [(i, 0) for i in once.tolist()], len(GENES) + len(CHOICES)))
    p = {name: column[row] for name, column in identity_traits(domain, vectors).items()}
    address = zip(identity.tolist(), picture.tolist(), strict=True)
    return picture_traits(domain, p, uniform(raw(seed, SHOT, index, address, len(SHOTS))))


def identity_traits(domain: str, vectors: Column) -> Columns:
    """Named traits (B,) of identities of a domain from their latent vectors (B, G + C)."""
    d = KNOWN[domain]
    genes, choices = normal(vectors[:, : len(GENES)]), vectors[:, len(GENES) :]
    p: Columns = {name: genes[:, k] * d.spread.get(name, 1.0) + d.shift.get(name, 0.0) for k, name in enumerate(GENES)}
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
    long = -0.65 * p["width"] - 0.6 * p["jaw_square"] + 0.3 * p["chin_len"] - 0.35 * p["weight"] - 0.2 * sign
    p["oval"] = (long > 0.55).astype(np.float64)
    p["bushy"] = (p["brow_thick"] > 1.15).astype(np.float64)
    return p


def _colours(p: Columns, c: Columns, d: Domain) -> None:
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


def _habits(p: Columns, c: Columns) -> None:
    """Hair style, beard and other habits of an identity."""
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


def picture_traits(domain: str, p: Columns, numbers: Column) -> Columns:
    """Named traits (B,) of pictures of identities with traits `p`, from uniform numbers (B, N)."""
    d = KNOWN[domain]
    u = {name: numbers[:, k] for k, name in enumerate(SHOTS)}
    bell = normal(numbers)
    n = {name: bell[:, k] for k, name in enumerate(SHOTS)}
    s: Columns = dict(p)
    s["yaw"] = np.clip(d.yaw * n["yaw"], -0.85, 0.85)
    s["pitch"] = d.pitch[0] + d.pitch[1] * n["pitch"]
    s["roll"] = 0.09 * n["roll"]
    s["scale"] = 1.27 + 0.07 * n["scale"]
    s["shift_x"], s["shift_y"] = 0.05 * n["shift_x"], 0.05 * n["shift_y"] - 0.06
    _light(s, d, u, n)
    _expression(s, p, u, n)
    _worn(s, p, u, n)
    _face_hair(s, p, u)
    s["blur"] = d.blur[0] + (d.blur[1] - d.blur[0]) * u["blur"] ** 1.5
    s["grain"] = d.grain[0] + (d.grain[1] - d.grain[0]) * u["grain"] ** 1.5
    s["blocks"] = (u["blocks"] < d.blocks) * 1.0
    s["quality"] = 0.35 + 0.65 * u["quality"]
    s["exposure"] = d.exposure[0] * np.exp(d.exposure[1] * n["exposure"])
    s["contrast"] = d.contrast[0] + d.contrast[1] * n["contrast"]
    s["colour"] = d.colour[0] + d.colour[1] * n["colour"]
    for name in AS_DRAWN:
        s[name] = u[name]
    s["cover"] = (u["cover"] < 0.06) * 1.0
    return s


def _light(s: Columns, d: Domain, u: Columns, n: Columns) -> None:
    """Main light as a unit vector (x right, y down, z to the camera), its strength and colour."""
    azimuth, above = 0.75 * n["azimuth"], d.height[0] + d.height[1] * n["height"]
    s["light_x"], s["light_y"] = np.sin(azimuth) * np.cos(above), -np.sin(above)
    s["light_z"] = np.maximum(np.cos(azimuth) * np.cos(above), 0.05)
    s["key"] = np.clip(d.key[0] + d.key[1] * n["key"], 0.15, 1.6)
    s["ambient"] = 0.26 + 0.22 * u["ambient"]
    s["warmth"] = d.warmth[0] + d.warmth[1] * n["warmth"]
    s["fill"] = 0.25 * u["fill"]


def _expression(s: Columns, p: Columns, u: Columns, n: Columns) -> None:
    """Smile, open mouth, brows, lids, gaze; age and weight at the time."""
    smiling = u["smile"] < p["smile_rate"]
    s["smiling"] = smiling * 1.0
    s["smile"] = np.where(smiling, 0.55 + 0.5 * u["smile_size"], -0.12 + 0.27 * u["smile_size"])
    wide = np.where(smiling, 0.6, 0.22) > u["open"]
    s["open"] = np.where(wide, 0.25 + 0.75 * np.abs(n["open"]) * 0.5, 0.0)
    s["raise"] = 0.5 * n["brow"]
    s["lids"] = np.clip(1.0 + 0.14 * n["lids"] - 0.16 * np.maximum(s["smile"], 0.0), 0.25, 1.3)
    s["lids"] = np.where(u["lids"] < 0.02, 0.08, s["lids"])
    s["gaze_x"], s["gaze_y"] = 0.018 * n["gaze_x"], 0.008 * n["gaze_y"]
    s["age"] = p["age"] + 2.5 * n["age"]
    s["young"] = (s["age"] < 42.0) * 1.0
    s["old"] = smooth(s["age"], 34.0, 68.0)
    s["weight"] = p["weight"] + 0.12 * n["weight"]
    s["chubby"] = (s["weight"] > 1.2) * 1.0
    s["bagged"] = (p["bags"] + 1.3 * s["old"] + 0.5 * n["tired"] > 1.05) * 1.0


def _worn(s: Columns, p: Columns, u: Columns, n: Columns) -> None:
    """Glasses, hat, make-up and the style of the hair that day."""
    s["glasses"] = (u["glasses"] < p["glasses_rate"]) * 1.0
    s["shaded"] = (u["tint"] < 0.16) * 1.0
    s["frame"], s["frame_size"], s["frame_dark"] = u["frame"], u["frame_size"], u["frame_dark"]
    s["hat"] = (u["hat"] < p["hat_rate"]) * 1.0
    s["hat_kind"], s["hat_hue"], s["hat_shade"] = np.floor(3.0 * u["hat_kind"]), u["hat_hue"], u["hat_shade"]
    s["lipstick"] = (u["lipstick"] < p["lipstick_rate"]) * 1.0
    s["rosy"] = (u["rosy"] < p["rosy_rate"]) * 1.0
    dyed = u["dye"] < np.where(p["male"] > 0.5, 0.02, 0.07)
    s["hair_kind"] = np.where(dyed, np.floor(3.0 * u["dye_kind"]), p["hair_kind"])
    changed = u["style"] < 0.3
    s["length"] = np.where(changed, np.clip(p["length"] * (0.55 + 0.9 * u["style"] / 0.3), 0.1, 1.4), p["length"])
    tied = (p["male"] < 0.5) & (u["style"] > 0.85)
    s["length"] = np.where(tied, 0.12, s["length"])
    s["part"] = 0.25 * p["part"] + 0.12 * n["style_part"]
    s["volume"] = 0.11 + 0.03 * p["volume"] + 0.02 * n["style_volume"] + 0.10 * p["curl"]
    s["fringe"] = np.where(u["style_part"] < 0.1, 1.0 - p["fringe"], p["fringe"]) * (p["bald"] < 0.5)
    hidden = (s["hat"] > 0.5) & (p["bald"] > 0.5)
    s["bald_seen"] = np.where(hidden, 0.0, p["bald"])


def _face_hair(s: Columns, p: Columns, u: Columns) -> None:
    """Beard of the day: the identity's own style on most pictures."""
    other = np.where(u["beard_kind"] < 0.5, SHAVEN, np.floor(1.0 + 8.0 * (u["beard_kind"] - 0.5)))
    style = np.where((p["male"] > 0.5) & (u["beard"] < 0.18), other, p["beard"])
    s["stubble"] = (style == STUBBLE) * 1.0
    s["mustache"] = ((style == MUSTACHE) | (style == BEARD) | ((style == GOATEE) & (p["vandyke"] > 0.5))) * 1.0
    s["goatee"] = (style == GOATEE) * 1.0
    s["beard"] = (style == BEARD) * 1.0
    s["shaven"] = (style == SHAVEN) * 1.0


def attributes(s: Columns) -> np.ndarray[tuple[int, int], np.dtype[np.int8]]:
    """int8 (B, A) in {-1, 1}, columns as `ATTRIBUTES`: read from the very traits that are drawn."""
    haired = s["bald"] < 0.5
    table = {
        "Bags_Under_Eyes": s["bagged"], "Bald": s["bald_seen"],
        "Black_Hair": haired & (s["hair_kind"] == BLACK), "Blond_Hair": haired & (s["hair_kind"] == BLOND),
        "Brown_Hair": haired & (s["hair_kind"] == BROWN), "Gray_Hair": haired & (s["hair_kind"] == GRAY),
        "Bushy_Eyebrows": s["bushy"], "Chubby": s["chubby"], "Eyeglasses": s["glasses"], "Goatee": s["goatee"],
        "Male": s["male"], "Mustache": s["mustache"], "No_Beard": s["shaven"], "Oval_Face": s["oval"],
        "Rosy_Cheeks": s["rosy"], "Smiling": s["smiling"], "Wearing_Hat": s["hat"],
        "Wearing_Lipstick": s["lipstick"], "Young": s["young"],
    }  # fmt: skip
    columns = [np.where(np.asarray(table[name]) > 0.5, 1, -1) for name in ATTRIBUTES]
    return np.stack(columns, axis=1).astype(np.int8)


def smooth(x: Column, low: float, high: float) -> Column:
    """Smooth step for columns."""
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return np.asarray(t * t * (3.0 - 2.0 * t), dtype=np.float64)


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
