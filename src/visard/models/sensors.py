"""Extractors for sensor readings and feature vectors (Kang et al. 2022, Section 5.3), `size` numbers a row."""

from __future__ import annotations

from torch import Tensor, nn

from visard.errors import UsageError

SIDE = 20  # of a velocity profile


class Mlp(nn.Module):
    """Two fully connected layers with dropout between: the paper's for PAMAP2, wider on request."""

    def __init__(self, hidden: int, embedding: int, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, embedding)
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


class CnnGru(nn.Module):
    """For velocity profiles (B, frames, 20, 20): a convolution for each frame, a GRU over time, a linear bottleneck."""

    def __init__(self, embedding: int, size: int) -> None:
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
