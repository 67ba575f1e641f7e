"""Model files: safetensors with the network's description in the metadata. Nothing in them can run."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from visard.data.augment import Three, to_float
from visard.errors import UsageError, VisardError, did_you_mean
from visard.files import write_atomically
from visard.models.iresnet import DEPTHS, WIDTHS, IResNet

NEEDED = ("model", "embedding", "size")
# Pictures go in as (x / 255 - mean) / std: [-1, 1] unless a network was trained otherwise.
NORMALISATION = {"mean": "0.5,0.5,0.5", "std": "0.5,0.5,0.5"}


def save_model(path: str | Path, weights: dict[str, Tensor], spec: dict[str, str]) -> None:
    """Write weights and spec, atomically; equal weights and spec give equal bytes.

    spec needs `model`, `embedding` and `size`; `mean`, `std` and visard's version are added where absent.
    """
    if absent := [key for key in NEEDED if key not in spec]:
        raise VisardError(f"cannot write {path}: the model's description lacks {', '.join(absent)}")
    metadata = {"format": "pt", "visard": _version(), **NORMALISATION, **spec}
    # A copy of each: safetensors refuses views, tensors that share memory, and channels-last order.
    plain = {k: v.detach().to("cpu").clone(memory_format=torch.contiguous_format) for k, v in weights.items()}
    write_atomically(Path(path), _sorted_header(save(plain, metadata)))


def read_model(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights and the spec of a model file; one clear line if it is anything else."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no model file at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            spec: dict[str, str] = dict(file.metadata() or {})
            weights: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise VisardError(f"{path} is not a readable model file: {reason}") from None
    if absent := [key for key in NEEDED if key not in spec]:
        raise VisardError(f"{path} was not written by visard: its metadata lacks {', '.join(absent)}")
    for key in ("embedding", "size"):
        if not spec[key].isascii() or not spec[key].isdigit():
            raise VisardError(f"{path} is damaged: {key} is {spec[key]!r}, not a number")
    return weights, {key: value for key, value in spec.items() if key != "format"}


def _sorted_header(data: bytes) -> bytes:
    """The same file with its metadata in order: safetensors writes it in the random order of a hash map."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors must start at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _version() -> str:
    try:
        return version("visard")
    except PackageNotFoundError:
        return "unknown"


# ----------
# Published weights of other projects: InsightFace's IResNets and torchvision's ResNet-18.
#
# Such files are pickles; torch's weights-only reader builds tensors and refuses everything that could run code.

# Where training scripts put the backbone's weights inside a larger checkpoint.
WRAPPERS = ("state_dict_backbone", "state_dict", "model")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation that its pictures are normalised by


class Architecture(NamedTuple):
    """What a set of weights belongs to."""

    model: str
    embedding: int
    size: int


def load_insightface(path: str | Path) -> dict[str, Tensor]:
    """Weights of an IResNet in float32, names and shapes checked; load them into `build(*guess(weights))`."""
    weights = read_weights(path)
    try:
        name, embedding, size = guess(weights)
        with torch.device("meta"):
            expected = IResNet(DEPTHS[name], embedding, size).state_dict()
        return fit(weights, expected)
    except VisardError as error:
        raise VisardError(f"{path}: {error}") from None


def guess(weights: dict[str, Tensor]) -> Architecture:
    """The IResNet that these weights belong to: its blocks are counted, the rest is in the shape of `fc`."""
    numbers = [re.match(r"layer([1-4])\.(\d+)\.prelu\.weight$", key) for key in weights]
    blocks = [m.groups() for m in numbers if m]
    depths = tuple(sum(1 for stage, _ in blocks if stage == str(k)) for k in (1, 2, 3, 4))
    fc = weights.get("fc.weight")
    if not blocks or fc is None or fc.ndim != 2:
        raise VisardError("not the weights of an IResNet (no layer1..4 with PReLU and no fc)")
    name = next((name for name, known in DEPTHS.items() if known == depths), None)
    if name is None:
        raise VisardError(f"an IResNet with {depths} blocks is none of {', '.join(DEPTHS)}")
    grid = round((fc.shape[1] / WIDTHS[3]) ** 0.5)
    if grid < 1 or WIDTHS[3] * grid**2 != fc.shape[1]:
        raise VisardError(f"fc.weight has {fc.shape[1]} inputs, not {WIDTHS[3]} times a square")
    return Architecture(name, fc.shape[0], 16 * grid)


def fit(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` in the order and the types of `expected`; an absent batch counter starts at 0."""
    counters = {k: torch.zeros_like(v, device="cpu") for k, v in expected.items() if not v.is_floating_point()}
    found = counters | weights
    if missing := [key for key in expected if key not in found]:
        raise VisardError(f"{len(missing)} weights are missing, first {missing[0]!r}")
    if unknown := [key for key in found if key not in expected]:
        raise VisardError(f"{len(unknown)} weights are unknown to the network, first {unknown[0]!r}")
    for key, value in expected.items():
        if found[key].shape != value.shape:
            shapes = f"{tuple(found[key].shape)} instead of {tuple(value.shape)}"
            raise VisardError(f"{key!r} has the shape {shapes}")
        if not torch.isfinite(found[key]).all():
            raise VisardError(f"{key!r} holds NaN or infinity")
    return {key: found[key].to(value.dtype).contiguous() for key, value in expected.items()}


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Named tensors of a torch file, unwrapped and without `module.` prefixes; no code is run."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no weights file at {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # arbitrary bytes make the reader fail in more ways than it documents
        raise VisardError(f"{path}: {_reason(error)}") from None
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content:
        raise VisardError(f"{path} holds no weights but {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise VisardError(f"{path} holds more than weights: {str(key)[:40]!r} is {type(value).__name__}")
    return {re.sub(r"^(module\.)+", "", key): value for key, value in content.items()}


def start_weights(path: str | Path, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Weights to start the network of `build` from: a visard model file, an InsightFace or a torchvision one.

    torchvision's ResNet-18 has no `embed`: it starts as `build` makes it from seed 0, so that a run repeats. Its
    weights are made to take pictures in [-1, 1].
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = build().state_dict()
    weights = read_model(path)[0] if Path(path).suffix == ".safetensors" else read_weights(path)
    published = "embed.weight" in expected and "embed.weight" not in weights
    if published:
        weights |= {key: value for key, value in expected.items() if key.startswith("embed.")}
    try:
        fitted = fit(weights, expected)
    except VisardError as error:
        raise VisardError(f"{path} does not fit the network: {error}") from None
    return for_plain_pictures(fitted) if published else fitted


def for_plain_pictures(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """ImageNet weights of a ResNet-18, for pictures x in [-1, 1] instead of (x / 2 + 1 / 2 - mean) / std.

    The factor 1 / (2 std) goes into the first convolution, and what the shift adds to its output into the mean of its
    batch norm. The same but for the border, where the padding is now mid-grey and was the mean colour.
    """
    kernel, mean, std = weights["conv1.weight"], *(torch.tensor(c).view(1, 3, 1, 1) for c in IMAGENET)
    added = (kernel * (0.5 - mean) / std).sum(dim=(1, 2, 3))
    changed = {"conv1.weight": kernel / (2 * std), "bn1.running_mean": weights["bn1.running_mean"] - added}
    return weights | changed


def _reason(error: Exception) -> str:
    text = str(error)
    # torch names what it refused as "Unsupported global: GLOBAL module.function was not an allowed global"
    if found := re.search(r"(?:GLOBAL|Unsupported class) ([A-Za-z_]\w*(?:\.\w+)+)", text):
        return f"refused, it holds pickled code ({found[1]}) and not only weights"
    if isinstance(error, EOFError) or "PytorchStreamReader" in text:
        return "truncated or damaged, cannot be read as weights"
    return f"not a file of weights ({type(error).__name__})"


# ----------
# Personal models: a backbone, and after it a linear layer of one client (entries `transform.weight`, `.bias`).

PREFIX = "transform."


class Transformed(nn.Module):
    """Pi(backbone(x)): (B, 3, size, size) -> (B, embedding)."""

    def __init__(self, backbone: nn.Module, transform: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.transform = backbone, transform

    def forward(self, x: Tensor) -> Tensor:
        # `forward` itself: a compiled backbone would be compiled again for evaluation
        out: Tensor = self.transform(self.backbone.forward(x))
        return out


def split_transform(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], nn.Linear | None]:
    """The backbone's entries, and the layer that follows it if there is one."""
    rest = {name: value for name, value in weights.items() if not name.startswith(PREFIX)}
    if len(rest) == len(weights):
        return weights, None
    weight, bias = (weights.get(PREFIX + name) for name in ("weight", "bias"))
    if len(weights) - len(rest) != 2 or weight is None or bias is None:
        raise VisardError("a personal model needs transform.weight and transform.bias")
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise VisardError(f"transform.weight {tuple(weight.shape)} and .bias {tuple(bias.shape)} do not fit together")
    if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        raise VisardError("the transformation holds NaN or infinity")
    layer = nn.Linear(weight.shape[1], weight.shape[0]).requires_grad_(False)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return rest, layer


def with_transform(backbone: nn.Module, transform: nn.Linear | None, embedding: int) -> nn.Module:
    """The backbone alone, or followed by the client's own layer, which must take its features."""
    if transform is not None and transform.in_features != embedding:
        raise VisardError(f"transform.weight takes features of {transform.in_features}, the network gives {embedding}")
    return backbone if transform is None else Transformed(backbone, transform)


# ----------
# What a network expects as input: side of the pictures, order of the channels, mean and standard deviation.

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
            return cls(
                spec.get("order", "rgb"),
                three(spec.get("mean", "0.5,0.5,0.5")),
                three(spec.get("std", "0.5,0.5,0.5")),
                int(spec.get("size", "112")),
            )
        except (ValueError, VisardError) as error:
            raise VisardError(f"{where}: its metadata are damaged ({error})") from None

    def to_spec(self) -> dict[str, str]:
        """The same as text, for the metadata of a model file."""
        mean, std = (",".join(f"{v:.10g}" for v in values) for values in (self.mean, self.std))
        return {"order": self.order, "mean": mean, "std": std, "size": str(self.size)}

    def tensor(self, pictures: npt.NDArray[np.uint8]) -> Tensor:
        """Pictures (B, H, W, 3) uint8 RGB -> (B, 3, H, W) float32 in the picture's own memory order."""
        return to_float(pictures, True, self.order, self.mean, self.std)


PRESETS = {
    "arcface": Inputs(),
    "cosface": Inputs(std=(128 / 255,) * 3),  # (x - 127.5) / 128
    "imagenet": Inputs(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), size=224),
    "raw": Inputs(mean=(0.0,) * 3, std=(1 / 255,) * 3),  # 0..255: the network normalises by itself
}


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
    if mean is not None:
        chosen = replace(chosen, mean=_asked("mean", mean))
    if std is not None:
        chosen = replace(chosen, std=_asked("std", std))
    return chosen if order is None else replace(chosen, order=order)


def _asked(what: str, text: str) -> Three:
    try:
        return three(text)
    except ValueError:
        raise UsageError(f"{what} {text!r}: give one number or three, separated by commas") from None


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
