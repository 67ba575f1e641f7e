"""Model files of every kind as a network and its spec: visard's own, InsightFace's weights, ONNX graphs."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from visard import models
from visard.errors import UsageError
from visard.models.files import PRESETS, Inputs, choose, guess, load_insightface, preset
from visard.models.onnx import load_onnx

WEIGHTS = (".pth", ".pt")
ENDINGS = (".safetensors", *WEIGHTS, ".onnx")


def open_model(
    path: str | Path,
    *,
    name: str | None = None,
    size: int | None = None,
    order: str | None = None,
    mean: str | None = None,
    std: str | None = None,
) -> tuple[nn.Module, dict[str, str]]:
    """The network in a file, in evaluation mode, and its spec with `order`, `mean`, `std` and `size` of its pictures.

    `name` (arcface, cosface, imagenet, raw), `order`, `mean` and `std` override what the file says; `size` is for
    graphs that leave it open, and an error where a network takes another one.
    """
    path = Path(path)
    if name is not None:
        preset(name)
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise UsageError(f"{path}: a model file ends in {', '.join(ENDINGS)}")
    if not path.is_file():
        raise UsageError(f"no model file at {path}")
    network: nn.Module
    if ending == ".onnx":
        network, spec = load_onnx(path, size, name)
    elif ending in WEIGHTS:
        network, spec = _insightface(path)
    else:
        network, spec = models.load(path)
    own = Inputs.of_spec(spec, path)
    if size not in (None, own.size):
        raise UsageError(f"{path}: takes pictures of {own.size} pixels, not {size}")
    return network, spec | choose(own, name, order=order, mean=mean, std=std).to_spec()


def _insightface(path: Path) -> tuple[nn.Module, dict[str, str]]:
    weights = load_insightface(path)
    found = guess(weights)
    network = models.build(found.model, embedding=found.embedding, size=found.size)
    network.load_state_dict(weights)
    spec = PRESETS["arcface"].to_spec() | {"size": str(found.size)}
    return network.eval(), spec | {"model": found.model, "embedding": str(found.embedding)}
