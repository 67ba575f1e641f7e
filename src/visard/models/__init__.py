"""Backbones: pictures (B, 3, size, size) in [-1, 1] to embeddings (B, embedding), not normalised.

All start from torch's default generator, so whoever seeds it decides the network.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from visard.errors import UsageError, VisardError, did_you_mean
from visard.models.files import (
    fit,
    load_insightface,
    read_model,
    save_model,
    split_transform,
    start_weights,
    with_transform,
)
from visard.models.iresnet import DEPTHS, IResNet
from visard.models.mobilefacenet import MobileFaceNet
from visard.models.resnet18 import ResNet18
from visard.models.sensors import CnnGru, Mlp
from visard.models.spherenet import SphereNet
from visard.models.tiny import Tiny

__all__ = [
    "NAMES", "build", "default_embedding", "has_batchnorm", "load", "load_insightface", "parameters_count",
    "read_model", "save_model", "start_weights",
]  # fmt: skip

# name -> f(embedding, size)
_BUILDERS: dict[str, Callable[[int, int], nn.Module]] = {
    **{name: partial(IResNet, depths) for name, depths in DEPTHS.items()},
    "mobilefacenet": MobileFaceNet,
    "spherenet20": partial(SphereNet, (1, 2, 4, 1)),
    "spherenet64": partial(SphereNet, (3, 7, 16, 3)),
    "resnet18": lambda embedding, size: ResNet18(embedding),
    "tiny": Tiny,
    "tiny_nobn": lambda embedding, size: Tiny(embedding, size, batchnorm=False),
}
NAMES: list[str] = list(_BUILDERS)
# for sensor readings; f(embedding, how many numbers a row has)
_SENSORS: dict[str, Callable[[int, int], nn.Module]] = {
    "mlp": partial(Mlp, 32),
    "mlp128": partial(Mlp, 128),
    "cnn_gru": CnnGru,
}


def build(name: str, *, embedding: int | None = None, size: int = 112) -> nn.Module:
    """A new network; `embedding` None is its own default (512; tiny 128), `size` the side of its pictures.

    Of networks for sensor readings `size` is how many numbers a row has.
    """
    _check_name(name)
    if size < 32 and name in _BUILDERS:
        raise UsageError(f"{name} needs pictures of at least 32 x 32, got size {size}")
    if embedding is not None and embedding < 1:
        raise UsageError(f"{name}: the embedding needs at least 1 dimension, got {embedding}")
    return (_BUILDERS | _SENSORS)[name](default_embedding(name) if embedding is None else embedding, size)


def default_embedding(name: str) -> int:
    """The length of the embedding unless one is asked for."""
    _check_name(name)
    return 64 if name in _SENSORS else 128 if name.startswith("tiny") else 512


def load(path: str | Path) -> tuple[nn.Module, dict[str, str]]:
    """The network in a model file, in evaluation mode, and its spec; a personal one ends in its client's own layer."""
    weights, spec = read_model(path)
    try:
        theta, transform = split_transform(weights)
        model = build(spec["model"], embedding=int(spec["embedding"]), size=int(spec["size"]))
        model.load_state_dict(fit(theta, model.state_dict()))
        model = with_transform(model, transform, int(spec["embedding"]))
    except VisardError as error:
        raise VisardError(f"{path}: {error}") from None
    return model.eval(), spec


def parameters_count(model: nn.Module) -> int:
    """How many numbers the network's parameters hold, trained or not; buffers are not counted."""
    return sum(p.numel() for p in model.parameters())


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the network uses statistics of its batch, which one identity alone would spoil."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return any(isinstance(module, kinds) for module in model.modules())


def _check_name(name: str) -> None:
    if name not in _BUILDERS and name not in _SENSORS:
        raise UsageError(f"unknown model {name!r}{did_you_mean(name, [*NAMES, *_SENSORS])}")
