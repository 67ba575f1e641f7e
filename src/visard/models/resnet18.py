"""ResNet-18 (He et al., CVPR 2016) with its 1000-way output kept, then a linear map to the embedding.

The network of federated HF-MAML (Gansekoele et al., FLTA 2024). Parameter names are torchvision's, so its
ImageNet weights load as `model.weights`; only `embed` is new. Those weights expect pictures normalised by ImageNet's
mean and deviation: `models.files` makes them take [-1, 1].
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, the shortcut added before the last ReLU."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))) + shortcut)


class ResNet18(nn.Module):
    """(B, 3, size, size) -> 1000 ImageNet logits -> (B, embedding), not normalised; any size from 32."""

    def __init__(self, embedding: int = 512, size: int = 112) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, 1000)
        self.embed = nn.Linear(1000, embedding)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.embed(self.fc(torch.mean(x, dim=(2, 3))))
        return out
