"""FedFace: Aggarwal, Zhou, Jain, FedFace: Collaborative Learning of Face Recognition Model, IJCB 2021;
spread-out after Yu et al., Federated Learning with Only Positive Labels (FedAwS), ICML 2020.

    theta   weights of the extractor f       w_i   class vector of client i, length 1 (a row for each of its identities)
    W       the rows of all clients          n_i   pictures of client i           m     margin of the positive loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from visard.core import (
    PUBLIC,
    Client,
    ClientId,
    Disclosure,
    Network,
    Setup,
    Stage,
    Weights,
    client_step,
    sample_clients,
)
from visard.core.method import SEES_UPDATES, AtLeastOne, Number, Positive, Share
from visard.errors import PublicError, UsageError
from visard.learning.features import class_means, features_of
from visard.learning.heads import HeadSettings, direction
from visard.learning.positive import (
    Member,
    OneStep,
    PositiveHead,
    SpreadOut,
    check_frozen,
    check_not_alone,
    collapse_metrics,
    one_step_together,
    same_weights,
    spread_out,
)
from visard.learning.train import Training, train
from visard.learning.weights import load_weights, weights_of
from visard.methods.supervised import Fit, Fitting, Looking, Supervised, pretraining


@dataclass(frozen=True)
class Server:
    theta: Weights
    W: dict[ClientId, Tensor]  # rows (identities, E) of every client that has answered once
    public: bool  # whether there are public pictures to look at


@dataclass(frozen=True)
class Down:  # all that the server sends: of W only the client's own rows
    theta: Weights
    w: Tensor | None  # None: the client has none yet and makes it
    lr: float


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    w: Annotated[Tensor, Disclosure.class_vectors]
    n: Annotated[int, Disclosure.count]
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class FedFace(Fitting[Server], Looking[Server]):
    """Every client pulls the features of its own identities to their class vectors; the server pushes these apart."""

    name = "fedface"
    title = "one face on each phone: positives at the clients, separation at the server"
    paper = "Aggarwal et al. 2021 (IJCB)"
    singly = "class vectors, which it pushes apart"
    hostile = (
        "The server holds a face template (class vector) of every person of every client: that is how the method "
        "works, and a policy refuses it unless kinds names class_vectors. With weights crafted so that features "
        "copy the picture, the first class vectors are the mean faces: prevented by pinning the weights that a "
        "run begins with (weights.start) and keeping later ones near (bounds.distance). method.enrol asks for "
        f"class vectors without training: refused unless bounds.lr begins at 0. {SEES_UPDATES}"
    )
    extendable = True
    discloses = frozenset(
        {Disclosure.weights, Disclosure.statistic, Disclosure.class_vectors, Disclosure.count, Disclosure.metric}
    )

    rounds: AtLeastOne = 200  # T
    training: OneStep = OneStep()  # Algorithm 1: one gradient step on all pictures, eta = 0.001
    margin: Annotated[float, Field(gt=-1, le=1)] = 0.9  # m
    spread: SpreadOut = SpreadOut()  # lambda, v, the pairs and the distance
    init: Literal["mean", "random"] = "mean"  # a class vector starts as the mean feature (Eq. 6), or anywhere
    enrol: bool = False  # in the first round all clients make their class vectors and none trains
    train_vectors: bool = True  # False: class vectors stay as they started
    vectors_lr: Positive | None = None  # learning rate of class vectors; None: training.lr, as in Algorithm 1
    participation: Share = 1.0  # share of the clients that are asked in a round
    batch_norm: Literal["frozen", "train"] = "frozen"  # train: refused where a client has one identity
    pretrain_rounds: Number = 0  # a first stage at the public client; 0 = the network of model.weights
    pretrain: Training = Training()
    head: HeadSettings = HeadSettings()  # of pre-training

    def supervised(self) -> Supervised:
        return Supervised(max(1, self.pretrain_rounds), self.pretrain, self.head)

    @property
    def vectors_rate(self) -> float:
        """How much faster class vectors learn than the network, whatever the schedule."""
        return 1.0 if self.vectors_lr is None else self.vectors_lr / self.training.lr

    def leaving(self, moving: bool) -> frozenset[Disclosure]:
        return super().leaving(moving and (self.batch_norm == "train" or self.pretrain_rounds > 0))

    def trains_norm(self) -> bool:
        return self.batch_norm == "train"

    def start(self, setup: Setup) -> Server:  # line 1
        theta = setup.new_weights()
        if self.pretrain_rounds and not setup.public_classes:
            raise UsageError("method.pretrain_rounds needs public people: set partition.public_identities")
        if self.batch_norm == "frozen":
            check_frozen(theta, trained=setup.given or self.pretrain_rounds > 0)
        return Server(theta, {}, setup.public_classes > 0)

    def stages(self) -> list[Stage[Server]]:
        first: list[Stage[Server]] = pretraining(self.pretrain_rounds, self.pretrain, PUBLIC, self.fit, Fit)
        return [*first, Stage("federate", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:
        first = self.enrol and net.round == 0
        lr = 0.0 if first else self.training.lr_at(net.round, self.rounds)
        chosen = sample_clients(net, 1.0 if first else self.participation)
        asked = {c: Down(s.theta, s.W.get(c), lr) for c in chosen}  # line 4
        means, ups = net.reduce(self.local, asked, mean="theta", by="n")  # lines 5 to 9
        theta = means["theta"]
        rows = s.W | {c: up.w for c, up in ups.items()}  # a client that did not reply keeps its row
        before = torch.cat(list(rows.values()))  # Eq. 8
        after = spread_out(before, self.spread)  # line 10, Eq. 9
        W = dict(zip(rows, torch.split(after, [len(w) for w in rows.values()]), strict=True))
        loss = sum(up.n * up.loss for up in ups.values()) / sum(up.n for up in ups.values())
        net.log(loss=loss, lr=lr, **collapse_metrics(before, after))
        if s.public:
            self.watch(net, theta)
        return Server(theta, W, s.public)

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, len(client.data.train)))
    def local(self, client: Client, msg: Down) -> Up:
        model, view, frozen = client.network(), client.data.train, self.batch_norm == "frozen"
        load_weights(model, msg.theta)
        if not frozen:
            check_not_alone(msg.theta, client.data.n_classes)
        head = PositiveHead(self.own(client, msg), self.margin, self.train_vectors)
        done = train(  # line 6, Eqs. 2 to 4 and 7
            model, head, view, self.training, client.rng, client.numerics,
            lr=msg.lr, frozen_norm=frozen, head_rate=self.vectors_rate,
        )  # fmt: skip
        return Up(weights_of(model), direction(head.weight.detach()), len(view), done.loss)  # line 7

    @local.together(when=lambda method: method.training.is_one_step and method.batch_norm == "frozen")
    def local_together(self, clients: Sequence[Client], msgs: Sequence[Down]) -> tuple[Weights, list[Up]]:
        """Lines 5 to 9 in one pass: the average of clients that take one step each is one step on the average."""
        model = clients[0].network()
        load_weights(model, same_weights([msg.theta for msg in msgs]))
        members = [Member(c.data.train, self.own(c, msg), c.rng) for c, msg in zip(clients, msgs, strict=True)]
        W, losses = one_step_together(
            model, members, self.margin, self.training, clients[0].numerics,
            lr=msgs[0].lr, trained=self.train_vectors, vectors_rate=self.vectors_rate,
        )  # fmt: skip
        ups = [Up({}, w, len(m.view), loss) for m, w, loss in zip(members, W, losses, strict=True)]
        return weights_of(model), ups

    def own(self, client: Client, msg: Down) -> Tensor:
        """The class vectors of a client's identities: those sent, or the first ones, from the network with theta."""
        view = client.data.train
        if not len(view):
            raise PublicError("has no training pictures")
        if msg.w is not None:
            return msg.w
        if self.init == "random":
            return direction(torch.randn(view.n_classes, client.embedding, generator=client.rng))
        features = features_of(client.network(), view, client.numerics.channels_last)
        return class_means(features, torch.from_numpy(view.labels), view.n_classes)  # line 2, Eq. 6
