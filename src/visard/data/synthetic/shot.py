"""How one picture was taken: pose, light, expression, what is worn, camera; and the attributes that result."""

from __future__ import annotations

import numpy as np

from visard.data.synthetic import people
from visard.data.synthetic.people import (
    BEARD,
    BLACK,
    BLOND,
    BROWN,
    GOATEE,
    GRAY,
    KNOWN,
    MUSTACHE,
    SHAVEN,
    STUBBLE,
    Column,
    Person,
    smooth,
)

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


def draw_shots(seed: int, index: int, identities: list[int], pictures: list[int]) -> Column:
    """The uniform numbers (B, N) of pictures."""
    rows = zip(identities, pictures, strict=True)
    return people.uniform(people.raw(seed, people.SHOT, index, rows, len(SHOTS)))


def shots(domain: str, p: Person, numbers: Column) -> Person:
    """Named traits (B,) of pictures of the people `p`, from uniform numbers (B, N)."""
    d = KNOWN[domain]
    u = {name: numbers[:, k] for k, name in enumerate(SHOTS)}
    bell = people.normal(numbers)
    n = {name: bell[:, k] for k, name in enumerate(SHOTS)}
    s: Person = dict(p)
    s["yaw"] = np.clip(d.yaw * n["yaw"], -0.85, 0.85)
    s["pitch"] = d.pitch[0] + d.pitch[1] * n["pitch"]
    s["roll"] = 0.09 * n["roll"]
    s["scale"] = 1.27 + 0.07 * n["scale"]
    s["shift_x"], s["shift_y"] = 0.05 * n["shift_x"], 0.05 * n["shift_y"] - 0.06
    _light(s, d.key, d.height, d.warmth, u, n)
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


def _light(
    s: Person,
    key: tuple[float, float],
    height: tuple[float, float],
    warmth: tuple[float, float],
    u: Person,
    n: Person,
) -> None:
    """Main light as a unit vector (x right, y down, z to the camera), its strength and colour."""
    azimuth, above = 0.75 * n["azimuth"], height[0] + height[1] * n["height"]
    s["light_x"], s["light_y"] = np.sin(azimuth) * np.cos(above), -np.sin(above)
    s["light_z"] = np.maximum(np.cos(azimuth) * np.cos(above), 0.05)
    s["key"] = np.clip(key[0] + key[1] * n["key"], 0.15, 1.6)
    s["ambient"] = 0.26 + 0.22 * u["ambient"]
    s["warmth"] = warmth[0] + warmth[1] * n["warmth"]
    s["fill"] = 0.25 * u["fill"]


def _expression(s: Person, p: Person, u: Person, n: Person) -> None:
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


def _worn(s: Person, p: Person, u: Person, n: Person) -> None:
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


def _face_hair(s: Person, p: Person, u: Person) -> None:
    """Beard of the day: the person's own style on most pictures."""
    other = np.where(u["beard_kind"] < 0.5, SHAVEN, np.floor(1.0 + 8.0 * (u["beard_kind"] - 0.5)))
    style = np.where((p["male"] > 0.5) & (u["beard"] < 0.18), other, p["beard"])
    s["stubble"] = (style == STUBBLE) * 1.0
    s["mustache"] = ((style == MUSTACHE) | (style == BEARD) | ((style == GOATEE) & (p["vandyke"] > 0.5))) * 1.0
    s["goatee"] = (style == GOATEE) * 1.0
    s["beard"] = (style == BEARD) * 1.0
    s["shaven"] = (style == SHAVEN) * 1.0


def attributes(s: Person) -> np.ndarray[tuple[int, int], np.dtype[np.int8]]:
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
