"""The input of a network: side of the pictures, order of the channels, mean and standard deviation.

In a run all pictures go in as [-1, 1] and in their own size; `entering` puts what a network expects in front of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

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

    @property
    def is_plain(self) -> bool:
        """Whether pictures go in as they do in a run: red, green, blue in [-1, 1]."""
        return self == Inputs(size=self.size)

    def tensor(self, pictures: npt.NDArray[np.uint8]) -> Tensor:
        """Pictures (B, H, W, 3) uint8 RGB -> (B, 3, H, W) float32 in the picture's own memory order."""
        return to_float(pictures, True, self.order, self.mean, self.std)


PRESETS = {
    "arcface": Inputs(),
    "cosface": Inputs(std=(128 / 255,) * 3),  # (x - 127.5) / 128
    "facenet": Inputs(std=(128 / 255,) * 3, size=160),  # as facenet-pytorch has it
    "imagenet": Inputs(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), size=224),
    "raw": Inputs(mean=(0.0,) * 3, std=(1 / 255,) * 3),  # 0..255: the network normalises by itself
}


def words(inputs: Inputs) -> str:
    """How a pixel x in 0..255 is scaled, with the preset's name if there is one."""
    mean, std = (
        parts[0] if len(set(parts := [f"{255 * v:.4g}" for v in values])) == 1 else f"[{', '.join(parts)}]"
        for values in (inputs.mean, inputs.std)
    )
    name = preset_of(inputs)
    return f"(x - {mean}) / {std}" + (f" ({name})" if name else "")


def preset_of(inputs: Inputs) -> str | None:
    """The name of the preset with this mean and deviation."""
    plain = replace(inputs, order="rgb").to_spec()  # as text: what files hold is rounded
    return next((name for name, known in PRESETS.items() if replace(known, size=inputs.size).to_spec() == plain), None)


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


class Entrance(nn.Module):
    """Pictures (B, 3, side, side) in [-1, 1] as a network expects them; sizes change as in `resized`."""

    scale: Tensor
    shift: Tensor

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.inputs = inputs
        std, mean = torch.tensor(inputs.std, device="cpu"), torch.tensor(inputs.mean, device="cpu")
        self.register_buffer("scale", (0.5 / std).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("shift", ((0.5 - mean) / std).view(1, 3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        size = self.inputs.size
        if x.shape[2:] != (size, size):
            pixels = x.add(1).mul_(127.5)
            moved = torch.nn.functional.interpolate(pixels, (size, size), mode="bicubic", antialias=True)
            x = moved.round_().clamp_(0, 255).div_(127.5).sub_(1)
        if self.inputs.order == "bgr":
            x = x.flip(1)
        if self.inputs.mean != PRESETS["arcface"].mean or self.inputs.std != PRESETS["arcface"].std:
            x = x * self.scale + self.shift
        return x


class Entered(nn.Module):
    """A network behind an entrance. Its layers are here under their own names, so its weights keep theirs."""

    def __init__(self, network: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.__dict__["network"] = network  # not as a layer: its own layers are
        for name, module in network.named_children():
            self.add_module(name, module)
        for name, parameter in network.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in network.named_buffers(recurse=False):
            self.register_buffer(name, buffer, name not in network._non_persistent_buffers_set)
        self.entrance = Entrance(inputs)

    def train(self, mode: bool = True) -> Entered:
        super().train(mode)
        self.__dict__["network"].training = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.__dict__["network"].forward(self.entrance(x))
        return found


def entering(network: nn.Module, inputs: Inputs, side: int) -> nn.Module:
    """The network for pictures in [-1, 1] of `side` pixels: as it is, or behind an entrance."""
    return network if inputs.is_plain and inputs.size == side else Entered(network, inputs)
