"""FedFR-DA: what the server keeps, and all that travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from visard.core import ClientId, Leaves, Weights
from visard.methods.aligning import Met
from visard.methods.encrypted.messages import Post


@dataclass(frozen=True)
class Server:
    theta: Weights
    W: Tensor | None  # class vectors of the source's people, where a file gave them
    labelled: list[ClientId]  # target clients that found clusters
    met: Met = Met()  # of alignment


@dataclass(frozen=True)
class Down:
    theta: Weights
    lr: float
    first: bool = False  # of the stage
    W: Tensor | None = None
    pull: Post | None = None  # what the peers say about alignment, where there is any


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Leaves.weights]
    n: Annotated[int, Leaves.count]
    loss: Annotated[float, Leaves.metric]
