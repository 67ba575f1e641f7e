"""Training at one party alone, on the public pictures or at a source: where the federated methods start."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from visard.core import PUBLIC, ClientId, Leaves, Network, Setup, Stage, Weights
from visard.methods.fitting import Fit, Fitting, Supervised, check_rounds
from visard.ops.training import HeadSettings, Training


@dataclass(frozen=True)
class Server:
    theta: Weights
    W: Tensor  # class vectors of the party's people
    b: Tensor | None = None  # and biases, where the head has some


@dataclass(frozen=True)
class Pretrain(Fitting[Server]):
    """One party trains on its labelled pictures; the others only test the result."""

    name = "pretrain"
    title = "one party with labelled pictures trains alone: where federation starts"
    leaves = frozenset({Leaves.weights, Leaves.class_vectors, Leaves.count, Leaves.metric})

    rounds: int = 20
    training: Training = Training()
    head: HeadSettings = HeadSettings()
    at: ClientId = PUBLIC  # the party that trains; "source" where the partition has domains

    def __post_init__(self) -> None:
        check_rounds(self.rounds)

    def supervised(self) -> Supervised:
        return Supervised(self.rounds, self.training, self.head)

    def start(self, setup: Setup) -> Server:
        return Server(setup.new_weights(), self.head.build(1, setup.embedding).weight.detach())

    def stages(self) -> list[Stage[Server]]:
        return [Stage("train", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:
        lr = self.training.lr_at(net.round, self.rounds)
        done = net.ask(self.fit, {self.at: Fit(s.theta, lr, class_vectors=True)})[self.at]
        net.log(loss=done.loss, lr=lr)
        assert done.W is not None
        return Server(done.theta, done.W, done.b)

    def backbone(self, s: Server) -> Weights | None:
        return s.theta

    def class_vectors(self, s: Server) -> Tensor | None:
        return s.W

    def biases(self, s: Server) -> Tensor | None:
        return s.b
