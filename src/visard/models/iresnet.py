"""IResNet 18/34/50/100, the improved residual network of Duta et al. (ICPR 2020) that ArcFace trains.

Parameter names and shapes are those of InsightFace's arcface_torch: its published weights load as they are.
"""

import math

import torch
from torch import Tensor, nn

DEPTHS: dict[str, tuple[int, int, int, int]] = {
    "iresnet18": (2, 2, 2, 2),
    "iresnet34": (3, 4, 6, 3),
    "iresnet50": (3, 4, 14, 3),
    "iresnet100": (3, 13, 30, 3),
}
WIDTHS = (64, 128, 256, 512)


class IBasicBlock(nn.Module):
    """BN, conv, BN, PReLU, conv (the one that strides), BN, plus the shortcut; nothing after the sum."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.prelu = nn.PReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        out: Tensor = self.bn3(self.conv2(y)) + shortcut
        return out


class IResNet(nn.Module):
    """(B, 3, size, size) in [-1, 1] -> (B, embedding), not normalised.

    `features` is a batch norm whose scale stays 1: the margin heads normalise the embedding anyway, and a
    free scale next to a normalisation only drifts under weight decay.
    """

    def __init__(self, depths: tuple[int, int, int, int], embedding: int = 512, size: int = 112) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.prelu = nn.PReLU(64)
        channels = (64, *WIDTHS)
        self.layer1, self.layer2, self.layer3, self.layer4 = map(_stage, channels, WIDTHS, depths)
        self.bn2 = nn.BatchNorm2d(WIDTHS[3])
        self.fc = nn.Linear(WIDTHS[3] * math.ceil(size / 16) ** 2, embedding)
        self.features = nn.BatchNorm1d(embedding)
        self.features.weight.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.features(self.fc(torch.flatten(self.bn2(x), 1)))
        return out


def _stage(channels: int, width: int, depth: int) -> nn.Sequential:
    first = IBasicBlock(channels, width, stride=2)
    return nn.Sequential(first, *(IBasicBlock(width, width, stride=1) for _ in range(depth - 1)))
