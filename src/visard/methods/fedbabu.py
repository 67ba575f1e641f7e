"""FedBABU: Oh, Kim, Yun, Towards Enhanced Representation for Federated Image Classification, ICLR 2022.

theta   the body: weights of the backbone, which alone is trained and averaged
W       the head: class vectors of all identities, random, the same everywhere, and never trained together;
        after the last round every client tunes head and body, the body or the head on its own pictures
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from visard.core import Client, Disclosure, Method, Network, Setup, Stage, State, Weights, client_step, sample_clients
from visard.core.method import CRAFTED_WEIGHTS, SEES_UPDATES, AtLeastOne, Share
from visard.learning.features import client_head
from visard.learning.heads import Head, HeadSettings
from visard.learning.train import Training, train
from visard.learning.weights import load_weights, weights_of


@dataclass(frozen=True)
class Server:
    theta: Weights
    W: Tensor


@dataclass(frozen=True)
class Down:
    theta: Weights
    W: Tensor
    lr: float


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    n: Annotated[int, Disclosure.count]
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class Tuned:
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class FedBabu(Method[Server]):
    """Only the body is learned together, against a head that stays random; clients tune for themselves at the end."""

    name = "fedbabu"
    title = "averaging of the body under a fixed random head, then tuning at each client"
    paper = "Oh, Kim, Yun 2022 (ICLR)"
    hostile = (
        f"{SEES_UPDATES} Class vectors stay as they were drawn and tell nothing. Running means of batch norm at a "
        "learning rate near 0 are the mean face of a client with one person: prevented by keeping statistic out "
        f"of kinds, as a policy does by default, or with model.weights (batch norm is frozen). {CRAFTED_WEIGHTS}"
    )
    extendable = False  # clients tune after the last round
    discloses = frozenset({Disclosure.weights, Disclosure.statistic, Disclosure.count, Disclosure.metric})

    rounds: AtLeastOne = 20
    participation: Share = 1.0  # share of the clients that are asked in a round
    training: Training = Training()
    head: HeadSettings = HeadSettings()
    tune: Literal["full", "body", "head"] = "full"  # the part that a client tunes at the end
    tune_epochs: AtLeastOne = 1  # tau_f

    def __post_init__(self) -> None:
        self.head.check_shared("method.head.kind")

    def start(self, setup: Setup) -> Server:
        return Server(setup.new_weights(), self.head.build(setup.classes, setup.embedding).weight.detach())

    def stages(self) -> list[Stage[Server]]:
        return [Stage("federate", self.rounds, self.round), Stage("personalise", 1, self.personalise)]

    def round(self, s: Server, net: Network) -> Server:
        down = Down(s.theta, s.W, self.training.lr_at(net.round, self.rounds))
        asked = dict.fromkeys(sample_clients(net, self.participation), down)
        means, ups = net.reduce(self.update_body, asked, mean="theta", by="n")  # sum_k n_k theta_k / n
        net.log(loss=sum(up.n * up.loss for up in ups.values()) / sum(up.n for up in ups.values()), lr=down.lr)
        return Server(means["theta"], s.W)

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, len(client.data.train)))
    def update_body(self, client: Client, msg: Down) -> Up:
        model, _, loss = self._train(client, msg, self.training, ("body",))
        return Up(weights_of(model), len(client.data.train), loss)

    def personalise(self, s: Server, net: Network) -> Server:
        tuned = net.ask(self.tune_own, dict.fromkeys(net.clients, Down(s.theta, s.W, self.training.lr)))
        net.log(loss=sum(up.loss for up in tuned.values()) / len(tuned))
        return s

    @client_step(trains=lambda self, client, msg: self.tuning.work(msg.lr, len(client.data.train)))
    def tune_own(self, client: Client, msg: Down) -> Tuned:
        model, head, loss = self._train(
            client, msg, self.tuning, ("body", "head") if self.tune == "full" else (self.tune,)
        )
        kept, own = weights_of(head), torch.from_numpy(client.data.train.classes)  # its rows of the common head
        client.state |= {"theta": weights_of(model), "head": kept | {"weight": kept["weight"][own]}}
        return Tuned(loss)

    @property
    def tuning(self) -> Training:
        return replace(self.training, unit="epochs", amount=self.tune_epochs)

    def _train(self, client: Client, msg: Down, how: Training, parts: Sequence[str]) -> tuple[nn.Module, Head, float]:
        load_weights(model := client.network(), msg.theta)
        head, labels, mask = client_head(client, self.head, msg.W, model)
        frozen = [part for name, part in (("body", model), ("head", head)) if name not in parts]
        view, rng, numerics = client.data.train, client.rng, client.numerics
        done = train(model, head, view, how, rng, numerics, lr=msg.lr, labels=labels, mask=mask, frozen=frozen)
        return model, head, done.loss

    def backbone(self, s: Server) -> Weights:
        return s.theta

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return state.get("theta", theta)
