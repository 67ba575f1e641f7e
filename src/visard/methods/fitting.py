"""Supervised training of one network at one party: what central, local and pre-training share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from visard.core import Client, Leaves, Method, Weights, client_step
from visard.core.method import S
from visard.errors import UsageError
from visard.ops.client_head import client_head
from visard.ops.training import HeadSettings, Trained, Training, load_weights, train, weights_of


@dataclass(frozen=True)
class Supervised:
    """How long and how a network is trained on labelled pictures."""

    rounds: int = 20
    training: Training = Training()
    head: HeadSettings = HeadSettings()

    def __post_init__(self) -> None:
        check_rounds(self.rounds)


@dataclass(frozen=True)
class Fit:
    theta: Weights
    lr: float
    class_vectors: bool = False  # whether the reply has them, and the biases of a head that has some
    means: bool = False  # a new head starts at the mean features of its people


@dataclass(frozen=True)
class Fitted:
    theta: Annotated[Weights, Leaves.weights]
    W: Annotated[Tensor | None, Leaves.class_vectors]
    b: Annotated[Tensor | None, Leaves.class_vectors]
    loss: Annotated[float, Leaves.metric]


class Fitting(Method[S]):
    """A method with a step that trains a network with its own head at one party."""

    @abstractmethod
    def supervised(self) -> Supervised:
        """The settings of that training."""

    @client_step
    def fit(self, client: Client, msg: Fit) -> Fitted:
        how = self.supervised()
        done = fit(client, msg.theta, how.training, how.head, msg.lr, msg.means)
        told = client.state["head"] if msg.class_vectors else {}
        return Fitted(weights_of(client.network()), told.get("weight"), told.get("bias"), done.loss)


def fit(
    client: Client, theta: Weights, training: Training, settings: HeadSettings, lr: float, means: bool = False
) -> Trained:
    """Train the client's network from `theta`; its head is kept in the client's state from round to round.

    A new head is random or, with `means`, starts at the mean features of its people.
    """
    model, view = client.network(), client.data.train
    load_weights(model, theta)
    head, *_ = client_head(client, settings, None, model, "means" if means else "random")
    done = train(model, head, view, training, client.rng, client.numerics, lr=lr)
    client.state["head"] = weights_of(head)
    return done


def check_rounds(rounds: int) -> None:
    """One clear line for a method without rounds."""
    if rounds < 1:
        raise UsageError(f"method.rounds = {rounds}: must be at least 1")
