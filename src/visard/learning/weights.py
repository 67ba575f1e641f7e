"""Weights of a network as a dictionary: into it, out of it, and which entries stay at a client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from visard.core import Weights
from visard.errors import PublicError

BatchNormPolicy = Literal["average", "parameters", "local"]


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Copy weights into a network; every entry must be there with its shape."""
    own = model.state_dict()
    if odd := sorted(set(own) ^ set(weights)):
        raise PublicError(
            f"weights do not fit the network: entry {odd[0]!r} is {'missing' if odd[0] in own else 'unknown'}"
        )
    with torch.no_grad():
        for key, value in own.items():
            if value.shape != weights[key].shape:
                raise PublicError(f"weights do not fit the network: {key!r} has shape {tuple(weights[key].shape)}")
            value.copy_(weights[key])


def weights_of(model: nn.Module) -> Weights:
    """A copy of all parameters and buffers on the CPU, in plain memory order."""
    return {k: v.to("cpu", copy=True, memory_format=torch.contiguous_format) for k, v in model.state_dict().items()}


def weights_in(model: nn.Module) -> Weights:
    """The same without a copy: for the end of a step, because engines copy what it gives before the next one."""
    return {k: v.cpu().contiguous() for k, v in model.state_dict().items()}


def kept_local(keys: Iterable[str], policy: BatchNormPolicy) -> set[str]:
    """The entries that stay at a client.

    `average`: none. `parameters`: running statistics of batch norm. `local` (FedBN): all of batch norm.
    """
    keys = set(keys)
    layers = {k.removesuffix("running_mean") for k in keys if k.endswith("running_mean")}
    if policy == "average":
        return set()
    names = ["running_mean", "running_var", "num_batches_tracked"]
    if policy == "local":
        names += ["weight", "bias"]
    return {layer + name for layer in layers for name in names} & keys


def without(weights: Weights, keys: set[str]) -> Weights:
    """The entries that are not in `keys`."""
    return {k: v for k, v in weights.items() if k not in keys}
