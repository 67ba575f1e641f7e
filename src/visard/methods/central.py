"""All data in one place: the upper bound. It moves every picture and label out of the clients, and says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from visard.core import Client, Leaves, Method, Network, Setup, Stage, Weights, client_step
from visard.errors import UsageError
from visard.ops.training import HeadSettings, Training, load_weights, train, weights_of


@dataclass(frozen=True)
class Server:
    theta: Weights


@dataclass(frozen=True)
class Down:
    theta: Weights
    lr: float


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Leaves.weights]
    loss: Annotated[float, Leaves.metric]


@dataclass(frozen=True)
class Central(Method[Server]):
    """The engine pools the clients' data before the first round; the one client left is the pool."""

    name = "central"
    title = "all pictures in one place: the upper bound"
    leaves = frozenset({Leaves.weights, Leaves.count, Leaves.metric})
    pools = frozenset({Leaves.pictures, Leaves.labels})

    rounds: int = 20
    training: Training = Training()
    head: HeadSettings = HeadSettings()

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"method.rounds = {self.rounds}: must be at least 1")

    def start(self, setup: Setup) -> Server:
        return Server(setup.new_weights())

    def stages(self) -> list[Stage[Server]]:
        return [Stage("train", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:
        lr = self.training.lr_at(net.round, self.rounds)
        (pool,) = net.clients
        up = net.ask(self.local, {pool: Down(s.theta, lr)})[pool]
        net.log(loss=up.loss, lr=lr)
        return Server(up.theta)

    @client_step
    def local(self, client: Client, msg: Down) -> Up:
        model = client.network()
        load_weights(model, msg.theta)
        head = self.head.build(client.data.n_classes, client.embedding)
        if "head" in client.state:
            load_weights(head, client.state["head"])
        done = train(model, head, client.data.train, self.training, client.rng, client.numerics, lr=msg.lr)
        client.state["head"] = weights_of(head)
        return Up(weights_of(model), done.loss)

    def backbone(self, s: Server) -> Weights | None:
        return s.theta
