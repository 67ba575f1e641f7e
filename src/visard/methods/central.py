"""All data in one place: the upper bound. It moves every picture and label out of the clients, and says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from visard.core import Leaves, Network, Setup, Stage, Weights
from visard.methods.fitting import Fit, Fitting, Supervised, check_rounds
from visard.ops.training import HeadSettings, Training


@dataclass(frozen=True)
class Server:
    theta: Weights


@dataclass(frozen=True)
class Central(Fitting[Server]):
    """The engine pools the clients' data before the first round; the one client left is the pool."""

    name = "central"
    title = "all pictures in one place: the upper bound"
    leaves = frozenset({Leaves.weights, Leaves.class_vectors, Leaves.count, Leaves.metric})
    pools = frozenset({Leaves.pictures, Leaves.labels})

    rounds: int = 20
    training: Training = Training()
    head: HeadSettings = HeadSettings()
    with_public: bool = False  # pool the public pictures too
    head_start: Literal["random", "means"] = "random"  # means: of the features of each person, for given weights

    def __post_init__(self) -> None:
        check_rounds(self.rounds)

    def pools_public(self) -> bool:
        return self.with_public

    def supervised(self) -> Supervised:
        return Supervised(self.rounds, self.training, self.head)

    def start(self, setup: Setup) -> Server:
        return Server(setup.new_weights())

    def stages(self) -> list[Stage[Server]]:
        return [Stage("train", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:
        lr = self.training.lr_at(net.round, self.rounds)
        (pool,) = net.clients
        done = net.ask(self.fit, {pool: Fit(s.theta, lr, means=self.head_start == "means")})[pool]
        net.log(loss=done.loss, lr=lr)
        return Server(done.theta)

    def backbone(self, s: Server) -> Weights | None:
        return s.theta
