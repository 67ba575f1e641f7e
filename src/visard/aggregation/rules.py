r"""Aggregation rules: how `Network.reduce` combines one field of the replies of many clients.

The run's `[aggregation]` section says which rule, for every method. A rule is a frozen dataclass whose fields are its
settings; it works on one field at a time and knows nothing of methods:

    [aggregation]
    rule = "mean"

Every rule has the two settings of `limits`, which hold before it: it is given weights and values within them. Rules for
rounds with hostile clients are in `robust`. An optimiser may follow any rule.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Protocol, Self

import torch
from pydantic import Field
from torch import Tensor

from visard.aggregation.dp import Privacy
from visard.aggregation.limits import BOUND, MAX_WEIGHT
from visard.aggregation.optimisers import Optimiser
from visard.core import Weights
from visard.errors import VisardError

Weighing = str | Callable[[Any], float] | None  # a field of the reply, a function of the reply, or all alike


class Gathered(Protocol):
    """One field while the replies come in."""

    def add(self, weights: Weights, n: float) -> None:
        """Add one client's value with weight n; it may be kept, but not changed."""

    def result(self) -> Weights:
        """The combined value of all clients."""


class Held(Protocol):
    """One field of all replies, in the order of the clients' names, read piece by piece."""

    weights: list[float]  # one for each reply
    like: Weights  # entries of the right types and shapes in the order of the first reply, without content (meta)
    sent: Weights | None  # what the clients were sent under the same name, if anything

    def pieces(self, key: str) -> Iterator[tuple[slice, Tensor]]:
        """An entry of all replies: (places in the flat entry, (replies, places) in the type that it has)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """How the values of many clients are combined."""

    name: ClassVar[str]
    title: ClassVar[str]  # one line that describes it
    by_numbers: ClassVar[bool] = False  # whether a number of the result follows from those in its place alone
    of_groups: ClassVar[bool] = False  # whether the mean of a group, with its weight, may stand for its members

    # largest norm of an update as a multiple of the median, and largest share of one reply; None: no limit in a
    # simulation, the values of `limits` between real parties
    bound: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    max_weight: Annotated[float, Field(gt=0, le=1)] | None = None
    optimiser: Optimiser | None = None  # None: the server takes the rule's result

    @abstractmethod
    def begin(self, sent: Weights | None) -> Gathered:
        """Start with one field of one ask; `sent` is what the clients were sent under the same name, if anything."""

    def too_few(self, replies: int) -> str | None:
        """Why so few replies are not enough for the rule; None if they are."""
        return None

    def beyond_mean(self) -> str:
        """The setting that makes more of the replies than their mean, such as hiding them; empty: none."""
        return f"aggregation.rule = {self.name}"

    @property
    def limited(self) -> bool:
        """Whether all replies must be there before the first can be used."""
        return bool(self.bound) or (self.max_weight or 1.0) < 1.0

    def between_parties(self) -> Self:
        """The same with the limits of a run between real parties, where the settings have none."""
        bound = BOUND if self.bound is None else self.bound
        most = MAX_WEIGHT if self.max_weight is None else self.max_weight
        return dataclasses.replace(self, bound=bound, max_weight=most)


class RuleOfAll(Rule):
    """A rule that needs all replies at once: they are held until the last one is there."""

    @abstractmethod
    def combine(self, replies: Held) -> Weights:
        """Combine one field of all replies."""

    def begin(self, sent: Weights | None) -> Gathered:
        raise TypeError(f"{self.name} takes all replies at once, by `combine`")

    @property
    def limited(self) -> bool:
        return True


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
                self._sum[key] = value.to(torch.float64, copy=True).mul_(n)
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
    by_numbers = True
    of_groups = True

    OF_SECURE: ClassVar = ("secure", "signed", "fewest", "threshold", "neighbours", "range")
    secure: bool = False  # the server sees only sums (`aggregation.secure`); the next settings are about that
    signed: bool = False  # clients sign their keys and the list of replies that arrived: policies can name known keys
    fewest: Annotated[int, Field(ge=2, le=4096)] = 2  # clients in a sum, at least
    threshold: Annotated[float, Field(gt=0.5, le=1)] = 2 / 3  # share of the holders of a secret that can open it
    neighbours: Annotated[int, Field(ge=2, le=4095)] = 100  # clients that each client has masks with, at most
    range: Annotated[float, Field(gt=0, le=1e6)] = 4.0  # largest change of one number in one round

    dp: Privacy | None = None  # differential privacy: bounded updates and noise

    def __post_init__(self) -> None:
        if self.dp is not None and self.bound:
            raise ValueError("bound is a multiple of the median of the norms, dp has a bound of its own (dp.clip)")
        if self.secure and self.bound:
            raise ValueError("bound needs the single replies, which secure = true hides ([[outgoing]] has clip)")

    def beyond_mean(self) -> str:
        if self.secure or self.dp is not None:
            return "aggregation.secure" if self.secure else "aggregation.dp"
        return f"aggregation.optimiser = {self.optimiser.name}" if self.optimiser else ""

    @property
    def limited(self) -> bool:
        return super().limited and not self.secure and self.dp is None

    def between_parties(self) -> Self:
        own = self.secure or self.dp is not None
        return dataclasses.replace(self, bound=0.0) if own else super().between_parties()

    def begin(self, sent: Weights | None) -> Gathered:
        return RunningMean()
