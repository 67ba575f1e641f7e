"""Pictures to network input, and random changes that keep the identity."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from visard.numerics import moved

ERASED_AREA = (0.02, 0.2)  # share of the picture that one erased rectangle covers
ERASED_ASPECT = (0.5, 2.0)  # height / width of the rectangle


Three = tuple[float, float, float]
HALF: Three = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Augment:
    """Which random changes a training batch gets; the default mirrors half of the pictures."""

    flip: bool = True  # mirror left-right with probability 1/2
    shift: Annotated[int, Field(ge=0)] = 0  # move by up to so many pixels each way; the border pixel is repeated
    jitter: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  # brightness +- jitter of half the range, contrast * (1 +- jitter)
    )
    erase: Annotated[float, Field(ge=0, le=1)] = 0.0  # probability that one rectangle of a picture turns mid-grey


def to_float(
    images: npt.NDArray[np.uint8],
    channels_last: bool = False,
    order: str = "rgb",
    mean: Three = HALF,
    std: Three = HALF,
) -> Tensor:
    """Pictures (B, H, W, 3) uint8 RGB -> (B, 3, H, W) float32: (x / 255 - mean) / std, by default in [-1, 1].

    With `channels_last` the result keeps the picture's own memory order and no transposition is made.
    Float data (sensor readings, vectors) is returned unchanged. The result is on the device of this process.
    """
    if images.dtype != np.uint8:
        return moved(torch.from_numpy(np.asarray(images, np.float32)))
    pixels = moved(torch.from_numpy(np.ascontiguousarray(images))).permute(0, 3, 1, 2)
    if order == "bgr":
        pixels = pixels.flip(1)
    if not channels_last:
        pixels = pixels.contiguous()  # transpose while a value is one byte
    if len(set(mean)) == len(set(std)) == 1:
        return pixels.to(torch.float32).mul_(1 / (255 * std[0])).sub_(mean[0] / std[0])
    scale = torch.tensor([1 / (255 * s) for s in std], device=pixels.device).view(1, 3, 1, 1)
    shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)], device=pixels.device).view(1, 3, 1, 1)
    return pixels.to(torch.float32).mul_(scale).sub_(shift)


MIRROR = Augment()


def augment(x: Tensor, rng: torch.Generator, options: Augment = MIRROR) -> Tensor:
    """Change each picture of x (B, 3, H, W), values in [-1, 1], independently; x itself stays as it is."""
    if not len(x):
        return x
    if options.flip:
        x = _flip(x, rng)
    if options.shift:
        x = _shift(x, rng, options.shift)
    if options.jitter:
        x = _jitter(x, rng, options.jitter)
    if options.erase:
        x = _erase(x, rng, options.erase)
    return x


def _uniform(rng: torch.Generator, n: int, low: float, high: float, device: torch.device) -> Tensor:
    return (torch.rand(n, generator=rng, device=rng.device) * (high - low) + low).to(device)


def _flip(x: Tensor, rng: torch.Generator) -> Tensor:
    mirrored = torch.rand(len(x), generator=rng, device=rng.device).to(x.device) < 0.5
    # the last axis is the width; torch.fliplr would mirror the channels of a batch
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(3), x)


def _shift(x: Tensor, rng: torch.Generator, k: int) -> Tensor:
    b, _, h, w = x.shape
    padded = torch.nn.functional.pad(x, (k, k, k, k), mode="replicate")
    offset = torch.randint(0, 2 * k + 1, (2, b), generator=rng, device=rng.device).to(x.device)
    # all windows as a strided view (B, 3, 2k + 1, 2k + 1, H, W); only the chosen ones are copied
    windows = padded.unfold(2, h, 1).unfold(3, w, 1)
    return windows[torch.arange(b, device=x.device), :, offset[0], offset[1]]


def _jitter(x: Tensor, rng: torch.Generator, strength: float) -> Tensor:
    shape = (-1, 1, 1, 1)
    brightness = _uniform(rng, len(x), -strength, strength, x.device).view(shape)
    contrast = _uniform(rng, len(x), 1 - strength, 1 + strength, x.device).view(shape)
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    # contrast * (x - mean) + mean + brightness in one pass
    return torch.addcmul(mean * (1 - contrast) + brightness, x, contrast).clamp_(-1, 1)


def _erase(x: Tensor, rng: torch.Generator, probability: float) -> Tensor:
    b, _, h, w = x.shape
    chosen = _uniform(rng, b, 0, 1, x.device) < probability
    area = _uniform(rng, b, *ERASED_AREA, x.device)
    aspect = torch.exp(_uniform(rng, b, np.log(ERASED_ASPECT[0]), np.log(ERASED_ASPECT[1]), x.device))
    height = ((area * aspect).sqrt() * h).clamp(1, h).floor()
    width = ((area / aspect).sqrt() * w).clamp(1, w).floor()
    top = (_uniform(rng, b, 0, 1, x.device) * (h - height + 1)).floor()
    left = (_uniform(rng, b, 0, 1, x.device) * (w - width + 1)).floor()
    rows = torch.arange(h, device=x.device)
    columns = torch.arange(w, device=x.device)
    inside_rows = (rows >= top[:, None]) & (rows < (top + height)[:, None]) & chosen[:, None]
    inside_columns = (columns >= left[:, None]) & (columns < (left + width)[:, None])
    mask = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
    return x.clone().masked_fill_(mask, 0.0)  # clone keeps the memory order, masked_fill would not
