"""Published weights of other projects: InsightFace's IResNets and torchvision's ResNet-18.

Such files are pickles; torch's weights-only reader builds tensors and refuses everything that could run code.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from visard.errors import UsageError, VisardError
from visard.models.files import read_model
from visard.models.iresnet import DEPTHS, WIDTHS, IResNet

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
