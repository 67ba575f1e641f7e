"""Widar3.0 and Office-Caltech10 as parties with vectors, and the extractors that suit them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visard.data.vectors import VectorData
from visard.errors import UsageError

FRAMES = 16  # to which every gesture is brought


def office(folder: Path, domain: str, role: str, seed: int) -> VectorData:
    """SURF words of one domain: rows of sum 1, columns standardised inside the domain."""
    file = _open(folder / "office_caltech10" / f"{domain}.npz")
    x = file["fts"].astype(np.float64)
    x /= x.sum(1, keepdims=True)
    x = (x - x.mean(0)) / (x.std(0) + 1e-12)
    return VectorData.of(x, file["labels"][:, 0].astype(np.int64) - 1, 10, 1.0 if role == "target" else 0.1, seed)


def widar(folder: Path, user: int, role: str, seed: int) -> VectorData:
    """Body-coordinate velocity profiles of one user, (n, FRAMES, 20, 20): frames picked evenly in time."""
    file = _open(folder / "widar3" / "bvp.npz")
    length, mine = file["length"].astype(np.int64), file["user"] == user
    begin = np.cumsum(length) - length
    rows = np.flatnonzero(mine & (length > 0))
    frames = file["frames"]
    picks = [begin[i] + np.round(np.linspace(0, length[i] - 1, FRAMES)).astype(np.int64) for i in rows]
    x = frames[np.stack(picks)].astype(np.float32)
    x /= x.sum((2, 3), keepdims=True) + 1e-6  # the power of a frame depends on the distance, not on the gesture
    x = x * 100 - 0.25
    return VectorData.of(x, file["gesture"][rows].astype(np.int64) - 1, 6, 1.0 if role == "target" else 0.1, seed)


def _open(path: Path) -> Any:
    if not path.exists():
        raise UsageError(f"{path} is not there")
    return np.load(path, allow_pickle=False)


class FrameNet(nn.Module):
    """A convolution for each frame, a GRU over time, a linear bottleneck: the paper's CNN-GRU, small."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.frame = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU()
        )
        self.time = nn.GRU(64, 128, batch_first=True)
        self.bottleneck = nn.Sequential(nn.Dropout(0.3), nn.Linear(128, length))

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        steps = self.frame(x.reshape(b * t, 1, 20, 20)).reshape(b, t, -1)
        features: Tensor = self.bottleneck(self.time(steps)[1][0])
        return features


def extractor(task: str, length: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        if task == "widar":
            return FrameNet(length)
        return nn.Sequential(nn.Linear(800, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, length))

    return build


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A fresh network of this seed."""
    torch.manual_seed(seed)
    return build()
