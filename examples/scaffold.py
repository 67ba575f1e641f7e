"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, 2020, Algorithm 1, option II.

    x     weights of the backbone at the server      y_i     those of client i while it trains
    c     control variate of the server              c_i     that of client i, who keeps it
    eta_g step of the server (method.eta_g)          eta_l   step of a client (method.training.lr)
    S     clients of a round                         N, K    number of clients, of steps of a client

A head classifies the client's own people, so it stays there and is trained without correction.

    visard run --plugin examples/scaffold.py scaffold
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from visard.core import Client, Disclosure, Method, Network, Setup, Stage, Weights, client_step, sample_clients
from visard.errors import UsageError
from visard.learning.features import client_head
from visard.learning.heads import HeadSettings
from visard.learning.train import Training, train
from visard.learning.weights import kept_local, load_weights, weights_of, without
from visard.plugins import register


@dataclass(frozen=True)
class Server:
    x: Weights
    c: Weights


@dataclass(frozen=True)
class Up:
    dy: Annotated[Weights, Disclosure.weights]
    dc: Annotated[Weights, Disclosure.weights]
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class PlainSteps(Training):
    """Gradient steps without momentum at one rate, as option II takes for granted."""

    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    clip: float = 0.0

    def __post_init__(self) -> None:
        if self.momentum or self.clip or self.schedule != "constant":
            raise UsageError("method.training: SCAFFOLD needs momentum = 0, clip = 0 and schedule = constant")


@register("methods", "scaffold")
@dataclass(frozen=True)
class Scaffold(Method[Server]):
    """Clients correct their gradients by how their own differ from everybody's, so that they do not drift apart."""

    name = "scaffold"
    title = "averaging with control variates against client drift"
    paper = "Karimireddy et al. 2020"
    discloses = frozenset({Disclosure.weights, Disclosure.statistic, Disclosure.count, Disclosure.metric})

    rounds: int = 20
    eta_g: float = 1.0
    participation: float = 1.0  # |S| / N
    training: PlainSteps = PlainSteps()
    head: HeadSettings = HeadSettings()

    def start(self, setup: Setup) -> Server:
        x = setup.new_weights()
        statistics = kept_local(x, "parameters")  # of batch norm: they have no gradients to correct
        return Server(x, {k: torch.zeros_like(v) for k, v in without(x, statistics).items()})

    def stages(self) -> list[Stage[Server]]:
        return [Stage("federate", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:
        S = sample_clients(net, self.participation)  # line 4
        delta, ups = net.reduce(self.local, dict.fromkeys(S, s), mean=("dy", "dc"), by=None)  # lines 5 and 16
        net.log(loss=sum(up.loss for up in ups.values()) / len(ups))
        step = {k: self.eta_g if v.is_floating_point() else 1 for k, v in s.x.items()}  # counters only count
        x = {k: v + step[k] * delta["dy"][k] for k, v in s.x.items()}  # line 17
        c = {k: v + len(ups) / len(net.clients) * delta["dc"][k] for k, v in s.c.items()}
        return Server(x, c)

    @client_step(trains=lambda self, client, msg: self.training.work(self.training.lr, len(client.data.train)))
    def local(self, client: Client, s: Server) -> Up:
        load_weights(model := client.network(), s.x)  # line 7: y_i <- x
        head, *_ = client_head(client, self.head, None, model)
        c_i: Weights = client.state.get("c", {k: torch.zeros_like(v) for k, v in s.c.items()})

        def correct(g: dict[str, Tensor]) -> None:  # line 10: g_i(y_i) - c_i + c
            for k in g:
                g[k].add_(s.c[k] - c_i[k])

        done = train(model, head, client.data.train, self.training, client.rng, client.numerics, correct=correct)
        y = weights_of(model)
        K, eta_l = done.steps, self.training.lr
        c_plus = {k: c_i[k] - s.c[k] + (s.x[k] - y[k]) / (K * eta_l) for k in s.c}  # line 12, (ii)
        client.state |= {"c": c_plus, "head": weights_of(head)}  # line 14: c_i <- c_i^+
        return Up({k: y[k] - s.x[k] for k in y}, {k: c_plus[k] - c_i[k] for k in c_i}, done.loss)  # line 13

    def backbone(self, s: Server) -> Weights:
        return s.x
