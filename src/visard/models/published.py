"""Weights that other projects publish: which network they are of, by their names and shapes.

IResNets are networks of visard. The others become steps (`visard.models.steps`): widths and depths are read from the
weights, so that every size of a family is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from visard.errors import VisardError, one_line
from visard.models.inputs import PRESETS, Inputs
from visard.models.iresnet import DEPTHS, WIDTHS
from visard.models.steps import Array, Draft, Value, build, to_text

READS = (
    "weights of IResNet, MobileFaceNet (arcface_torch, foamliu) and ResNet (torchvision, timm), any ONNX recogniser, "
    "and with model.name = package.module:factory the weights of that network"
)


@dataclass
class _Net:
    """A network that is being written down; sizes of layers come from the weights of that name."""

    draft: Draft
    weights: dict[str, Tensor]
    used: set[str] = field(default_factory=set)

    def take(self, name: str) -> Array:
        if name not in self.weights:
            raise VisardError(f"lacks {name!r}")
        self.used.add(name)
        found: Array = np.ascontiguousarray(self.weights[name].float().numpy())
        return found

    def has(self, name: str) -> bool:
        return name in self.weights

    def conv(self, x: Value, name: str, stride: int = 1, pad: int | None = None) -> Value:
        w = self.take(f"{name}.weight")
        if w.ndim != 4 or w.shape[1] == 0 or x.shape[1] % w.shape[1]:
            raise VisardError(f"{name}.weight has the shape {w.shape} for {x.shape[1]} channels")
        bias = {"bias": self.take(f"{name}.bias")} if self.has(f"{name}.bias") else {}
        side = w.shape[2] // 2 if pad is None else pad
        return self.draft.add(
            "conv", [x], {"weight": w, **bias}, width=w.shape[0], channels=x.shape[1], kernel=[*w.shape[2:]],
            stride=[stride, stride], pad=[side, side], dilation=[1, 1], groups=x.shape[1] // w.shape[1],
            bias=bool(bias),
        )  # fmt: skip

    def norm(self, x: Value, name: str) -> Value:
        parts = {k: self.take(f"{name}.{k}") for k in ("weight", "bias", "running_mean", "running_var")}
        return self.draft.add("norm", [x], parts, width=x.shape[1], eps=1e-5, dims=2 if x.dims == 4 else 1)

    def prelu(self, x: Value, name: str) -> Value:
        slope = self.take(f"{name}.weight").reshape(-1)
        return self.draft.add("prelu", [x], {"weight": slope}, width=slope.size)

    def relu(self, x: Value) -> Value:
        return self.draft.add("relu", [x])

    def relu6(self, x: Value) -> Value:
        return self.draft.add("clip", [x], low=0.0, high=6.0)

    def linear(self, x: Value, name: str) -> Value:
        w = self.take(f"{name}.weight")
        bias = {"bias": self.take(f"{name}.bias")} if self.has(f"{name}.bias") else {}
        return self.draft.add(
            "linear", [x], {"weight": w, **bias}, width=w.shape[0], channels=w.shape[1], bias=bool(bias)
        )

    def sum(self, x: Value, y: Value) -> Value:
        return self.draft.add("add", [x, y])

    def flat(self, x: Value) -> Value:
        return self.draft.add("reshape", [x], shape=[int(np.prod(x.shape[1:]))])

    def many(self, pattern: str) -> int:
        """How many numbers from 0 on fill the place of N in a name."""
        count = 0
        while self.has(pattern.replace("N", str(count))):
            count += 1
        return count


def _arcface_mobilefacenet(net: _Net, x: Value) -> Value:
    """layers.0 to layers.7, conv_sep, features; layers.1 is a convolution or blocks; 0, 2, 4, 6 halve the picture."""

    def block(x: Value, name: str, stride: int = 1, linear: bool = False) -> Value:
        x = net.norm(net.conv(x, f"{name}.layers.0", stride), f"{name}.layers.1")
        return x if linear else net.prelu(x, f"{name}.layers.2")

    def depthwise(x: Value, name: str, stride: int) -> Value:
        y = block(block(x, f"{name}.layers.0"), f"{name}.layers.1", stride)
        y = block(y, f"{name}.layers.2", linear=True)
        return net.sum(x, y) if stride == 1 else y

    x = block(x, "layers.0", 2)
    for stage in range(1, 8):
        name = f"layers.{stage}"
        if stage == 1 and net.has(f"{name}.layers.0.weight"):
            x = block(x, name)
        elif stage % 2:
            for i in range(net.many(f"{name}.layers.N.layers.0.layers.0.weight")):
                x = depthwise(x, f"{name}.layers.{i}", 1)
        else:
            x = depthwise(x, name, 2)
    x = block(x, "conv_sep")
    x = net.norm(net.conv(x, "features.layers.0.layers.0", pad=0), "features.layers.0.layers.1")
    return net.norm(net.linear(net.flat(x), "features.layers.2"), "features.layers.3")


def _foamliu_mobilefacenet(net: _Net, x: Value) -> Value:
    """Blocks with ReLU6; the first one and those that widen fourfold halve the picture."""

    def block(x: Value, name: str, stride: int = 1) -> Value:
        return net.relu6(net.norm(net.conv(x, f"{name}.0", stride), f"{name}.1"))

    x = block(x, "conv1", 2)
    x = net.relu(net.norm(net.conv(x, "dw_conv.depthwise"), "dw_conv.bn1"))
    x = net.relu(net.norm(net.conv(x, "dw_conv.pointwise"), "dw_conv.bn2"))
    for i in range(net.many("features.N.conv.0.0.weight")):
        name, before = f"features.{i}.conv", x
        x = block(x, f"{name}.0")
        stride = 2 if i == 0 or x.shape[1] == 4 * before.shape[1] else 1
        x = net.norm(net.conv(block(x, f"{name}.1", stride), f"{name}.2"), f"{name}.3")
        if stride == 1 and x.shape == before.shape:
            x = net.sum(before, x)
    x = net.norm(net.conv(block(x, "conv2"), "gdconv.depthwise", pad=0), "gdconv.bn")
    return net.flat(net.norm(net.conv(x, "conv3"), "bn"))


def _resnet(net: _Net, x: Value) -> Value:
    """torchvision's names, which timm has too; with `conv1.0` and a pooled shortcut timm's variant `d`.

    A last layer of 1,000 classes is left out: the features are what it takes.
    """
    if net.has("conv1.weight"):
        x = net.conv(x, "conv1", 2)
    else:
        x = net.relu(net.norm(net.conv(x, "conv1.0", 2), "conv1.1"))
        x = net.relu(net.norm(net.conv(x, "conv1.3"), "conv1.4"))
        x = net.conv(x, "conv1.6")
    x = net.relu(net.norm(x, "bn1"))
    x = net.draft.add("max_pool", [x], kernel=[3, 3], stride=[2, 2], pad=[1, 1], dilation=[1, 1], ceil=False)
    for stage in range(1, 5):
        for i in range(net.many(f"layer{stage}.N.conv1.weight")):
            x = _residual(net, x, f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1)
    x = net.draft.add("mean", [x], dims=[2, 3], keep=False)
    if net.has("fc.weight") and net.weights["fc.weight"].shape[0] == 1000:
        net.used |= {"fc.weight", "fc.bias"}
    elif net.has("fc.weight"):
        x = net.linear(x, "fc")
    return x


def _residual(net: _Net, x: Value, name: str, stride: int) -> Value:
    deep = net.has(f"{name}.conv3.weight")
    y = net.relu(net.norm(net.conv(x, f"{name}.conv1", 1 if deep else stride), f"{name}.bn1"))
    y = net.norm(net.conv(y, f"{name}.conv2", stride if deep else 1), f"{name}.bn2")
    if deep:
        y = net.norm(net.conv(net.relu(y), f"{name}.conv3"), f"{name}.bn3")
    if net.has(f"{name}.downsample.0.weight"):
        x = net.norm(net.conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
    elif net.has(f"{name}.downsample.1.weight"):
        if stride > 1:
            x = net.draft.add("avg_pool", [x], kernel=[2, 2], stride=[2, 2], pad=[0, 0], ceil=True, whole=False)
        x = net.norm(net.conv(x, f"{name}.downsample.1"), f"{name}.downsample.2")
    return net.relu(net.sum(y, x))


@dataclass(frozen=True)
class Family:
    """A kind of network: a name that all of its weights have, how it is written down, and its pictures."""

    words: str
    sign: str
    make: Callable[[_Net, Value], Value]
    inputs: Inputs
    kernel: str = ""  # the convolution as large as the last map: 16 pixels of the picture for each of its own


FAMILIES = (
    Family(
        "MobileFaceNet of arcface_torch", "features.layers.2.weight", _arcface_mobilefacenet, PRESETS["arcface"],
        "features.layers.0.layers.0.weight",
    ),
    Family(
        "MobileFaceNet of foamliu", "gdconv.depthwise.weight", _foamliu_mobilefacenet, PRESETS["imagenet"],
        "gdconv.depthwise.weight",
    ),
    Family("ResNet of torchvision or timm", "layer4.0.conv1.weight", _resnet, PRESETS["imagenet"]),
)  # fmt: skip
OTHERS = {  # what else a file may be, by the beginning of a name
    "input_layer.": "an IR network as in AdaFace or insightface_pytorch",
    "conv2d_1a.": "the Inception-ResNet of facenet-pytorch",
    "blocks.0.attn": "a vision transformer",
    "patch_embed.": "a vision transformer",
    "features.0.0.": "a MobileNet or EfficientNet of torchvision",
    "conv_stem.": "an EfficientNet of timm",
    "body.stage": "a RetinaFace detector",
    "backbone.": "a network inside another",
}


def recognise(weights: dict[str, Tensor], size: int | None = None) -> tuple[dict[str, str], dict[str, Tensor]] | None:
    """Spec and weights under the names of the network that visard makes of them; None where no family is known.

    `size` is the side of the pictures where the weights do not say it (ResNets, by default 112).
    """
    if is_iresnet(weights):
        name, embedding, side = guess(weights)
        return PRESETS["arcface"].to_spec() | {"model": name, "embedding": str(embedding), "size": str(side)}, weights
    family = _family(weights)
    if family is None:
        return None
    side = size or 112
    if family.kernel:
        side = 16 * int(weights[family.kernel].shape[-1]) if weights[family.kernel].ndim == 4 else 0
    if not 32 <= side <= 1024:
        raise VisardError(f"looks like a {family.words} for pictures of {side} pixels, which is none")
    net = _Net(Draft(3, 2 * sum(w.nbytes for w in weights.values()) + 2**20), weights)
    try:
        features = family.make(net, Value(0, (3, 3, side, side)))
        text = to_text(net.draft.steps)
        network = build(text, features.shape[1], side)
        found = net.draft.named(network)
    except VisardError as error:
        raise VisardError(f"looks like a {family.words}, but {error}") from None
    except Exception as error:  # torch has exceptions of all kinds for shapes that do not fit
        raise VisardError(f"looks like a {family.words}, but {one_line(error)}") from None
    more = [name for name in weights if name not in net.used and not name.endswith("num_batches_tracked")]
    if more:
        raise VisardError(f"looks like a {family.words}, but has {more[0]!r} besides")
    own = {"model": "onnx", "embedding": str(features.shape[1]), "size": str(side), "graph": text}
    return family.inputs.to_spec() | own, found


def _family(weights: dict[str, Tensor]) -> Family | None:
    return next((family for family in FAMILIES if family.sign in weights), None)


def looks_like(weights: dict[str, Tensor]) -> str:
    """What the weights seem to be, for the error message."""
    if is_iresnet(weights):
        return "an IResNet"
    if (family := _family(weights)) is not None:
        return f"a {family.words}"
    for sign, words in OTHERS.items():
        if any(name.startswith(sign) for name in weights):
            return words
    return f"no network that visard knows ({len(weights)} weights, the first is {next(iter(weights), '')[:60]!r})"


def is_iresnet(weights: dict[str, Tensor]) -> bool:
    """Whether these are weights of an IResNet, of whatever depth."""
    return any(re.match(r"layer[1-4]\.\d+\.prelu\.weight$", key) for key in weights)


def guess(weights: dict[str, Tensor]) -> tuple[str, int, int]:
    """Name, embedding and size of the IResNet of these weights: its blocks are counted, `fc` has the right shape."""
    blocks = [m[1] for key in weights if (m := re.match(r"layer([1-4])\.\d+\.prelu\.weight$", key))]
    depths = tuple(blocks.count(stage) for stage in "1234")
    fc = weights.get("fc.weight")
    if not blocks or fc is None or fc.ndim != 2:
        raise VisardError("not the weights of an IResNet (no layer1..4 with PReLU and no fc)")
    name = next((name for name, known in DEPTHS.items() if known == depths), None)
    if name is None:
        raise VisardError(f"an IResNet with {depths} blocks is none of {', '.join(DEPTHS)}")
    grid = round((fc.shape[1] / WIDTHS[3]) ** 0.5)
    if grid < 1 or WIDTHS[3] * grid**2 != fc.shape[1]:
        raise VisardError(f"fc.weight has {fc.shape[1]} inputs, not {WIDTHS[3]} times a square")
    return name, fc.shape[0], 16 * grid
