"""What a network expects as input: side of the pictures, order of the channels, mean and standard deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from visard.data.augment import Three, to_float
from visard.errors import UsageError, VisardError, did_you_mean

ORDERS = ("rgb", "bgr")


@dataclass(frozen=True)
class Inputs:
    """A picture x in 0..255 goes in as (x / 255 - mean) / std; mean and std follow the order of the channels."""

    order: str = "rgb"
    mean: Three = (0.5, 0.5, 0.5)
    std: Three = (0.5, 0.5, 0.5)
    size: int = 112  # pixels of a side, where the network's file does not say

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UsageError(f"channel order {self.order!r}{did_you_mean(self.order, ORDERS)}")
        if len(self.mean) != 3 or len(self.std) != 3:
            raise UsageError("mean and std need three numbers each")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise UsageError(f"mean {self.mean}, std {self.std}: must be finite, std above 0")
        if not 1 <= self.size <= 4096:
            raise UsageError(f"size = {self.size}: must be 1 to 4096 pixels")

    @classmethod
    def of_spec(cls, spec: dict[str, str], where: object = "model") -> Inputs:
        """As the metadata of a model file say: order, mean, std and size as text."""
        try:
            mean, std = three(spec.get("mean", "0.5")), three(spec.get("std", "0.5"))
            return cls(spec.get("order", "rgb"), mean, std, int(spec.get("size", "112")))
        except (ValueError, VisardError) as error:
            raise VisardError(f"{where}: its metadata are damaged ({error})") from None

    def to_spec(self) -> dict[str, str]:
        """The same as text, for the metadata of a model file."""
        mean, std = (",".join(f"{v:.10g}" for v in values) for values in (self.mean, self.std))
        return {"order": self.order, "mean": mean, "std": std, "size": str(self.size)}

    def tensor(self, pictures: npt.NDArray[np.uint8]) -> Tensor:
        """Pictures (B, H, W, 3) uint8 RGB -> (B, 3, H, W) float32 in the picture's own memory order."""
        return to_float(pictures, True, self.order, self.mean, self.std)


PRESETS = {
    "arcface": Inputs(),
    "cosface": Inputs(std=(128 / 255,) * 3),  # (x - 127.5) / 128
    "imagenet": Inputs(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), size=224),
    "raw": Inputs(mean=(0.0,) * 3, std=(1 / 255,) * 3),  # 0..255: the network normalises by itself
}


def preset(name: str) -> Inputs:
    """The inputs that a kind of network was trained with."""
    if name not in PRESETS:
        raise UsageError(f"no input preset {name!r}{did_you_mean(name, PRESETS)}")
    return PRESETS[name]


def choose(
    own: Inputs, name: str | None, *, order: str | None = None, mean: str | None = None, std: str | None = None
) -> Inputs:
    """The network's own inputs, or those of a preset, with single settings changed; its size stays."""
    chosen = own if name is None else replace(preset(name), size=own.size)
    changes: dict[str, Any] = {} if order is None else {"order": order}
    for what, text in (("mean", mean), ("std", std)):
        try:
            changes |= {} if text is None else {what: three(text)}
        except ValueError:
            raise UsageError(f"{what} {text!r}: give one number or three, separated by commas") from None
    return replace(chosen, **changes)


def three(text: str) -> Three:
    """Three numbers from "a,b,c" or "a"."""
    values = [float(part) for part in text.split(",")]
    if len(values) not in (1, 3):
        raise ValueError(f"{text!r} is not one number or three")
    a, b, c = values * (3 // len(values))
    return a, b, c


def resized(pictures: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """Pictures (B, H, W, 3) brought to `size` x `size` (bicubic, smoothed before they shrink)."""
    if pictures.shape[1:3] == (size, size):
        return pictures
    pixels = torch.from_numpy(np.ascontiguousarray(pictures)).permute(0, 3, 1, 2).to(torch.float32)
    moved = torch.nn.functional.interpolate(pixels, (size, size), mode="bicubic", antialias=True)
    return moved.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
