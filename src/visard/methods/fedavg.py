"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017;
with mu > 0 FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020;
with in_turn > 1 FedSeq: Zaccone et al., Speeding up Heterogeneous Federated Learning with Sequentially Trained
Superclients, ICPR 2022.

    theta   weights of the backbone     W   class vectors of a global head, one row for each identity
    n       pictures of a client        C   strength of the embedding regularisation

`Averaging` is the common part of FedAvg, HF-MAML and others: a subclass says how a client learns.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn

from visard.core import (
    Client,
    ClientId,
    Disclosure,
    Network,
    Setup,
    Stage,
    State,
    Weights,
    Work,
    client_step,
    sample_clients,
)
from visard.core.method import CRAFTED_WEIGHTS, SEES_UPDATES, AtLeastOne, NotNegative, Share
from visard.errors import UsageError
from visard.learning.features import HeadStart, client_head
from visard.learning.heads import Head, HeadSettings
from visard.learning.objective import Drift
from visard.learning.train import Training, train
from visard.learning.weights import BatchNormPolicy, kept_local, load_weights, weights_in, without
from visard.methods.negatives import Shown, WithNegatives


@dataclass(frozen=True)
class Server:
    theta: Weights  # the averaged weights
    fixed: Weights  # batch norm entries that stay at the clients; a new client starts from these
    W: Tensor | None  # global head only
    shown: Shown = field(default_factory=dict)  # class vectors that clients have shown, for others' negatives


@dataclass(frozen=True)
class Down:
    theta: Weights
    fixed: Weights
    W: Tensor | None
    lr: float
    negatives: Tensor | None = None  # rows that the other clients have shown, or the client's own, corrected


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    W: Annotated[Tensor | None, Disclosure.class_vectors]
    n: Annotated[int, Disclosure.count]
    loss: Annotated[float, Disclosure.metric]
    gradients: Annotated[int, Disclosure.count]  # gradient evaluations
    samples: Annotated[int, Disclosure.count]  # pictures drawn


class Learnt(NamedTuple):
    """The result of a client's training."""

    loss: float
    gradients: int
    samples: int


class Task(NamedTuple):
    """The training task of a client: network and head, labels (n,) as rows of the head, and its classes."""

    model: nn.Module
    head: Head
    labels: Tensor
    mask: Tensor | None
    drift: Drift | None


@dataclass(frozen=True)
class Averaging(WithNegatives[Server]):
    """The server sends, the clients learn, the server averages; a subclass says how a client learns."""

    hostile = (
        f"{SEES_UPDATES} Where batch norm follows the batches, its running means at a learning rate near 0 are "
        "the mean face of a client with one person: prevented by keeping statistic out of kinds, as a policy "
        "does by default, with model.weights (batch norm is frozen), or by method.batch_norm = local. With "
        "share_head it gets class vectors, which are face templates: prevented by keeping class_vectors out of "
        "kinds, also the default. With negatives = class_vectors it and the other clients get the same; with "
        "corrected it alone does; with noisy a version with noise, once in a run (kind noisy_vectors; how much noise: "
        "require.method.negatives_by.noise). With in_turn the next client gets a client's weights as they are, and one "
        "that poisons them reaches all that follow: prevented by bounds.parties = 2 or more, the default. "
        f"{CRAFTED_WEIGHTS}"
    )
    extendable = True
    discloses = frozenset(
        {Disclosure.weights, Disclosure.statistic, Disclosure.class_vectors, Disclosure.count, Disclosure.metric}
        | {Disclosure.noisy_vectors}
    )

    rounds: AtLeastOne = 20
    head: HeadSettings = HeadSettings()
    share_head: bool = False  # True: one global head with absent classes masked; False: heads stay at home
    mask_absent: bool = True  # False: in a global head the people of other clients are negatives, and move
    head_start: HeadStart = "random"  # means: a head of a client's own starts at the mean features of its identities
    refresh_head: bool = False  # from its second round on it goes on from the means under the weights that have come
    weighting: Literal["data", "uniform"] = "data"
    regularisation: NotNegative = 0.0  # C of Gansekoele et al. 2024, Eq. 4: how much features may drift within a round
    participation: Share = 1.0  # share of the clients that are asked in a round
    in_turn: AtLeastOne = 1  # clients that train one after the other, each from the weights of the one before
    batch_norm: BatchNormPolicy = "average"

    def __post_init__(self) -> None:
        if self.share_head:
            self.head.check_shared("method.share_head")
        if not (self.share_head or self.mask_absent):
            raise UsageError("method.mask_absent is about a global head: set method.share_head")
        if self.share_head and self.refresh_head:
            raise UsageError("method.refresh_head is for heads that stay at home: leave out method.share_head")
        if self.share_head and self.negatives != "none":
            raise UsageError("method.negatives is for heads that stay at home: leave out method.share_head")
        self.check_negatives(self.head)

    def leaving(self, moving: bool) -> frozenset[Disclosure]:
        kinds = super().leaving(moving and self.batch_norm == "average") - {Disclosure.noisy_vectors}
        return (kinds if self.share_head else kinds - {Disclosure.class_vectors}) | self.shows()

    def trains_norm(self) -> bool:
        return self.batch_norm != "average"

    @abstractmethod
    def rate(self, round: int) -> float:
        """The learning rate of a round, from 0."""

    @abstractmethod
    def work(self, client: Client, msg: Down) -> Work:
        """The training that `learn` is asked for."""

    @abstractmethod
    def learn(self, client: Client, task: Task, msg: Down) -> Learnt:
        """Train network and head of a client in place."""

    def start(self, setup: Setup) -> Server:
        self.check_public(setup)
        theta = setup.new_weights()
        stays = kept_local(theta, self.batch_norm)
        W = self.head.build(setup.classes, setup.embedding).weight.detach() if self.share_head else None
        return Server(without(theta, stays), {k: v for k, v in theta.items() if k in stays}, W)

    def stages(self) -> list[Stage[Server]]:
        return [Stage("federate", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:
        down = Down(s.theta, s.fixed, s.W, self.rate(net.round))
        asked = dict.fromkeys(sample_clients(net, self.participation), down)
        if s.shown:
            asked = {c: replace(down, negatives=self.rows_for(s.shown, c)) for c in asked}
        last, ups = self._in_turn(net, asked) if self.in_turn > 1 else (asked, {})
        by = "n" if self.weighting == "data" and self.in_turn == 1 else None
        means, replies = net.reduce(self.local, last, mean=("theta", "W"), by=by)
        ups |= replies
        loss = sum(up.n * up.loss for up in ups.values()) / sum(up.n for up in ups.values())
        gradients, samples = (sum(getattr(up, name) for up in ups.values()) for name in ("gradients", "samples"))
        net.log(loss=loss, lr=down.lr, gradients=gradients, samples=samples)
        shown = self.gathered(s.shown, net, means["theta"] | s.fixed, ups, net.round + 1, self.head.scale)
        return Server(means["theta"], s.fixed, means["W"], shown)

    def _in_turn(self, net: Network, asked: dict[ClientId, Down]) -> tuple[dict[ClientId, Down], dict[ClientId, Up]]:
        """Let the clients train one after the other in rows of `in_turn`, drawn anew every round.

        Returns the messages to the last client of each row, and the replies of all others. The rows end together; one
        that is shorter begins later. A client that does not answer is passed over.
        """
        order = [list(asked)[i] for i in torch.randperm(len(asked), generator=net.rng).tolist()]
        count = math.ceil(len(order) / self.in_turn)
        rows = [order[i::count] for i in range(count)]  # the longest first; lengths differ by one at most
        ups: dict[ClientId, Up] = {}
        for left in range(len(rows[0]) - 1, 0, -1):  # clients that follow in each row
            here = {row[-1 - left]: row[-left] for row in rows if len(row) > left}  # each with the one after it
            replies = net.hand_on(self.local, {c: asked[c] for c in here}, fields=("theta", "W"))
            for client, following in here.items():
                given = replies.get(client, asked[client])
                asked = asked | {following: replace(asked[following], theta=given.theta, W=given.W)}
            ups |= {c: replace(up, theta={}, W=None) for c, up in replies.items()}
        return {row[-1]: asked[row[-1]] for row in rows}, ups

    @client_step(trains=lambda self, client, msg: self.work(client, msg))
    def local(self, client: Client, msg: Down) -> Up:
        model = client.network()
        load_weights(model, whole := msg.theta | msg.fixed | client.state.get("batch_norm", {}))
        head, labels, mask = client_head(client, self.head, msg.W, model, self.head_start, self.refresh_head)
        mask = mask if self.mask_absent else None
        drift = Drift(model, self.regularisation) if self.regularisation else None
        taught = self.against(client, head, model, whole, msg.negatives)
        done = self.learn(client, Task(model, taught, labels, mask, drift), msg)
        theta = weights_in(model)
        if msg.fixed:
            client.state["batch_norm"] = {k: theta[k] for k in msg.fixed}
        if not self.share_head:
            client.state["head"] = weights_in(head)
        W = head.weight.detach() if self.share_head else None
        return Up(without(theta, set(msg.fixed)), W, len(client.data.train), *done)

    def backbone(self, s: Server) -> Weights | None:
        return None if s.fixed else s.theta  # without batch norm there is no generic network

    def global_head(self, s: Server) -> Tensor | None:
        return s.W

    def basis(self, s: Server) -> Weights | None:
        return s.theta | s.fixed

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return theta and theta | state.get("batch_norm", {})


@dataclass(frozen=True)
class FedAvg(Averaging):
    """Every round the clients train the shared backbone on their own faces and the server averages."""

    name = "fedavg"
    title = "federated averaging: the backbone is shared, the pictures stay"
    paper = "McMahan et al. 2017; proximal term Li et al. 2020"
    training: Training = Training()
    mu: NotNegative = 0.0  # FedProx

    def rate(self, round: int) -> float:
        return self.training.lr_at(round, self.rounds)

    def work(self, client: Client, msg: Down) -> Work:
        return self.training.work(msg.lr, len(client.data.train))

    def learn(self, client: Client, task: Task, msg: Down) -> Learnt:
        done = train(
            task.model, task.head, client.data.train, self.training, client.rng, client.numerics,
            lr=msg.lr, labels=task.labels, mask=task.mask, anchor=msg.theta, mu=self.mu, penalty=task.drift,
        )  # fmt: skip
        return Learnt(done.loss, done.steps, done.pictures)
