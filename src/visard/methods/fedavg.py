"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017;
with FedProx's proximal term (Li et al., Federated Optimization in Heterogeneous Networks, 2020).

    theta   weights of the backbone          W     class vectors of a global head, one row for each identity
    n       pictures of a client             mu    strength of the proximal term
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from visard.core import Client, ClientId, Leaves, Method, Network, Setup, Stage, State, Weights, client_step
from visard.errors import UsageError
from visard.ops.average import BatchNormPolicy, RunningMean, kept_local, without
from visard.ops.client_head import HeadStart, client_head
from visard.ops.drift import Drift
from visard.ops.training import HeadSettings, Training, load_weights, train, weights_of


@dataclass(frozen=True)
class Server:
    theta: Weights  # what is averaged
    fixed: Weights  # batch norm entries that stay at the clients: what a new client starts from
    W: Tensor | None  # global head only


@dataclass(frozen=True)
class Down:
    theta: Weights
    fixed: Weights
    W: Tensor | None
    lr: float


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Leaves.weights]
    W: Annotated[Tensor | None, Leaves.class_vectors]
    n: Annotated[int, Leaves.count]
    loss: Annotated[float, Leaves.metric]
    gradients: Annotated[int, Leaves.count]  # gradient evaluations
    samples: Annotated[int, Leaves.count]  # pictures seen


@dataclass(frozen=True)
class FedAvg(Method[Server]):
    """Every round the clients train the shared backbone on their own faces and the server averages."""

    name = "fedavg"
    title = "federated averaging: the backbone is shared, the pictures stay"
    paper = "McMahan et al. 2017; proximal term Li et al. 2020"
    leaves = frozenset({Leaves.weights, Leaves.class_vectors, Leaves.count, Leaves.metric})

    rounds: int = 20
    training: Training = Training()
    head: HeadSettings = HeadSettings()
    share_head: bool = False  # True: one global head with absent classes masked; False: heads stay at home
    head_start: HeadStart = "random"  # means: a head of a client's own starts at the mean features of its people
    weighting: Literal["data", "uniform"] = "data"
    mu: float = 0.0  # FedProx
    regularisation: float = 0.0  # C of Gansekoele et al. 2024, Eq. 4: how much features may drift within a round
    participation: float = 1.0  # share of the clients that are asked in a round
    batch_norm: BatchNormPolicy = "average"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"method.rounds = {self.rounds}: must be at least 1")
        for name in ("mu", "regularisation"):
            if getattr(self, name) < 0:
                raise UsageError(f"method.{name} = {getattr(self, name)}: must not be negative")
        if not 0 < self.participation <= 1:
            raise UsageError(f"method.participation = {self.participation}: must be above 0 and at most 1")

    def start(self, setup: Setup) -> Server:
        theta = setup.new_weights()
        stays = kept_local(theta, self.batch_norm)
        W = self.head.build(setup.classes, setup.embedding).weight.detach() if self.share_head else None
        return Server(without(theta, stays), {k: v for k, v in theta.items() if k in stays}, W)

    def stages(self) -> list[Stage[Server]]:
        return [Stage("federate", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:
        lr = self.training.lr_at(net.round, self.rounds)
        theta, W, loss, pictures, gradients, samples = RunningMean(), RunningMean(), 0.0, 0, 0, 0
        for _, up in net.stream(self.local, {c: Down(s.theta, s.fixed, s.W, lr) for c in self.sample(net)}):
            n = up.n if self.weighting == "data" else 1
            theta.add(up.theta, n)
            if up.W is not None:
                W.add({"W": up.W}, n)
            loss, pictures = loss + up.n * up.loss, pictures + up.n
            gradients, samples = gradients + up.gradients, samples + up.samples
        net.log(loss=loss / pictures, lr=lr, gradients=gradients, samples=samples)
        return Server(theta.mean(), s.fixed, W.mean()["W"] if self.share_head else None)

    def sample(self, net: Network) -> list[ClientId]:
        """The clients of this round, in their fixed order."""
        count = max(1, round(self.participation * len(net.clients)))
        chosen = torch.randperm(len(net.clients), generator=net.rng)[:count].tolist()
        return [net.clients[i] for i in sorted(chosen)]

    @client_step
    def local(self, client: Client, msg: Down) -> Up:
        model, view = client.network(), client.data.train
        load_weights(model, msg.theta | msg.fixed | client.state.get("batch_norm", {}))
        head, labels, mask = client_head(client, self.head, msg.W, model, self.head_start)
        done = train(
            model, head, view, self.training, client.rng, client.numerics,
            lr=msg.lr, labels=labels, mask=mask, anchor=msg.theta, mu=self.mu,
            penalty=Drift(model, self.regularisation) if self.regularisation else None,
        )  # fmt: skip
        theta = weights_of(model)
        if msg.fixed:
            client.state["batch_norm"] = {k: theta[k] for k in msg.fixed}
        if not self.share_head:
            client.state["head"] = weights_of(head)
        return Up(
            without(theta, set(msg.fixed)),
            head.weight.detach() if self.share_head else None,
            len(view),
            done.loss,
            done.steps,
            done.pictures,
        )

    def backbone(self, s: Server) -> Weights | None:
        return None if s.fixed else s.theta  # without batch norm there is no generic network

    def global_head(self, s: Server) -> Tensor | None:
        return s.W

    def basis(self, s: Server) -> Weights | None:
        return s.theta | s.fixed

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return theta and theta | state.get("batch_norm", {})
