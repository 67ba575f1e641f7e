r"""LoRA: every layer keeps its weights W and learns a difference of low rank beside them, W + scale B A.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. A (rank, in) begins as layers usually do,
B (out, rank) at 0, so a network begins as what it was. A kernel (out, in / groups, k, k) is a matrix of `out` rows,
also where a convolution has groups. Layers whose factors would not be smaller than themselves stay as they are, and so
does everything that is no linear layer or convolution: biases, batch norm, PReLU.

Between clients the factors are averaged, each by itself (FedIT, Zhang et al., ICASSP 2024). The product of averages is
not the average of products; it is where all clients have the same A.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.batchnorm import _NormBase

from visard.errors import PublicError, UsageError
from visard.models.cut import Frozen, Trunk, Weights, digest_of

SCALE = 2.0  # a step of SGD then moves W, within the rows of A, by about as much as a step on W itself (4/3)
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FORWARD = {kind.forward for kind in KINDS}  # a layer with one of its own computes something else
A, B = "lora_A", "lora_B"


def merged(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W + scale B A, in the shape of W."""
    return weight + (SCALE * (b @ a)).view(weight.shape)


@cache
def _adapted(kind: type[Any]) -> type[Any]:
    """The kind of layer, with W + scale B A instead of W."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = merged(self.weight, self.lora_A, self.lora_B)
        if issubclass(kind, nn.Linear):
            return linear(x, weight, self.bias)
        found: Tensor = self._conv_forward(x, weight, self.bias)
        return found

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def layers(network: nn.Module, rank: int) -> Iterator[tuple[str, Any]]:
    """Names and layers of a network that get factors of this rank."""
    used = Counter(id(module.weight) for module in network.modules() if isinstance(module, KINDS))
    for name, module in network.named_modules():
        plain = isinstance(module, KINDS) and type(module).forward in FORWARD
        if plain and used[id(module.weight)] == 1:
            rows, columns = len(module.weight), math.prod(module.weight.shape[1:])
            if rank * (rows + columns) < rows * columns:
                yield name, module


def adapt(network: nn.Module, rank: int) -> nn.Module:
    """Give a network factors, in place. They are all that trains, and all of its weights that others see."""
    chosen = dict(layers(network, rank))
    for module in network.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                del module._parameters[name]
                module.register_buffer(name, value.requires_grad_(False).detach(), persistent=False)
        module._non_persistent_buffers_set.update(module._buffers)
        if isinstance(module, _NormBase):  # it would add an entry to weights that it loads, of which none is its own
            module._load_from_state_dict = _nothing  # type: ignore[assignment,method-assign]
    for module in chosen.values():
        rows, columns = len(module.weight), math.prod(module.weight.shape[1:])
        kind: Any = type(module)
        module.__class__ = _adapted(kind)
        module.register_parameter(A, nn.Parameter(torch.zeros(rank, columns)))
        module.register_parameter(B, nn.Parameter(torch.zeros(rows, rank)))
    return network


def _nothing(*_: Any) -> None: ...


@dataclass
class LowRank(Trunk):
    """A network that is frozen as a whole, with factors beside its layers as its tail."""

    rank: int = 0

    @classmethod
    def beside(cls, build: Callable[[], nn.Module], rank: int, whole: Weights) -> LowRank:
        """Factors of this rank beside a network with these weights."""
        with torch.random.fork_rng(devices=[]):
            if not any(layers(network := build(), rank)):
                raise UsageError(
                    f"model.train = lora:{rank}: {type(network).__name__} has no linear layer or convolution that is "
                    "larger than its factors would be: take a lower rank"
                )
        return cls(build, "", digest_of(whole), lambda: whole, rank=rank)

    @property
    def trained(self) -> str:
        return f"lora:{self.rank}"

    def of_trunk(self, whole: Weights) -> Weights:
        return dict(whole)

    def network(self) -> Frozen:
        with torch.random.fork_rng(devices=[]):
            network = self.build()
        network.load_state_dict(self.weights)
        return Frozen(network)

    def tail(self) -> nn.Module:
        return adapt(self.network().network, self.rank)

    def outline(self) -> nn.Module:
        return adapt(self.build(), self.rank)

    def start(self, whole: Weights, seed: int) -> Weights:
        """Initial factors, which leave the network unchanged."""
        rng = torch.Generator().manual_seed(seed)
        factors = {name: value.detach().clone() for name, value in self.outline().state_dict().items()}
        for name, value in factors.items():
            if name.endswith(A):
                bound = 1 / math.sqrt(value.shape[1])
                value.uniform_(-bound, bound, generator=rng)
        return factors

    def whole(self, tail: Weights) -> Weights:
        """The weights of the network with its factors merged into it."""
        others = {name: value for name, value in tail.items() if not name.endswith((A, B))}
        return {**self.weights, **others, **self.effective(tail)}

    def effective(self, tail: Weights) -> Weights:
        """The merged weights of the layers that have factors."""
        found = {}
        for layer in dict.fromkeys(name[: -len(A)] for name in tail if name.endswith((A, B))):
            if not {f"{layer}{A}", f"{layer}{B}"} <= tail.keys():
                raise PublicError(f"of the factors of {layer.rstrip('.')} one is missing")
            weight = self.weights[f"{layer}weight"]
            both = merged(weight, tail[f"{layer}{A}"], tail[f"{layer}{B}"])
            found[f"{layer}weight"] = torch.where(both == weight, weight, both)  # -0.0 stays what it is
        return found
