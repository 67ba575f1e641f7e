r"""Server optimisers: how far the server moves from what it sent towards the result of its rule.

Without one the server takes the rule's result as it is. With one the difference between that and what was sent is the
direction $\Delta_t$ of a step (Reddi et al. 2021, Algorithms 1 and 2):

    [aggregation.optimiser]
    name = "adam"
    lr = 0.01

An optimiser works on the field `theta` of every method that averages one, and there on the trained entries with
numbers: batch norm's running statistics and counters take the rule's result. What it remembers is part of the
checkpoint. All steps are computed in float64 and kept in the types of the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visard.core import State, Weights
from visard.disclosure import is_statistic
from visard.plugins import Registry

FIELD = "theta"  # that optimisers work on
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class Optimiser(ABC):
    """A frozen dataclass whose fields are its settings; its state is passed in and out."""

    name: ClassVar[str]
    title: ClassVar[str]  # one line that describes it
    keeps: ClassVar[tuple[str, ...]]  # names of what it keeps for each entry

    lr: Rate

    @abstractmethod
    def step(self, delta: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """The step (float64) for one entry from its `delta`; `kept` (float64) is replaced by what to remember."""

    def first(self, name: str) -> float:
        """The initial value of something that it keeps."""
        return 0.0

    def apply(self, sent: Weights, result: Weights, state: State, statistics: Collection[str] = ()) -> Weights:
        """New weights from those that were sent and the rule's result; `state` is updated."""
        found = dict(result)
        for key, value in result.items():
            if not value.is_floating_point() or is_statistic(key, statistics):
                continue
            start = sent[key].double()
            kept = {
                name: held[key].double()
                if key in (held := state.get(name, {}))
                else torch.full_like(start, self.first(name))
                for name in self.keeps
            }
            found[key] = (start + self.step(value.double() - start, kept)).to(value.dtype)
            for name in self.keeps:
                state.setdefault(name, {})[key] = kept[name].to(value.dtype)
        return found


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimiser):
    r"""$m_t = \beta m_{t-1} + \Delta_t$, $x_{t+1} = x_t + \eta m_t$: FedAvgM (Hsu et al. 2019); a learning rate of the
    server alone where the momentum is 0."""

    name = "sgd"
    title = "a server learning rate with momentum (FedAvgM)"
    keeps = ("m",)

    lr: Rate = 1.0  # eta
    momentum: Decay = 0.9  # beta

    def step(self, delta: Tensor, kept: dict[str, Tensor]) -> Tensor:
        kept["m"] = self.momentum * kept["m"] + delta
        return self.lr * kept["m"]


@dataclass(frozen=True, kw_only=True)
class _Adaptive(Optimiser):
    r"""Reddi et al. 2021, Algorithm 2: $m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t$ and
    $x_{t+1} = x_t + \eta m_t / (\sqrt{v_t} + \tau)$, from $m_{-1} = 0$ and $v_{-1} = \tau^2$. As there, and unlike in
    Adam for a single machine, nothing corrects the bias of the first steps.
    """

    keeps = ("m", "v")

    lr: Rate = 0.01  # eta
    beta1: Decay = 0.9
    tau: Rate = 1e-3  # the larger, the less adaptive

    def first(self, name: str) -> float:
        return self.tau**2 if name == "v" else 0.0

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        r"""$v_t$ of $v_{t-1}$ and $\Delta_t^2$."""

    def step(self, delta: Tensor, kept: dict[str, Tensor]) -> Tensor:
        kept["m"] = self.beta1 * kept["m"] + (1 - self.beta1) * delta
        kept["v"] = self.second(kept["v"], delta.square())
        return self.lr * kept["m"] / (kept["v"].sqrt() + self.tau)


@dataclass(frozen=True, kw_only=True)
class Adagrad(_Adaptive):
    r"""$v_t = v_{t-1} + \Delta_t^2$; the paper uses $\beta_1 = 0$."""

    name = "adagrad"
    title = "steps by the sum of all squares so far (FedAdagrad)"

    beta1: Decay = 0.0

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True, kw_only=True)
class Adam(_Adaptive):
    r"""$v_t = \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2$."""

    name = "adam"
    title = "steps by a running mean of squares (FedAdam)"

    beta2: Decay = 0.99

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class Yogi(Adam):
    r"""$v_t = v_{t-1} - (1 - \beta_2) \Delta_t^2 \, \mathrm{sign}(v_{t-1} - \Delta_t^2)$."""

    name = "yogi"
    title = "as adam, with squares that change more slowly (FedYogi)"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


OPTIMISERS: Registry[type[Optimiser]] = Registry(
    "optimisers",
    {kind.name: kind for kind in (Sgd, Adam, Yogi, Adagrad)},
    lambda found: isinstance(found, type) and issubclass(found, Optimiser),
    "server optimiser",
)
