"""All that travels in encrypted MMD, down to a party and up to the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from visard.core import Leaves, State, Weights
from visard.crypto.exchange import Plan
from visard.crypto.session import Letters


def begun(theta: Weights, head: Weights) -> State:
    """What a party's state begins with; an empty head leaves the party's own."""
    return {"theta": theta} | ({"head": head} if head else {})


@dataclass(frozen=True)
class Begin:
    theta: Weights
    head: Weights  # empty: a new one, or the own
    lr: float


@dataclass(frozen=True)
class Pretrained:
    theta: Annotated[Weights, Leaves.weights]
    classifier: Annotated[Weights, Leaves.class_vectors]  # empty where classes are not shared
    loss: Annotated[float, Leaves.metric]


@dataclass(frozen=True)
class Card:
    hello: Annotated[bytes, Leaves.public_key]  # public key and a nonce


@dataclass(frozen=True)
class Cards:
    plan: Plan
    hellos: Letters


@dataclass(frozen=True)
class Look:
    plan: Plan


@dataclass(frozen=True)
class Measured:
    kernel: Annotated[Tensor, Leaves.statistic]  # coefficients, from distances of the party's own features


@dataclass(frozen=True)
class Go:
    plan: Plan
    received: Letters  # sender -> message; empty: nothing to learn from yet
    secrets: Letters  # in the first exchange
    theta: Weights  # of pooled sources; empty: the own
    head: Weights
    lr: float
    more: bool  # whether there is another exchange


@dataclass(frozen=True)
class Moved:
    letters: Annotated[Letters, Leaves.ciphertext]
    tags: Annotated[Letters, Leaves.ciphertext]
    weights: Annotated[Weights, Leaves.weights]  # of pooled sources
    classifier: Annotated[Weights, Leaves.class_vectors]  # of shared classes
    figures: Annotated[dict[str, float], Leaves.metric]


@dataclass(frozen=True)
class Post:
    plan: Plan
    received: Letters


@dataclass(frozen=True)
class Mail:
    letters: Annotated[Letters, Leaves.ciphertext]
    tags: Annotated[Letters, Leaves.ciphertext]
    figures: Annotated[dict[str, float], Leaves.metric]


@dataclass(frozen=True)
class Draw:
    plan: Plan
    theta: Weights  # of all clients in this round
    secrets: Letters  # in the first exchange
    exchange: int


@dataclass(frozen=True)
class Drawn:
    letters: Annotated[Letters, Leaves.ciphertext]
    tags: Annotated[Letters, Leaves.ciphertext]
    kernel: Annotated[Tensor | None, Leaves.statistic]  # the source's: coefficients, from its own distances
    figures: Annotated[dict[str, float], Leaves.metric]


@dataclass(frozen=True)
class Heads:
    plan: Plan
    heads: list[Weights]  # of the sources
    theta: Weights = field(default_factory=dict)  # the pre-trained extractor, before alignment; empty: the own


@dataclass(frozen=True)
class Predicted:
    figures: Annotated[dict[str, float], Leaves.metric]
