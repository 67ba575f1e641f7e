r"""Aggregation rules: what `Network.reduce` makes of one field of the replies of many clients.

The run's `[aggregation]` section says which rule, for every method. A rule is a frozen dataclass whose fields are its
settings; it works on one field at a time and knows nothing of methods:

    [aggregation]
    rule = "mean"
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from visard.core import Weights
from visard.errors import VisardError
from visard.plugins import Registry

Weighing = str | Callable[[Any], float] | None  # a field of the reply, a function of the reply, or all alike


class Gathered(Protocol):
    """One field while the replies come in."""

    def add(self, weights: Weights, n: float) -> None:
        """Take in one client's value with weight n; it may be kept, but not changed."""

    def result(self) -> Weights:
        """What the values of all clients become."""


@dataclasses.dataclass(frozen=True)
class Rule(ABC):
    """How the values of many clients become one."""

    name: ClassVar[str]
    title: ClassVar[str]  # one line that describes it
    of_groups: ClassVar[bool] = False  # whether the mean of a group, with its weight, may stand for its members

    @abstractmethod
    def begin(self, sent: Weights | None) -> Gathered:
        """Start with one field of one ask; `sent` is what the clients were sent under the same name, if anything."""


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

    def result(self) -> Weights:
        """The average, in the types and the order of the first client's entries."""
        if not self.total:
            raise VisardError("an average over no clients")
        return {
            key: (self._sum[key] / self.total).to(like.dtype) if like.is_floating_point() else self._sum[key]
            for key, like in self._like.items()
        }


@dataclasses.dataclass(frozen=True)
class Mean(Rule):
    """The weighted mean."""

    name = "mean"
    title = "the mean, each client by its weight"
    of_groups = True

    def begin(self, sent: Weights | None) -> Gathered:
        return RunningMean()


RULES: Registry[type[Rule]] = Registry(
    "aggregations",
    {"mean": Mean},
    lambda value: isinstance(value, type) and issubclass(value, Rule),
    "aggregation rule",
)


def weighted_mean(parts: Iterable[tuple[Weights, float]]) -> Weights:
    """The mean of (weights, n) pairs; see `RunningMean`."""
    running = RunningMean()
    for weights, n in parts:
        running.add(weights, n)
    return running.result()


class Reduction:
    """Takes fields out of replies as they come in, so that memory does not grow with the clients.

    A field holds weights, one tensor, or None, which does not count. Clients that were simulated as a group share one
    value: it is added once, with the weight of all of them.
    """

    def __init__(self, rule: Rule, fields: tuple[str, ...], by: Weighing, sent: Any) -> None:
        self.fields, self._by = fields, by
        self._gathered = {name: rule.begin(_as_weights(getattr(sent, name, None))) for name in fields}
        self._last: dict[str, tuple[Any, float]] = {}
        self._tensors: set[str] = set()

    def known(self, reply: Any) -> tuple[str, ...]:
        """The fields of a reply that are the value of the reply before it."""
        return tuple(f for f in self.fields if f in self._last and getattr(reply, f, None) is self._last[f][0])

    def take(self, reply: Any) -> Any:
        """Count a reply in; returns it without the fields."""
        by = self._by
        weight = 1 if by is None else getattr(reply, by) if isinstance(by, str) else by(reply)
        empty: dict[str, Any] = {}
        for name in self.fields:
            value = getattr(reply, name)
            empty[name] = {} if isinstance(value, dict) else None
            if value is None:
                continue
            held = self._last.get(name)
            if held and value is held[0]:
                self._last[name] = (value, held[1] + weight)
            else:
                self._add(name)
                self._last[name] = (value, weight)
        return dataclasses.replace(reply, **empty)

    def result(self) -> dict[str, Any]:
        """What each field becomes; None where no client had it."""
        found: dict[str, Any] = {}
        for name, gathered in self._gathered.items():
            if name not in self._last:
                found[name] = None
                continue
            self._add(name)
            value = gathered.result()
            found[name] = value[""] if name in self._tensors else value
        return found

    def _add(self, name: str) -> None:
        if name in self._last:
            value, weight = self._last[name]
            if isinstance(value, Tensor):
                self._tensors.add(name)
            self._gathered[name].add(cast(Weights, _as_weights(value)), weight)


def _as_weights(value: Any) -> Weights | None:
    """Weights as they are, one tensor as the entry ""; None for anything else."""
    if isinstance(value, Tensor):
        return {"": value}
    return dict(value) if isinstance(value, Mapping) else None
