"""Fine-tune of FedFR-DA (P + C of its ablation): the source's network, trained on with pseudo labels of the target.

theta_s   the source's network, from model.weights or from a first stage at the source
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn

from visard.clustering.cluster import Clustering, metrics_of, pseudo_labels
from visard.core import Client, ClientId, Disclosure, Method, Network, Setup, Stage, Weights, client_step, nothing
from visard.core.method import ALREADY_CENTRAL, AtLeastOne, Number
from visard.errors import VisardError
from visard.learning.heads import HeadSettings
from visard.learning.train import Training, train
from visard.learning.weights import load_weights, weights_of
from visard.methods.domain_adaptation import SOURCE, Labelled, check_start, restore_head, targets
from visard.methods.supervised import Down, Theta, fit, pretraining


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class FineTune(Method[Theta]):
    """The targets' pictures are pooled and clustered once; the source is out of the picture."""

    name = "finetune"
    title = "the source's network, trained on with pseudo labels of the target's pooled pictures"
    paper = "a baseline of Zhuang et al. 2021"
    hostile = ALREADY_CENTRAL
    extendable = True
    discloses = frozenset({Disclosure.weights, Disclosure.statistic, Disclosure.count, Disclosure.metric})
    centralises = frozenset({Disclosure.pictures, Disclosure.labels})  # labels only to look at: `centralises_from`

    rounds: AtLeastOne = 20
    training: Training = Training(unit="iterations", amount=100)
    head: HeadSettings = HeadSettings("arcface", 30.0, 0.5)
    clustering: Clustering = Clustering()
    cluster_by: Literal["client", "pool"] = "client"  # the pictures of each client alone, as FedFR-DA must, or all
    target_head: Literal["random", "means"] = "means"
    pretrain_rounds: Number = 0  # at the source, in this run; 0: model.weights has its network
    pretraining: Training = Training()
    measure: bool = True  # compare clusters with the identities of the files: a simulation, in which labels move too

    def centralises_from(self, client: ClientId) -> frozenset[Disclosure]:
        if client == SOURCE:
            return frozenset()
        return self.centralises if self.measure or self.oracle() else frozenset({Disclosure.pictures})

    def packages(self) -> dict[str, str]:
        return self.clustering.packages()

    def without_labels(self, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
        return tuple(targets(clients))

    def oracle(self) -> str:
        return self.clustering.oracle

    def start(self, setup: Setup) -> Theta:
        check_start(self.name, setup, self.pretrain_rounds)
        return Theta(setup.new_weights())

    def stages(self) -> list[Stage[Theta]]:
        first: list[Stage[Theta]] = pretraining(self.pretrain_rounds, self.pretraining, SOURCE, self.fit, Down)
        return [*first, Stage("label", 1, self.label_all), Stage("train", self.rounds, self.round)]

    def label_all(self, s: Theta, net: Network) -> Theta:
        (pool,) = net.clients
        up = net.ask(self.label, {pool: Down(s.theta, 0.0)})[pool]
        if not up.clusters:
            raise VisardError("no cluster was found: raise clustering.d or lower clustering.min_size")
        net.log(clusters=up.clusters, kept=up.kept, **up.figures)
        return s

    def round(self, s: Theta, net: Network) -> Theta:
        lr = self.training.lr_at(net.round, self.rounds)
        (pool,) = net.clients
        up = net.ask(self.tune, {pool: Down(s.theta, lr)})[pool]
        net.log(loss=up.loss, lr=lr)
        return Theta(up.theta)

    @client_step(trains=lambda self, client, msg: self.pretraining.work(msg.lr, len(client.data.train)))
    def fit(self, client: Client, msg: Down) -> Up:
        done = fit(client, msg.theta, self.pretraining, self.head, msg.lr)
        return Up(weights_of(client.network()), done.loss)

    @client_step(trains=nothing)
    def label(self, client: Client, msg: Down) -> Labelled:
        model, view = client.network(), client.data.train
        load_weights(model, msg.theta)
        labels, means = self._cluster(client, model)
        client.state.update(labels=labels, start={"weight": means} if self.target_head == "means" else {})
        measured = metrics_of(labels, view) if self.measure and view.labelled else {}
        return Labelled(len(means), int((labels >= 0).sum()), measured)

    def _cluster(self, client: Client, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Labels (n,) of the pool's pictures, and the mean direction of each cluster."""
        pool, labels, means, count = client.data.train, torch.full((len(client.data.train),), -1), [], 0
        for view in client.data.parts.values() if self.cluster_by == "client" else [pool]:
            found = pseudo_labels(model, view, self.clustering, client.numerics.channels_last)
            rows = torch.from_numpy(np.searchsorted(pool.index, view.index))
            labels[rows] = torch.where(found.labels >= 0, found.labels + count, -1)
            means.append(found.means)
            count += found.found.clusters
        return labels, torch.cat(means)

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, len(client.data.train)))
    def tune(self, client: Client, msg: Down) -> Up:
        model, known = client.network(), client.state["labels"] >= 0
        load_weights(model, msg.theta)
        labels, view = client.state["labels"][known], client.data.train.take(known.numpy())
        start = client.state.pop("start", {})
        head = restore_head(self.head, int(labels.max()) + 1, client.embedding, client.state, start)
        done = train(model, head, view, self.training, client.rng, client.numerics, lr=msg.lr, labels=labels)
        client.state["head"] = weights_of(head)
        return Up(weights_of(model), done.loss)
