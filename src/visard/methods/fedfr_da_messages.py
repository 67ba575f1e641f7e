"""FedFR-DA: what the server keeps, and all that travels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from visard.core import ClientId, Leaves, Weights
from visard.methods.aligning import Met
from visard.methods.encrypted.messages import Post


@dataclass(frozen=True)
class Server:
    theta: Weights
    head: Weights  # the source's, where it goes on with one from a file
    labelled: list[ClientId]  # target clients that found clusters
    begun: bool = False  # whether the source has trained with the targets: its head is its own from then on
    met: Met = Met()  # of alignment


@dataclass(frozen=True)
class Down:
    theta: Weights
    lr: float
    first: bool = False  # the source has not trained with the targets yet
    head: Weights = field(default_factory=dict)  # which it then starts with
    pull: Post | None = None  # what the peers say about alignment, where there is any


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Leaves.weights]
    n: Annotated[int, Leaves.count]
    loss: Annotated[float, Leaves.metric]
