"""HF-MAML: Gansekoele, Hess and Bhulai, Meta-Learning for Federated Face Recognition in Imbalanced Data Regimes, 2024.
The update itself (Eqs. 1 to 3) is in `visard.ops.meta`, the embedding regularisation (Eq. 4) in `visard.ops.drift`.

    theta   weights w of the backbone      W   class vectors a of the head
    n       pictures of a client           C   strength of the embedding regularisation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from visard.core import Client, Leaves, Method, Network, Setup, Stage, State, Weights, client_step
from visard.errors import UsageError
from visard.ops.average import BatchNormPolicy, RunningMean, kept_local, without
from visard.ops.client_head import HeadStart, client_head
from visard.ops.drift import Drift
from visard.ops.meta import MetaTraining, meta_train
from visard.ops.training import HeadSettings, load_weights, weights_of


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
    beta: float


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Leaves.weights]
    W: Annotated[Tensor | None, Leaves.class_vectors]
    n: Annotated[int, Leaves.count]
    loss: Annotated[float, Leaves.metric]
    gradients: Annotated[int, Leaves.count]  # gradient evaluations
    samples: Annotated[int, Leaves.count]  # pictures drawn


@dataclass(frozen=True)
class HFMaml(Method[Server]):
    """The clients train a model that a few batches of a client make its own; the server averages."""

    name = "hf-maml"
    title = "Hessian-free meta-learning: a model that any client makes its own in a few batches"
    paper = "Gansekoele, Hess and Bhulai 2024"
    leaves = frozenset({Leaves.weights, Leaves.class_vectors, Leaves.count, Leaves.metric})

    rounds: int = 30
    training: MetaTraining = MetaTraining()
    head: HeadSettings = HeadSettings("arcface", 8.0, 0.5)
    share_head: bool = False  # True: global classification, absent classes masked; False: heads stay at home
    head_start: HeadStart = "random"  # means: a head of a client's own starts at the mean features of its people
    regularisation: float = 0.0  # C, Eq. 4; 0 = none
    batch_norm: BatchNormPolicy = "average"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"method.rounds = {self.rounds}: must be at least 1")
        if self.regularisation < 0:
            raise UsageError(f"method.regularisation = {self.regularisation}: must not be negative")

    def start(self, setup: Setup) -> Server:
        theta = setup.new_weights()
        stays = kept_local(theta, self.batch_norm)
        W = self.head.build(setup.classes, setup.embedding).weight.detach() if self.share_head else None
        return Server(without(theta, stays), {k: v for k, v in theta.items() if k in stays}, W)

    def stages(self) -> list[Stage[Server]]:
        return [Stage("federate", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:  # Algorithm 1, server
        beta = self.training.beta_at(net.round, self.rounds)
        theta, W, loss, pictures, gradients, samples = RunningMean(), RunningMean(), 0.0, 0, 0, 0
        for _, up in net.stream(self.local, dict.fromkeys(net.clients, Down(s.theta, s.fixed, s.W, beta))):
            theta.add(up.theta, up.n)  # w = sum n_k w_k / sum n_k
            if up.W is not None:
                W.add({"W": up.W}, up.n)  # a = sum n_k a_k / sum n_k
            loss, pictures = loss + up.n * up.loss, pictures + up.n
            gradients, samples = gradients + up.gradients, samples + up.samples
        net.log(loss=loss / pictures, lr=beta, gradients=gradients, samples=samples)
        return Server(theta.mean(), s.fixed, W.mean()["W"] if self.share_head else None)

    @client_step
    def local(self, client: Client, msg: Down) -> Up:  # Algorithm 1, client
        model, view = client.network(), client.data.train
        load_weights(model, msg.theta | msg.fixed | client.state.get("batch_norm", {}))  # w_k = w
        head, labels, mask = client_head(
            client, self.head, msg.W, model, self.head_start
        )  # a_k = a, or the client's own
        drift = Drift(model, self.regularisation) if self.regularisation else None
        done = meta_train(
            model, head, view, self.training, client.rng, client.numerics,
            beta=msg.beta, labels=labels, mask=mask, drift=drift,
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
            done.gradients,
            done.samples,
        )

    def backbone(self, s: Server) -> Weights | None:
        return None if s.fixed else s.theta  # without batch norm there is no generic network

    def global_head(self, s: Server) -> Tensor | None:
        return s.W

    def basis(self, s: Server) -> Weights | None:
        return s.theta | s.fixed

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return theta and theta | state.get("batch_norm", {})
