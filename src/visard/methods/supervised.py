"""Supervised training of one network at one client: the common part of central, local and pre-training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from visard.core import (
    PUBLIC,
    BoundStep,
    Client,
    ClientId,
    Disclosure,
    Method,
    Network,
    Stage,
    Weights,
    client_step,
    nothing,
)
from visard.core.method import AtLeastOne, S
from visard.errors import PublicError
from visard.learning.features import class_means, client_head, features_of
from visard.learning.heads import HeadSettings
from visard.learning.positive import variance
from visard.learning.train import Trained, Training, train
from visard.learning.weights import load_weights, weights_of


@dataclass(frozen=True)
class Theta:
    """Server state of a method that keeps nothing but a network."""

    theta: Weights


@dataclass(frozen=True)
class Down:
    theta: Weights
    lr: float


@dataclass(frozen=True)
class Supervised:
    """How long and how a network is trained on labelled pictures."""

    rounds: AtLeastOne = 20
    training: Training = Training()
    head: HeadSettings = HeadSettings()


@dataclass(frozen=True)
class Fit:
    theta: Weights
    lr: float
    class_vectors: bool = False  # whether the reply has them, and the biases of a head that has some
    means: bool = False  # a new head starts at the mean features of its identities


@dataclass(frozen=True)
class Fitted:
    theta: Annotated[Weights, Disclosure.weights]
    W: Annotated[Tensor | None, Disclosure.class_vectors]
    b: Annotated[Tensor | None, Disclosure.class_vectors]
    loss: Annotated[float, Disclosure.metric]


class Fitting(Method[S]):
    """A method with a step that trains a network with its own head at one client."""

    @property
    def fits_at(self) -> ClientId:
        """The one client that is asked for `fit`, by default the one with the public pictures; "": any."""
        return PUBLIC

    @abstractmethod
    def supervised(self) -> Supervised:
        """The settings of that training."""

    @client_step(trains=lambda self, client, msg: self.supervised().training.work(msg.lr, len(client.data.train)))
    def fit(self, client: Client, msg: Fit) -> Fitted:
        if self.fits_at not in ("", client.id):  # its class vectors are asked for: of other people they are templates
            raise PublicError(f"this step is for {self.fits_at} alone")
        how = self.supervised()
        done = fit(client, msg.theta, how.training, how.head, msg.lr, msg.means)
        shown = client.state["head"] if msg.class_vectors else {}
        return Fitted(weights_of(client.network()), shown.get("weight"), shown.get("bias"), done.loss)


def pretraining(
    rounds: int,
    training: Training,
    at: ClientId,
    step: BoundStep[Any, Any],
    message: Callable[[Weights, float], Any],
    keep: Callable[[S, Any], S] = lambda s, done: replace(s, theta=done.theta),  # type: ignore[type-var]
) -> list[Stage[S]]:
    """The stage in which one client with labelled pictures trains the network alone; no stage for no rounds.

    `message(theta, lr)` is what it is asked with `step`; `keep` makes the next server state of its reply.
    """

    def round(s: S, net: Network) -> S:
        lr = training.lr_at(net.round, rounds)
        done = net.ask(step, {at: message(s.theta, lr)})[at]  # type: ignore[attr-defined]
        net.log(loss=done.loss, lr=lr)
        return keep(s, done)

    return [Stage("pretrain", rounds, round)] if rounds else []


def fit(
    client: Client, theta: Weights, training: Training, settings: HeadSettings, lr: float, means: bool = False
) -> Trained:
    """Train the client's network from `theta`; its head is kept in the client's state from round to round.

    A new head is random or, with `means`, starts at the mean features of its identities.
    """
    model, view = client.network(), client.data.train
    load_weights(model, theta)
    head, *_ = client_head(client, settings, None, model, "means" if means else "random")
    done = train(model, head, view, training, client.rng, client.numerics, lr=lr)
    client.state["head"] = weights_of(head)
    return done


@dataclass(frozen=True)
class Measure:
    theta: Weights


@dataclass(frozen=True)
class Proxies:
    Phi: Annotated[Tensor, Disclosure.class_vectors]  # of public identities, from the public client


class WithProxies(Fitting[S]):
    """A method that starts from public identities, which one client (`PUBLIC`) trains on or measures."""

    def public_means(self, theta: Weights, net: Network) -> Tensor:
        """Mean features (K_g, E) of the public identities."""
        return net.ask(self.measure, {PUBLIC: Measure(theta)})[PUBLIC].Phi

    @client_step(trains=nothing)
    def measure(self, client: Client, msg: Measure) -> Proxies:
        if client.id != PUBLIC:  # mean features of other people are templates
            raise PublicError(f"this step is for {PUBLIC} alone")
        load_weights(model := client.network(), msg.theta)
        view = client.data.train
        features = features_of(model, view, client.numerics.channels_last)
        return Proxies(class_means(features, torch.from_numpy(view.labels), view.n_classes))


PICTURES = 256  # evenly over the public ones


@dataclass(frozen=True)
class Look:
    theta: Weights


@dataclass(frozen=True)
class Seen:
    variance: Annotated[float, Disclosure.metric]  # of unit features; 0 = all in one point


class Looking(Method[S]):
    """A method with a step that measures the features where the public pictures are."""

    def watch(self, net: Network, theta: Weights) -> None:
        """Log the variance of the features."""
        net.log(**{"Feature variance": net.ask(self.look, {PUBLIC: Look(theta)})[PUBLIC].variance})

    @client_step(trains=nothing)
    def look(self, client: Client, msg: Look) -> Seen:
        model, view = client.network(), client.data.train
        load_weights(model, msg.theta)
        some = view.take(np.unique(np.linspace(0, len(view) - 1, PICTURES).astype(np.int64)))
        return Seen(variance(features_of(model, some, client.numerics.channels_last)))
