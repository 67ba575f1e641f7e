"""Baselines without federation: all pictures in one place, every client alone, one client alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from visard.core import PUBLIC, Client, ClientId, Disclosure, Method, Network, Setup, Stage, State, Weights, client_step
from visard.core.method import ALREADY_CENTRAL, AtLeastOne, Number
from visard.errors import UsageError
from visard.learning.heads import HeadSettings
from visard.learning.train import Training
from visard.learning.weights import weights_of
from visard.methods.domain_adaptation import SOURCE
from visard.methods.supervised import Down, Fit, Fitting, Supervised, Theta, fit


@dataclass(frozen=True)
class Central(Fitting[Theta]):
    """The upper bound: every picture and label is moved to one place before the first round, which the ledger says."""

    name = "central"
    title = "all pictures in one place: the upper bound"
    hostile = ALREADY_CENTRAL
    extendable = True
    discloses = frozenset(
        {Disclosure.weights, Disclosure.statistic, Disclosure.class_vectors, Disclosure.count, Disclosure.metric}
    )
    centralises = frozenset({Disclosure.pictures, Disclosure.labels})

    rounds: AtLeastOne = 20
    training: Training = Training()
    head: HeadSettings = HeadSettings()
    with_public: bool = False  # pool the public pictures too
    head_start: Literal["random", "means"] = "random"  # means: of the features of each identity, for given weights

    @property
    def fits_at(self) -> ClientId:
        return ""  # the pool

    def centralises_public(self) -> bool:
        return self.with_public

    def supervised(self) -> Supervised:
        return Supervised(self.rounds, self.training, self.head)

    def start(self, setup: Setup) -> Theta:
        return Theta(setup.new_weights())

    def stages(self) -> list[Stage[Theta]]:
        return [Stage("train", self.rounds, self.round)]

    def round(self, s: Theta, net: Network) -> Theta:
        lr = self.training.lr_at(net.round, self.rounds)
        (pool,) = net.clients
        done = net.ask(self.fit, {pool: Fit(s.theta, lr, means=self.head_start == "means")})[pool]
        net.log(loss=done.loss, lr=lr)
        return Theta(done.theta)


@dataclass(frozen=True)
class Up:
    n: Annotated[int, Disclosure.count]
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class Local(Method[Theta]):
    """The lower bound that federation has to beat: every client trains its own network, losses and counts leave."""

    name = "local"
    title = "each client alone: the lower bound"
    hostile = (
        "It gets a loss, test results and counts. With weights of its choice at the start a loss can be made to "
        "depend on a single picture; nothing else leaves. Prevented by pinning the weights (weights.start)."
    )
    extendable = True
    discloses = frozenset({Disclosure.count, Disclosure.metric})

    rounds: AtLeastOne = 20
    training: Training = Training()
    head: HeadSettings = HeadSettings()

    def start(self, setup: Setup) -> Theta:
        return Theta(setup.new_weights())

    def stages(self) -> list[Stage[Theta]]:
        return [Stage("train", self.rounds, self.round)]

    def round(self, s: Theta, net: Network) -> Theta:
        lr = self.training.lr_at(net.round, self.rounds)
        ups = net.ask(self.local, {c: Down(s.theta, lr) for c in net.clients})
        net.log(loss=sum(u.n * u.loss for u in ups.values()) / sum(u.n for u in ups.values()), lr=lr)
        return s

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, len(client.data.train)))
    def local(self, client: Client, msg: Down) -> Up:
        done = fit(client, client.state.get("theta", msg.theta), self.training, self.head, msg.lr)
        client.state["theta"] = weights_of(client.network())
        return Up(len(client.data.train), done.loss)

    def backbone(self, s: Theta) -> Weights | None:
        return None  # theta is only where all start

    def basis(self, s: Theta) -> Weights | None:
        return s.theta

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return state.get("theta", theta)


@dataclass(frozen=True)
class PretrainServer:
    theta: Weights
    W: Tensor  # class vectors of its identities
    b: Tensor | None = None  # and biases, where the head has some


@dataclass(frozen=True)
class Pretrain(Fitting[PretrainServer]):
    """One client trains on its labelled pictures, the public ones or a source; the others only test the result."""

    name = "pretrain"
    title = "one client with labelled pictures trains alone: where federation starts"
    hostile = (
        "The one client that trains sends its network and the class vectors of its people, which are face "
        "templates: take it only for public pictures, and keep class_vectors out of kinds elsewhere, as a policy "
        "does by default."
    )
    extendable = True
    discloses = frozenset(
        {Disclosure.weights, Disclosure.statistic, Disclosure.class_vectors, Disclosure.count, Disclosure.metric}
    )

    rounds: Number = 20  # 0: model.weights as they are
    training: Training = Training()
    head: HeadSettings = HeadSettings()
    at: ClientId = PUBLIC  # the client that trains; "source" where the partition has domains
    head_start: Literal["random", "means"] = "random"  # means: of the features of each identity, for given weights

    @property
    def fits_at(self) -> ClientId:
        return self.at

    def supervised(self) -> Supervised:
        return Supervised(max(1, self.rounds), self.training, self.head)

    def start(self, setup: Setup) -> PretrainServer:
        if not (self.rounds or setup.given):
            raise UsageError("method.rounds = 0 tests the network of model.weights: give one, or rounds")
        return PretrainServer(setup.new_weights(), self.head.build(1, setup.embedding).weight.detach())

    def stages(self) -> list[Stage[PretrainServer]]:
        return [Stage("train", self.rounds, self.round)] if self.rounds else []

    def round(self, s: PretrainServer, net: Network) -> PretrainServer:
        lr = self.training.lr_at(net.round, self.rounds)
        ask = Fit(s.theta, lr, class_vectors=True, means=self.head_start == "means")
        done = net.ask(self.fit, {self.at: ask})[self.at]
        net.log(loss=done.loss, lr=lr)
        assert done.W is not None
        return PretrainServer(done.theta, done.W, done.b)

    def class_vectors(self, s: PretrainServer) -> Tensor | None:
        return s.W if self.rounds else None

    def biases(self, s: PretrainServer) -> Tensor | None:
        return s.b


@dataclass(frozen=True)
class TargetOnly(Central):
    """`central` without the source: the target's pictures with the labels that FedFR-DA does without."""

    name = "target-only"
    title = "all target pictures in one place, with labels: what labels would give"
    paper = "a baseline of Zhuang et al. 2021"
    hostile = ALREADY_CENTRAL

    def centralises_from(self, client: ClientId) -> frozenset[Disclosure]:
        return frozenset() if client == SOURCE else self.centralises
