"""Each client alone: the lower bound that federation has to beat. Nothing but figures leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from visard.core import Client, Leaves, Method, Network, Setup, Stage, State, Weights, client_step
from visard.errors import UsageError
from visard.ops.training import HeadSettings, Training, load_weights, train, weights_of


@dataclass(frozen=True)
class Server:
    theta: Weights  # where everyone starts


@dataclass(frozen=True)
class Down:
    theta: Weights
    lr: float


@dataclass(frozen=True)
class Up:
    n: Annotated[int, Leaves.count]
    loss: Annotated[float, Leaves.metric]


@dataclass(frozen=True)
class Local(Method[Server]):
    """Every client trains its own network on its own faces."""

    name = "local"
    title = "each client alone: the lower bound"
    leaves = frozenset({Leaves.count, Leaves.metric})

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
        ups = net.ask(self.local, {c: Down(s.theta, lr) for c in net.clients})
        net.log(loss=sum(u.n * u.loss for u in ups.values()) / sum(u.n for u in ups.values()), lr=lr)
        return s

    @client_step
    def local(self, client: Client, msg: Down) -> Up:
        model, view = client.network(), client.data.train
        load_weights(model, client.state.get("theta", msg.theta))
        head = self.head.build(client.data.n_classes, client.embedding)
        if "head" in client.state:
            load_weights(head, client.state["head"])
        done = train(model, head, view, self.training, client.rng, client.numerics, lr=msg.lr)
        client.state.update(theta=weights_of(model), head=weights_of(head))
        return Up(len(view), done.loss)

    def basis(self, s: Server) -> Weights | None:
        return s.theta

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return state.get("theta", theta)
