"""The populations: how faces, hair, cameras and light are distributed in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
