"""From traits to what is drawn: lengths in head units (half a face is about 1), angles and linear colours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .person import BLACK, BLOND, BROWN, GRAY, RED, Column, Person
from .shapes import Plane

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
    tints = {name: rgb.astype(np.float32)[:, :, None, None] for name, rgb in _colours(s).items()}
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


def _colours(s: Person) -> dict[str, NDArray[np.float64]]:
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
