"""Each client alone: the lower bound that federation has to beat. Nothing but figures leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from visard.core import Client, Leaves, Method, Network, Setup, Stage, State, Weights, client_step
from visard.methods.fitting import check_rounds, fit
from visard.ops.training import HeadSettings, Training, weights_of


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
        check_rounds(self.rounds)

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
        done = fit(client, client.state.get("theta", msg.theta), self.training, self.head, msg.lr)
        client.state["theta"] = weights_of(client.network())
        return Up(len(client.data.train), done.loss)

    def basis(self, s: Server) -> Weights | None:
        return s.theta

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return state.get("theta", theta)
