"""SphereNet (Liu et al., SphereFace, CVPR 2017): residual, PReLU, no batch norm.

Without batch statistics a client that holds a single identity trains the same network as everybody else.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)


class ResidualUnit(nn.Module):
    """x + PReLU(conv(PReLU(conv(x)))), both 3x3 with bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, 1, 1)
        self.prelu1 = nn.PReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1)
        self.prelu2 = nn.PReLU(width)
        # Small weights start each unit near the identity: with nothing to normalise the sum, 29 units of
        # unit gain would multiply the variance by about 2^29.
        for name, parameter in self.named_parameters():
            if name.startswith("conv"):
                nn.init.normal_(parameter, 0.0, 0.01 if name.endswith("weight") else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.prelu2(self.conv2(self.prelu1(self.conv1(x))))
        return x + y


class SphereNet(nn.Module):
    """(B, 3, size, size) in [-1, 1] -> (B, embedding), not normalised.

    `stages`: residual units after each of the four strided convolutions. "SphereNet-64" is (3, 7, 16, 3) in
    the code of FedFR (Liu et al., AAAI 2022), here the default, and (3, 8, 16, 3) in the SphereFace paper.
    """

    def __init__(self, stages: Sequence[int] = (3, 7, 16, 3), embedding: int = 512, size: int = 112) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, units in zip(WIDTHS, stages, strict=True):
            down = nn.Conv2d(channels, width, 3, 2, 1)
            nn.init.kaiming_normal_(down.weight, a=0.25, nonlinearity="leaky_relu")  # 0.25: PReLU's start
            layers.append(nn.Sequential(down, nn.PReLU(width), *(ResidualUnit(width) for _ in range(units))))
            channels = width
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.fc = nn.Linear(channels * math.ceil(size / 16) ** 2, embedding)
        nn.init.xavier_uniform_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(torch.flatten(x, 1))
        return out
