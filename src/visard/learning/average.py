"""Averages of weights over clients, and which entries of a network take part in them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from visard.core import ClientId, Network, Weights
from visard.errors import VisardError

BatchNormPolicy = Literal["average", "parameters", "local"]


class RunningMean:
    r"""$\bar\theta = \sum_i n_i \theta_i / \sum_i n_i$, one client at a time.

    Sums are kept in float64, so that the order of many clients does not show in float32. Integer entries
    (batch norm's `num_batches_tracked`) are counters: their mean is their maximum.
    """

    def __init__(self) -> None:
        self._sum: Weights = {}
        self._like: Weights = {}
        self.total = 0.0

    def add(self, weights: Weights, n: float) -> None:
        """Take in one client's weights with weight n."""
        if not 0 < n < math.inf:
            raise VisardError(f"a weight of {n} in an average: it must be positive and finite")
        if not self._like:
            self._like = weights
        for key, value in weights.items():
            if not value.is_floating_point():
                self._sum[key] = torch.maximum(self._sum[key], value) if key in self._sum else value
            elif key in self._sum:
                self._sum[key].add_(value, alpha=n)
            else:
                self._sum[key] = value.to(torch.float64) * n
        self.total += n

    def mean(self) -> Weights:
        """The average, in the types and the order of the first client's entries."""
        if not self.total:
            raise VisardError("an average over no clients")
        return {
            key: (self._sum[key] / self.total).to(like.dtype) if like.is_floating_point() else self._sum[key]
            for key, like in self._like.items()
        }


def weighted_mean(parts: Iterable[tuple[Weights, float]]) -> Weights:
    """The mean of (weights, n) pairs; see `RunningMean`."""
    running = RunningMean()
    for weights, n in parts:
        running.add(weights, n)
    return running.mean()


def mean_figures(parts: Iterable[tuple[dict[str, float], float]]) -> dict[str, float]:
    """The mean of each figure over (figures, n) of clients; one that a client lacks does not count for it."""
    total: dict[str, float] = {}
    weight: dict[str, float] = {}
    for figures, n in parts:
        for name, value in figures.items():
            total[name] = total.get(name, 0.0) + n * value
            weight[name] = weight.get(name, 0.0) + n
    return {name: total[name] / weight[name] for name in total if weight[name]}


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


def squared_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    r"""$\lVert a - b \rVert^2$ over the entries that both have."""
    return float(sum(((a[k].double() - b[k].double()) ** 2).sum() for k in a if k in b))


# ----------
# Which clients take part in a round.


def sample_clients(net: Network, share: float) -> list[ClientId]:
    """A random share of the clients (at least one) by the server's generator, in their fixed order."""
    count = max(1, round(share * len(net.clients)))
    chosen = torch.randperm(len(net.clients), generator=net.rng)[:count].tolist()
    return [net.clients[i] for i in sorted(chosen)]
