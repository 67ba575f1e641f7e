"""MobileFaceNet (Chen et al., CCBR 2018): about one million parameters, made for phones."""

import math

import torch
from torch import Tensor, nn

# expansion t, channels c, repeats n, stride s of the first: Table 1 of the paper
BOTTLENECKS = ((2, 64, 5, 2), (4, 128, 1, 2), (2, 128, 6, 1), (4, 128, 1, 2), (2, 128, 2, 1))


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch norm, and PReLU unless `linear`."""

    def __init__(
        self, channels: int, width: int, kernel: int, stride: int = 1, *, padding: int = 0, groups: int = 1,
        linear: bool = False,
    ) -> None:  # fmt: skip
        conv = nn.Conv2d(channels, width, kernel, stride, padding, groups=groups, bias=False)
        nn.init.kaiming_normal_(conv.weight, a=0.25, mode="fan_out", nonlinearity="leaky_relu")
        super().__init__(conv, nn.BatchNorm2d(width), *([] if linear else [nn.PReLU(width)]))


class Bottleneck(nn.Module):
    """Expand 1x1, depthwise 3x3, project 1x1 without activation; a shortcut where the shape stays."""

    def __init__(self, channels: int, width: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = channels * expansion
        self.expand = ConvNorm(channels, inner, 1)
        self.depthwise = ConvNorm(inner, inner, 3, stride, padding=1, groups=inner)
        self.project = ConvNorm(inner, width, 1, linear=True)
        self.shortcut = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.shortcut else y


class MobileFaceNet(nn.Module):
    """(B, 3, size, size) in [-1, 1] -> (B, embedding), not normalised.

    The last map is read by a depthwise convolution as large as the map itself (7 x 7 at 112): an average
    would give the corner of a face the same say as its centre.
    """

    def __init__(self, embedding: int = 512, size: int = 112) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, 64, 3, 2, padding=1), ConvNorm(64, 64, 3, padding=1, groups=64))
        blocks: list[nn.Module] = []
        channels = 64
        for t, c, n, s in BOTTLENECKS:
            for i in range(n):
                blocks.append(Bottleneck(channels, c, t, s if i == 0 else 1))
                channels = c
        self.blocks = nn.Sequential(*blocks)
        self.widen = ConvNorm(channels, 512, 1)
        self.gdconv = ConvNorm(512, 512, math.ceil(size / 16), groups=512, linear=True)
        self.fc = nn.Linear(512, embedding, bias=False)
        self.features = nn.BatchNorm1d(embedding)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gdconv(self.widen(self.blocks(self.stem(x))))
        out: Tensor = self.features(self.fc(torch.flatten(x, 1)))
        return out
