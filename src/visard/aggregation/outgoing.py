r"""Outgoing postprocessors: change a reply at the client before it leaves.

The run's settings list them, for every method, and every engine applies them in that order after each step:

    [[outgoing]]
    name = "clip"
    norm = 1.0

A postprocessor is a frozen dataclass whose fields are its settings. It gives a reply of the same type, and passes on
replies without the fields that it works on. If it sends another form, the server converts it back first (`received`);
ledgers record what was sent, and the ledger of a run lists the postprocessors. They do not apply where data were
centralised, since these have left already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visard.core import Client, R, Weights


@dataclass(frozen=True)
class Postprocessor(ABC):
    """Changes replies at the client."""

    name: ClassVar[str]
    title: ClassVar[str]  # one line that describes it
    last: ClassVar[bool] = False  # whether it sends another form, which no postprocessor after it could read

    @abstractmethod
    def __call__(self, client: Client, message: Any, reply: R) -> R:
        """The reply that leaves the client in place of `reply`, which answers `message`; neither is changed."""

    def received(self, message: Any, reply: R) -> R:
        """At the server: the reply in its original form; a ValueError says what is wrong with it."""
        return reply


@dataclass(frozen=True)
class Clip(Postprocessor):
    r"""Bounds the L2 norm of the update:
    $\theta \leftarrow \theta_0 + (\theta - \theta_0) \min(1, C / \lVert \theta - \theta_0 \rVert_2)$
    with $\theta_0$ of the message, over all entries together. Integer entries are counters and stay as they are.
    """

    name = "clip"
    title = "bounds the norm of the update of the weights"

    norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # C

    def __call__(self, client: Client, message: Any, reply: R) -> R:
        before, after = getattr(message, "theta", None), getattr(reply, "theta", None)
        if not isinstance(before, dict) or not isinstance(after, dict) or before.keys() != after.keys():
            return reply
        update = {k: v.double() - before[k].double() for k, v in after.items() if v.is_floating_point()}
        length = norm(update)
        if length <= self.norm:
            return reply
        scale = self.norm / length
        clipped = {k: (before[k].double() + scale * u).to(after[k].dtype) for k, u in update.items()}
        return replace(reply, theta={**after, **clipped})  # type: ignore[type-var]


def norm(weights: Weights) -> float:
    """The L2 norm of all entries together, in float64."""
    squares: list[Tensor] = [v.double().square().sum() for v in weights.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
