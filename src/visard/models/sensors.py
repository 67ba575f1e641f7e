"""Extractors for sensor readings and feature vectors (Kang et al. 2022, Section 5.3), `size` numbers a row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visard.errors import UsageError

SIDE = 20  # of a velocity profile
SEEN = 20  # batches that statistics are taken from


class Standardise(nn.Module):
    r"""Columns to mean 0 and deviation 1 by the statistics of the first batches that were ever trained on.

    They travel with the weights: a target goes on with those of the sources. Standardised by its own statistics it
    would hide the very shift that alignment is to remove. Moments are kept as means: averaging networks is exact.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("square", torch.zeros(size))
        self.register_buffer("count", torch.zeros(()))
        self.mean: Tensor
        self.square: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.count < SEEN:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(x.mean(0), 1 / float(self.count))
                self.square.lerp_((x * x).mean(0), 1 / float(self.count))
        if not self.count:
            return x
        spread = (self.square - self.mean**2).clamp_min(0).sqrt()
        # a column that hardly ever changed is not blown up: at least a tenth of the usual deviation, at most 5 of them
        least = 0.1 * float(spread.median()) + 1e-6
        return ((x - self.mean) / spread.clamp_min(least)).clamp(-5, 5)


class Mlp(nn.Module):
    """Two fully connected layers with dropout between: the paper's for PAMAP2, on standardised columns."""

    def __init__(self, hidden: int, embedding: int = 64, size: int = 54) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), Standardise(size),
            nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, embedding),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


class CnnGru(nn.Module):
    """For velocity profiles (B, frames, 20, 20): a convolution for each frame, a GRU over time, a linear bottleneck."""

    def __init__(self, embedding: int = 64, size: int = 20 * SIDE**2) -> None:
        super().__init__()
        if size % SIDE**2:
            raise UsageError(f"cnn_gru takes frames of {SIDE} x {SIDE} numbers, not rows of {size}")
        self.frame = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU()
        )
        self.time = nn.GRU(64, 128, batch_first=True)
        self.bottleneck = nn.Sequential(nn.Dropout(0.3), nn.Linear(128, embedding))

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        steps = self.frame(x.reshape(b * t, 1, SIDE, SIDE)).reshape(b, t, -1)
        features: Tensor = self.bottleneck(self.time(steps)[1][0])
        return features
